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
from models.loss_head import LossHead, VocabShard
from models.norm import RMSNorm
from models.transformer import SequenceParallelComm, Transformer
from parallelisms import collectives

ParallelStyle = Literal["replicate", "replicate_heads", "colwise", "rowwise"]

BLOCK_PLAN: dict[str, ParallelStyle] = {
    "attention_norm": "replicate",
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.q_norm": "replicate_heads",
    "attention.k_norm": "replicate_heads",
    "attention.o_proj": "rowwise",
    "ffn_norm": "replicate",
    "feed_forward.gate_proj": "colwise",
    "feed_forward.up_proj": "colwise",
    "feed_forward.down_proj": "rowwise",
}
COLWISE_ROWWISE_PAIRS = ("attention", "feed_forward")
KV_PROJECTIONS = ("attention.k_proj", "attention.v_proj")


def apply(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Cuts the model over a mesh of one axis, in place; its parameters may be on the meta device.

    Losses come out whole, and alike on all ranks. What must divide is said by `rules.tensor_problems`.
    """
    if mesh.size() == 1:
        return
    parallelizer = TensorParallelizer(mesh, sequence_parallel=sequence_parallel)
    kv_heads = model.config.num_kv_heads
    replicated_projections = KV_PROJECTIONS if kv_heads < mesh.size() else ()
    for block in model.layers():
        for name, style in BLOCK_PLAN.items():
            if style == "replicate_heads" and not model.config.qk_norm:
                continue
            parallelizer.distribute_weight(
                cast(Any, block.get_submodule(name)), "replicate" if name in replicated_projections else style
            )
        for name in replicated_projections:
            parallelizer.select_kv_head(cast(Linear, block.get_submodule(name)), kv_heads)
        block.sp_comm = parallelizer.sequence_parallel_comm()
        for name in COLWISE_ROWWISE_PAIRS:
            parallelizer.add_region_hooks(block.get_submodule(name))
    replicated_vocabulary = not loss_parallel
    if model.embed is not None:
        parallelizer.parallelize_embedding(
            model.embed, replicated=replicated_vocabulary and model.config.tie_embeddings
        )
    if model.head is not None:
        parallelizer.parallelize_head(model.head, replicated=replicated_vocabulary)
    if model.embed is not None and model.head is not None and model.config.tie_embeddings:
        model.head.proj.weight = model.embed.weight


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Lets the compiler split matrix products, and exchange each piece while it works on the next (async TP).

    Needs CUDA devices that reach each other's memory, and the private switch and memory of torch.
    """
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 no longer needs this call, 2.11 may.
        _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


class TensorParallelizer:
    """Cuts modules for this rank of the tp axis."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self._mesh = mesh
        self._size, self._rank = mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()
        self._sequence_parallel = sequence_parallel
        self._group_name = self._group.group_name

    def distribute_weight(self, module: Linear | Embedding | RMSNorm, style: ParallelStyle) -> None:
        """Cuts the weight, and lets the module see the part that is here."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placement = {"colwise": Shard(0), "rowwise": Shard(1)}.get(style, Replicate())
        module.weight = nn.Parameter(distribute_tensor(module.weight, self._mesh, [placement], src_data_rank=None))
        # A whole weight has met a part of the heads only, or of the tokens, where ranks share them.
        is_partial = style == "replicate_heads" or (style == "replicate" and self._sequence_parallel)
        module.view = partial(_replicated_weight, name=self._group_name) if is_partial else _local_weight

    def select_kv_head(self, projection: Linear, num_kv_heads: int) -> None:
        """Of a whole projection to fewer heads than ranks, each rank computes the head that its queries need."""
        head_dim = projection.weight.shape[0] // num_kv_heads
        first = self._rank * num_kv_heads // self._size * head_dim
        projection.view = partial(_replicated_weight, name=self._group_name, rows=slice(first, first + head_dim))

    def add_region_hooks(self, module: nn.Module) -> None:
        """Lets a pair of matrices begin with all tokens and end in a sum."""
        module.register_forward_pre_hook(lambda _, arguments: (self._enter_region(arguments[0]), *arguments[1:]))
        module.register_forward_hook(lambda _, __, x_BTE: self._exit_region(x_BTE))

    def sequence_parallel_comm(self) -> SequenceParallelComm:
        """The same, for a block that finds its gradients by hand."""
        if not self._sequence_parallel:
            return SequenceParallelComm(reduce=partial(collectives.all_reduce_functional, group_name=self._group_name))
        group_arguments: Any = {"group_name": self._group_name, "size": self._size}
        return SequenceParallelComm(
            partial(collectives.all_gather_tokens, **group_arguments),
            partial(collectives.reduce_scatter_tokens, **group_arguments),
        )

    def parallelize_embedding(self, module: Embedding, *, replicated: bool) -> None:
        if not replicated:
            self.distribute_weight(module, "colwise")
            module.vocab_start_index = self._rank * (module.weight.shape[0] // self._size)
            module.register_forward_hook(lambda _, __, x_BTE: self._exit_region(x_BTE))
            return
        self.distribute_weight(module, "replicate")
        if self._sequence_parallel:
            module.register_forward_pre_hook(lambda _, arguments: (self._local_tokens(arguments[0]),))

    def parallelize_head(self, module: LossHead, *, replicated: bool) -> None:
        self.distribute_weight(module.norm, "replicate")
        if not replicated:
            self.distribute_weight(module.proj, "colwise")
            module.norm.register_forward_hook(lambda _, __, x_BSE: self._enter_region(x_BSE))
            module.vocab_shard = VocabShard(
                vocab_start_index=self._rank * (module.proj.weight.shape[0] // self._size),
                all_reduce_max=partial(collectives.all_reduce_max, self._group),
                all_reduce_sum=partial(collectives.all_reduce, self._group),
            )
            return
        self.distribute_weight(module.proj, "replicate")
        if self._sequence_parallel:
            # Each rank finds the losses of its own tokens, and all get them.
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0], self._local_tokens(arguments[1])))
            module.register_forward_hook(
                lambda _, __, losses_BS: AllGatherSplitGrad.apply(losses_BS, self._group_name, self._size)
            )

    def _enter_region(self, x_BSE: Tensor) -> Tensor:
        function = AllGather if self._sequence_parallel else CopyToTP
        out_BTE: Tensor = function.apply(x_BSE, self._group_name, self._size)
        return out_BTE

    def _exit_region(self, x_BTE: Tensor) -> Tensor:
        function = ReduceScatter if self._sequence_parallel else AllReduce
        out_BSE: Tensor = function.apply(x_BTE, self._group_name, self._size)
        return out_BSE

    def _local_tokens(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self._size, dim=1)[self._rank]


