"""The ledger in words: a table at the start, and what to change when memory does not suffice. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.job_config import Config
from trainer.config.parse import toml_value
from trainer.config.sections import MemorySection
from trainer.memory.estimator import GIB, Ledger, Line, ledger


@dataclass(frozen=True)
class Lever:
    """A change to a configuration, and the bytes that it frees on the fullest rank."""

    change: str
    frees: float


def table(found: Ledger) -> list[str]:
    """A line for each kind of thing, the sum last."""
    total = Line(f"together: states + {found.k:.1f} x {_gib(found.stream)}", found.device, found.host)
    rows = [f"{line.name:<40}{_gib(line.device):>9}{_gib(line.host):>9}" for line in (*found.lines, total)]
    where = f", rank {found.place} of the pipeline" if found.pp > 1 else ""
    return [
        f"memory of the fullest rank, predicted {found.moment}{where}",
        f"{'GiB':<40}{'device':>9}{'host':>9}",
        *(row for row, line in zip(rows, (*found.lines, total), strict=True) if line.device or line.host),
    ]


def short(found: Ledger) -> str:
    """A line."""
    most = sorted(found.lines, key=lambda line: -line.device)[:3]
    told = ", ".join(f"{line.name} {_gib(line.device)}" for line in most)
    return f"memory of the fullest rank, predicted: {_gib(found.device)} GiB ({told}); host {_gib(found.host)} GiB"


def advice(config: Config, world_size: int, *, most: int = 3) -> list[str]:
    """What the configuration was to take, and the changes that would free most, a line each."""
    found = [f"{lever.change} would free {_gib(lever.frees)} GiB" for lever in levers(config, world_size)[:most]]
    nothing = ["no change of a single key frees memory: take more ranks, or a smaller model"]
    return [short(ledger(config, world_size)), *(found or nothing)]


def levers(config: Config, world_size: int) -> list[Lever]:
    """The changes that free memory and break no further rule, most first."""
    before, known = ledger(config, world_size).device, {*config.problems(world_size)}
    found = []
    for change, other, size in changes(config, world_size):
        if known.issuperset(other.problems(size)) and (frees := before - ledger(other, size).device) > 0:
            found.append(Lever(change, frees))
    return sorted(found, key=lambda lever: -lever.frees)


def changes(config: Config, world_size: int) -> Iterator[tuple[str, Config, int]]:
    """Those that may free memory: (in words, the configuration, its number of processes). Some break rules."""
    memory, training, mesh = config.memory, config.training, config.parallelism
    for given in _of_memory(memory):
        ((key, value),) = given.items()
        yield f"memory.{key} = {toml_value(value)}", changed(config, "memory", **given), world_size
    if (chunk := memory.head_chunk_mib // 4) >= 1:
        yield f"memory.head_chunk_mib = {chunk}", changed(config, "memory", head_chunk_mib=chunk), world_size
    if (rows := training.micro_batch_size // 2) >= 1:
        yield f"training.micro_batch_size = {rows}", changed(config, "training", micro_batch_size=rows), world_size
    for key in ("sequence_parallel", "loss_parallel"):
        if mesh.tp > 1 and not getattr(mesh, key):
            yield f"parallelism.{key} = true", changed(config, "parallelism", **{key: True}), world_size
    for axis in ("cp", "tp", "dp_shard"):
        yield _doubled(config, world_size, axis)


def _of_memory(memory: MemorySection) -> Iterator[dict[str, Any]]:
    for policy in {"none": ("keep_attention", "full"), "keep_attention": ("full",)}.get(memory.recompute, ()):
        yield {"recompute": policy}
    if memory.offload == "none":
        yield {"offload": "inputs"}
    if memory.offload != "inputs_and_attention":
        yield {"offload": "inputs_and_attention"}
    if memory.mlp_tile_mib is None:
        yield {"mlp_tile_mib": 512}
    yield {"head_groups": 2 * memory.head_groups}
    yield {"input_every": 2 * memory.input_every}
    if memory.optimizer_placement == "device":
        yield {"optimizer_placement": "host"}
    if memory.optimizer_dtype == "float32":
        yield {"optimizer_dtype": "bfloat16"}


def _doubled(config: Config, world_size: int, axis: str) -> tuple[str, Config, int]:
    """Twice as many ranks along an axis, taken from those that hold other rows, or else added."""
    degrees = config.parallelism.degrees(world_size)
    more = {axis: 2 * degrees[axis]}
    for other in ("dp_replicate", "dp_shard"):
        if other != axis and degrees[other] % 2 == 0:
            more[other] = degrees[other] // 2
            break
    else:
        world_size *= 2
        more.setdefault("dp_shard", degrees["dp_shard"])
    told = ", ".join(f"parallelism.{key} = {size}" for key, size in more.items() if size != degrees[key])
    added = (
        ""
        if len(more) > 1 and any(size < degrees[key] for key, size in more.items())
        else f" on {world_size} processes"
    )
    return told + added, changed(config, "parallelism", **more), world_size


def changed(config: Config, section: str, **values: Any) -> Config:
    """With other values of a section, unchecked."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:.0f}"
