"""How far the coarse estimates that rank the layouts of a search are from traces, over drawn
layouts.

    python -m benchmarks.rough_plans [NUMBER [FILE ...]]

Draws NUMBER layouts of each file with memory options, 12 by default, and prints a table: quartiles
of estimate over trace. Takes some seconds a layout until its trace is known. Numbers of
`trainer/plan/rough.py` were fitted to it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from statistics import quantiles

from trainer.config import checks
from trainer.config.overrides import with_overrides
from trainer.config.parse import load
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import load_device
from trainer.plan.layouts import enumerate_layouts
from trainer.plan.plan import TrainingPlan
from trainer.plan.rough import RoughPlan
from trainer.plan.search import FASTEST_OPTIONS, LEANER_OPTIONS, MEMORY_CHOICES
from trainer.plan.tracing import tracing_processes

DEVICE = load_device("h100-80gb")
FILES = {
    "llama3_8b_1m": 32,
    "llama3_8b_128k": 8,
    "llama3_70b_128k": 64,
    "gpt_oss_20b_128k": 16,
    "qwen3_30b_a3b_1m": 64,
    "gemma3_4b_128k": 8,
    "llama3_1b": 8,
    "llama3_8b": 8,
}
"""Number of devices by file."""
MAX_STAGES = 8
"""Pipeline ranks of a drawn layout: each distinct one takes a trace of its own."""


def main(words: Sequence[str]) -> int:
    number = int(words[0]) if words else 12
    say("| file | devices | seconds | device memory |")
    say("|---|---:|---|---|")
    with tracing_processes() as trace:
        for name in words[1:] or FILES:
            world_size = FILES[name]
            drawn = [*drawn_plans(name, world_size, number)]
            pairs = [
                (RoughPlan(plan.config, world_size, DEVICE), traced)
                for plan, traced in zip(drawn, trace(drawn), strict=True)
                if traced is not None
            ]
            seconds = [rough.step_seconds / traced.step_seconds for rough, traced in pairs]
            memory = [rough.device_share / traced.device_utilization for rough, traced in pairs]
            row = (f"`{name}`", world_size, described(seconds), described(memory))
            say(f"| {' | '.join(map(str, row))} |")
    return 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def drawn_plans(name: str, world_size: int, number: int) -> Iterator[TrainingPlan]:
    rng = random.Random(name)
    config = load(["--config", name])
    layouts = [*enumerate_layouts(config, world_size, DEVICE)]
    while number:
        options = rng.choice(MEMORY_CHOICES) | rng.choice(({}, *LEANER_OPTIONS))
        changes = FASTEST_OPTIONS | rng.choice(layouts) | options
        found = with_attention_choice(with_overrides(config, changes), DEVICE)
        is_legal = not checks.layout_problems(found, world_size)
        if is_legal and found.parallelism.pp <= MAX_STAGES:
            number -= 1
            yield TrainingPlan(found, world_size, DEVICE)


def described(ratios: Sequence[float]) -> str:
    """Quartiles."""
    return " ".join(f"{mark:.2f}" for mark in quantiles(ratios, n=4))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
