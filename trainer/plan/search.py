"""Which mesh: every way to lay a run out on so many devices, by the seconds that are predicted of an update. No torch.

A way is a mesh, how rows are shared, a schedule, and what is kept where. The last costs time to save memory, so of every
mesh the way that keeps everything is a bound: meshes are looked at in the order of their bounds, until none that is left
can be among the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any, TypeVar

from trainer.config.job_config import Config
from trainer.config.parse import toml_value
from trainer.config.sections import LONGEST_ROW
from trainer.hardware.device_specs import Device
from trainer.plan.plan import Plan, plan_of

SHOWN = 5
MOST_TOKENS = 32_768
"""Of a micro-batch on a rank: larger ones make no product faster."""
UNIT = 1 << 12
"""Of lengths that are tried."""
LEAST_TOKENS = 512
"""Of a row on a rank, beyond the first: shorter pieces are all messages and no work."""
PASTED = ("training", "parallelism", "memory")
EQUAL = 1.005
"""Times the seconds of the fastest that count as equal to it: what takes least of its devices and hosts is then the best."""
METHODS = ("ring", "allgather", "ulysses", "hybrid")
SCHEDULES = (("1F1B", None), ("Interleaved1F1B", None), ("Interleaved1F1B", 4))
"""And stages of a rank; None is what a schedule has by itself."""
AUTO = {"cp_layout": "auto", "cp_outer": "auto", "pp_layers": None}
"""What belongs to another mesh is not taken over."""

# What is kept and where: the less memory a way takes, the later it is tried.
LEVERS = ("recompute", "offload", "mlp_tile_mib", "head_groups", "input_every")
KEEPS: tuple[dict[str, Any], ...] = tuple(
    {f"memory.{lever}": value for lever, value in zip(LEVERS, values, strict=True)}
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


C = TypeVar("C", bound=Config)
GROUPED = [keep for keep in KEEPS if keep["memory.head_groups"] > 1 and keep["memory.offload"] == "none"]
LEAN = 4
"""Of them, the last, that take least of a device."""
Told = Callable[[int], None] | None
"""Is given the number of plans that were made, now and then."""


@dataclass(frozen=True)
class Way:
    """A run laid out in one way."""

    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.seconds

    @property
    def mesh(self) -> dict[str, int]:
        return self.plan.config.parallelism.degrees(self.plan.world_size)

    def toml(self) -> str:
        """Whole sections, to stand in place of the file's."""
        return "\n\n".join("\n".join(self._section(name)) for name in PASTED)

    def _section(self, name: str) -> Iterator[str]:
        section = getattr(self.plan.config, name)
        yield f"[{name}]"
        for key, value in section:
            if value is not None and value != type(section).model_fields[key].default:
                yield f"{key} = {toml_value(value)}"


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: Sequence[Way]
    """The fastest of each mesh that fits, fastest first; of those that are about equal, what fills least."""
    misfits: Sequence[Way]
    """The leanest ways of meshes that would be faster than the best, but do not fit."""
    tried: int
    """Plans that were made."""
    problems: Sequence[str] = field(default=())
    """Where nothing could be laid out: what stood in the way most often."""


def search(
    config: Config,
    ranks: int,
    device: Device,
    *,
    shown: int = SHOWN,
    fixed: Sequence[str] = (),
    told: Told = None,
) -> Found:
    """The fastest ways to run a configuration on so many devices. Keys that are `fixed` keep their values."""
    looked = _Looked(config, ranks, device, fixed, told)
    bounds = sorted(looked.bounds(), key=_least)
    best: list[Way] = []
    misfits: list[Way] = []
    for bound in bounds:
        if len(best) == shown and _least(bound) >= best[-1].seconds:
            break
        fitting, leanest = looked.fitted(bound)
        if fitting is None:
            misfits.append(leanest)
            continue
        best = sorted(_one_of_each_mesh([*best, fitting]), key=lambda way: way.seconds)[:shown]
    limit = best[0].seconds if best else inf
    best.sort(
        key=lambda way: (
            way.seconds > EQUAL * limit,
            way.plan.overfull if way.seconds <= EQUAL * limit else way.seconds,
        )
    )
    faster = [way for way in misfits if way.seconds < limit]
    problems = [problem for problem, _ in looked.problems.most_common(3)]
    return Found(best, faster[:shown], looked.plans, () if bounds else problems)


def holds(config: Config, ranks: int, device: Device, *, told: Told = None) -> bool:
    """Whether some way fits, which is found sooner than the fastest."""
    looked = _Looked(config, ranks, device, (), told)
    return any(looked.holds(layout) for layout in layouts(config, ranks, device))


def _least(bound: Way) -> float:
    """Seconds below which no way of a layout can be: where heads go in groups, messages of attention may hide."""
    exposed = bound.plan.times.busiest.exposed
    return bound.seconds - sum(exposed.get(channel, 0) for channel in ("cp", "rotate", "exchange"))


