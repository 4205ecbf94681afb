"""Candidate single changes to a configuration that may free memory or save time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parallelisms.parallel_dims import AXES, CP_METHODS
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.toml_format import toml_value
from trainer.hardware.device_specs import DeviceSpec
from trainer.memory import report
from trainer.memory.report import with_overrides

OPTIONAL_KERNELS = ("fa3", "fa4")
"""Kernels from separate packages."""
PACKAGE_NOTE = ", if its package is installed"


@dataclass(frozen=True)
class Candidate:
    text: str
    config: Config
    world_size: int

    @property
    def key(self) -> str:
        """Candidates with the same key compete; kernels from separate packages do not compete with built-in ones."""
        return self.text.partition(" ")[0] + (PACKAGE_NOTE if self.text.endswith(PACKAGE_NOTE) else "")


def memory_saving_candidates(config: Config, world_size: int, device: DeviceSpec) -> Iterator[Candidate]:
    """Changes that may free device or host memory and add no configuration problem."""
    del device
    memory_candidates = (Candidate(*found) for found in report.memory_changes(config, world_size))
    yield from _valid(
        config,
        world_size,
        (*memory_candidates, *_host_memory_candidates(config, world_size), *_mesh_candidates(config, world_size)),
    )


def speedup_candidates(config: Config, world_size: int, device: DeviceSpec) -> Iterator[Candidate]:
    """Changes that may save time on the same number of devices and add no configuration problem."""
    yield from _valid(
        config, world_size, (*_single_key_candidates(config, world_size, device), *_mesh_candidates(config, world_size))
    )


def _valid(config: Config, world_size: int, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    existing_problems = {*checks.layout_problems(config, world_size)}
    for candidate in candidates:
        if existing_problems.issuperset(checks.layout_problems(candidate.config, candidate.world_size)):
            yield candidate


def _host_memory_candidates(config: Config, world_size: int) -> Iterator[Candidate]:
    memory = config.memory
    if memory.offload != "none":
        yield _candidate(config, "memory", "offload", "none", world_size)
    if memory.offload == "inputs_and_attention":
        yield _candidate(config, "memory", "offload", "inputs", world_size)
    if memory.optimizer_placement == "host":
        yield _candidate(config, "memory", "optimizer_placement", "device", world_size)
    if config.checkpoint.asynchronous:
        synchronous = with_overrides(config, {"checkpoint.asynchronous": False})
        yield Candidate("checkpoint.async = false", synchronous, world_size)


def _single_key_candidates(config: Config, world_size: int, device: DeviceSpec) -> Iterator[Candidate]:
    for section, values in _faster_values(config, device).items():
        for key, choices in values.items():
            for value in choices:
                if value != getattr(getattr(config, section), key):
                    yield _candidate(config, section, key, value, world_size)


def _faster_values(config: Config, device: DeviceSpec) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Values that may be faster, by section and key."""
    memory, parallelism = config.memory, config.parallelism
    policies = {"none": (), "keep_attention": ("none",), "full": ("keep_attention", "none")}
    schedules = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    return {
        "memory": {
            "recompute": policies[memory.recompute],
            "offload": {"inputs_and_attention": ("inputs", "none"), "inputs": ("none",)}.get(memory.offload, ()),
            "mlp_tile_mib": (None, *((4 * memory.mlp_tile_mib,) if memory.mlp_tile_mib else ())),
            "head_groups": (max(1, memory.head_groups // 2),),
            "blocks_per_checkpoint": (max(1, memory.blocks_per_checkpoint // 2),),
            "loss_chunk_mib": (4 * memory.loss_chunk_mib,),
            "optimizer_placement": ("device",),
        },
        "training": {
            "attention": tuple(
                kernel
                for kernel in device.attention_flops
                if kernel != device.attention_kernel(config.training.attention)
            ),
            "compile": (True,),
            "reduce_dtype": ("bfloat16",),
            "micro_batch_size": (2 * config.training.micro_batch_size,),
        },
        "parallelism": {
            "reshard_after_forward": (False,) if parallelism.pp == 1 else (),
            "cp_method": CP_METHODS if parallelism.cp > 1 else (),
            "cp_reduce_dtype": ("bfloat16",) if parallelism.cp > 1 else (),
            "async_tp": (True,) if parallelism.tp > 1 else (),
            "sequence_parallel": (True,) if parallelism.tp > 1 else (),
            "loss_parallel": (True,) if parallelism.tp > 1 else (),
            "pp_schedule": schedules if parallelism.pp > 1 else (),
            "pp_stages_per_rank": (2, 4) if parallelism.pp > 1 else (),
        },
    }


def _mesh_candidates(config: Config, world_size: int) -> Iterator[Candidate]:
    """Moves a factor of two from one mesh dimension to another."""
    degrees = config.parallelism.degrees(world_size)
    for from_axis in AXES:
        for to_axis in AXES:
            if from_axis != to_axis and degrees[from_axis] % 2 == 0:
                changes = {
                    f"parallelism.{from_axis}": degrees[from_axis] // 2,
                    f"parallelism.{to_axis}": 2 * degrees[to_axis],
                }
                text = ", ".join(f"{key} = {size}" for key, size in changes.items())
                yield Candidate(text, with_overrides(config, changes), world_size)


def _candidate(config: Config, section: str, key: str, value: Any, world_size: int) -> Candidate:
    text = f"{section}.{key} unset" if value is None else f"{section}.{key} = {toml_value(value)}"
    if key == "attention" and value in OPTIONAL_KERNELS:
        text += PACKAGE_NOTE
    return Candidate(text, with_overrides(config, {f"{section}.{key}": value}), world_size)