# ---- what a module sees of its weight


def _local_weight(weight: Tensor) -> Tensor:
    local: Tensor = cast(Any, weight).to_local()
    return local


def _replicated_weight(weight: Tensor, *, name: str, rows: slice | None = None) -> Tensor:
    """A weight that all ranks have, or these rows of it, of whose gradient each rank finds a part."""
    local: Tensor = CopyWeightToTP.apply(_local_weight(weight), name)
    return local if rows is None else local[rows]


# ---- exchanges, each with its opposite for the gradient


class AllGather(torch.autograd.Function):
    """Tokens of every rank: [B, S, E] -> [B, T, E]. Gradients are summed, and each rank gets those of its tokens."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, name: str, size: int) -> Tensor:
        ctx.group = (name, size)
        return collectives.all_gather_tokens(x_BSE, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.reduce_scatter_tokens(grads[0], *ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """The sum of every rank's numbers, of this rank's tokens: [B, T, E] -> [B, S, E]. Gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x_BTE: Tensor, name: str, size: int) -> Tensor:
        ctx.group = (name, size)
        return collectives.reduce_scatter_tokens(x_BTE, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.all_gather_tokens(grads[0], *ctx.group), None, None


class AllReduce(torch.autograd.Function):
    """The sum of every rank's numbers. All ranks hold the same gradient of it, which is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        del ctx, size
        return collectives.all_reduce_functional(x, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grads[0], None, None


class CopyToTP(torch.autograd.Function):
    """The same numbers to ranks that each make a part of something of them; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        del size
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.all_reduce_functional(grads[0], ctx.name), None, None


class CopyWeightToTP(torch.autograd.Function):
    """A weight that is the same on all ranks; parts of its gradient are summed, in single precision at least."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, name: str) -> Tensor:
        ctx.name = name
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        accumulation_dtype = torch.promote_types(grad.dtype, torch.float32)
        return collectives.all_reduce_functional(grad.to(accumulation_dtype), ctx.name).to(grad.dtype), None


class AllGatherSplitGrad(torch.autograd.Function):
    """Tokens of every rank, of which all ranks then make the same: a gradient is that of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, losses_BS: Tensor, name: str, size: int) -> Tensor:
        ctx.tokens = losses_BS.shape[1]
        ctx.rank = collectives.resolve_process_group(name).rank()
        return collectives.all_gather_tokens(losses_BS, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first = ctx.rank * ctx.tokens
        return grads[0][:, first : first + ctx.tokens], None, None
