"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019): each matrix is cut over the ranks of the tp axis.

Two cuts in a row need one exchange at either end: after a cut by rows a rank has some heads, or some of the inner
width, for all tokens; a cut by columns turns these into its part of a sum. Between the ends tokens are whole.

    embed                                          rows       ends in a sum
    attention_norm                                 whole
    attention    q_proj, k_proj, v_proj            rows       begins with all tokens
                 q_norm, k_norm                    for heads
                 o_proj                            columns    ends in a sum
    ffn_norm                                       whole
    feed_forward gate_proj, up_proj                rows       begins with all tokens
                 down_proj                         columns    ends in a sum
    head.norm                                      whole
    head.proj                                      rows       begins with all tokens, ends in a loss

With sequence parallelism (Korthikanti et al., 2022) ranks share the tokens outside of these pairs too: a sum is
scattered over tokens, and all tokens are gathered again. Without it every rank holds all tokens, and sums are sums.

Parameters are DTensors, so that FSDP2 and checkpoints know them whole; what is computed are plain tensors.

Shape suffixes: B rows, S tokens of this rank, T tokens of all tp ranks, E width of the residual stream.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.linear import Embedding, Linear
from models.loss_head import Head, Vocabulary
from models.norm import RMSNorm
from models.transformer import Exchange, Transformer
from parallelisms import collectives

Cut = Literal["whole", "for heads", "rows", "columns"]

BLOCK: dict[str, Cut] = {
    "attention_norm": "whole",
    "attention.q_proj": "rows",
    "attention.k_proj": "rows",
    "attention.v_proj": "rows",
    "attention.q_norm": "for heads",
    "attention.k_norm": "for heads",
    "attention.o_proj": "columns",
    "ffn_norm": "whole",
    "feed_forward.gate_proj": "rows",
    "feed_forward.up_proj": "rows",
    "feed_forward.down_proj": "columns",
}
PAIRS = ("attention", "feed_forward")
KEYS = ("attention.k_proj", "attention.v_proj")