class _Looked:
    """The ways of one search, and what was seen of them."""

    def __init__(self, config: Config, ranks: int, device: Device, fixed: Sequence[str], told: Told) -> None:
        self.config, self.ranks, self.device, self.told = config, ranks, device, told
        self.fixed = [tuple(key.split(".")) for key in fixed]
        self.plans = 0
        self.problems: Counter[str] = Counter()

    def bounds(self) -> Iterator[Way]:
        """Every mesh with every way to share rows, keeping everything; or, where that is fixed, as it is asked for."""
        for layout in layouts(self.config, self.ranks, self.device):
            way = self.way(layout | KEEPS[0]) or (self.way(layout) if self.fixed else None)
            if way is not None:
                yield way

    def fitted(self, bound: Way) -> tuple[Way | None, Way]:
        """The fastest way of a layout that fits, of about equals the one with fewest levers; and the leanest of all."""
        if bound.plan.fits and bound.mesh["cp"] == 1:
            return bound, bound
        # Where all fits, only what hides messages of attention may still help.
        keeps = [keep for keep in KEEPS[1:] if not bound.plan.fits or keep in GROUPED]
        ways = [bound, *(way for keep in keeps if (way := self.way(keep, bound.plan.config)) is not None)]
        fitting = [way for way in ways if way.plan.fits]
        leanest = min(ways, key=lambda way: way.plan.overfull)
        least = EQUAL * min((way.seconds for way in fitting), default=inf)
        return next((way for way in fitting if way.seconds <= least), None), leanest

    def holds(self, layout: dict[str, Any]) -> bool:
        """Whether a layout fits, one row at a time and without copies of the model, which only take more."""
        if layout["training.micro_batch_size"] > 1 or layout["parallelism.dp_replicate"] > 1:
            return False
        lean = [way for keep in KEEPS[-LEAN:] if (way := self.way(layout | keep)) is not None]
        if any(way.plan.fits for way in lean):
            return True
        # Where the host is what lacks, less may be put there.
        if all(way.plan.fullest.device > way.plan.device_room for way in lean):
            return False
        return any((way := self.way(layout | keep)) is not None and way.plan.fits for keep in KEEPS[:-LEAN])

    def way(self, changes: dict[str, Any], config: Config | None = None) -> Way | None:
        """None where the configuration has problems so, or is not as it is fixed."""
        config = changed(config or self.config, changes)
        if any(
            getattr(getattr(config, name), key) != getattr(getattr(self.config, name), key) for name, key in self.fixed
        ):
            return None
        if problems := config.shape_problems(self.ranks):
            self.problems.update(problems)
            return None
        self.plans += 1
        if self.told is not None and self.plans % 100 == 0:
            self.told(self.plans)
        return Way(plan_of(config, self.ranks, self.device))


