"""Which mesh: every way to lay a run out on so many devices, by the seconds that are predicted of an update. No torch.

A way is a mesh, how rows are shared, a schedule, and what is kept where. The last costs time to save memory, so of every
mesh the way that keeps everything is a bound: meshes are looked at in the order of their bounds, until none that is left
can be among the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

from trainer.config import Config
from trainer.load import toml_value
from trainer.plan.devices import Device
from trainer.plan.plan import Plan, plan_of

SHOWN = 5
MOST_TOKENS = 32_768
"""Of a micro-batch on a rank: larger ones make no product faster."""
LEAST_TOKENS = 512
"""Of a row on a rank, beyond the first: shorter pieces are all messages and no work."""
METHODS = ("ring", "allgather", "ulysses", "hybrid")
SCHEDULES = ("1F1B", "Interleaved1F1B")

# What is kept and where: the less memory a way takes, the later it is tried.
LEVERS = ("recompute", "offload", "mlp_tile_mib", "head_groups", "input_every")
KEEPS: tuple[dict[str, Any], ...] = tuple(
    {f"memory.{lever}": value for lever, value in zip(LEVERS, values, strict=True)}
    for values in (
        ("none", "none", None, 1, 1),
        ("keep_attention", "none", None, 1, 1),
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
Told = Callable[[int], None] | None
"""Is given the number of plans that were made, now and then."""


@dataclass(frozen=True)
class Way:
    """A run laid out in one way."""

    plan: Plan
    changes: dict[str, Any]
    """Keys whose values are not those of the configuration that was given."""

    @property
    def seconds(self) -> float:
        return self.plan.seconds

    @property
    def mesh(self) -> dict[str, int]:
        return self.plan.config.parallelism.degrees(self.plan.world_size)

    def toml(self) -> str:
        """To paste."""
        sections: dict[str, list[str]] = {}
        for key, value in self.changes.items():
            section, _, name = key.partition(".")
            line = f"# {name}: left out" if value is None else f"{name} = {toml_value(value)}"
            sections.setdefault(section, []).append(line)
        return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items())


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: Sequence[Way]
    """The fastest of each mesh that fits, fastest first."""
    misfits: Sequence[Way]
    """The leanest ways of meshes that would be faster than the best, but do not fit."""
    tried: int
    """Plans that were made."""
    problems: Sequence[str] = field(default=())
    """Where nothing could be laid out: what stood in the way most often."""


def search(config: Config, ranks: int, device: Device, *, shown: int = SHOWN, told: Told = None) -> Found:
    """The fastest ways to run a configuration on so many devices."""
    looked = _Looked(config, ranks, device, told)
    bounds = sorted(looked.bounds(), key=lambda way: way.seconds)
    best: list[Way] = []
    misfits: list[Way] = []
    for bound in bounds:
        if len(best) == shown and bound.seconds >= best[-1].seconds:
            break
        fitting, leanest = looked.fitted(bound)
        if fitting is None:
            misfits.append(leanest)
            continue
        best = sorted(_one_of_each_mesh([*best, fitting]), key=lambda way: way.seconds)[:shown]
    limit = best[0].seconds if best else float("inf")
    faster = [way for way in misfits if way.seconds < limit]
    return Found(best, faster[:shown], looked.plans, [*looked.problems][:3] if not bounds else ())


class _Looked:
    """The ways of one search, and what was seen of them."""

    def __init__(self, config: Config, ranks: int, device: Device, told: Told) -> None:
        self.config, self.ranks, self.device, self.told = config, ranks, device, told
        self.plans = 0
        self.problems: dict[str, None] = {}

    def bounds(self) -> Iterator[Way]:
        """Every mesh with every way to share rows, keeping everything."""
        for layout in layouts(self.config, self.ranks, self.device):
            way = self.way(layout | KEEPS[0])
            if way is not None:
                yield way

    def fitted(self, bound: Way) -> tuple[Way | None, Way]:
        """The fastest way of a layout that fits; and the leanest that was looked at."""
        if bound.plan.fits:
            return bound, bound
        ways = [way for keep in KEEPS[1:] if (way := self.way(keep, bound.plan.config)) is not None]
        fitting = [way for way in ways if way.plan.fits]
        leanest = min([bound, *ways], key=lambda way: way.plan.overfull)
        return min(fitting, key=lambda way: way.seconds, default=None), leanest

    def way(self, changes: dict[str, Any], config: Config | None = None) -> Way | None:
        """None where the configuration has problems so."""
        config = changed(config or self.config, changes)
        if problems := config.shape_problems(self.ranks):
            self.problems |= dict.fromkeys(problems)
            return None
        self.plans += 1
        if self.told is not None and self.plans % 100 == 0:
            self.told(self.plans)
        return Way(plan_of(config, self.ranks, self.device), dict(differing(self.config, config)))


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
        mesh = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.pp": pp}
        for replicas, micro, method, schedule in product(
            _replicas(data, cp * tp, device),
            _micro_batches(rows // data, length // cp),
            METHODS if cp > 1 else ("auto",),
            SCHEDULES if pp > 1 else ("1F1B",),
        ):
            for exchanged in _exchanged(method, cp, tp, model.num_heads, device):
                yield {
                    **mesh,
                    "parallelism.dp_replicate": replicas,
                    "parallelism.dp_shard": data // replicas,
                    "parallelism.cp_method": method,
                    "parallelism.cp_ulysses": exchanged,
                    "parallelism.pp_schedule": schedule,
                    "training.micro_batch_size": micro,
                }


def differing(config: Config, other: Config) -> Iterator[tuple[str, Any]]:
    """The keys that a search may change and did, with their values in the other."""
    for section in ("parallelism", "training", "memory"):
        before, after = getattr(config, section), getattr(other, section)
        for key in type(after).model_fields:
            if getattr(before, key) != getattr(after, key):
                yield f"{section}.{key}", getattr(after, key)


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


def _micro_batches(rows: int, length: int) -> list[int]:
    """Rows of a micro-batch on a rank that holds so many tokens of each."""
    return [count for count in divisors(rows) if count == 1 or count * length <= MOST_TOKENS][-2:]


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


def longest(config: Config, ranks: int, device: Device, *, unit: int = 1 << 12, told: Told = None) -> tuple[int, Found]:
    """The longest rows that fit, in whole units of tokens, and the ways to run them; 0 if one unit does not fit.

    One row an update for each group of ranks that shares one.
    """

    def tried(units: int) -> Found:
        return search(with_length(config, units * unit), ranks, device, shown=1, told=told)

    return _largest(tried, unit)


def _largest(tried: Callable[[int], Found], unit: int) -> tuple[int, Found]:
    low, high, found = 0, 1, tried(1)
    last = found
    while found.best:
        low, high, last = high, 2 * high, found
        found = tried(high)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        found = tried(middle)
        low, high = (middle, high) if found.best else (low, middle)
        last = found if found.best else last
    return low * unit, last


def fewest(config: Config, device: Device, *, most: int = 65_536, told: Told = None) -> tuple[int, Found]:
    """The fewest devices that hold the run: whole nodes, or a power of two of one's devices. 0 if there are none."""
    found = Found((), (), 0)
    counts = [1 << power for power in range(most.bit_length())]
    for ranks in counts:
        found = search(config, ranks, device, shown=1, told=told)
        if found.best:
            return ranks, found
    return 0, found


