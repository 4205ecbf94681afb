"""Reports a memory estimate: the start-up table, and changes to try after running out of memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.checkpoint.manifest import format_bytes
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.toml_format import toml_value
from trainer.memory.estimator import GIB, MemoryEstimate, MemoryItem, estimate_memory

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class MemorySaving:
    change: str
    freed_bytes: float
    """On the rank with the highest peak."""


def memory_table(estimate: MemoryEstimate) -> list[str]:
    """One line per nonzero item, the total last; in MiB if the total is below 1 GiB."""
    unit, unit_name = (GIB, "GiB") if estimate.device_bytes >= GIB else (GIB >> 10, "MiB")
    total_item = MemoryItem(
        f"total: states + {estimate.residual_multiple:.1f} x {_format_number(estimate.residual_bytes / unit)}",
        estimate.device_bytes,
        estimate.host_bytes,
    )
    rows = [
        f"{item.name:<40}{_format_number(item.device_bytes / unit):>9}{_format_number(item.host_bytes / unit):>9}"
        for item in (*estimate.items, total_item)
    ]
    rank_text = f", pp rank {estimate.pp_rank}" if estimate.pp > 1 else ""
    return [
        f"predicted peak memory per rank, {estimate.phase}{rank_text}",
        f"{unit_name:<40}{'device':>9}{'host':>9}",
        *(
            row
            for row, line in zip(rows, (*estimate.items, total_item), strict=True)
            if line.device_bytes or line.host_bytes
        ),
    ]


def memory_summary(estimate: MemoryEstimate) -> str:
    largest = sorted(estimate.items, key=lambda item: -item.device_bytes)[:3]
    text = ", ".join(f"{item.name} {_format_size(item.device_bytes)}" for item in largest)
    host = f"; host {_format_size(estimate.host_bytes)}" if estimate.host_bytes else ""
    return f"predicted peak memory per rank: {_format_size(estimate.device_bytes)} ({text}){host}"


def out_of_memory_advice(config: Config, world_size: int, *, limit: int = 3) -> list[str]:
    """The estimate, then the `limit` changes that free most, one per line."""
    suggestions = [
        f"{saving.change} would free {_format_size(saving.freed_bytes)}"
        for saving in memory_savings(config, world_size)[:limit]
    ]
    fallback = ["no single-key change frees memory: use more ranks or a smaller model"]
    return [memory_summary(estimate_memory(config, world_size)), *(suggestions or fallback)]


def memory_savings(config: Config, world_size: int) -> list[MemorySaving]:
    """Changes that free memory without adding configuration problems, largest saving first."""
    current_bytes, known_problems = (
        estimate_memory(config, world_size).device_bytes,
        {*checks.problems(config, world_size)},
    )
    savings = []
    for change, changed_config, changed_world_size in memory_changes(config, world_size):
        if (
            known_problems.issuperset(checks.problems(changed_config, changed_world_size))
            and (freed_bytes := current_bytes - estimate_memory(changed_config, changed_world_size).device_bytes) > 0
        ):
            savings.append(MemorySaving(change, freed_bytes))
    return sorted(savings, key=lambda saving: -saving.freed_bytes)


def memory_changes(config: Config, world_size: int) -> Iterator[tuple[str, Config, int]]:
    """Yields (change, configuration, world size) of changes that may free memory; not validated."""
    for key, value in _memory_saving_values(config):
        yield f"{key} = {toml_value(value)}", with_overrides(config, {key: value}), world_size
    for axis in ("cp", "tp", "dp_shard"):
        yield _doubled_degree(config, world_size, axis)


def _memory_saving_values(config: Config) -> Iterator[tuple[str, Any]]:
    memory, training, parallelism = config.memory, config.training, config.parallelism
    for policy in {"none": ("keep_attention", "full"), "keep_attention": ("full",)}.get(memory.recompute, ()):
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
    if memory.loss_chunk_mib >= 4:
        yield "memory.loss_chunk_mib", memory.loss_chunk_mib // 4
    if training.micro_batch_size >= 2:
        yield "training.micro_batch_size", training.micro_batch_size // 2
    if parallelism.tp > 1 and not parallelism.sequence_parallel:
        yield "parallelism.sequence_parallel", True
    if parallelism.tp > 1 and not parallelism.loss_parallel:
        yield "parallelism.loss_parallel", True


def _doubled_degree(config: Config, world_size: int, axis: str) -> tuple[str, Config, int]:
    """Doubles a mesh dimension at the expense of a dp dimension, or else doubles the world size."""
    degrees = config.parallelism.degrees(world_size)
    new_degrees = {axis: 2 * degrees[axis]}
    for other in ("dp_replicate", "dp_shard"):
        if other != axis and degrees[other] % 2 == 0:
            new_degrees[other] = degrees[other] // 2
            break
    else:
        world_size *= 2
        new_degrees.setdefault("dp_shard", degrees["dp_shard"])
    changes = {f"parallelism.{key}": size for key, size in new_degrees.items()}
    text = ", ".join(f"parallelism.{key} = {size}" for key, size in new_degrees.items() if size != degrees[key])
    if not any(size < degrees[key] for key, size in new_degrees.items()):
        text += f" on {world_size} processes"
    return text, with_overrides(config, changes), world_size


def with_overrides(config: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
    """Replaces values by dotted key; does not validate."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _format_size(size: float) -> str:
    return f"{_format_number(size / GIB)} GiB" if size >= GIB else format_bytes(size)


def _format_number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
