"""Searches the layouts of a run on a number of devices for the lowest predicted step time. Imports
no torch.

A layout is a mesh, a cp method, a pipeline schedule and memory options, with the attention kernels
that "auto" takes. Memory options, eager blocks and an optimizer on the host only trade time for
memory, so the layout without any is a lower bound for its mesh. Branch and bound: meshes are tried
in order of their bounds until no remaining bound can be among the best.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.overrides import ConfigT, with_overrides
from trainer.config.sections import MAX_SEQ_LEN
from trainer.config.toml_format import toml_value
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.interconnect import used_domain_size
from trainer.plan.memory_options import LOSS_CHUNKS_MIB, MEMORY_OPTIONS
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
"""Layouts within this factor of the fastest count as equal; the one that uses least memory is then
the best.
"""
SEARCHED_CP_METHODS = ("ring", "allgather", "ulysses", "hybrid")
"""alltoall has the same predicted cost as ring."""
PP_SCHEDULES = (
    ("1F1B", None, "per_step"),
    ("1F1B", None, "per_micro_batch"),
    ("Interleaved1F1B", None, "per_step"),
    ("Interleaved1F1B", 4, "per_step"),
)
"""(schedule, stages per rank, when gradients are reduced); None is the schedule's default."""
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
        ("keep_attention", "inputs", None, 1, 1),
        ("keep_attention", "inputs_and_attention", None, 1, 1),
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
FASTEST_OPTIONS = {
    "training.attention": "auto",
    "training.compile": "auto",
    "memory.loss_chunk_mib": LOSS_CHUNKS_MIB[0],
    "memory.optimizer_placement": "device",
}
"""Where a search starts, whatever the file says: "auto" is the fastest that the planned device can
run.
"""
SMALL_CHUNKS = {"memory.loss_chunk_mib": LOSS_CHUNKS_MIB[-1]}
LEANER_OPTIONS: tuple[dict[str, Any], ...] = (
    SMALL_CHUNKS,
    SMALL_CHUNKS | {"training.compile": False},
    SMALL_CHUNKS | {"memory.optimizer_placement": "host"},
    SMALL_CHUNKS | {"training.compile": False, "memory.optimizer_placement": "host"},
)
"""Slower than FASTEST_OPTIONS, with all else equal, and of less memory.

The last needs least of a device.
"""
HEAD_GROUP_CHOICES = [
    memory
    for memory in MEMORY_CHOICES
    if memory["memory.head_groups"] > 1 and memory["memory.offload"] == "none"
]
NUM_LEANEST_CHOICES = 4
"""The last MEMORY_CHOICES, which need least device memory."""


@dataclass(frozen=True)
class SearchResult:
    best: Sequence[TrainingPlan]
    """The fastest layout of each mesh that fits, fastest first; among equals, by memory."""
    not_fitting: Sequence[TrainingPlan]
    """Layouts that would be faster than the best but do not fit, each with its leanest options."""
    num_plans: int
    problems: Sequence[str] = ()
    """The most frequent configuration problems, if no layout is valid."""
    shortage: str = ""
    """Why longer sequences do not fit, if the longest was asked for."""


def search(
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    max_results: int = MAX_RESULTS,
    pinned: Sequence[str] = (),
) -> SearchResult:
    """The fastest layouts of a configuration on `world_size` devices.

    `pinned` keys keep their values.
    """
    layouts = _LayoutSearch(config, world_size, device, pinned)
    bounds = sorted(layouts.lower_bounds(), key=_min_step_seconds)
    best: list[TrainingPlan] = []
    not_fitting: list[Sequence[TrainingPlan]] = []
    for bound in bounds:
        # Bounds ascend, so no later mesh can be faster than the slowest of the best.
        if len(best) == max_results and _min_step_seconds(bound) >= best[-1].step_seconds:
            break
        slowest = best[-1].step_seconds if len(best) == max_results else inf
        fastest, lean = layouts.fastest_fitting(bound, slowest)
        if fastest is not None:
            best = _fastest_per_mesh([*best, layouts.with_largest_chunks(fastest)])[:max_results]
        if lean:
            not_fitting.append(lean)
    best_seconds = best[0].step_seconds if best else inf
    faster = ([plan for plan in lean if plan.step_seconds < best_seconds] for lean in not_fitting)
    leanest = (min(lean, key=attrgetter("memory_utilization")) for lean in faster if lean)
    problems = [] if bounds else [problem for problem, _ in layouts.problems.most_common(3)]
    return SearchResult(ranked(best), [*islice(leanest, max_results)], layouts.num_plans, problems)


