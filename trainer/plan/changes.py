"""Single changes to a configuration that may free memory or save time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from operator import attrgetter
from typing import Any

from models.kernel_choice import FLASH_VERSIONS
from parallelisms.mesh.context_plan import CP_METHODS
from parallelisms.mesh.parallel_dims import AXES
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.sections import ParallelismSection
from trainer.config.toml_format import toml_value
from trainer.hardware.attention_choice import attention_problems
from trainer.hardware.device_specs import DeviceSpec

PACKAGE_NOTE = ", if its package is installed"
LIGHTER_OFFLOADS = {"inputs_and_attention": ("inputs", "none"), "inputs": ("none",)}
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


def memory_saving_changes(config: Config, world_size: int) -> Iterator[Change]:
    """Changes that may free device or host memory; not validated."""
    host_values: dict[str, tuple[Any, ...]] = {
        "memory.offload": LIGHTER_OFFLOADS.get(config.memory.offload, ()),
        "memory.optimizer_placement": ("device",),
    }
    changes = [*memory_changes(config, world_size), *_key_changes(config, world_size, host_values)]
    if config.checkpoint.asynchronous:
        synchronous = with_overrides(config, {"checkpoint.asynchronous": False})
        changes.append(Change("checkpoint.async = false", synchronous, world_size))
    yield from changes
    yield from _mesh_changes(config, world_size)


def speedup_changes(config: Config, world_size: int, device: DeviceSpec) -> Iterator[Change]:
    """Changes that may save time on the same number of devices; not validated."""
    yield from _key_changes(config, world_size, _faster_values(config, device))
    yield from _mesh_changes(config, world_size)


def competition_key(change: Change) -> str:
    """Key under which changes compete: only the best of each is suggested.

    Kernels from separate packages do not compete.
    """
    # Of two degrees the first by name, in whichever order they stand.
    first = min(change.text.removesuffix(PACKAGE_NOTE).split(", ")).partition(" ")[0]
    return first + (PACKAGE_NOTE if change.text.endswith(PACKAGE_NOTE) else "")


def _key_changes(
    config: Config, world_size: int, values: dict[str, tuple[Any, ...]]
) -> Iterator[Change]:
    for key, choices in values.items():
        for value in choices:
            if value != attrgetter(key)(config):
                note = PACKAGE_NOTE if value in FLASH_VERSIONS else ""
                yield change_of(config, world_size, {key: value}, note=note)


def _able_flash_versions(config: Config, device: DeviceSpec) -> list[str]:
    choices = {
        kernel: with_overrides(config, {"training.attention": kernel}) for kernel in FLASH_VERSIONS
    }
    return [
        kernel
        for kernel, changed in choices.items()
        if kernel in device.attention_flops and not attention_problems(changed, device)
    ]


def _faster_values(config: Config, device: DeviceSpec) -> dict[str, tuple[Any, ...]]:
    """Values that may be faster, by key."""
    memory = config.memory
    parallelism = config.parallelism
    training = config.training
    # Values that save time if memory allows: less recomputation and offload, larger tiles and
    # chunks.
    values: dict[str, tuple[Any, ...]] = {
        "memory.recompute": {
            "none": (),
            "keep_attention": ("none",),
            "full": ("keep_attention", "none"),
        }[memory.recompute],
        "memory.offload": LIGHTER_OFFLOADS.get(memory.offload, ()),
        "memory.mlp_tile_mib": (
            None,
            *((4 * memory.mlp_tile_mib,) if memory.mlp_tile_mib else ()),
        ),
        "memory.head_groups": (max(1, memory.head_groups // 2),),
        "memory.blocks_per_checkpoint": (max(1, memory.blocks_per_checkpoint // 2),),
        "memory.loss_chunk_mib": (4 * memory.loss_chunk_bytes >> 20,),
        "memory.optimizer_placement": ("device",),
        "training.attention": ("auto", *_able_flash_versions(config, device)),
        "training.compile": () if config.compiles_on_gpu else (True,),
        "training.reduce_dtype": ("bfloat16",),
        "training.micro_batch_size": (2 * training.micro_batch_size,),
    }
    if config.model.build().num_experts:
        values["parallelism.ep"] = (2 * parallelism.ep, max(1, parallelism.ep // 2))
    if parallelism.pp == 1:
        values["parallelism.reshard_after_forward"] = (False,)
    if parallelism.cp > 1:
        values |= {
            "parallelism.cp_method": CP_METHODS,
            "parallelism.cp_reduce_dtype": ("bfloat16",),
        }
    if parallelism.tp > 1:
        values |= {
            f"parallelism.{key}": (True,)
            for key in ("async_tp", "sequence_parallel", "loss_parallel")
        }
    if parallelism.pp > 1:
        values["parallelism.pp_schedule"] = ("1F1B", "Interleaved1F1B")
        values["parallelism.pp_stages_per_rank"] = (2, 4)
        values["parallelism.pp_reduce_gradients"] = ("per_step",)
    return values


def _mesh_changes(config: Config, world_size: int) -> Iterator[Change]:
    """Moves a factor of two from one mesh dimension to another."""
    degrees = config.parallelism.degrees(world_size)
    for giver, taker in permutations(AXES, 2):
        if degrees[giver] % 2 == 0:
            halved = degrees[giver] // 2
            doubled = 2 * degrees[taker]
            yield change_of(
                config,
                world_size,
                {f"parallelism.{giver}": halved, f"parallelism.{taker}": doubled},
            )


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