def told(way: Way) -> str:
    """A mesh and what goes with it, in a few words."""
    config = way.plan.config
    parallelism, memory, rows = config.parallelism, config.memory, config.training.micro_batch_size
    words = [" x ".join(f"{axis} {size}" for axis, size in way.mesh.items() if size > 1) or "one rank"]
    if parallelism.cp > 1:
        words.append(parallelism.cp_method + (f" of {parallelism.cp_ulysses}" if parallelism.cp_ulysses else ""))
    words += [parallelism.pp_schedule] * (parallelism.pp > 1) + [f"{rows} rows"] * (rows > 1) + [memory.recompute]
    words += [f"offload {memory.offload}"] * (memory.offload != "none")
    words += [f"tiles {memory.mlp_tile_mib} MiB"] * (memory.mlp_tile_mib is not None)
    words += [f"{memory.head_groups} head groups"] * (memory.head_groups > 1)
    return ", ".join(words + [f"one input of {memory.input_every}"] * (memory.input_every > 1))


def why_slower(way: Way, best: Way) -> str:
    """What costs a way most of what it is slower than the best."""
    mine, theirs = (other.plan.times.busiest.parts() for other in (way, best))
    costs = {name: mine.get(name, 0) - theirs.get(name, 0) for name in mine.keys() | theirs.keys()}
    worst = sorted(costs.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {seconds:+.2f} s" for name, seconds in worst if seconds > 0)
