"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019): shards every weight matrix over the tp
ranks.

Styles as in torch: colwise shards a weight's dimension 0 (`Shard(0)`, output features), rowwise
dimension 1 (`Shard(1)`, input features). A colwise and a rowwise layer form a tensor-parallel
region with one collective at either end. Inside it a rank has all tokens, but only a shard of the
heads or of the FFN width. `models/layers.py` has every weight's style. Tokens are gathered before
q, k, v, gate, up and the head, and reduce-scattered after o, down and the embedding.

With sequence parallelism (Korthikanti et al., 2022) the ranks shard the tokens outside the
regions. Without it every rank has all tokens: the all-gather is an identity, the reduce-scatter an
all-reduce. The gradients use the conjugate collectives.

Parameters are DTensors, so that FSDP2 and checkpoints see their global shapes; the computation
uses plain tensors.

Shape suffixes: B sequences, S tokens of this rank, T tokens of all tp ranks, E width of the
residual stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from models.layers import ParallelStyle
from models.linear import Embedding, set_local_view
from models.loss_head import LossHead, VocabShard
from models.norm import RMSNorm
from models.transformer import SequenceParallelComm, Transformer, TransformerBlock
from parallelisms.mesh import collectives
from parallelisms.mesh.parallel_dims import tensor_parallel_problems