def ranked(plans: Iterable[TrainingPlan]) -> list[TrainingPlan]:
    """The fastest plan of each mesh, fastest first; among equals, by memory."""
    best = _fastest_per_mesh(plans)
    # Predictions are not exact to 0.5 %, so memory decides among equals.
    ties = [plan for plan in best if plan.step_seconds <= TIE_FACTOR * best[0].step_seconds]
    return sorted(ties, key=attrgetter("memory_utilization")) + best[len(ties) :]


def any_layout_fits(
    config: Config, world_size: int, device: DeviceSpec, *, pinned: Sequence[str] = ()
) -> bool:
    """Cheaper than `search`: stops at the first layout that fits."""
    layouts = _LayoutSearch(config, world_size, device, pinned)
    return any(
        layouts.layout_fits(layout) for layout in enumerate_layouts(config, world_size, device)
    )


def _min_step_seconds(bound: TrainingPlan) -> float:
    """Lower bound for all memory options of a layout: head groups may hide the communication of
    attention.
    """
    exposed = bound.step_time.busiest.exposed
    return bound.step_seconds - sum(
        exposed.get(channel, 0) for channel in ("cp", "rotate", "exchange")
    )


class _LayoutSearch:
    def __init__(
        self, config: Config, world_size: int, device: DeviceSpec, pinned: Sequence[str] = ()
    ) -> None:
        self.world_size = world_size
        self.device = device
        self.pinned = pinned
        self.config = with_overrides(config, self.without_pinned(FASTEST_OPTIONS))
        self.num_plans = 0
        self.problems: Counter[str] = Counter()

    def without_pinned(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key not in self.pinned}

    def lower_bounds(self) -> Iterator[TrainingPlan]:
        """Every layout without memory options, or with the pinned ones."""
        for layout in enumerate_layouts(self.config, self.world_size, self.device):
            plan = self.evaluate(layout | MEMORY_CHOICES[0]) or (
                self.evaluate(layout) if self.pinned else None
            )
            if plan is not None:
                yield plan

    def fastest_fitting(
        self, bound: TrainingPlan, limit: float
    ) -> tuple[TrainingPlan | None, Sequence[TrainingPlan]]:
        """The fastest options that fit, among equals the first in MEMORY_CHOICES; or lean ones if
        none fit.

        Neither if options that take more than `limit` seconds might fit.
        """
        if bound.fits and bound.mesh["cp"] == 1:
            return bound, ()
        # If the bound fits, only head groups can be faster, by overlapping communication of
        # attention.
        choices = HEAD_GROUP_CHOICES if bound.fits else MEMORY_CHOICES[1:]
        plans = [bound, *filter(None, (self.evaluate(memory, bound.config) for memory in choices))]
        lean = (
            []
            if bound.fits
            else [
                form for plan in plans[-NUM_LEANEST_CHOICES:] for form in self.leaner_forms(plan)
            ]
        )
        if lean and all(plan.exceeds_device for plan in lean):
            return None, lean
        # Fastest first, until no remaining option can tie with the fastest that fits.
        fitting: list[tuple[int, TrainingPlan]] = []
        for place, plan in sorted(enumerate(plans), key=lambda each: each[1].step_seconds):
            if plan.step_seconds > limit:
                break
            forms = [plan] if plan.fits else self.leaner_forms(plan)
            fitting += [(place, form) for form in forms if form.fits]
            # Slower options than a fitting one may still tie with it.
            limit = min([limit, *(TIE_FACTOR * form.step_seconds for _, form in fitting)])
        else:
            if not fitting:
                return None, [*plans, *lean]
        # The limit shrank with each option that fits, so those within it are equally fast.
        equal = [each for each in fitting if each[1].step_seconds <= limit]
        return min(equal, key=itemgetter(0))[1] if equal else None, ()

    def leaner_forms(self, plan: TrainingPlan) -> list[TrainingPlan]:
        """The plan with each of LEANER_OPTIONS that is not pinned; only the leanest if that
        exceeds the device.
        """
        *others, leanest = (self.without_pinned(options) for options in LEANER_OPTIONS)
        form = self.evaluate(leanest, plan.config)
        if form is not None and form.exceeds_device:
            return [form]
        forms = [self.evaluate(options, plan.config) for options in others]
        return [*filter(None, [*forms, form])]

    def with_largest_chunks(self, plan: TrainingPlan) -> TrainingPlan:
        """The plan with the largest chunks of logits that fit."""
        return (
            self.evaluate(self.without_pinned({"memory.loss_chunk_mib": "auto"}), plan.config)
            or plan
        )

    def layout_fits(self, layout: dict[str, Any]) -> bool:
        """Skips larger micro-batches and replicas, which only need more memory."""
        if any(
            layout[key] > 1
            for key in ("training.micro_batch_size", "parallelism.dp_replicate")
            if key not in self.pinned
        ):
            return False
        evaluated = (
            self.evaluate(layout | memory) for memory in MEMORY_CHOICES[-NUM_LEANEST_CHOICES:]
        )
        plans = [plan for plan in evaluated if plan is not None]
        if any(plan.fits for plan in plans):
            return True
        leanest = [form for plan in plans for form in self.leaner_forms(plan)]
        if any(plan.fits for plan in leanest):
            return True
        # If host memory is short, offloading less may fit; pinned keys may exclude all of these.
        if leanest and all(plan.exceeds_device for plan in leanest):
            return False
        others = filter(
            None,
            (self.evaluate(layout | memory) for memory in MEMORY_CHOICES[:-NUM_LEANEST_CHOICES]),
        )
        return any(form.fits for plan in others for form in (plan, *self.leaner_forms(plan)))

    def evaluate(
        self, changes: dict[str, Any], config: Config | None = None
    ) -> TrainingPlan | None:
        """None if the configuration is invalid or changes a pinned key."""
        config = with_overrides(config or self.config, changes)
        if any(attrgetter(key)(config) != attrgetter(key)(self.config) for key in self.pinned):
            return None
        if problems := checks.layout_problems(config, self.world_size):
            self.problems.update(problems)
            return None
        self.num_plans += 1
        # Large searches take minutes, so a terminal shows progress.
        if self.num_plans % 100 == 0 and sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{self.num_plans:,} plans")
        return plan_stage(config, self.world_size, self.device)


