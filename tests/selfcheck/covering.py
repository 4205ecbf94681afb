"""python -m tests.selfcheck.covering: completes covering_cases.txt after a change of the factors;
to write it anew, empty it.

Legal cases that together contain every pair of levels for which a legal case was found. The first
ones, on few processes, contain all but the pairs with mesh dimensions of three and four ranks, and
of options of two mesh dimensions.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.errors import ConfigError
from trainer.selfcheck.factors import LEVELS, MESH_FACTORS
from trainer.selfcheck.random_configs import (
    Pair,
    all_pairs,
    format_case,
    needs_of,
    normalize,
    pairs,
    parse_case,
    problems,
    random_case,
    without_simplest,
    world_size,
)

PATH = Path(__file__).with_name("covering_cases.txt")
DRAWS = 60
CHANGES = 1500
"""For each case: how many are drawn, and how many changes of the best are tried."""


def read_cases() -> list[dict[str, str]]:
    return [parse_case(line) for line in PATH.read_text().splitlines()]


def smallest_case(pair: Pair) -> dict[str, str]:
    """A pair of levels, and the first level of each factor that they need."""
    needed = needs_of(dict(pair)) or {}
    return without_simplest({factor: levels[0] for factor, levels in needed.items()})


def small_pairs() -> set[Pair]:
    """The pairs without mesh dimensions of three ranks, and without options of two mesh
    dimensions.
    """
    return {pair for pair in all_pairs() if _is_small(smallest_case(pair), pair)}


def _is_small(case: dict[str, str], pair: Pair) -> bool:
    mesh = [factor for factor in MESH_FACTORS if factor in case]
    is_of_options = not any(factor in mesh for factor, _ in pair)
    small_degrees = all(
        case[factor] == "2" or (factor, case[factor]) == ("parallelism.cp", "4") for factor in mesh
    )
    return small_degrees and world_size(case) <= 4 and not (is_of_options and len(mesh) > 1)


def still_legal(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    for line in lines:
        with suppress(ConfigError):
            if not problems(case := parse_case(line)):
                yield case


def completed(
    cases: list[dict[str, str]], wanted: set[Pair], *, max_processes: int
) -> list[dict[str, str]]:
    """With cases of the pairs that these lack, and without those whose pairs are all in others."""
    missing = wanted.difference(*map(pairs, cases))
    cases = without_redundant(
        [*cases, *covering_cases(missing, max_processes=max_processes)], wanted
    )
    return best_first(cases, wanted)


def covering_cases(wanted: Iterable[Pair], *, max_processes: int) -> list[dict[str, str]]:
    """Legal cases that contain every pair for which a few draws find one; greedy: the most new
    pairs per second first.
    """
    rng = random.Random(0)
    cases = list[dict[str, str]]()
    missing = sorted(wanted)
    rng.shuffle(missing)
    uncovered = dict.fromkeys(missing)
    while uncovered:
        first, *_ = uncovered
        tries = 2 if problems(smallest_case(first)) else DRAWS
        drawn = (
            random_case(rng, max_processes=max_processes, fixed=dict(first)) for _ in range(tries)
        )
        candidates = [case for case in drawn if case is not None and first in pairs(case)]
        if not candidates:
            del uncovered[first]
            continue

        def value(case: dict[str, str], *, first: Pair = first) -> float:
            """New pairs per second."""
            covered = pairs(case)
            return len(covered & uncovered.keys()) / cost(case) if first in covered else 0.0

        cases.append(improved(max(candidates, key=value), value, rng, max_processes=max_processes))
        for pair in pairs(cases[-1]) & uncovered.keys():
            del uncovered[pair]
    return cases


def improved(
    case: dict[str, str],
    value: Callable[[dict[str, str]], float],
    rng: random.Random,
    *,
    max_processes: int,
) -> dict[str, str]:
    """The case after changes of single levels that kept it legal and did not lower its value."""
    best = value(case)
    for _ in range(CHANGES):
        factor, level = rng.choice(LEVELS)
        changed = normalize(case | {factor: level})
        is_small = world_size(changed) <= max_processes
        if (
            is_small
            and changed != case
            and (new := value(changed)) >= best
            and not problems(changed)
        ):
            case = changed
            best = new
    return case


def cost(case: dict[str, str]) -> float:
    """Seconds, roughly."""
    launches = 1 + ("checkpoint" in case)
    return (0.3 + 0.4 * world_size(case) * launches) * (1 + 5 * ("training.compile" in case))


def without_redundant(cases: list[dict[str, str]], wanted: set[Pair]) -> list[dict[str, str]]:
    """The cases without those whose wanted pairs all stand in others; large ones are dropped
    first.
    """
    counts = Counter(pair for case in cases for pair in pairs(case) & wanted)
    for case in sorted(cases, key=cost, reverse=True):
        own = pairs(case) & wanted
        if all(counts[pair] > 1 for pair in own):
            counts.subtract(own)
            cases = [other for other in cases if other is not case]
    return cases


def best_first(cases: list[dict[str, str]], wanted: set[Pair]) -> list[dict[str, str]]:
    """In the order of new pairs per second."""
    ordered = list[dict[str, str]]()
    waiting = [*cases]
    uncovered = {*wanted}
    while waiting:
        best = max(waiting, key=lambda case: len(pairs(case) & uncovered) / cost(case))
        waiting.remove(best)
        uncovered -= pairs(best)
        ordered.append(best)
    return ordered


def main() -> None:
    kept = [*still_legal(PATH.read_text().splitlines())]
    small = completed(
        [case for case in kept if world_size(case) <= 4], small_pairs(), max_processes=4
    )
    others = {*all_pairs()}.difference(*map(pairs, small))
    large = completed([case for case in kept if case not in small], others, max_processes=8)
    PATH.write_text("".join(f"{format_case(case)}\n" for case in small + large))
    for cases in (small, large):
        sys.stdout.write(
            f"{len(cases)} cases; processes {dict(Counter(map(world_size, cases)))}\n"
        )
    for first in range(10, len(small), 10):
        covered = small_pairs().intersection(set().union(*map(pairs, small[:first])))
        total = len(small_pairs().intersection(set().union(*map(pairs, small))))
        sys.stdout.write(
            f"first {first}: {len(covered) / total:.1%}, {sum(map(cost, small[:first])):.0f} s\n"
        )


if __name__ == "__main__":
    main()
