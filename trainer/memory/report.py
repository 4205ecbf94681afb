"""The ledger in words: a table at the start, and what to change when memory does not suffice. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.sections import MemorySection
from trainer.config.toml_format import toml_value
from trainer.memory.estimator import GIB, MemoryEstimate, MemoryItem, estimate_memory


@dataclass(frozen=True)
class MemorySaving:
    """A change to a configuration, and the bytes that it frees on the fullest rank."""

    change: str
    freed_bytes: float


def memory_table(estimate: MemoryEstimate) -> list[str]:
    """A line for each kind of thing, the sum last."""
    total_item = MemoryItem(
        f"together: states + {estimate.residual_multiple:.1f} x {_format_gib(estimate.residual_bytes)}",
        estimate.device_bytes,
        estimate.host_bytes,
    )
    rows = [
        f"{item.name:<40}{_format_gib(item.device_bytes):>9}{_format_gib(item.host_bytes):>9}"
        for item in (*estimate.items, total_item)
    ]
    rank_text = f", rank {estimate.pp_rank} of the pipeline" if estimate.pp > 1 else ""
    return [
        f"memory of the fullest rank, predicted {estimate.phase}{rank_text}",
        f"{'GiB':<40}{'device':>9}{'host':>9}",
        *(
            row
            for row, line in zip(rows, (*estimate.items, total_item), strict=True)
            if line.device_bytes or line.host_bytes
        ),
    ]


def memory_summary(estimate: MemoryEstimate) -> str:
    """A line."""
    largest = sorted(estimate.items, key=lambda item: -item.device_bytes)[:3]
    text = ", ".join(f"{line.name} {_format_gib(line.device_bytes)}" for line in largest)
    return f"memory of the fullest rank, predicted: {_format_gib(estimate.device_bytes)} GiB ({text}); host {_format_gib(estimate.host_bytes)} GiB"


def out_of_memory_advice(config: Config, world_size: int, *, limit: int = 3) -> list[str]:
    """What the configuration was to take, and the changes that would free most, a line each."""
    suggestions = [
        f"{saving.change} would free {_format_gib(saving.freed_bytes)} GiB"
        for saving in memory_savings(config, world_size)[:limit]
    ]
    fallback = ["no change of a single key frees memory: take more ranks, or a smaller model"]
    return [memory_summary(estimate_memory(config, world_size)), *(suggestions or fallback)]


def memory_savings(config: Config, world_size: int) -> list[MemorySaving]:
    """The changes that free memory and break no further rule, most first."""
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
    """Those that may free memory: (in words, the configuration, its number of processes). Some break rules."""
    memory, training, parallelism = config.memory, config.training, config.parallelism
    for values in _memory_options(memory):
        ((key, value),) = values.items()
        yield f"memory.{key} = {toml_value(value)}", with_section_values(config, "memory", **values), world_size
    if (chunk := memory.loss_chunk_mib // 4) >= 1:
        yield (
            f"memory.loss_chunk_mib = {chunk}",
            with_section_values(config, "memory", loss_chunk_mib=chunk),
            world_size,
        )
    if (micro_batch_size := training.micro_batch_size // 2) >= 1:
        yield (
            f"training.micro_batch_size = {micro_batch_size}",
            with_section_values(config, "training", micro_batch_size=micro_batch_size),
            world_size,
        )
    for key in ("sequence_parallel", "loss_parallel"):
        if parallelism.tp > 1 and not getattr(parallelism, key):
            yield f"parallelism.{key} = true", with_section_values(config, "parallelism", **{key: True}), world_size
    for axis in ("cp", "tp", "dp_shard"):
        yield _doubled_degree(config, world_size, axis)


def _memory_options(memory: MemorySection) -> Iterator[dict[str, Any]]:
    for policy in {"none": ("keep_attention", "full"), "keep_attention": ("full",)}.get(memory.recompute, ()):
        yield {"recompute": policy}
    if memory.offload == "none":
        yield {"offload": "inputs"}
    if memory.offload != "inputs_and_attention":
        yield {"offload": "inputs_and_attention"}
    if memory.mlp_tile_mib is None:
        yield {"mlp_tile_mib": 512}
    yield {"head_groups": 2 * memory.head_groups}
    yield {"blocks_per_checkpoint": 2 * memory.blocks_per_checkpoint}
    if memory.optimizer_placement == "device":
        yield {"optimizer_placement": "host"}
    if memory.optimizer_dtype == "float32":
        yield {"optimizer_dtype": "bfloat16"}


def _doubled_degree(config: Config, world_size: int, axis: str) -> tuple[str, Config, int]:
    """Twice as many ranks along an axis, taken from those that hold other rows, or else added."""
    degrees = config.parallelism.degrees(world_size)
    new_degrees = {axis: 2 * degrees[axis]}
    for other in ("dp_replicate", "dp_shard"):
        if other != axis and degrees[other] % 2 == 0:
            new_degrees[other] = degrees[other] // 2
            break
    else:
        world_size *= 2
        new_degrees.setdefault("dp_shard", degrees["dp_shard"])
    text = ", ".join(f"parallelism.{key} = {size}" for key, size in new_degrees.items() if size != degrees[key])
    suffix = (
        ""
        if len(new_degrees) > 1 and any(size < degrees[key] for key, size in new_degrees.items())
        else f" on {world_size} processes"
    )
    return text + suffix, with_section_values(config, "parallelism", **new_degrees), world_size


def with_section_values(config: Config, section: str, **values: Any) -> Config:
    """With other values of a section, unchecked."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _format_gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:.0f}"