def apply(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Cuts the model over a mesh of one axis, in place; its parameters may be on the meta device.

    Losses come out whole, and alike on all ranks. What must divide is said by `rules.tensor_problems`.
    """
    if mesh.size() == 1:
        return
    cutter = Cutter(mesh, sequence_parallel=sequence_parallel)
    kv_heads = model.config.num_kv_heads
    alike = KEYS if kv_heads < mesh.size() else ()
    for block in model.layers():
        for name, cut in BLOCK.items():
            if cut == "for heads" and not model.config.qk_norm:
                continue
            cutter.place(cast(Any, block.get_submodule(name)), "whole" if name in alike else cut)
        for name in alike:
            cutter.share_heads(cast(Linear, block.get_submodule(name)), kv_heads)
        block.exchange = cutter.exchange()
        for name in PAIRS:
            cutter.pair(block.get_submodule(name))
    whole = not loss_parallel
    if model.embed is not None:
        cutter.embedding(model.embed, whole=whole and model.config.tie_embeddings)
    if model.head is not None:
        cutter.head(model.head, whole=whole)
    if model.embed is not None and model.head is not None and model.config.tie_embeddings:
        model.head.proj.weight = model.embed.weight


def overlap(mesh: DeviceMesh) -> None:
    """Lets the compiler split matrix products, and exchange each piece while it works on the next (async TP).

    Needs CUDA devices that reach each other's memory, and the private switch and memory of torch.
    """
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 no longer needs this call, 2.11 may.
        _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


class Cutter:
    """Cuts modules for this rank of the tp axis."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self._mesh = mesh
        self._size, self._rank = mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()
        self._shares_tokens = sequence_parallel
        self._name = self._group.group_name

    def place(self, module: Linear | Embedding | RMSNorm, cut: Cut) -> None:
        """Cuts the weight, and lets the module see the part that is here."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placement = {"rows": Shard(0), "columns": Shard(1)}.get(cut, Replicate())
        module.weight = nn.Parameter(distribute_tensor(module.weight, self._mesh, [placement], src_data_rank=None))
        # A whole weight has met a part of the heads only, or of the tokens, where ranks share them.
        is_partial = cut == "for heads" or (cut == "whole" and self._shares_tokens)
        module.view = partial(_of_parts, name=self._name) if is_partial else _here

    def share_heads(self, projection: Linear, heads: int) -> None:
        """Of a whole projection to fewer heads than ranks, each rank computes the head that its queries need."""
        width = projection.weight.shape[0] // heads
        first = self._rank * heads // self._size * width
        projection.view = partial(_of_parts, name=self._name, rows=slice(first, first + width))

    def pair(self, module: nn.Module) -> None:
        """Lets a pair of matrices begin with all tokens and end in a sum."""
        module.register_forward_pre_hook(lambda _, arguments: (self._begin(arguments[0]), *arguments[1:]))
        module.register_forward_hook(lambda _, __, x_BTE: self._end(x_BTE))

    def exchange(self) -> Exchange:
        """The same, for a block that finds its gradients by hand."""
        if not self._shares_tokens:
            return Exchange(reduce=partial(collectives.sum_of, group_name=self._name))
        group: Any = {"group_name": self._name, "size": self._size}
        return Exchange(partial(collectives.gather_tokens, **group), partial(collectives.scatter_tokens, **group))

    def embedding(self, module: Embedding, *, whole: bool) -> None:
        if not whole:
            self.place(module, "rows")
            module.first = self._rank * (module.weight.shape[0] // self._size)
            module.register_forward_hook(lambda _, __, x_BTE: self._end(x_BTE))
            return
        self.place(module, "whole")
        if self._shares_tokens:
            module.register_forward_pre_hook(lambda _, arguments: (self._mine(arguments[0]),))

    def head(self, module: Head, *, whole: bool) -> None:
        self.place(module.norm, "whole")
        if not whole:
            self.place(module.proj, "rows")
            module.norm.register_forward_hook(lambda _, __, x_BSE: self._begin(x_BSE))
            module.vocabulary = Vocabulary(
                first=self._rank * (module.proj.weight.shape[0] // self._size),
                largest=partial(collectives.largest_over, self._group),
                total=partial(collectives.sum_over, self._group),
            )
            return
        self.place(module.proj, "whole")
        if self._shares_tokens:
            # Each rank finds the losses of its own tokens, and all get them.
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0], self._mine(arguments[1])))
            module.register_forward_hook(lambda _, __, losses_BS: Join.apply(losses_BS, self._name, self._size))

    def _begin(self, x_BSE: Tensor) -> Tensor:
        kind = Gather if self._shares_tokens else Fan
        out_BTE: Tensor = kind.apply(x_BSE, self._name, self._size)
        return out_BTE

    def _end(self, x_BTE: Tensor) -> Tensor:
        kind = Scatter if self._shares_tokens else Sum
        out_BSE: Tensor = kind.apply(x_BTE, self._name, self._size)
        return out_BSE

    def _mine(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self._size, dim=1)[self._rank]


# ---- what a module sees of its weight


def _here(weight: Tensor) -> Tensor:
    local: Tensor = cast(Any, weight).to_local()
    return local


def _of_parts(weight: Tensor, *, name: str, rows: slice | None = None) -> Tensor:
    """A weight that all ranks have, or these rows of it, of whose gradient each rank finds a part."""
    local: Tensor = Common.apply(_here(weight), name)
    return local if rows is None else local[rows]


# ---- exchanges, each with its opposite for the gradient


class Gather(torch.autograd.Function):
    """Tokens of every rank: [B, S, E] -> [B, T, E]. Gradients are summed, and each rank gets those of its tokens."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, name: str, size: int) -> Tensor:
        ctx.group = (name, size)
        return collectives.gather_tokens(x_BSE, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.scatter_tokens(grads[0], *ctx.group), None, None


class Scatter(torch.autograd.Function):
    """The sum of every rank's numbers, of this rank's tokens: [B, T, E] -> [B, S, E]. Gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x_BTE: Tensor, name: str, size: int) -> Tensor:
        ctx.group = (name, size)
        return collectives.scatter_tokens(x_BTE, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.gather_tokens(grads[0], *ctx.group), None, None


class Sum(torch.autograd.Function):
    """The sum of every rank's numbers. All ranks hold the same gradient of it, which is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        del ctx, size
        return collectives.sum_of(x, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grads[0], None, None


class Fan(torch.autograd.Function):
    """The same numbers to ranks that each make a part of something of them; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        del size
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.sum_of(grads[0], ctx.name), None, None


class Common(torch.autograd.Function):
    """A weight that is the same on all ranks; parts of its gradient are summed, in single precision at least."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, name: str) -> Tensor:
        ctx.name = name
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        return collectives.sum_of(grad.to(wide), ctx.name).to(grad.dtype), None


class Join(torch.autograd.Function):
    """Tokens of every rank, of which all ranks then make the same: a gradient is that of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x_BS: Tensor, name: str, size: int) -> Tensor:
        ctx.tokens = x_BS.shape[1]
        ctx.rank = collectives.named(name).rank()
        return collectives.gather_tokens(x_BS, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first = ctx.rank * ctx.tokens
        return grads[0][:, first : first + ctx.tokens], None, None
