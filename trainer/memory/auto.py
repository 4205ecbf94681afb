"""`memory.recompute = "auto"`: the fastest choice of what to keep and where that is predicted to fit. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from trainer.config.job_config import Config
from trainer.config.parse import toml_value
from trainer.errors import ConfigError
from trainer.memory.estimator import GIB, KEPT, ledger

DEVICE, HOST = 0.9, 0.75
"""What may be filled of a device, where kernels and the allocator need the rest, and of a node, where data is read."""
ROUNDED = 17 / 16
"""What pinned memory takes at most of what lies in it."""
# Each in the order in which it is tried, with what it adds to the time, about: copies, launches and sums of more pieces.
LEVERS: dict[str, dict[Any, float]] = {
    "recompute": {"none": 0, "keep_attention": 0, "full": 0},
    "offload": {"none": 0, "inputs": 0.004, "inputs_and_attention": 0.008},
    "mlp_tile_mib": {None: 0, 1024: 0.01, 256: 0.03},
    "head_groups": {1: 0, 2: 0.004, 4: 0.01, 8: 0.02, 16: 0.04},
    "input_every": {1: 0, 2: 0, 4: 0, 8: 0},
}


def fitted(config: Config, world_size: int, *, ranks: int, device: float, host: float) -> Config:
    """The configuration with `auto` made into levers. Keys of `memory` that were given stay as they are.

    `device` are the bytes of a device, `host` those of a node of so many `ranks`. Raises ConfigError where nothing fits.
    """
    if config.memory.recompute != "auto":
        return config
    room, node, given = device * DEVICE, host * HOST, config.memory.host_budget_gib
    budget = node if given is None else given * GIB
    broken: list[str] = []
    closest: tuple[float, Config] | None = None
    for choice in sorted(_choices(config), key=_time):
        if problems := choice.shape_problems(world_size):
            broken = broken or problems
            continue
        found = ledger(choice, world_size)
        kept = found.line(KEPT).host * ranks * ROUNDED
        fits_host = kept <= budget and (found.host - found.line(KEPT).host) * ranks + kept <= node
        if fits_host and found.device <= room:
            return _with_budget(choice, budget / GIB)
        if fits_host and (closest is None or found.device < closest[0]):
            closest = found.device, choice
    if closest is None:
        raise ConfigError(
            broken or [f'memory.recompute = "auto" finds nothing that fits {node / GIB:.1f} GiB of a node']
        )
    least, choice = closest
    raise ConfigError(
        [
            f'memory.recompute = "auto" finds nothing that fits {room / GIB:.1f} GiB of a device ({DEVICE} of it) and '
            f"{node / GIB:.1f} GiB of a node; least is {least / GIB:.1f} GiB, with {told(choice)}"
        ]
    )


def told(config: Config) -> str:
    """What is kept and where, in words."""
    return ", ".join(f"memory.{key} = {toml_value(value)}" for key, value in _changed(config).items())


def memory_of_node() -> float:
    """Bytes, or fewer if a container may take no more."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return float(min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text())))
    return float(installed)


def _changed(config: Config) -> dict[str, Any]:
    return {
        key: value
        for key, values in LEVERS.items()
        if (value := getattr(config.memory, key)) is not None and (key == "recompute" or value != next(iter(values)))
    }


def _choices(config: Config) -> Iterator[Config]:
    """Without a budget, within which attention might be computed again after all."""
    memory = config.memory
    given = memory.model_fields_set - {"recompute"}
    values = [[getattr(memory, key)] if key in given else [*LEVERS[key]] for key in LEVERS]
    for chosen in product(*values):
        levers = dict(zip(LEVERS, chosen, strict=True)) | {"device_gib": None, "host_budget_gib": None}
        yield config.model_copy(update={"memory": memory.model_copy(update=levers)})


def _with_budget(config: Config, gib: float) -> Config:
    if config.memory.offload == "none":
        return config
    return config.model_copy(update={"memory": config.memory.model_copy(update={"host_budget_gib": gib})})


def _time(config: Config) -> tuple[float, int]:
    """Executed FLOPs of a token, and about what else takes time; of equals the one with fewer levers is first."""
    memory, model = config.memory, config.model.build()
    flops = model.executed_flops(
        tokens=1, pairs=config.training.seq_len / 2, recompute=memory.recompute, input_every=memory.input_every
    )
    more = sum(values.get(getattr(memory, key), 0) for key, values in LEVERS.items())
    return flops * (1 + more), len(_changed(config))
