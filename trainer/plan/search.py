"""Searches the layouts of a run on a number of devices for the lowest predicted step time. Imports no torch.

A layout is a mesh, a cp method, a pipeline schedule and memory options. Memory options only trade time for memory, so the
layout without any is a lower bound for its mesh. Branch and bound: meshes are tried in order of their bounds until no
remaining bound can be among the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.sections import MAX_SEQ_LEN
from trainer.config.toml_format import toml_value
from trainer.hardware.device_specs import DeviceSpec
from trainer.memory.auto import MEMORY_OPTIONS
from trainer.memory.report import ConfigT, with_overrides
from trainer.plan.plan import TrainingPlan, plan_stage

MAX_RESULTS = 5
MAX_MICRO_BATCH_TOKENS = 32_768
"""Per micro-batch and rank: larger micro-batches make no matmul faster."""
SEQ_LEN_STEP = 1 << 12
"""Granularity of the lengths tried."""
MIN_TOKENS_PER_RANK = 512
"""Per sequence and rank, if sharded: smaller shards are dominated by communication."""
TOML_SECTIONS = ("training", "parallelism", "memory")
TIE_FACTOR = 1.005
"""Layouts within this factor of the fastest count as equal; the one that uses least memory is then the best."""
SEARCHED_CP_METHODS = ("ring", "allgather", "ulysses", "hybrid")
"""alltoall has the same predicted cost as ring."""
PP_SCHEDULES = (("1F1B", None), ("Interleaved1F1B", None), ("Interleaved1F1B", 4))
"""(schedule, stages per rank); None is the schedule's default."""
MESH_DEPENDENT_DEFAULTS = {"cp_layout": "auto", "cp_outer_method": "auto", "pp_layers": None}
"""Keys that only make sense for the mesh they were written for."""

# From most to least memory.
MEMORY_CHOICES: tuple[dict[str, Any], ...] = tuple(
    {f"memory.{key}": value for key, value in zip(MEMORY_OPTIONS, values, strict=True)}
    | {"memory.device_gib": None, "memory.host_budget_gib": None}
    for values in (
        ("none", "none", None, 1, 1),
        ("keep_attention", "none", None, 1, 1),
        ("keep_attention", "none", None, 2, 1),
        ("keep_attention", "none", None, 4, 1),
        ("keep_attention", "none", 256, 1, 1),
        ("keep_attention", "inputs", 256, 1, 1),
        ("keep_attention", "inputs_and_attention", 256, 1, 1),
        ("keep_attention", "inputs_and_attention", 256, 2, 1),
        ("keep_attention", "inputs_and_attention", 256, 4, 1),
        ("keep_attention", "inputs_and_attention", 256, 4, 4),
        ("full", "inputs", 256, 1, 1),
        ("full", "inputs", 256, 4, 1),
        ("keep_attention", "inputs_and_attention", 256, 8, 1),
        ("keep_attention", "inputs_and_attention", 256, 8, 4),
        ("full", "inputs", 256, 8, 1),
    )
)
HEAD_GROUP_CHOICES = [
    keep for keep in MEMORY_CHOICES if keep["memory.head_groups"] > 1 and keep["memory.offload"] == "none"
]
NUM_LEANEST_CHOICES = 4
"""The last MEMORY_CHOICES, which need least device memory."""
ProgressCallback = Callable[[int], None] | None
"""Called with the number of plans evaluated, every 100 plans."""


@dataclass(frozen=True)
class LayoutPlan:
    plan: TrainingPlan

    @property
    def seconds(self) -> float:
        return self.plan.step_seconds

    @property
    def mesh(self) -> dict[str, int]:
        return self.plan.config.parallelism.degrees(self.plan.world_size)

    def toml(self) -> str:
        """Complete sections that replace those of the configuration file."""
        return "\n\n".join("\n".join(self._section(name)) for name in TOML_SECTIONS)

    def _section(self, name: str) -> Iterator[str]:
        section = getattr(self.plan.config, name)
        yield f"[{name}]"
        for key, value in section:
            if value is not None and value != type(section).model_fields[key].default:
                yield f"{key} = {toml_value(value)}"


@dataclass(frozen=True)
class SearchResult:
    best: Sequence[LayoutPlan]
    """The fastest layout of each mesh that fits, fastest first; among equals, by memory."""
    not_fitting: Sequence[LayoutPlan]
    """The leanest layouts of meshes that would be faster than the best but do not fit."""
    num_plans: int
    problems: Sequence[str] = field(default=())
    """The most frequent configuration problems, if no layout is valid."""