def enumerate_layouts(
    config: Config, world_size: int, device: DeviceSpec
) -> Iterator[dict[str, Any]]:
    """Plausible layouts of `world_size` ranks; not validated."""
    model = config.model.build()
    global_batch_size = config.training.global_batch_size
    seq_len = config.training.seq_len
    for tp, cp, pp in product(divisors(world_size), repeat=3):
        if world_size % (tp * cp * pp) or tp > model.num_heads or pp > model.num_layers:
            continue
        domain_size = used_domain_size([range(world_size), range(tp * cp)], world_size, device)
        # Tensor parallelism sends activations in every layer, too much for the network.
        if tp > domain_size:
            continue
        if tp * cp > 1 and seq_len // (tp * cp) < MIN_TOKENS_PER_RANK:
            continue
        dp = world_size // (tp * cp * pp)
        # A data-parallel rank without a sequence would only wait.
        if dp > global_batch_size:
            continue
        mesh: dict[str, Any] = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.pp": pp}
        mesh |= {f"parallelism.{key}": value for key, value in MESH_DEPENDENT_DEFAULTS.items()}
        mesh["parallelism.async_tp"] = config.parallelism.async_tp and tp > 1
        for replicas, micro_batch_size, method, (schedule, stages, reduces) in product(
            _dp_replicate_sizes(dp, cp * tp, domain_size),
            _micro_batch_sizes(global_batch_size, dp, seq_len // cp),
            SEARCHED_CP_METHODS if cp > 1 else ("auto",),
            PP_SCHEDULES if pp > 1 else PP_SCHEDULES[:1],
        ):
            choices = product(
                _ulysses_sizes(method, cp, tp, model.num_heads, domain_size),
                _ep_sizes(model.num_experts, dp // replicas * cp, tp, domain_size),
            )
            for ulysses, ep in choices:
                yield {
                    **mesh,
                    "parallelism.dp_replicate": replicas,
                    "parallelism.dp_shard": dp // replicas,
                    "parallelism.ep": ep,
                    "parallelism.cp_method": method,
                    "parallelism.cp_ulysses": ulysses,
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "parallelism.pp_reduce_gradients": reduces,
                    "training.micro_batch_size": micro_batch_size,
                }


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _dp_replicate_sizes(dp: int, ranks_per_replica: int, domain_size: int) -> list[int]:
    """One replica, or one per link domain."""
    replicas_per_domain = max(1, domain_size // ranks_per_replica)
    return (
        [1]
        if dp <= replicas_per_domain or dp % replicas_per_domain
        else [1, dp // replicas_per_domain]
    )


def _micro_batch_sizes(global_batch_size: int, dp: int, tokens_per_sequence: int) -> list[int]:
    """One sequence, and the two largest sizes within MAX_MICRO_BATCH_TOKENS."""
    sequences_per_rank = -(-global_batch_size // dp)
    fitting = [
        count
        for count in divisors(sequences_per_rank)
        if global_batch_size % count == 0 and count * tokens_per_sequence <= MAX_MICRO_BATCH_TOKENS
    ]
    return sorted({1, *fitting[-2:]})


def _ulysses_sizes(
    method: str, cp: int, tp: int, heads: int, domain_size: int
) -> Iterator[int | None]:
    """Ulysses degrees of the hybrid method; None for methods without a choice."""
    if method != "hybrid":
        yield None
        return
    for count in divisors(cp):
        if 1 < count < cp and count * tp <= domain_size and heads // tp % count == 0:
            yield count


def _ep_sizes(num_experts: int, ranks: int, tp: int, domain_size: int) -> list[int]:
    """One, the most in a link domain, and the most of all."""
    possible = (
        [size for size in divisors(ranks) if num_experts % size == 0] if num_experts else [1]
    )
    return sorted({1, max(size for size in possible if size * tp <= domain_size), possible[-1]})


def _fastest_per_mesh(plans: Iterable[TrainingPlan]) -> list[TrainingPlan]:
    """Fastest first, without layouts that differ from a faster one only in ep, cp method, schedule
    or batching.
    """
    by_mesh: dict[tuple[int, ...], TrainingPlan] = {}
    for plan in sorted(plans, key=attrgetter("step_seconds")):
        by_mesh.setdefault(tuple(plan.mesh.values()), plan)
    return [*by_mesh.values()]


# ---- longest sequence, fewest devices


def with_seq_len(config: ConfigT, seq_len: int) -> ConfigT:
    """Keeps the tokens per step as far as whole sequences allow; micro-batches of one sequence."""
    tokens = config.training.tokens_per_step
    changes = {
        "seq_len": seq_len,
        "global_batch_size": max(1, round(tokens / seq_len)),
        "micro_batch_size": 1,
    }
    return with_overrides(config, {f"training.{key}": value for key, value in changes.items()})


def longest_sequence(
    config: Config, world_size: int, device: DeviceSpec, *, pinned: Sequence[str] = ()
) -> SearchResult:
    """The layout of the longest sequence that fits, to within 1/32; none if not even
    `SEQ_LEN_STEP` does.
    """

    def fits(steps: int) -> bool:
        return any_layout_fits(
            with_seq_len(config, steps * SEQ_LEN_STEP), world_size, device, pinned=pinned
        )

    def best_layout(steps: int) -> SearchResult:
        return search(
            with_seq_len(config, steps * SEQ_LEN_STEP),
            world_size,
            device,
            max_results=1,
            pinned=pinned,
        )

    # Doubles until a length does not fit, then bisects to 1/32.
    low = 0
    high = 1
    while high * SEQ_LEN_STEP <= MAX_SEQ_LEN and fits(high):
        low = high
        high = 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    beyond = best_layout(high)
    leanest = min(beyond.not_fitting, key=attrgetter("memory_utilization"), default=None)
    shortage = (
        "" if leanest is None else f"{high * SEQ_LEN_STEP:,} tokens: {leanest.memory_shortages[0]}"
    )
    return replace(best_layout(low) if low else beyond, shortage=shortage)


def fewest_devices(
    config: Config, device: DeviceSpec, *, max_devices: int = 65_536, pinned: Sequence[str] = ()
) -> SearchResult:
    """The layout on the fewest devices on which the run fits, if there is one.

    Beyond one node, whole nodes in steps of 1/8 of a power of two.
    """

    def fits(count: int) -> bool:
        return any_layout_fits(config, count, device, pinned=pinned)

    powers = (1 << power for power in range(max_devices.bit_length()))
    world_size = next(filter(fits, powers), 0)
    # Eight sizes between two powers of two; beyond one node, none smaller than a node.
    step = (
        1
        if world_size <= device.devices_per_node
        else max(device.devices_per_node, world_size // 16)
    )
    world_size = next(filter(fits, range(world_size // 2 + step, world_size, step)), world_size)
    return search(config, world_size or max_devices, device, max_results=1, pinned=pinned)


# ---- a layout in words


def layout_toml(config: Config) -> str:
    """Complete sections that replace those of the configuration file."""
    lines = []
    for name in TOML_SECTIONS:
        section = getattr(config, name)
        defaults = {key: field.default for key, field in type(section).model_fields.items()}
        given = [
            (key, value) for key, value in section if value is not None and value != defaults[key]
        ]
        lines.append(
            "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in given)])
        )
    return "\n\n".join(lines)


def describe_layout(plan: TrainingPlan) -> str:
    config = plan.config
    parallelism = config.parallelism
    memory = config.memory
    micro_batch_size = config.training.micro_batch_size
    method = config.context_plan().resolved_method
    stages = parallelism.pp_stages_per_rank
    ulysses = (
        f" (ulysses {config.context_plan().ulysses_degree})" if parallelism.cp_ulysses else ""
    )
    phrases = {
        " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
        or "1 rank": True,
        f"ep {parallelism.ep}": parallelism.ep > 1,
        f"{method}{ulysses}": parallelism.cp > 1,
        parallelism.pp_schedule
        + (f" with {stages} stages per rank" if stages else ""): parallelism.pp > 1,
        "gradients reduced per micro-batch": parallelism.pp > 1
        and parallelism.pp_reduce_gradients == "per_micro_batch",
        f"micro-batch {micro_batch_size}": micro_batch_size > 1,
        f"recompute {memory.recompute}": True,
        f"offload {memory.offload}": memory.offload != "none",
        f"MLP tiles of {memory.mlp_tile_mib} MiB": memory.mlp_tile_mib is not None,
        f"{memory.head_groups} head groups": memory.head_groups > 1,
        "optimizer on the host": memory.optimizer_placement == "host",
        f"{memory.blocks_per_checkpoint} blocks per checkpoint": memory.blocks_per_checkpoint > 1,
    }
    return ", ".join(phrase for phrase, is_shown in phrases.items() if is_shown)


def why_slower(plan: TrainingPlan, best: TrainingPlan) -> str:
    """The two components that cost most time compared with the best."""
    seconds, best_seconds = (each.step_time.busiest.breakdown() for each in (plan, best))
    costs = {
        name: seconds.get(name, 0) - best_seconds.get(name, 0)
        for name in seconds.keys() | best_seconds.keys()
    }
    worst = sorted(costs.items(), key=lambda item: -item[1])[:2]
    reasons = [
        f"{name} {cost:+.2f} s" for name, cost in worst if cost >= 0.005 * best.step_seconds
    ]
    more = ", more memory" if plan.memory_utilization > best.memory_utilization else ""
    return ", ".join(reasons) or f"about equal time{more}"
