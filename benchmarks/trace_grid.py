"""python -m benchmarks.trace_grid [--cases N] [--seed S] [--jobs N]: whole steps composed of short
traces against dry runs.

The cases of `benchmarks.memory_grid`, with DEPTH times as many layers. A dry run runs every layer
and micro-batch of the same trainer; a trace runs few of them. Prints each case whose device or
host peak is off by more than LIMIT, whose FLOPs or messages differ, or whose trace was too short,
then the counts. Exit status 1 if there is one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks.memory_grid import GridCase, draw_cases, grid_parser, results_of
from trainer.config import checks

LIMIT = 0.005
DEPTH = 4


@dataclass(frozen=True)
class Difference:
    """A composed step beside the dry run of a case."""

    case: GridCase
    device: tuple[int, int]
    """Bytes composed and counted."""
    host: tuple[int, int]
    flops: tuple[int, int]
    messages: tuple[int, int]
    """Bytes sent."""
    blocks: tuple[int, int]
    """Recorded, and of this rank."""
    is_closed: bool

    @property
    def error(self) -> float:
        pairs = (self.device, self.host, self.messages)
        return max(abs(found / counted - 1) for found, counted in pairs if counted)

    @property
    def is_wrong(self) -> bool:
        return not self.is_closed or self.flops[0] != self.flops[1] or self.error > LIMIT

    def __str__(self) -> str:
        parts = {
            "device": self.device,
            "host": self.host,
            "FLOPs": self.flops,
            "sent": self.messages,
        }
        off = ", ".join(
            f"{name} {found / counted - 1:+.2%}"
            for name, (found, counted) in parts.items()
            if counted
        )
        closed = "" if self.is_closed else ", not closed"
        return f"{off}{closed}; {self.blocks[0]} of {self.blocks[1]} blocks: {self.case}"


def deep_cases(seed: int) -> Iterator[GridCase]:
    """Endless; without the host budgets of pipelines, which cannot be traced."""
    for case in draw_cases(seed):
        changes = tuple(
            (key, DEPTH * int(str(value)) if key == "model.num_layers" else value)
            for key, value in case.changes
        )
        deep = GridCase(changes, case.world_size, case.pp_rank)
        if not checks.layout_problems(deep.config, deep.world_size):
            yield deep


def compare(case: GridCase) -> Difference:
    from benchmarks.dry_run import dry_run  # Imports torch, slowly.
    from trainer.trace.record import trace_step

    found, step, _ = trace_step(case.config, case.world_size, case.rank)
    counted = dry_run(case.config, case.world_size, rank=case.rank)
    flops = Counter(found.work.matmul_flops) + Counter(found.work.attention_flops)
    counted_flops = sum(counted.matmul_flops.values()) + sum(counted.attention_flops.values())
    return Difference(
        case,
        (found.peak.size, counted.peak_bytes),
        (found.host_bytes, counted.peak_host_bytes),
        (flops.total(), counted_flops),
        (
            round(found.work.sent_bytes.total()),
            round(sum(message.bytes for message in counted.messages)),
        ),
        (
            sum(len(blocks.kept) for blocks in step.stages.values()),
            sum(len(blocks.originals) for blocks in step.stages.values()),
        ),
        found.is_closed,
    )


def main(argv: Sequence[str]) -> int:
    options = grid_parser("trace_grid", __doc__, cases=200).parse_args(argv)
    if options.case is not None:
        result = compare(options.case)
        sys.stdout.write(f"{result}\n")
        return int(result.is_wrong)
    cases = [*islice(deep_cases(options.seed), options.cases)]
    wrong = 0
    exact = 0
    largest = 0.0
    for result in results_of(compare, cases, options.jobs):
        exact += result.device[0] == result.device[1]
        largest = max(largest, result.error)
        if result.is_wrong:
            wrong += 1
            sys.stdout.write(f"{result}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(cases)} cases, {wrong} wrong; device peaks of {exact} equal to the byte, the largest error {largest:.2%}\n"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
