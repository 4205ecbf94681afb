"""`memory.recompute = "auto"`: the fastest memory options predicted to fit; `memory.loss_chunk_mib
= "auto"`: the largest chunk of logits that costs no memory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.sections import MIN_LOSS_CHUNK_MIB
from trainer.config.toml_format import toml_value
from trainer.errors import ConfigError
from trainer.hardware.host import GIB
from trainer.plan.memory_estimate import (
    SAVED_ACTIVATIONS,
    MemoryEstimate,
    estimate_memory,
    rank_memory,
)
from trainer.plan.reserves import DEVICE_FRACTION, PINNED_OVERHEAD

HOST_FRACTION = 0.75
"""Usable share of node memory at launch; the rest is for processes and data loading."""
# Values by key, in the order tried, with the estimated relative step-time overhead (copies,
# launches, partial sums).
MEMORY_OPTIONS: dict[str, dict[Any, float]] = {
    "recompute": {"none": 0, "keep_attention": 0, "full": 0},
    "offload": {"none": 0, "inputs": 0.004, "inputs_and_attention": 0.008},
    "mlp_tile_mib": {None: 0, 1024: 0.01, 256: 0.03},
    "head_groups": {1: 0, 2: 0.004, 4: 0.01, 8: 0.02, 16: 0.04},
    "blocks_per_checkpoint": {1: 0, 2: 0, 4: 0, 8: 0},
}

LOSS_CHUNKS_MIB = (1024, 512, MIN_LOSS_CHUNK_MIB)
"""1024 MiB are 2,093 rows of a vocabulary of 128,256: the sum of weight gradients is hidden behind
a product of 700.
"""
FREE_LOSS_CHUNKS_MIB = (4096, 2048)
"""Chunks that are taken only if they do not raise the peak. With a vocabulary of 201,088, a chunk
of 1024 MiB is 1,334 rows; one four times as large takes 4 % off a step of gpt-oss-20b on an H200
(benchmarks/measured/2026-11-27-h200.jsonl).
"""


class NothingFitsError(ConfigError):
    """`closest` is the legal candidate that needs least of a device."""

    def __init__(self, problems: list[str], closest: Config) -> None:
        super().__init__(problems)
        self.closest = closest


@dataclass(frozen=True)
class Choice:
    config: Config
    reason: str = ""
    """Which limit faster options exceed; empty if the fastest fit, or if `memory.recompute` was
    stated.
    """


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that a device and a node may use."""

    device: float
    host: float
    """Usable bytes of a node's host memory."""
    budget: float | None
    """Bytes of a node's host memory for offloaded activations, from `memory.host_budget_gib`."""
    ranks_per_node: int

    def device_shortage(self, estimate: MemoryEstimate) -> str:
        """Message about missing device memory; empty if the device suffices."""
        return _shortage(
            estimate.device_bytes, self.device, f"usable on a device ({DEVICE_FRACTION:.0%} of it)"
        )

    def host_shortage(self, estimate: MemoryEstimate) -> str:
        """Message about missing host memory; empty if the budget and the node suffice."""
        activations = estimate.item(SAVED_ACTIVATIONS).host_bytes
        saved = activations * self.ranks_per_node * PINNED_OVERHEAD
        over_budget = (
            ""
            if self.budget is None
            else _shortage(saved, self.budget, "of memory.host_budget_gib")
        )
        held = (estimate.host_bytes - activations) * self.ranks_per_node + saved
        usable = f"of host memory usable on a node ({HOST_FRACTION:.0%} of it)"
        return over_budget or _shortage(held, self.host, usable)


@dataclass(frozen=True)
class Rejected:
    """Options that do not fit, and what they lack."""

    config: Config
    device_bytes: float
    device_shortage: str
    host_shortage: str

    @property
    def shortage(self) -> str:
        return " and ".join(filter(None, (self.device_shortage, self.host_shortage)))


def _shortage(needed: float, limit: float, of_what: str) -> str:
    return (
        f"needs {needed / GIB:.1f} of the {limit / GIB:.1f} GiB {of_what}"
        if needed > limit
        else ""
    )


def fit_memory_options(
    config: Config, world_size: int, *, ranks_per_node: int, device_bytes: float, host_bytes: float
) -> Config:
    """The configuration that `choose_memory_options` chooses."""
    return choose_memory_options(
        config,
        world_size,
        ranks_per_node=ranks_per_node,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    ).config