def search(
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    max_results: int = MAX_RESULTS,
    pinned: Sequence[str] = (),
    on_progress: ProgressCallback = None,
) -> SearchResult:
    """The fastest layouts of a configuration on `world_size` devices. `pinned` keys keep their values."""
    layout_search = _LayoutSearch(config, world_size, device, pinned, on_progress)
    bounds = sorted(layout_search.lower_bounds(), key=_min_step_seconds)
    best: list[LayoutPlan] = []
    not_fitting: list[LayoutPlan] = []
    for bound in bounds:
        if len(best) == max_results and _min_step_seconds(bound) >= best[-1].seconds:
            break
        fastest, leanest = layout_search.fastest_fitting(bound)
        if fastest is None:
            not_fitting.append(leanest)
            continue
        best = sorted(_fastest_per_mesh([*best, fastest]), key=lambda candidate: candidate.seconds)[:max_results]
    best_seconds = best[0].seconds if best else inf
    best.sort(
        key=lambda candidate: (
            candidate.seconds > TIE_FACTOR * best_seconds,
            candidate.plan.memory_utilization if candidate.seconds <= TIE_FACTOR * best_seconds else candidate.seconds,
        )
    )
    faster = [candidate for candidate in not_fitting if candidate.seconds < best_seconds]
    problems = [problem for problem, _ in layout_search.problems.most_common(3)]
    return SearchResult(best, faster[:max_results], layout_search.num_plans, () if bounds else problems)


def any_layout_fits(
    config: Config, world_size: int, device: DeviceSpec, *, on_progress: ProgressCallback = None
) -> bool:
    """Cheaper than `search`: stops at the first layout that fits."""
    layout_search = _LayoutSearch(config, world_size, device, (), on_progress)
    return any(layout_search.layout_fits(layout) for layout in enumerate_layouts(config, world_size, device))


def _min_step_seconds(bound: LayoutPlan) -> float:
    """Lower bound for all memory options of a layout: head groups may hide the communication of attention."""
    exposed = bound.plan.step_time.busiest.exposed
    return bound.seconds - sum(exposed.get(channel, 0) for channel in ("cp", "rotate", "exchange"))


class _LayoutSearch:
    def __init__(
        self, config: Config, world_size: int, device: DeviceSpec, pinned: Sequence[str], on_progress: ProgressCallback
    ) -> None:
        self.config, self.world_size, self.device, self.on_progress = config, world_size, device, on_progress
        self.pinned = [tuple(key.split(".")) for key in pinned]
        self.num_plans = 0
        self.problems: Counter[str] = Counter()

    def lower_bounds(self) -> Iterator[LayoutPlan]:
        """Every layout without memory options, or with the pinned ones."""
        for layout in enumerate_layouts(self.config, self.world_size, self.device):
            candidate = self.evaluate(layout | MEMORY_CHOICES[0]) or (self.evaluate(layout) if self.pinned else None)
            if candidate is not None:
                yield candidate

    def fastest_fitting(self, bound: LayoutPlan) -> tuple[LayoutPlan | None, LayoutPlan]:
        """(fastest memory options that fit, leanest memory options); among equals, the first in MEMORY_CHOICES."""
        if bound.plan.fits and bound.mesh["cp"] == 1:
            return bound, bound
        # If the bound fits, only head groups can be faster, by overlapping communication of attention.
        memory_choices = [
            memory for memory in MEMORY_CHOICES[1:] if not bound.plan.fits or memory in HEAD_GROUP_CHOICES
        ]
        candidates = [
            bound,
            *(
                candidate
                for keep in memory_choices
                if (candidate := self.evaluate(keep, bound.plan.config)) is not None
            ),
        ]
        fitting = [candidate for candidate in candidates if candidate.plan.fits]
        leanest = min(candidates, key=lambda candidate: candidate.plan.memory_utilization)
        max_seconds = TIE_FACTOR * min((candidate.seconds for candidate in fitting), default=inf)
        return next((candidate for candidate in fitting if candidate.seconds <= max_seconds), None), leanest

    def layout_fits(self, layout: dict[str, Any]) -> bool:
        """Skips larger micro-batches and replicas, which only need more memory."""
        if layout["training.micro_batch_size"] > 1 or layout["parallelism.dp_replicate"] > 1:
            return False
        leanest = [
            candidate
            for memory in MEMORY_CHOICES[-NUM_LEANEST_CHOICES:]
            if (candidate := self.evaluate(layout | memory)) is not None
        ]
        if any(candidate.plan.fits for candidate in leanest):
            return True
        # If host memory is short, offloading less may fit.
        if all(candidate.plan.peak_memory.device_bytes > candidate.plan.usable_device_memory for candidate in leanest):
            return False
        return any(
            (candidate := self.evaluate(layout | keep)) is not None and candidate.plan.fits
            for keep in MEMORY_CHOICES[:-NUM_LEANEST_CHOICES]
        )

    def evaluate(self, changes: dict[str, Any], config: Config | None = None) -> LayoutPlan | None:
        """None if the configuration is invalid or changes a pinned key."""
        config = with_overrides(config or self.config, changes)
        if any(
            getattr(getattr(config, name), key) != getattr(getattr(self.config, name), key) for name, key in self.pinned
        ):
            return None
        if problems := checks.layout_problems(config, self.world_size):
            self.problems.update(problems)
            return None
        self.num_plans += 1
        if self.on_progress is not None and self.num_plans % 100 == 0:
            self.on_progress(self.num_plans)
        return LayoutPlan(plan_stage(config, self.world_size, self.device))