def apply(
    model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Shards the model over a 1-D mesh, in place; its parameters may be on the meta device.

    Every rank returns the losses of all tokens. Raises ValueError for the problems that
    `parallel_dims.tensor_parallel_problems` finds.
    """
    if mesh.size() == 1:
        return
    config = model.config
    _require_divisible(
        config, mesh.size(), replicate_vocab=config.tie_embeddings and not loss_parallel
    )
    parallelizer = TensorParallelizer(mesh, sequence_parallel=sequence_parallel)
    for block in model.transformer_blocks():
        parallelizer.parallelize_block(block, config)
    replicate_vocab = not loss_parallel
    if model.embed is not None:
        parallelizer.parallelize_embedding(
            model.embed, replicate=replicate_vocab and config.tie_embeddings
        )
    if model.head is not None:
        parallelizer.parallelize_head(model.head, replicate=replicate_vocab)
    # Each module has a DTensor of its own now: tie them again.
    if model.embed is not None and model.head is not None and config.tie_embeddings:
        model.head.proj.weight = model.embed.weight


def _require_divisible(config: ModelConfig, tp: int, *, replicate_vocab: bool) -> None:
    if problems := tensor_parallel_problems(config, tp, replicate_vocab=replicate_vocab):
        raise ValueError("; ".join(problems))


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Async TP: the compiler splits matrix products and overlaps the collective of each piece with
    the next one.

    Needs CUDA devices with peer access. Uses private APIs of torch.
    """
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 deprecates this call, 2.11 may need it.
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


class TensorParallelizer:
    """Parallelizes modules for this tp rank."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self._mesh = mesh
        self._size = mesh.size()
        self._rank = mesh.get_local_rank()
        self._group = mesh.get_group()
        self._sequence_parallel = sequence_parallel
        self._group_name = self._group.group_name

    def parallelize_block(self, block: TransformerBlock, config: ModelConfig) -> None:
        """Shards the parameters of a block, but its experts', which `expert_parallel.apply`
        shards.
        """
        for name, parameter in block.kind.parameters.items():
            prefix, _, attribute = name.rpartition(".")
            module = block.get_submodule(prefix)
            style = parameter.style_over(config.sizes, self._size)
            if not parameter.per_expert:
                self.distribute(module, style, attribute)
            # A norm over all heads.
            if parameter.initial == "ones" and parameter.style == "colwise":
                cast(RMSNorm, module).mean_of = self.mean_over_ranks()
            if style != parameter.style:
                self.select_kv_head(module, config.num_kv_heads, attribute)
        block.sp_comm = self.sequence_parallel_comm()
        for sublayer in block.sublayers:
            if sublayer.module.last:
                self.add_region_hooks(sublayer.module)

    def distribute(self, module: nn.Module, style: ParallelStyle, name: str = "weight") -> None:
        """Replaces a parameter by a DTensor, of which this rank computes with its local shard."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placement = {"colwise": Shard(0), "vocab": Shard(0), "rowwise": Shard(1)}.get(
            style, Replicate()
        )
        # No source rank: each rank draws or loads its own shard, so nothing is broadcast.
        sharded = distribute_tensor(
            getattr(module, name), self._mesh, [placement], src_data_rank=None
        )
        setattr(module, name, nn.Parameter(sharded))
        # The ranks use a replicated weight for different heads or tokens, so each has a part of
        # its gradient.
        is_partial = style == "replicate_partial" or (
            style == "replicate" and self._sequence_parallel
        )
        set_local_view(
            module,
            name,
            partial(replicated_part, group_name=self._group_name) if is_partial else local_part,
        )

    def select_kv_head(
        self, projection: nn.Module, num_kv_heads: int, name: str = "weight"
    ) -> None:
        """Makes each rank compute only the KV head that it needs: with fewer KV heads than ranks,
        the projection is replicated.
        """
        head_dim = getattr(projection, name).shape[0] // num_kv_heads
        # tp / num_kv_heads neighbouring ranks share a head, as their query heads do.
        first = self._rank * num_kv_heads // self._size * head_dim
        rows = slice(first, first + head_dim)
        set_local_view(
            projection, name, partial(replicated_part, group_name=self._group_name, rows=rows)
        )

    def mean_over_ranks(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        """(shards, all-reduce) for a mean over tp; replicated KV heads weigh equally."""
        return self._size, partial(collectives.all_reduce_functional, group_name=self._group_name)

    def add_region_hooks(self, module: nn.Module) -> None:
        """Adds the collectives at both ends of a colwise-rowwise pair."""
        module.register_forward_pre_hook(lambda _, args: (self._enter_region(args[0]), *args[1:]))
        module.register_forward_hook(lambda _, __, x_BTE: self._exit_region(x_BTE))

    def sequence_parallel_comm(self) -> SequenceParallelComm:
        """The collectives of a region as plain functions, for blocks with a manually written
        backward.
        """
        if not self._sequence_parallel:
            return SequenceParallelComm(
                reduce=partial(collectives.all_reduce_functional, group_name=self._group_name)
            )
        conjugates = (collectives.all_gather_tokens, collectives.reduce_scatter_tokens)
        return SequenceParallelComm(
            *(partial(f, group_name=self._group_name, size=self._size) for f in conjugates)
        )

    def parallelize_embedding(self, module: Embedding, *, replicate: bool) -> None:
        if not replicate:
            self.distribute(module, "vocab")
            module.vocab_start_index = self._rank * (module.weight.shape[0] // self._size)
            module.register_forward_hook(lambda _, __, x_BTE: self._exit_region(x_BTE))
            return
        self.distribute(module, "replicate")
        if self._sequence_parallel:
            module.register_forward_pre_hook(
                lambda _, args: (_local_tokens(args[0], self._group_name, self._size),)
            )

    def parallelize_head(self, module: LossHead, *, replicate: bool) -> None:
        self.distribute(module.norm, "replicate")
        if not replicate:
            self.distribute(module.proj, "colwise")
            module.norm.register_forward_hook(lambda _, __, x_BSE: self._enter_region(x_BSE))
            module.vocab_shard = VocabShard(
                vocab_start_index=self._rank * (module.proj.weight.shape[0] // self._size),
                num_shards=self._size,
                all_reduce_max=partial(collectives.all_reduce_max, self._group),
                all_reduce_sum=partial(collectives.all_reduce, self._group),
            )
            return
        self.distribute(module.proj, "replicate")
        if self._sequence_parallel:
            # Each rank computes the losses of its own tokens.
            group = (self._group_name, self._size)
            module.register_forward_pre_hook(
                lambda _, args: (args[0], _local_tokens(args[1], *group))
            )
            module.register_forward_hook(
                lambda _, __, losses_BS: AllGatherSplitGrad.apply(losses_BS, *group)
            )

    def _enter_region(self, x_BSE: Tensor) -> Any:
        return (AllGather if self._sequence_parallel else CopyToTP).apply(
            x_BSE, self._group_name, self._size
        )

    def _exit_region(self, x_BTE: Tensor) -> Any:
        return (ReduceScatter if self._sequence_parallel else AllReduce).apply(
            x_BTE, self._group_name, self._size
        )


def local_part(weight: Tensor) -> Tensor:
    """`to_local`, also where dynamo traces: it finds no such method by its name."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def replicated_part(weight: Tensor, *, group_name: str, rows: slice | None = None) -> Tensor:
    """A replicated weight, or these rows of it, whose gradient is summed over the tp ranks."""
    local: Tensor = CopyWeightToTP.apply(local_part(weight), group_name, 0)
    return local if rows is None else local[rows]


# ---- differentiable collectives: (tensor, group name, group size) -> tensor

Collective = Callable[[Tensor, str, int], Tensor]


def _differentiable(forward: Collective, backward: Collective) -> type[torch.autograd.Function]:
    """The autograd function that applies `forward` to its input and `backward` to the gradient."""

    class DifferentiableCollective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group_name: str, size: int) -> Tensor:
            ctx.group = (group_name, size)
            return forward(x, group_name, size)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return backward(grads[0], *ctx.group), None, None

    return DifferentiableCollective


def _identity(x: Tensor, group_name: str, size: int) -> Tensor:
    del group_name, size
    return x.view_as(x)


def _all_reduce(x: Tensor, group_name: str, size: int) -> Tensor:
    del size
    return collectives.all_reduce_functional(x, group_name)


def _all_reduce_fp32(grad: Tensor, group_name: str, size: int) -> Tensor:
    """Sums in float32 at least, and rounds once."""
    return _all_reduce(
        grad.to(torch.promote_types(grad.dtype, torch.float32)), group_name, size
    ).to(grad.dtype)


def _local_tokens(x_BT: Tensor, group_name: str, size: int) -> Tensor:
    return x_BT.chunk(size, dim=1)[collectives.resolve_process_group(group_name).rank()]


# Enter and exit a region with sequence parallelism; each is the gradient of the other.
AllGather = _differentiable(collectives.all_gather_tokens, collectives.reduce_scatter_tokens)
ReduceScatter = _differentiable(collectives.reduce_scatter_tokens, collectives.all_gather_tokens)
# The same without: Megatron's f and g.
CopyToTP = _differentiable(_identity, _all_reduce)
AllReduce = _differentiable(_all_reduce, _identity)
CopyWeightToTP = _differentiable(_identity, _all_reduce_fp32)
# All ranks compute the same from the gathered tokens, so each keeps the gradient of its own
# tokens.
AllGatherSplitGrad = _differentiable(collectives.all_gather_tokens, _local_tokens)