def choose_memory_options(
    config: Config, world_size: int, *, ranks_per_node: int, device_bytes: float, host_bytes: float
) -> Choice:
    """Resolves `memory.recompute` and `memory.loss_chunk_mib` if they are "auto"; keys of `memory`
    that the user set are kept.

    `host_bytes` is the memory of one node. Raises NothingFitsError, or ConfigError if every
    candidate breaks a rule.
    """
    budget_gib = config.memory.host_budget_gib
    limits = Limits(
        device=device_bytes * DEVICE_FRACTION,
        host=host_bytes * HOST_FRACTION,
        budget=None if budget_gib is None else budget_gib * GIB,
        ranks_per_node=ranks_per_node,
    )
    if config.memory.recompute != "auto":
        _require_in_memory_checkpoints_fit(config, world_size, ranks_per_node, limits.host)
        choice = Choice(config)
    else:
        choice = _fit_recomputation(config, world_size, limits)
    return Choice(_fit_loss_chunk(choice.config, world_size, limits.device), choice.reason)


def _fit_loss_chunk(config: Config, world_size: int, device_limit: float) -> Config:
    """Resolves `memory.loss_chunk_mib = "auto"`, with which all else was fitted to the smallest
    chunk.
    """
    if config.memory.loss_chunk_mib != "auto":
        return config
    limit = max(device_limit, estimate_memory(config, world_size).device_bytes)
    # All else was fitted with the smallest chunk, so that one always fits.
    chosen = _largest_chunk(config, LOSS_CHUNKS_MIB, world_size, limit) or config
    # Still larger chunks are free where another moment of the step sets the peak.
    peak = estimate_memory(chosen, world_size).device_bytes
    return _largest_chunk(config, FREE_LOSS_CHUNKS_MIB, world_size, peak) or chosen


def _largest_chunk(
    config: Config, sizes_mib: Sequence[int], world_size: int, limit: float
) -> Config | None:
    """The configuration with the largest chunk that needs at most `limit` bytes of a device and
    that the tokens can fill; None if there is none.
    """
    candidates = (with_overrides(config, {"memory.loss_chunk_mib": mib}) for mib in sizes_mib)
    useful = (each for each in candidates if not _is_wider_than_all_logits(each, world_size))
    return next(
        (each for each in useful if estimate_memory(each, world_size).device_bytes <= limit), None
    )


def _is_wider_than_all_logits(config: Config, world_size: int) -> bool:
    """Whether half of the chunk has room for every token of a micro-batch."""
    rank = rank_memory(config, world_size, config.parallelism.pp - 1)
    is_smallest = config.memory.loss_chunk_bytes >> 20 == MIN_LOSS_CHUNK_MIB
    return not is_smallest and rank.loss_chunk_tokens // 2 >= rank.head_tokens


def _fit_recomputation(config: Config, world_size: int, limits: Limits) -> Choice:
    """Resolves `memory.recompute = "auto"`."""
    found_problems: list[str] = []
    rejected: list[Rejected] = []
    # The first candidate that fits is the fastest: candidates come in the order of their estimated
    # step time.
    for candidate in sorted(_candidates(config), key=_relative_step_time):
        if problems := checks.layout_problems(candidate, world_size):
            found_problems = found_problems or problems
            continue
        estimate = estimate_memory(candidate, world_size)
        shortages = limits.device_shortage(estimate), limits.host_shortage(estimate)
        if any(shortages):
            rejected.append(Rejected(candidate, estimate.device_bytes, *shortages))
            continue
        # Ranks enforce the limit that the estimate assumed: without it a run could pin more host
        # memory than planned.
        offload_limit = limits.host if limits.budget is None else limits.budget
        budget = (
            {}
            if candidate.memory.offload == "none"
            else {"memory.host_budget_gib": offload_limit / GIB}
        )
        return Choice(with_overrides(candidate, budget), _why_no_faster(candidate, rejected))
    if not rejected:
        raise ConfigError(found_problems)
    raise _refusal(rejected)


def _why_no_faster(chosen: Config, rejected: Sequence[Rejected]) -> str:
    """Why the faster options were rejected: the shortage of the most similar one that only the
    device rules out, and of the one that only the host rules out.
    """
    # An option that lacks both is no useful answer: neither more device nor more host memory alone
    # would allow it.
    only_device = [each for each in rejected if not each.host_shortage]
    only_host = [each for each in rejected if not each.device_shortage]
    groups = [only_device, only_host] if only_device or only_host else [rejected]
    return "; ".join(_nearest_shortage(chosen, group) for group in groups if group)


