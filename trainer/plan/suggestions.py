"""Single changes to a configuration that may free memory or save time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from operator import attrgetter
from typing import Any

from models.kernel_choice import FLASH_VERSIONS
from parallelisms.mesh.context_plan import CP_METHODS
from parallelisms.mesh.parallel_dims import AXES
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.hardware.attention_choice import attention_problems
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.memory_advice import Change, change_of, memory_changes, valid_changes

PACKAGE_NOTE = ", if its package is installed"
LIGHTER_OFFLOADS = {"inputs_and_attention": ("inputs", "none"), "inputs": ("none",)}


def memory_saving_changes(config: Config, world_size: int) -> Iterator[Change]:
    """Changes that may free device or host memory and add no configuration problem."""
    host_values: dict[str, tuple[Any, ...]] = {
        "memory.offload": LIGHTER_OFFLOADS.get(config.memory.offload, ()),
        "memory.optimizer_placement": ("device",),
    }
    changes = [*memory_changes(config, world_size), *_key_changes(config, world_size, host_values)]
    if config.checkpoint.asynchronous:
        synchronous = with_overrides(config, {"checkpoint.asynchronous": False})
        changes.append(Change("checkpoint.async = false", synchronous, world_size))
    yield from valid_changes(config, world_size, [*changes, *_mesh_changes(config, world_size)])


def speedup_changes(config: Config, world_size: int, device: DeviceSpec) -> Iterator[Change]:
    """Changes that may save time on the same number of devices and add no configuration
    problem.
    """
    key_changes = _key_changes(config, world_size, _faster_values(config, device))
    yield from valid_changes(
        config, world_size, (*key_changes, *_mesh_changes(config, world_size))
    )


def competition_key(change: Change) -> str:
    """Key under which changes compete: only the best of each is suggested.

    Kernels from separate packages do not compete.
    """
    return change.text.partition(" ")[0] + (
        PACKAGE_NOTE if change.text.endswith(PACKAGE_NOTE) else ""
    )


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
