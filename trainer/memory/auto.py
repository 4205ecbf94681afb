"""`memory.recompute = "auto"`: the fastest memory options predicted to fit; `memory.loss_chunk_mib = "auto"`: the largest
chunk of logits that costs no memory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.sections import MIN_LOSS_CHUNK_MIB
from trainer.config.toml_format import toml_value
from trainer.errors import ConfigError
from trainer.hardware.host import GIB
from trainer.memory.estimator import SAVED_ACTIVATIONS, estimate_memory
from trainer.memory.rank import RankMemory
from trainer.memory.report import with_overrides

DEVICE_FRACTION, HOST_FRACTION = 0.9, 0.75
"""Usable share of device and node memory; the rest is for kernel workspaces, fragmentation and data loading."""
PINNED_OVERHEAD = 17 / 16
"""Upper bound of pinned bytes allocated per byte stored."""
# Values by key, in the order tried, with the estimated relative step-time overhead (copies, launches, partial sums).
MEMORY_OPTIONS: dict[str, dict[Any, float]] = {
    "recompute": {"none": 0, "keep_attention": 0, "full": 0},
    "offload": {"none": 0, "inputs": 0.004, "inputs_and_attention": 0.008},
    "mlp_tile_mib": {None: 0, 1024: 0.01, 256: 0.03},
    "head_groups": {1: 0, 2: 0.004, 4: 0.01, 8: 0.02, 16: 0.04},
    "blocks_per_checkpoint": {1: 0, 2: 0, 4: 0, 8: 0},
}

LOSS_CHUNKS_MIB = (1024, 512, MIN_LOSS_CHUNK_MIB)
"""1024 MiB are 2,093 rows of a vocabulary of 128,256: the sum of weight gradients is hidden behind a product of 700."""


class NothingFitsError(ConfigError):
    """`closest` is the legal candidate that needs least of a device."""

    def __init__(self, problems: list[str], closest: Config) -> None:
        super().__init__(problems)
        self.closest = closest


def fit_memory_options(
    config: Config, world_size: int, *, ranks_per_node: int, device_bytes: float, host_bytes: float
) -> Config:
    """Resolves `memory.recompute` and `memory.loss_chunk_mib` if they are "auto"; keys of `memory` that the user set are
    kept.

    `host_bytes` is the memory of one node. Raises NothingFitsError, or ConfigError if every candidate breaks a rule.
    """
    host_limit = host_bytes * HOST_FRACTION
    if config.memory.recompute != "auto":
        _require_in_memory_checkpoints_fit(config, world_size, ranks_per_node, host_limit)
        fitted = config
    else:
        fitted = _fit_recomputation(config, world_size, ranks_per_node, device_bytes * DEVICE_FRACTION, host_limit)
    return _fit_loss_chunk(fitted, world_size, device_bytes * DEVICE_FRACTION)


def _fit_loss_chunk(config: Config, world_size: int, device_limit: float) -> Config:
    """Resolves `memory.loss_chunk_mib = "auto"`, with which all else was fitted to the smallest chunk."""
    if config.memory.loss_chunk_mib != "auto":
        return config
    limit = max(device_limit, estimate_memory(config, world_size).device_bytes)
    candidates = (with_overrides(config, {"memory.loss_chunk_mib": mib}) for mib in LOSS_CHUNKS_MIB)
    useful = (each for each in candidates if not _is_wider_than_all_logits(each, world_size))
    return next(each for each in useful if estimate_memory(each, world_size).device_bytes <= limit)


def _is_wider_than_all_logits(config: Config, world_size: int) -> bool:
    """Whether half of the chunk has room for every token of a micro-batch."""
    rank = RankMemory(config, world_size, config.parallelism.pp - 1)
    is_smallest = config.memory.loss_chunk_bytes >> 20 == MIN_LOSS_CHUNK_MIB
    return not is_smallest and rank.loss_chunk_tokens // 2 >= rank.head_tokens


def _fit_recomputation(
    config: Config, world_size: int, ranks_per_node: int, device_limit: float, host_limit: float
) -> Config:
    """Resolves `memory.recompute = "auto"`."""
    budget_gib = config.memory.host_budget_gib
    offload_limit = host_limit if budget_gib is None else budget_gib * GIB
    found_problems: list[str] = []
    over_host: list[Config] = []
    closest: tuple[float, Config] | None = None
    for candidate in sorted(_candidates(config), key=_relative_step_time):
        if problems := checks.layout_problems(candidate, world_size):
            found_problems = found_problems or problems
            continue
        estimate = estimate_memory(candidate, world_size)
        activations = estimate.item(SAVED_ACTIVATIONS).host_bytes
        saved = activations * ranks_per_node * PINNED_OVERHEAD
        if saved > offload_limit or (estimate.host_bytes - activations) * ranks_per_node + saved > host_limit:
            over_host.append(candidate)
            continue
        if estimate.device_bytes <= device_limit:
            budget = {} if candidate.memory.offload == "none" else {"memory.host_budget_gib": offload_limit / GIB}
            return with_overrides(candidate, budget)
        if closest is None or estimate.device_bytes < closest[0]:
            closest = estimate.device_bytes, candidate
    if closest is None and not over_host:
        raise ConfigError(found_problems)
    host = f"{host_limit / GIB:.1f} GiB of host memory per node"
    refusal = 'memory.recompute = "auto" finds no options that fit'
    if closest is None:
        raise NothingFitsError([f"{refusal} {host}"], over_host[0])
    minimum = f"the minimum is {closest[0] / GIB:.1f} GiB, with {describe_memory_options(closest[1])}"
    device = f"{device_limit / GIB:.1f} GiB per device ({DEVICE_FRACTION:.0%} of it)"
    raise NothingFitsError([f"{refusal} {device} and {host}; {minimum}"], closest[1])


def _require_in_memory_checkpoints_fit(config: Config, world_size: int, ranks_per_node: int, host_limit: float) -> None:
    if config.checkpoint.memory_interval is None:
        return
    estimate = estimate_memory(config, world_size)
    counted = estimate.item("in-memory checkpoints").host_bytes
    # The estimate's nodes are those of parallelism.ranks_per_node; these are the launch's.
    ratio = (1 + (world_size > ranks_per_node)) / (1 + (world_size > config.parallelism.ranks_per_node))
    copies = counted * ratio * ranks_per_node
    needed = (estimate.host_bytes - counted) * ranks_per_node + copies
    if needed > host_limit:
        raise ConfigError(
            [
                f"checkpoint.memory_interval = {config.checkpoint.memory_interval}: a node needs {needed / GIB:.1f} GiB "
                f"of host memory, {copies / GIB:.1f} GiB of it for in-memory checkpoints, and {host_limit / GIB:.1f} GiB "
                f"are usable ({HOST_FRACTION:.0%} of it)"
            ]
        )


def describe_memory_options(config: Config) -> str:
    """The non-default memory options, as TOML assignments."""
    return ", ".join(f"memory.{key} = {toml_value(value)}" for key, value in _non_default_options(config).items())


def describe_choice(config: Config, fitted: Config) -> str:
    """What `fit_memory_options` chose, as TOML assignments; empty if nothing was "auto"."""
    choices = [describe_memory_options(fitted)] * (config.memory.recompute == "auto")
    if config.memory.loss_chunk_mib == "auto":
        choices.append(f"memory.loss_chunk_mib = {toml_value(fitted.memory.loss_chunk_mib)}")
    return ", ".join(choices)


def _non_default_options(config: Config) -> dict[str, Any]:
    return {
        key: value
        for key, values in MEMORY_OPTIONS.items()
        if (value := getattr(config.memory, key)) is not None and (key == "recompute" or value != next(iter(values)))
    }


def _candidates(config: Config) -> Iterator[Config]:
    """All combinations, without a host budget, since a budget may force recomputing attention."""
    memory = config.memory
    set_keys = memory.model_fields_set - {"recompute"}
    values = [[getattr(memory, key)] if key in set_keys else [*MEMORY_OPTIONS[key]] for key in MEMORY_OPTIONS]
    for combination in product(*values):
        options = dict(zip(MEMORY_OPTIONS, combination, strict=True)) | {"device_gib": None, "host_budget_gib": None}
        yield config.model_copy(update={"memory": memory.model_copy(update=options)})


def _relative_step_time(config: Config) -> tuple[float, int]:
    """Sort key: executed FLOPs per token with estimated overheads, then the number of non-default options."""
    memory, model = config.memory, config.model.build()
    seq_len = config.training.seq_len
    flops = model.hardware_flops(
        tokens=1,
        pairs=model.mean_pairs(seq_len) / seq_len,
        recompute=memory.recompute,
        blocks_per_checkpoint=memory.blocks_per_checkpoint,
    )
    overhead = sum(values.get(getattr(memory, key), 0) for key, values in MEMORY_OPTIONS.items())
    return flops * (1 + overhead), len(_non_default_options(config))