def layouts(config: Config, ranks: int, device: Device) -> Iterator[dict[str, Any]]:
    """Meshes of so many ranks, and how they share rows and stages, that are not hopeless; some still break rules."""
    model, rows, length = config.model.build(), config.training.global_batch_size, config.training.seq_len
    for tp, cp, pp in product(divisors(ranks), repeat=3):
        if ranks % (tp * cp * pp) or tp > min(device.linked, model.num_heads) or pp > model.num_layers:
            continue
        if tp * cp > 1 and length // (tp * cp) < LEAST_TOKENS:
            continue
        data = ranks // (tp * cp * pp)
        if data > rows:
            continue
        mesh: dict[str, Any] = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.pp": pp}
        mesh |= {f"parallelism.{key}": value for key, value in AUTO.items()}
        mesh["parallelism.async_tp"] = config.parallelism.async_tp and tp > 1
        for replicas, micro, method, (schedule, stages) in product(
            _replicas(data, cp * tp, device),
            _micro_batches(rows, data, length // cp),
            METHODS if cp > 1 else ("auto",),
            SCHEDULES if pp > 1 else SCHEDULES[:1],
        ):
            for exchanged in _exchanged(method, cp, tp, model.num_heads, device):
                yield {
                    **mesh,
                    "parallelism.dp_replicate": replicas,
                    "parallelism.dp_shard": data // replicas,
                    "parallelism.cp_method": method,
                    "parallelism.cp_ulysses": exchanged,
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "training.micro_batch_size": micro,
                }


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def changed(config: C, changes: dict[str, Any]) -> C:
    """The configuration with other values, by dotted keys; they are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _replicas(data: int, sharing: int, device: Device) -> list[int]:
    """Copies of the model among `data` groups of `sharing` ranks: one, or one on each node."""
    inside = max(1, device.linked // sharing)
    return [1] if data <= inside or data % inside else [1, data // inside]


def _micro_batches(rows: int, data: int, length: int) -> list[int]:
    """Rows of a micro-batch, on so many data-parallel ranks that hold so many tokens of each: one, and the two largest."""
    each = -(-rows // data)
    fitting = [count for count in divisors(each) if rows % count == 0 and count * length <= MOST_TOKENS]
    return sorted({1, *fitting[-2:]})


def _exchanged(method: str, cp: int, tp: int, heads: int, device: Device) -> Iterator[int | None]:
    """Ranks that exchange heads, where a method leaves that open."""
    if method != "hybrid":
        yield None
        return
    for count in divisors(cp):
        if 1 < count < cp and count * tp <= device.linked and heads // tp % count == 0:
            yield count


def _one_of_each_mesh(ways: Iterable[Way]) -> Iterator[Way]:
    """The fastest of those that differ in how they share rows or run stages alone."""
    seen = set()
    for way in sorted(ways, key=lambda way: way.seconds):
        mesh = tuple(way.mesh.values())
        if mesh not in seen:
            seen.add(mesh)
            yield way


# ---- other questions


def with_length(config: C, length: int) -> C:
    """Rows of that length, and as many tokens in an update as before, as far as whole rows allow."""
    training = config.training
    tokens = training.global_batch_size * training.seq_len
    rows = max(1, round(tokens / length))
    return changed(
        config, {"training.seq_len": length, "training.global_batch_size": rows, "training.micro_batch_size": 1}
    )


def longest(config: C, ranks: int, device: Device, *, told: Told = None) -> tuple[int, Found, str]:
    """The longest rows that fit, to within a thirty-second, the ways to run them, and what stops longer ones; 0 if none fit.

    One row an update for each group of ranks that shares one.
    """
    low, high = 0, 1
    while high * UNIT <= LONGEST_ROW and holds(with_length(config, high * UNIT), ranks, device, told=told):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        fits = holds(with_length(config, middle * UNIT), ranks, device, told=told)
        low, high = (middle, high) if fits else (low, middle)
    beyond = search(with_length(config, high * UNIT), ranks, device, shown=1, told=told)
    least = min(beyond.misfits, key=lambda way: way.plan.overfull, default=None)
    stops = "" if least is None else f"{high * UNIT:,} tokens: {least.plan.misfits[0]}"
    return (
        low * UNIT,
        search(with_length(config, low * UNIT), ranks, device, shown=1, told=told) if low else beyond,
        stops,
    )


def fewest(config: Config, device: Device, *, most: int = 65_536, told: Told = None) -> tuple[int, Found]:
    """The fewest devices that hold the run: of one node any number, else whole nodes, in steps of an eighth of a power of two.
    0 if there are none.
    """
    ranks = next(
        (count for power in range(most.bit_length()) if holds(config, count := 1 << power, device, told=told)), 0
    )
    step = 1 if ranks <= device.node else max(device.node, ranks // 16)
    for fewer in range(ranks // 2 + step, ranks, step):
        if holds(config, fewer, device, told=told):
            ranks = fewer
            break
    return ranks, search(config, ranks or most, device, shown=1, told=told)


def laid_out(plan: Plan) -> str:
    """A mesh and what goes with it, in a few words."""
    config = plan.config
    parallelism, memory, rows = config.parallelism, config.memory, config.training.micro_batch_size
    mesh = parallelism.degrees(plan.world_size)
    words = [" x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one rank"]
    if parallelism.cp > 1:
        words.append(
            config.context_plan().chosen + (f" of {config.context_plan().ulysses}" * bool(parallelism.cp_ulysses))
        )
    stages = f" of {parallelism.pp_stages_per_rank} stages each" if parallelism.pp_stages_per_rank else ""
    words += (
        [parallelism.pp_schedule + stages] * (parallelism.pp > 1) + [f"{rows} rows"] * (rows > 1) + [memory.recompute]
    )
    words += [f"offload {memory.offload}"] * (memory.offload != "none")
    words += [f"tiles {memory.mlp_tile_mib} MiB"] * (memory.mlp_tile_mib is not None)
    words += [f"{memory.head_groups} head groups"] * (memory.head_groups > 1)
    words += ["states on the host"] * (memory.optimizer_placement == "host")
    return ", ".join(words + [f"one input of {memory.input_every}"] * (memory.input_every > 1))


def why_slower(way: Way, best: Way) -> str:
    """What costs a way most of what it is slower than the best."""
    mine, theirs = (other.plan.times.busiest.parts() for other in (way, best))
    costs = {name: mine.get(name, 0) - theirs.get(name, 0) for name in mine.keys() | theirs.keys()}
    worst = sorted(costs.items(), key=lambda item: -item[1])[:2]
    noticed = [f"{name} {seconds:+.2f} s" for name, seconds in worst if seconds >= 0.005 * best.seconds]
    return ", ".join(noticed) or "about equal, and fills more"
