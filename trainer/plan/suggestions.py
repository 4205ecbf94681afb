"""Single changes to a configuration that may help: that free memory, or save time. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parallelisms.parallel_dims import AXES, METHODS
from trainer.config.job_config import Config
from trainer.config.parse import toml_value
from trainer.hardware.device_specs import Device
from trainer.memory import report
from trainer.memory.report import changed

EXTRA = ("fa3", "fa4")
"""Kernels that come in packages of their own."""
PACKAGE = ", where its package is installed"


@dataclass(frozen=True)
class Candidate:
    text: str
    config: Config
    world_size: int

    @property
    def key(self) -> str:
        """What is changed. Kernels of other packages are told beside those that everybody has."""
        return self.text.partition(" ")[0] + (PACKAGE if self.text.endswith(PACKAGE) else "")


def freeing(config: Config, world_size: int, device: Device) -> Iterator[Candidate]:
    """Changes that may free memory of a device or of a node, and break no further rule."""
    del device
    found = (Candidate(*found) for found in report.changes(config, world_size))
    yield from _allowed(config, world_size, (*found, *_of_host(config, world_size), *_moves(config, world_size)))


def hastening(config: Config, world_size: int, device: Device) -> Iterator[Candidate]:
    """Changes that may save time on as many devices, and break no further rule."""
    yield from _allowed(config, world_size, (*_single(config, world_size, device), *_moves(config, world_size)))


def _allowed(config: Config, world_size: int, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    known = {*config.shape_problems(world_size)}
    for candidate in candidates:
        if known.issuperset(candidate.config.shape_problems(candidate.world_size)):
            yield candidate


def _of_host(config: Config, world_size: int) -> Iterator[Candidate]:
    memory = config.memory
    if memory.offload != "none":
        yield _with(config, "memory", "offload", "none", world_size)
    if memory.offload == "inputs_and_attention":
        yield _with(config, "memory", "offload", "inputs", world_size)
    if memory.optimizer_placement == "host":
        yield _with(config, "memory", "optimizer_placement", "device", world_size)
    if config.checkpoint.asynchronous:
        other = changed(config, "checkpoint", asynchronous=False)
        yield Candidate("checkpoint.async = false", other, world_size)


def _single(config: Config, world_size: int, device: Device) -> Iterator[Candidate]:
    for section, values in _faster(config, device).items():
        for key, choices in values.items():
            for value in choices:
                if value != getattr(getattr(config, section), key):
                    yield _with(config, section, key, value, world_size)


def _faster(config: Config, device: Device) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Values of keys by section that cost less time, at least sometimes."""
    memory, mesh = config.memory, config.parallelism
    policies = {"none": (), "keep_attention": ("none",), "full": ("keep_attention", "none")}
    schedules = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    return {
        "memory": {
            "recompute": policies[memory.recompute],
            "offload": {"inputs_and_attention": ("inputs", "none"), "inputs": ("none",)}.get(memory.offload, ()),
            "mlp_tile_mib": (None, *((4 * memory.mlp_tile_mib,) if memory.mlp_tile_mib else ())),
            "head_groups": (max(1, memory.head_groups // 2),),
            "input_every": (max(1, memory.input_every // 2),),
            "head_chunk_mib": (4 * memory.head_chunk_mib,),
            "optimizer_placement": ("device",),
        },
        "training": {
            "attention": tuple(
                kernel for kernel in device.attention if kernel != device.kernel(config.training.attention)
            ),
            "compile": (True,),
            "reduce_dtype": ("bfloat16",),
            "micro_batch_size": (2 * config.training.micro_batch_size,),
        },
        "parallelism": {
            "reshard_after_forward": (False,) if mesh.pp == 1 else (),
            "cp_method": METHODS if mesh.cp > 1 else (),
            "cp_reduce_dtype": ("bfloat16",) if mesh.cp > 1 else (),
            "async_tp": (True,) if mesh.tp > 1 else (),
            "sequence_parallel": (True,) if mesh.tp > 1 else (),
            "loss_parallel": (True,) if mesh.tp > 1 else (),
            "pp_schedule": schedules if mesh.pp > 1 else (),
            "pp_stages_per_rank": (2, 4) if mesh.pp > 1 else (),
        },
    }


def _moves(config: Config, world_size: int) -> Iterator[Candidate]:
    """Twice as many ranks along an axis, taken from another."""
    degrees = config.parallelism.degrees(world_size)
    for less in AXES:
        for more in AXES:
            if less != more and degrees[less] % 2 == 0:
                sizes = {less: degrees[less] // 2, more: 2 * degrees[more]}
                told = ", ".join(f"parallelism.{axis} = {size}" for axis, size in sizes.items())
                yield Candidate(told, changed(config, "parallelism", **sizes), world_size)


def _with(config: Config, section: str, key: str, value: Any, world_size: int) -> Candidate:
    told = f"{section}.{key} left out" if value is None else f"{section}.{key} = {toml_value(value)}"
    if key == "attention" and value in EXTRA:
        told += PACKAGE
    return Candidate(told, changed(config, section, **{key: value}), world_size)