def _nearest_shortage(chosen: Config, rejected: Sequence[Rejected]) -> str:
    # Of equally similar options the last, which would gain least.
    nearest = min(reversed(rejected), key=lambda each: len(_other_options(each.config, chosen)))
    return f"{', '.join(_other_options(nearest.config, chosen))} {nearest.shortage}"


def _other_options(config: Config, chosen: Config) -> list[str]:
    """The memory options of a configuration that are not the chosen ones; of `recompute`, the
    value alone.
    """
    values = {key: getattr(config.memory, key) for key in MEMORY_OPTIONS}
    other = {key: value for key, value in values.items() if value != getattr(chosen.memory, key)}
    return [
        toml_value(value)
        if key == "recompute"
        else f"no memory.{key}"
        if value is None
        else _assignment(key, value)
        for key, value in other.items()
    ]


def _refusal(rejected: Sequence[Rejected]) -> NothingFitsError:
    """Error that names what binds: the device, the node's host memory, or the budget of it."""
    # If something fits the host, the device is what binds, and the leanest of those names the
    # least that it needs.
    within_host = [each for each in rejected if not each.host_shortage]
    leanest = min(within_host, key=lambda each: each.device_bytes, default=rejected[0])
    refusal = 'memory.recompute = "auto" finds no options that fit'
    problem = f"{refusal}: at least, {describe_memory_options(leanest.config)} {leanest.shortage}"
    on_device = [each for each in rejected if not each.device_shortage]
    if within_host and on_device:
        options = describe_memory_options(on_device[0].config)
        problem += f"; {options} would fit the device, but {on_device[0].host_shortage}"
    return NothingFitsError([problem], leanest.config)


def _require_in_memory_checkpoints_fit(
    config: Config, world_size: int, ranks_per_node: int, host_limit: float
) -> None:
    if config.checkpoint.memory_interval is None:
        return
    estimate = estimate_memory(config, world_size)
    counted = estimate.item("in-memory checkpoints").host_bytes
    # The estimate's nodes are those of parallelism.ranks_per_node; these are the launch's.
    copies_of_launch = 2 if world_size > ranks_per_node else 1
    copies_of_estimate = 2 if world_size > config.parallelism.ranks_per_node else 1
    copies = counted * copies_of_launch / copies_of_estimate * ranks_per_node
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
    return ", ".join(
        _assignment(key, value) for key, value in _non_default_options(config).items()
    )


def _assignment(key: str, value: Any) -> str:
    return f"memory.{key} = {toml_value(value)}"


def describe_choice(config: Config, choice: Choice) -> str:
    """The chosen options as TOML assignments, with the limit that binds; empty if nothing was
    "auto".
    """
    choices = []
    if config.memory.recompute == "auto":
        choices.append(describe_memory_options(choice.config))
    if config.memory.loss_chunk_mib == "auto":
        choices.append(_assignment("loss_chunk_mib", choice.config.memory.loss_chunk_mib))
    return ": ".join(filter(None, (", ".join(choices), choice.reason)))


def _non_default_options(config: Config) -> dict[str, Any]:
    return {
        key: value
        for key, values in MEMORY_OPTIONS.items()
        if (value := getattr(config.memory, key)) is not None
        and (key == "recompute" or value != next(iter(values)))
    }


def _candidates(config: Config) -> Iterator[Config]:
    """All combinations, without a host budget, since a budget may force recomputing attention."""
    memory = config.memory
    # Keys that the user set are constraints. `recompute` itself says "auto".
    set_keys = memory.model_fields_set - {"recompute"}
    values = [
        [getattr(memory, key)] if key in set_keys else [*MEMORY_OPTIONS[key]]
        for key in MEMORY_OPTIONS
    ]
    for combination in product(*values):
        options = dict(zip(MEMORY_OPTIONS, combination, strict=True)) | {
            "device_gib": None,
            "host_budget_gib": None,
        }
        yield config.model_copy(update={"memory": memory.model_copy(update=options)})


def _relative_step_time(config: Config) -> tuple[float, int]:
    """Sort key: executed FLOPs per token with estimated overheads, then the number of non-default
    options.
    """
    memory = config.memory
    model = config.model.build()
    seq_len = config.training.seq_len
    flops = model.hardware_flops(
        tokens=1,
        pairs=model.mean_pairs(seq_len) / seq_len,
        recompute=memory.recompute,
        blocks_per_checkpoint=memory.blocks_per_checkpoint,
    )
    overhead = sum(values.get(getattr(memory, key), 0) for key, values in MEMORY_OPTIONS.items())
    return flops * (1 + overhead), len(_non_default_options(config))