def enumerate_layouts(config: Config, world_size: int, device: DeviceSpec) -> Iterator[dict[str, Any]]:
    """Plausible layouts of `world_size` ranks; not validated."""
    model, global_batch_size, seq_len = config.model.build(), config.training.global_batch_size, config.training.seq_len
    for tp, cp, pp in product(divisors(world_size), repeat=3):
        if world_size % (tp * cp * pp) or tp > min(device.link_domain_size, model.num_heads) or pp > model.num_layers:
            continue
        if tp * cp > 1 and seq_len // (tp * cp) < MIN_TOKENS_PER_RANK:
            continue
        dp = world_size // (tp * cp * pp)
        if dp > global_batch_size:
            continue
        mesh: dict[str, Any] = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.pp": pp}
        mesh |= {f"parallelism.{key}": value for key, value in MESH_DEPENDENT_DEFAULTS.items()}
        mesh["parallelism.async_tp"] = config.parallelism.async_tp and tp > 1
        for replicas, micro_batch_size, method, (schedule, stages) in product(
            _dp_replicate_sizes(dp, cp * tp, device),
            _micro_batch_sizes(global_batch_size, dp, seq_len // cp),
            SEARCHED_CP_METHODS if cp > 1 else ("auto",),
            PP_SCHEDULES if pp > 1 else PP_SCHEDULES[:1],
        ):
            for ulysses in _ulysses_sizes(method, cp, tp, model.num_heads, device):
                yield {
                    **mesh,
                    "parallelism.dp_replicate": replicas,
                    "parallelism.dp_shard": dp // replicas,
                    "parallelism.cp_method": method,
                    "parallelism.cp_ulysses": ulysses,
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "training.micro_batch_size": micro_batch_size,
                }


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _dp_replicate_sizes(dp: int, ranks_per_replica: int, device: DeviceSpec) -> list[int]:
    """One replica, or one per link domain."""
    replicas_per_domain = max(1, device.link_domain_size // ranks_per_replica)
    return [1] if dp <= replicas_per_domain or dp % replicas_per_domain else [1, dp // replicas_per_domain]


def _micro_batch_sizes(global_batch_size: int, dp: int, tokens_per_sequence: int) -> list[int]:
    """One sequence, and the two largest sizes within MAX_MICRO_BATCH_TOKENS."""
    sequences_per_rank = -(-global_batch_size // dp)
    fitting = [
        count
        for count in divisors(sequences_per_rank)
        if global_batch_size % count == 0 and count * tokens_per_sequence <= MAX_MICRO_BATCH_TOKENS
    ]
    return sorted({1, *fitting[-2:]})


def _ulysses_sizes(method: str, cp: int, tp: int, heads: int, device: DeviceSpec) -> Iterator[int | None]:
    """Ulysses degrees of the hybrid method; None for methods without a choice."""
    if method != "hybrid":
        yield None
        return
    for count in divisors(cp):
        if 1 < count < cp and count * tp <= device.link_domain_size and heads // tp % count == 0:
            yield count


def _fastest_per_mesh(plans: Iterable[LayoutPlan]) -> Iterator[LayoutPlan]:
    """Drops layouts that differ from a faster one only in cp method, schedule or batching."""
    seen = set()
    for candidate in sorted(plans, key=lambda candidate: candidate.seconds):
        mesh = tuple(candidate.mesh.values())
        if mesh not in seen:
            seen.add(mesh)
            yield candidate


# ---- longest sequence, fewest devices


def with_seq_len(config: ConfigT, seq_len: int) -> ConfigT:
    """Keeps the tokens per step as far as whole sequences allow; micro-batches of one sequence."""
    training = config.training
    tokens = training.global_batch_size * training.seq_len
    global_batch_size = max(1, round(tokens / seq_len))
    return with_overrides(
        config,
        {"training.seq_len": seq_len, "training.global_batch_size": global_batch_size, "training.micro_batch_size": 1},
    )


def longest_sequence(
    config: ConfigT, world_size: int, device: DeviceSpec, *, on_progress: ProgressCallback = None
) -> tuple[int, SearchResult, str]:
    """(longest sequence length that fits, its layouts, the shortage of longer ones); 0 if none fits.

    Exact to 1/32.
    """
    low, high = 0, 1
    while high * SEQ_LEN_STEP <= MAX_SEQ_LEN and any_layout_fits(
        with_seq_len(config, high * SEQ_LEN_STEP), world_size, device, on_progress=on_progress
    ):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        fits = any_layout_fits(with_seq_len(config, middle * SEQ_LEN_STEP), world_size, device, on_progress=on_progress)
        low, high = (middle, high) if fits else (low, middle)
    beyond = search(
        with_seq_len(config, high * SEQ_LEN_STEP), world_size, device, max_results=1, on_progress=on_progress
    )
    leanest = min(beyond.not_fitting, key=lambda candidate: candidate.plan.memory_utilization, default=None)
    shortage = "" if leanest is None else f"{high * SEQ_LEN_STEP:,} tokens: {leanest.plan.memory_shortages[0]}"
    return (
        low * SEQ_LEN_STEP,
        search(with_seq_len(config, low * SEQ_LEN_STEP), world_size, device, max_results=1, on_progress=on_progress)
        if low
        else beyond,
        shortage,
    )


def fewest_devices(
    config: Config, device: DeviceSpec, *, max_devices: int = 65_536, on_progress: ProgressCallback = None
) -> tuple[int, SearchResult]:
    """The fewest devices on which the run fits; 0 if none. Beyond one node, whole nodes in steps of 1/8 of a power of two."""
    world_size = next(
        (
            count
            for power in range(max_devices.bit_length())
            if any_layout_fits(config, count := 1 << power, device, on_progress=on_progress)
        ),
        0,
    )
    step = 1 if world_size <= device.devices_per_node else max(device.devices_per_node, world_size // 16)
    for smaller in range(world_size // 2 + step, world_size, step):
        if any_layout_fits(config, smaller, device, on_progress=on_progress):
            world_size = smaller
            break
    return world_size, search(config, world_size or max_devices, device, max_results=1, on_progress=on_progress)


def describe_layout(plan: TrainingPlan) -> str:
    config = plan.config
    parallelism, memory, micro_batch_size = config.parallelism, config.memory, config.training.micro_batch_size
    mesh = parallelism.degrees(plan.world_size)
    phrases = [" x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 rank"]
    if parallelism.cp > 1:
        phrases.append(
            config.context_plan().resolved_method
            + (f" (ulysses {config.context_plan().ulysses_degree})" * bool(parallelism.cp_ulysses))
        )
    stages = f" with {parallelism.pp_stages_per_rank} stages per rank" if parallelism.pp_stages_per_rank else ""
    phrases += (
        [parallelism.pp_schedule + stages] * (parallelism.pp > 1)
        + [f"micro-batch {micro_batch_size}"] * (micro_batch_size > 1)
        + [f"recompute {memory.recompute}"]
    )
    phrases += [f"offload {memory.offload}"] * (memory.offload != "none")
    phrases += [f"MLP tiles of {memory.mlp_tile_mib} MiB"] * (memory.mlp_tile_mib is not None)
    phrases += [f"{memory.head_groups} head groups"] * (memory.head_groups > 1)
    phrases += ["optimizer on the host"] * (memory.optimizer_placement == "host")
    return ", ".join(
        phrases + [f"{memory.blocks_per_checkpoint} blocks per checkpoint"] * (memory.blocks_per_checkpoint > 1)
    )


def why_slower(candidate: LayoutPlan, best: LayoutPlan) -> str:
    """The two components that cost most time compared with the best."""
    candidate_seconds, best_seconds = (other.plan.step_time.busiest.breakdown() for other in (candidate, best))
    costs = {
        name: candidate_seconds.get(name, 0) - best_seconds.get(name, 0)
        for name in candidate_seconds.keys() | best_seconds.keys()
    }
    worst = sorted(costs.items(), key=lambda item: -item[1])[:2]
    reasons = [f"{name} {seconds:+.2f} s" for name, seconds in worst if seconds >= 0.005 * best.seconds]
    return ", ".join(reasons) or "equal time, more memory"
