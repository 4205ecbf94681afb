"""Searches the layouts of a run on a number of devices for the lowest step time.

A layout is a mesh, a cp method, a pipeline schedule and memory options, with the attention kernels
that "auto" takes. Coarse estimates rank the layouts; the best are traced; what their traces say
corrects the estimates, until all of the best are traced. No answer comes from an estimate.

Memory options, eager blocks and an optimizer on the host only trade time for memory, so the layout
without any is a lower bound for its mesh.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from operator import attrgetter, itemgetter
from typing import Any, Protocol, TypeVar

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.overrides import ConfigT, with_overrides
from trainer.config.sections import MAX_SEQ_LEN
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import attention_problems, with_attention_choice
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.layouts import enumerate_layouts
from trainer.plan.memory_options import LOSS_CHUNKS_MIB, MEMORY_OPTIONS, with_stated_memory
from trainer.plan.plan import TrainingPlan
from trainer.plan.traced_forms import MAX_ROUNDS, NEAR_TIE, TIE_FACTOR, Form, Traces, form_of
from trainer.plan.tracing import Trace, traced_plans
from trainer.trace.answers import show_progress

MAX_RESULTS = 5
NUM_NOT_FITTING = 2
"""Layouts that do not fit: how many are traced to say why."""
MAX_SLOWDOWN = 1.5
"""Relative to the fastest layout: which further meshes are searched for options that fit."""
Layout = TypeVar("Layout", Form, TrainingPlan)
SEQ_LEN_STEP = 1 << 12
"""Granularity of the lengths tried."""
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
    "memory.loss_chunk_mib": LOSS_CHUNKS_MIB[-1],
    "memory.optimizer_placement": "device",
}
"""Where a search starts, whatever the file says: "auto" is the fastest that the planned device can
run.
"""
SMALL_CHUNKS = {"memory.loss_chunk_mib": LOSS_CHUNKS_MIB[0]}
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
    """Layouts that would be faster than the best but do not fit, each with its leanest options; if
    none fits, those that need least memory, the leanest first.
    """
    num_layouts: int
    """Layouts that were estimated."""
    num_traces: int
    problems: Sequence[str] = ()
    """The most frequent configuration problems, if no layout is valid."""
    memory_ratio: float = 1
    """Median memory of the traces, relative to the estimates."""
    shortage: str = ""
    """Why longer sequences do not fit, if the longest was asked for."""


def search(
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    max_results: int = MAX_RESULTS,
    min_traced: int = MAX_RESULTS,
    pinned: Sequence[str] = (),
    trace: Trace = traced_plans,
) -> SearchResult:
    """The fastest layouts of a configuration on `world_size` devices.

    `min_traced`: meshes to trace in a round, if there are as many. A single trace corrects the
    estimates of all others alike, whatever they differ in, so 1 is for asking what fits. `pinned`
    keys keep their values, but for "auto". Raises ConfigError for a configuration that is
    wrong on any mesh, or if the device cannot run the attention kernel that they name.
    """
    layouts = _LayoutSearch(config, world_size, device, pinned)
    bounds = [*layouts.lower_bounds()]
    found: list[TrainingPlan] = []
    best: list[Form] = []
    others: list[Form] = []
    num_traced = max(max_results, min_traced)
    for number in range(MAX_ROUNDS):
        best, not_fitting = layouts.best(bounds, num_traced)
        if not best or (number == 0 and max_results > 1):
            others = not_fitting
        # With enough results, only what may be faster than all of them is worth a trace.
        slowdown = 1 if len(found) == num_traced else MAX_SLOWDOWN
        limit = slowdown * found[0].step_seconds if found else inf
        unknown = [
            form
            for form in (*best, *others)
            if form not in layouts.traces and layouts.traces.seconds(form) < limit
        ]
        if not unknown and best and num_traced > 1:
            near = NEAR_TIE * layouts.traces.seconds(best[0])
            unknown = [form for each in best for form in layouts.simpler(each, near)]
        if not unknown:
            break
        layouts.traces.add(unknown, trace)
        found = ranked(plan for plan in layouts.traces.plans if plan.fits)[:num_traced]
    seconds = min((plan.step_seconds for plan in found), default=inf)
    plans = map(layouts.traces.plan_of, others or best)
    return SearchResult(
        best=found[:max_results],
        not_fitting=[
            plan for plan in plans if plan and not plan.fits and plan.step_seconds < seconds
        ],
        num_layouts=layouts.num_layouts,
        num_traces=len(layouts.traces.plans),
        problems=[] if bounds else layouts.why_none(),
        memory_ratio=layouts.traces.memory_ratio,
    )


def ranked(plans: Iterable[TrainingPlan]) -> list[TrainingPlan]:
    """The fastest plan of each mesh, fastest first; among equals, by memory."""
    best = _first_by_mesh(sorted(plans, key=attrgetter("step_seconds")))
    # Memory decides among equals.
    ties = [plan for plan in best if plan.step_seconds <= TIE_FACTOR * best[0].step_seconds]
    return sorted(ties, key=attrgetter("memory_utilization")) + best[len(ties) :]


def any_layout_might_fit(
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    pinned: Sequence[str] = (),
    memory_ratio: float = 1,
) -> bool:
    """Whether a layout fits by its estimate, corrected by a ratio: a guess, which traces prove."""
    layouts = _LayoutSearch(config, world_size, device, pinned, memory_ratio)
    return any(
        layouts.layout_fits(layout) for layout in enumerate_layouts(config, world_size, device)
    )


class _LayoutSearch:
    def __init__(
        self,
        config: Config,
        world_size: int,
        device: DeviceSpec,
        pinned: Sequence[str] = (),
        memory_ratio: float = 1,
    ) -> None:
        config, device = with_stated_memory(config, device)
        self.world_size = world_size
        self.device = device
        # What is left to be chosen is not pinned.
        self.pinned = [key for key in pinned if attrgetter(key)(config) != "auto"]
        stated = with_overrides(config, self.without_pinned(FASTEST_OPTIONS))
        if problems := attention_problems(stated, device):
            raise ConfigError(problems)
        self.config = with_attention_choice(stated, device)
        self.choices = [self.without_pinned(memory) for memory in MEMORY_CHOICES]
        self.traces = Traces(memory_ratio)
        if problems := [*checks.unplaced_problems(self.config)]:
            raise ConfigError(problems)
        self.problems: Counter[str] = Counter()
        self._forms: dict[frozenset[tuple[str, Any]], Form | None] = {}

    @property
    def num_layouts(self) -> int:
        return sum(form is not None for form in self._forms.values())

    def why_none(self) -> list[str]:
        """Why there is no layout: the most frequent problems."""
        if self.problems:
            return [problem for problem, _ in self.problems.most_common(3)]
        devices = f"no layout of {self.world_size:,} devices"
        if self.pinned:
            given = ", ".join(self.pinned)
            return [f"{given} as given: {devices} that is worth a search keeps them"]
        training = self.config.training
        shared = f"{training.global_batch_size:,} sequences of {training.seq_len:,} tokens"
        advice = "raise --training.global_batch_size or use fewer devices"
        return [f"{devices} shares {shared} per step: {advice}"]

    def without_pinned(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key not in self.pinned}

    def lower_bounds(self) -> Iterator[Form]:
        """Every layout without memory options, but for pinned ones."""
        # Beside a pinned memory option the first choice may be illegal.
        is_pinned = any(key.startswith("memory.") for key in self.pinned)
        choices = self.choices if is_pinned else self.choices[:1]
        for layout in enumerate_layouts(self.config, self.world_size, self.device):
            forms = (self.form(layout | memory) for memory in choices)
            if (bound := next(filter(None, forms), None)) is not None:
                yield bound

    def min_seconds(self, bound: Form) -> float:
        """Lower bound for all memory options of a layout: head groups may hide the communication
        of attention.
        """
        hidden = bound.estimate.exposed_attention_seconds
        return self.traces.ratios(bound).seconds * (bound.estimate.step_seconds - hidden)

    def best(self, bounds: Iterable[Form], max_results: int) -> tuple[list[Form], list[Form]]:
        """The fastest form of each mesh that fits, as far as is known, and the leanest ones of
        layouts that would be faster than the best and do not fit; of all layouts, leanest first, if
        none fits.
        """
        best: list[Form] = []
        not_fitting: list[Sequence[Form]] = []
        seconds = self.traces.seconds
        for bound in sorted(bounds, key=self.min_seconds):
            is_full = len(best) == max_results
            slowest = seconds(best[-1]) if is_full else inf
            # Bounds ascend, so no later mesh can be faster than the slowest of the best.
            if self.min_seconds(bound) >= slowest:
                break
            fastest, lean = self.fastest_fitting(bound, slowest)
            if fastest is not None:
                best = _first_by_mesh(sorted([*best, fastest], key=seconds))[:max_results]
            if lean:
                not_fitting.append(lean)
        limit = seconds(best[0]) if best else inf
        faster = ([form for form in lean if seconds(form) < limit] for lean in not_fitting)
        leanest = [min(lean, key=self.traces.memory_share) for lean in faster if lean]
        if not best:
            leanest.sort(key=self.traces.memory_share)
        return best, _first_by_mesh(leanest)[: min(max_results, NUM_NOT_FITTING)]

    def fastest_fitting(self, bound: Form, limit: float) -> tuple[Form | None, Sequence[Form]]:
        """The fastest options that fit, among equals the first in MEMORY_CHOICES; or lean ones if
        none fit.

        Neither if options that take more than `limit` seconds might fit.
        """
        fits = self.traces.fits
        seconds = self.traces.seconds
        bound_fits = fits(bound)
        if bound_fits and bound.config.parallelism.cp == 1:
            return self.with_best_chunks(bound), ()
        # If the bound fits, only head groups can be faster, by overlapping communication of
        # attention.
        choices = map(self.without_pinned, HEAD_GROUP_CHOICES) if bound_fits else self.choices[1:]
        forms = [bound, *filter(None, (self.changed(bound, memory) for memory in choices))]
        lean = (
            []
            if bound_fits
            else [leaner for form in forms[-NUM_LEANEST_CHOICES:] for leaner in self.leaner(form)]
        )
        if lean and all(self.traces.device_share(form) > 1 for form in lean):
            return None, lean
        # Fastest first, until no remaining option can tie with the fastest that fits.
        fitting: list[tuple[int, Form]] = []
        for place, form in sorted(enumerate(forms), key=lambda each: seconds(each[1])):
            if seconds(form) > limit:
                break
            candidates = [form] if fits(form) else self.leaner(form)
            fitting += [(place, self.with_best_chunks(each)) for each in candidates if fits(each)]
            # Slower options than a fitting one may still tie with it.
            limit = min([limit, *(TIE_FACTOR * seconds(each) for _, each in fitting)])
        else:
            if not fitting:
                return None, [*forms, *lean]
        # The limit shrank with each option that fits, so those within it are equally fast.
        equal = [each for each in fitting if seconds(each[1]) <= limit]
        return min(equal, key=itemgetter(0))[1] if equal else None, ()

    def leaner(self, form: Form) -> list[Form]:
        """The form with each of LEANER_OPTIONS that is not pinned; only the leanest if that
        exceeds the device.
        """
        *others, leanest = (self.without_pinned(options) for options in LEANER_OPTIONS)
        last = self.changed(form, leanest)
        if last is not None and self.traces.device_share(last) > 1:
            return [last]
        forms = [self.changed(form, options) for options in others]
        return [*filter(None, [*forms, last])]

    def simpler(self, best: Form, limit: float) -> Iterator[Form]:
        """Untraced forms with simpler memory options that may fit, in at most `limit` seconds."""
        seconds = self.traces.seconds
        choices = takewhile(lambda memory: not memory.items() <= best.key, self.choices)
        for form in filter(None, (self.changed(best, memory) for memory in choices)):
            leaner = (self.changed(form, self.without_pinned(each)) for each in LEANER_OPTIONS)
            candidates = filter(self.traces.may_fit, filter(None, (form, *leaner)))
            fastest = min(candidates, key=seconds, default=best)
            if fastest is not best and seconds(fastest) <= limit:
                yield fastest

    def with_best_chunks(self, form: Form) -> Form:
        """The form with the fastest chunks of logits that fit; of equally fast ones the smallest."""
        if "memory.loss_chunk_mib" in self.pinned:
            return form
        chunks = ({"memory.loss_chunk_mib": size} for size in LOSS_CHUNKS_MIB)
        forms = (self.changed(form, chunk) for chunk in chunks)
        fitting = [each for each in forms if each is not None and self.traces.fits(each)]
        return min([*fitting, form], key=self.traces.seconds)

    def layout_fits(self, layout: dict[str, Any]) -> bool:
        """Skips larger micro-batches and replicas, which only need more memory."""
        if any(
            layout[key] > 1
            for key in ("training.micro_batch_size", "parallelism.dp_replicate")
            if key not in self.pinned
        ):
            return False
        fits = self.traces.fits
        found = (self.form(layout | memory) for memory in self.choices[-NUM_LEANEST_CHOICES:])
        forms = [form for form in found if form is not None]
        if any(map(fits, forms)):
            return True
        leanest = [leaner for form in forms for leaner in self.leaner(form)]
        if any(map(fits, leanest)):
            return True
        # If host memory is short, offloading less may fit; pinned keys may exclude all of these.
        if leanest and all(self.traces.device_share(form) > 1 for form in leanest):
            return False
        others = filter(
            None, (self.form(layout | memory) for memory in self.choices[:-NUM_LEANEST_CHOICES])
        )
        return any(fits(each) for form in others for each in (form, *self.leaner(form)))

    def changed(self, form: Form, options: dict[str, Any]) -> Form | None:
        """The form with other options; None if that is invalid."""
        return self.form(dict(form.key) | options)

    def form(self, changes: dict[str, Any]) -> Form | None:
        """None if the configuration is invalid or changes a pinned key."""
        key = frozenset(changes.items())
        if key not in self._forms:
            self._forms[key] = self._estimated(key)
            # Large searches take minutes, so a terminal shows progress.
            if len(self._forms) % 100 == 0:
                show_progress(f"{len(self._forms):,} layouts")
        return self._forms[key]

    def _estimated(self, key: frozenset[tuple[str, Any]]) -> Form | None:
        config = with_overrides(self.config, dict(key))
        if any(attrgetter(key)(config) != attrgetter(key)(self.config) for key in self.pinned):
            return None
        try:
            return form_of(config, key, self.world_size, self.device)
        except ConfigError as error:
            self.problems.update(error.problems)
            return None


def _first_by_mesh(layouts: Iterable[Layout]) -> list[Layout]:
    by_mesh: dict[str, Layout] = {}
    for each in layouts:
        by_mesh.setdefault(str(each.mesh), each)
    return list(by_mesh.values())


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
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    pinned: Sequence[str] = (),
    trace: Trace = traced_plans,
) -> SearchResult:
    """The layout of the longest sequence that fits, to within 1/32; none if not even
    `SEQ_LEN_STEP` does.
    """
    steps = [1]
    while steps[-1] * SEQ_LEN_STEP < MAX_SEQ_LEN:
        steps.append(steps[-1] + max(1, steps[-1] // 32))
    lengths = [
        each * SEQ_LEN_STEP for each in reversed(steps) if each * SEQ_LEN_STEP <= MAX_SEQ_LEN
    ]

    def might_fit(length: int, *, memory_ratio: float) -> bool:
        longer = with_seq_len(config, length)
        return any_layout_might_fit(
            longer, world_size, device, pinned=pinned, memory_ratio=memory_ratio
        )

    found, beyond = _first_fitting(
        lengths,
        might_fit,
        lambda length: search(
            with_seq_len(config, length),
            world_size,
            device,
            max_results=1,
            min_traced=1,
            pinned=pinned,
            trace=trace,
        ),
    )
    leanest = min(
        beyond.not_fitting if beyond else (), key=attrgetter("memory_utilization"), default=None
    )
    shortage = (
        ""
        if leanest is None
        else f"{leanest.config.training.seq_len:,} tokens: {leanest.memory_shortages[0]}"
    )
    return replace(found, shortage=shortage)


def fewest_devices(
    config: Config,
    device: DeviceSpec,
    *,
    max_devices: int = 65_536,
    pinned: Sequence[str] = (),
    trace: Trace = traced_plans,
) -> SearchResult:
    """The layout on the fewest devices on which the run fits, if there is one.

    Beyond one node, whole nodes in steps of 1/8 of a power of two.
    """
    sizes = [1]
    while sizes[-1] < max_devices:
        power = 1 << (sizes[-1].bit_length() - 1)
        # Eight sizes between two powers of two; none that leaves a node partly empty.
        node = device.devices_per_node
        sizes.append(sizes[-1] + (power if power < node else max(node, power // 8)))
    found, _ = _first_fitting(
        [size for size in sizes if size <= max_devices],
        partial(any_layout_might_fit, config, device=device, pinned=pinned),
        lambda size: search(
            config, size, device, max_results=1, min_traced=1, pinned=pinned, trace=trace
        ),
        guess=_by_powers,
    )
    return found


class MightFit(Protocol):
    def __call__(self, candidate: int, /, *, memory_ratio: float) -> bool: ...


Guess = Callable[[Sequence[int], Callable[[int], bool]], int]
"""The first of some candidates that might fit, as an index; that of the last if none might."""


def _by_bisection(candidates: Sequence[int], might_fit: Callable[[int], bool]) -> int:
    place = bisect_left(candidates, 1, key=lambda candidate: int(might_fit(candidate)))
    return min(place, len(candidates) - 1)


def _by_powers(candidates: Sequence[int], might_fit: Callable[[int], bool]) -> int:
    """Upwards, powers of two first: more devices than there is work for have no layout."""
    powers = [place for place, size in enumerate(candidates) if size.bit_count() == 1]
    end = next((place for place in powers if might_fit(candidates[place])), len(candidates) - 1)
    start = max((place for place in powers if place < end), default=-1)
    return next((place for place in range(start + 1, end) if might_fit(candidates[place])), end)


def _first_fitting(
    candidates: Sequence[int],
    might_fit: MightFit,
    look: Callable[[int], SearchResult],
    *,
    guess: Guess = _by_bisection,
) -> tuple[SearchResult, SearchResult | None]:
    """The result of the first candidate of which a layout fits, and that of the one before it; of
    the last candidate if none fits.

    Estimates guess the first, traces prove it and correct the estimates of the next guess.
    """
    results: dict[int, SearchResult] = {}
    low = -1
    high = len(candidates)
    ratio = 1.0
    while high - low > 1:
        might = partial(might_fit, memory_ratio=ratio)
        place = low + 1 + guess(candidates[low + 1 : high], might)
        results[place] = look(candidates[place])
        ratio = results[place].memory_ratio
        low, high = (low, place) if results[place].best else (place, high)
    return results.get(high, results[max(results)]), results.get(high - 1)
