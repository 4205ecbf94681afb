"""The memory estimate in words, and changes of the configuration that free memory.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import checks, extension
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.sections import ParallelismSection
from trainer.config.toml_format import toml_value
from trainer.hardware.host import GIB
from trainer.plan.memory_estimate import MemoryEstimate, estimate_memory
from trainer.storage.durable_io import format_bytes

BY_FORMULAS = "by formulas, which count what an extension adds as ours; longhaul plan traces it"
MESH_SAVINGS: dict[str, dict[str, Any]] = {
    "tp": {"sequence_parallel": True, "loss_parallel": True},
    "pp": {"pp_reduce_gradients": "per_micro_batch", "pp_schedule": "1F1B"},
}
"""Values of keys that save memory with several ranks on an axis."""


@dataclass(frozen=True)
class Change:
    """A configuration that differs in one key or in mesh degrees."""

    text: str
    config: Config
    world_size: int


def memory_summary(config: Config, estimate: MemoryEstimate) -> str:
    text = ", ".join(
        f"{item.name} {_format_size(item.device_bytes)}" for item in estimate.largest_items
    )
    host = f"; host {_format_size(estimate.host_bytes)}" if estimate.host_bytes else ""
    note = f"; {BY_FORMULAS}" if _has_added_parts(config) else ""
    return f"predicted peak memory per rank: {_format_size(estimate.device_bytes)} ({text}){host}{note}"


def _has_added_parts(config: Config) -> bool:
    """Whether an extension adds a layer or the optimizer of the run."""
    names = [("optimizers", config.optimizer.name)]
    for kind in config.model.build().kinds:
        names += [("mixers", kind.mixer), ("feed_forwards", kind.feed_forward)]
    return any(extension.adding(table, name) for table, name in names)


def out_of_memory_advice(config: Config, world_size: int, *, limit: int = 3) -> list[str]:
    """The estimate, then the `limit` changes that free most, one per line."""
    savings = [*memory_savings(config, world_size).items()][:limit]
    suggestions = [
        f"{text} would free {_format_size(freed_bytes)}" for text, freed_bytes in savings
    ]
    fallback = ["no single-key change frees memory: use more ranks or a smaller model"]
    return [
        memory_summary(config, estimate_memory(config, world_size)),
        *(suggestions or fallback),
    ]


def memory_savings(config: Config, world_size: int) -> dict[str, float]:
    """Bytes that valid changes free on the rank with the highest peak, by change, the largest
    saving first.
    """
    peak = estimate_memory(config, world_size).device_bytes
    freed = {
        change.text: peak - estimate_memory(change.config, change.world_size).device_bytes
        for change in valid_changes(config, world_size, memory_changes(config, world_size))
    }
    return {
        text: size
        for text, size in sorted(freed.items(), key=lambda saving: -saving[1])
        if size > 0
    }


def valid_changes(config: Config, world_size: int, changes: Iterable[Change]) -> Iterator[Change]:
    """The changes that add no configuration problem."""
    existing_problems = {*checks.layout_problems(config, world_size)}
    for change in changes:
        if existing_problems.issuperset(checks.layout_problems(change.config, change.world_size)):
            yield change


def memory_changes(config: Config, world_size: int) -> Iterator[Change]:
    """Changes that may free device memory; not validated."""
    for key, value in (*_memory_saving_values(config), *_mesh_saving_values(config.parallelism)):
        yield change_of(config, world_size, {key: value})
    for axis in ("cp", "tp", "dp_shard"):
        yield _doubled_degree(config, world_size, axis)


def _memory_saving_values(config: Config) -> Iterator[tuple[str, Any]]:
    memory = config.memory
    training = config.training
    for policy in {"none": ("keep_attention", "full"), "keep_attention": ("full",)}.get(
        memory.recompute, ()
    ):
        yield "memory.recompute", policy
    offloads = ("none", "inputs", "inputs_and_attention")
    for offload in offloads[offloads.index(memory.offload) + 1 :]:
        yield "memory.offload", offload
    if memory.mlp_tile_mib is None:
        yield "memory.mlp_tile_mib", 512
    yield "memory.head_groups", 2 * memory.head_groups
    yield "memory.blocks_per_checkpoint", 2 * memory.blocks_per_checkpoint
    if memory.optimizer_placement == "device":
        yield "memory.optimizer_placement", "host"
    if memory.optimizer_dtype == "float32":
        yield "memory.optimizer_dtype", "bfloat16"
    if (chunk_mib := memory.loss_chunk_bytes >> 20) >= 4:
        yield "memory.loss_chunk_mib", chunk_mib // 4
    if training.micro_batch_size >= 2:
        yield "training.micro_batch_size", training.micro_batch_size // 2


def _mesh_saving_values(parallelism: ParallelismSection) -> Iterator[tuple[str, Any]]:
    for axis, values in MESH_SAVINGS.items():
        for key, value in values.items() if getattr(parallelism, axis) > 1 else ():
            if getattr(parallelism, key) != value:
                yield f"parallelism.{key}", value


def _doubled_degree(config: Config, world_size: int, axis: str) -> Change:
    """Doubles a mesh dimension at the expense of a dp dimension, or else doubles the world
    size.
    """
    degrees = config.parallelism.degrees(world_size)
    doubled = {f"parallelism.{axis}": 2 * degrees[axis]}
    # Halving a dp dimension keeps the number of devices. Only without one does the job grow.
    for other in ("dp_replicate", "dp_shard"):
        if other != axis and degrees[other] % 2 == 0:
            return change_of(
                config, world_size, doubled | {f"parallelism.{other}": degrees[other] // 2}
            )
    config = with_overrides(config, {"parallelism.dp_shard": degrees["dp_shard"]})
    return change_of(config, 2 * world_size, doubled, note=f" on {2 * world_size} processes")


def change_of(
    config: Config, world_size: int, overrides: Mapping[str, Any], *, note: str = ""
) -> Change:
    texts = (
        f"{key} unset" if value is None else f"{key} = {toml_value(value)}"
        for key, value in overrides.items()
    )
    return Change(", ".join(texts) + note, with_overrides(config, overrides), world_size)


def _format_size(size: float) -> str:
    if size < GIB:
        return format_bytes(size)
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"
