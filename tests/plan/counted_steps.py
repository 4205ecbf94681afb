"""Counts communication, matmul FLOPs and memory traffic of a rank in a real step, at torch's
dispatcher.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from models import attention_op
from parallelisms.context import ring, ulysses
from parallelisms.mesh import collectives
from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES
from trainer.config.job_config import Config
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import BlendedDataset
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

# Dispatch modes do not see inside custom operators.
OPERATORS = {
    operator._opoverload: operator._init_fn
    for operator in (
        ring.attention,
        ring.attention_backward,
        ulysses._seq_to_heads,
        ulysses._heads_to_seq,
        attention_op.attention,
        attention_op.attention_backward,
    )
}


def _addmm_flops(_: Tensor, left: Tensor, right: Tensor, **__: object) -> int:
    """FLOPs of addmm_, which torch's registry lacks."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


aten = torch.ops.aten
PRODUCTS = {packet: flop_registry[packet] for packet in (aten.mm, aten.addmm, aten.bmm)} | {
    aten.addmm_: _addmm_flops
}
SILENT = ("recv_", "wait_tensor", "barrier", "monitored_barrier_")
Key = tuple[str, str, bool]
"""(channel, kind, whether autograd was running backward)."""


class Seen(TorchDispatchMode):
    """Counts bytes and calls by channel and kind, without small messages, and matmul FLOPs by
    torch's formulas.
    """

    def __init__(self, channels: dict[str, str]) -> None:
        """`channels`: channel by group name."""
        super().__init__()
        self.bytes: defaultdict[Key, float] = defaultdict(float)
        self.calls: Counter[Key] = Counter()
        self.products = 0
        self._channels = channels

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in OPERATORS:
            with self:
                return OPERATORS[function](*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            self._see(function._schema.name.partition("::")[2], [*args, *(kwargs or {}).values()])
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            self.products += PRODUCTS[function.overloadpacket](
                *args, **(kwargs or {}), out_val=out
            )
        return out

    def _see(self, name: str, args: list[Any]) -> None:
        if name in SILENT:
            return
        size, kind, found = _describe(name, args)
        (group,) = (_name(x) for x in args if isinstance(x, torch.ScriptObject | str) and _name(x))
        ranks = collectives.resolve_process_group(group).size()
        if size < MIN_COUNTED_BYTES or ranks == 1:
            return
        key = (self._channels[group], kind, torch._C._current_graph_task_id() != -1)
        self.bytes[key] += found(ranks)
        self.calls[key] += 1


def _describe(name: str, args: list[Any]) -> tuple[int, str, Any]:
    """(size, kind, sent bytes as a function of the group size), independent of `sent_bytes`."""
    if name in ("_allgather_base_", "all_gather_into_tensor"):
        part = args[1 if name == "_allgather_base_" else 0].nbytes
        return part, "all_gather", lambda ranks: part * (ranks - 1)
    if name == "_reduce_scatter_base_":
        left = args[0].nbytes
        return left, "reduce_scatter", lambda ranks: left * (ranks - 1)
    if name == "reduce_scatter_tensor":
        left = args[0].nbytes // args[2]
        return left, "reduce_scatter", lambda ranks: left * (ranks - 1)
    if name in ("allreduce_", "all_reduce"):
        whole = (args[0][0] if name == "allreduce_" else args[0]).nbytes
        return whole, "all_reduce", lambda ranks: 2 * whole * (ranks - 1) / ranks
    if name == "alltoall_base_":
        own = args[1].nbytes
        splits = args[4]
        return own, "all_to_all", lambda ranks: own if splits else own * (ranks - 1) / ranks
    if name == "send":
        message = args[0][0].nbytes
        return message, "send", lambda _: message
    raise ValueError(f"unknown collective {name}")


def _name(x: Any) -> str:
    """Name of a process group; "" for other arguments."""
    if isinstance(x, str):
        return "" if x in ("sum", "max") else x
    try:
        return str(ProcessGroup.unbox(x).group_name)
    except (RuntimeError, TypeError):
        return ""


class Touched(TorchDispatchMode):
    """Counts bytes that operators read and write, except matmuls and attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in OPERATORS:
            with self:
                return OPERATORS[function](*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.namespace == "fsdp":
            # Copies of weights and gradients, into tensors that are given.
            self.bytes += sum(x.nbytes for x in _tensors((args, kwargs)))
        if (
            function.namespace == "aten"
            and not name.startswith(UNTOUCHED)
            and not _is_view(function)
        ):
            found = [*_tensors(args), *_tensors(out)]
            # Some operators only write their first argument, or touch few rows of it.
            found = (
                found[1:]
                if name in ("copy_", "fill_", "zero_")
                else [args[3]] * 2
                if name == "index_copy_"
                else found
            )
            self.bytes += sum(x.nbytes for x in found)
        return out


UNTOUCHED = (
    "empty",
    "new_empty",
    "mm",
    "addmm",
    "bmm",
    "gather",
    "scatter",
    "_scaled_dot",
    "_unsafe_view",
    "detach",
)


def _is_view(function: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in function._schema.returns
    )


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Counted:
    """One rank's second step, since the first initializes."""

    pp_rank: int
    bytes: dict[Key, float]
    calls: dict[Key, int]
    matmul_flops: float
    pairs: int
    """(query, key) pairs per head."""


def touched(config: Config) -> int:
    """Memory traffic of a step's forward and backward, without FSDP weights."""
    trainer, reading = _begun(config)
    with Touched() as seen:
        trainer.accumulate_gradients(next(reading))
    reading.close()
    return int(seen.bytes)


def _begun(config: Config) -> tuple[Trainer, Any]:
    """(trainer after its first step, its data iterator)."""
    training = config.training
    rows = CopyDataset(
        vocab_size=config.model.build().vocab_size,
        period=training.seq_len // 2,
        seq_len=training.seq_len,
        num_sequences=training.global_batch_size * training.steps,
        seed=0,
    )
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, BlendedDataset([rows], seq_len=training.seq_len))
    reading = trainer.loader.steps(0)
    trainer.step = 1
    trainer.train_step(next(reading), 1e-3)
    return trainer, reading


def count(config: Config) -> Counted:
    trainer, reading = _begun(config)
    names = {str(group.group_name): channel for channel, group in trainer.mesh._groups.items()}
    names[str(cast(ProcessGroup, distributed.group.WORLD).group_name)] = "world"
    batches = next(reading)
    with Seen(names) as seen:
        trainer.train_step(batches, 1e-3)
    reading.close()
    pairs = sum(batch.num_computed_pairs for batch in batches)
    return Counted(
        trainer.mesh.coordinate["pp"], dict(seen.bytes), dict(seen.calls), seen.products, pairs
    )
