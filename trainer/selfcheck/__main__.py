"""`python -m trainer.selfcheck`: checks that a run on its mesh computes the same as in one process.

The run is reduced (`shrink.py`) and trained on this machine's CPU, whatever its target cluster. Exits with 0 if results
match, 1 if they differ or a run fails, 2 if the configuration is wrong. Imports no torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from math import prod
from pathlib import Path

from trainer.commands import OVERRIDES_HELP, CommandParser, integer, print_lines, run_command
from trainer.config import checks
from trainer.config.job_config import Config, TrainingStage
from trainer.config.parse import load
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_SUCCESS, ConfigError, RankFailedError
from trainer.launch.cluster import LaunchWorld, pluralize
from trainer.launch.launcher import format_problems
from trainer.selfcheck import processes
from trainer.selfcheck.comparison import (
    SCALAR_TOLERANCE,
    TENSOR_TOLERANCE,
    comparison_table,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.shrink import ReducedRun, reduce_run, write_sample_documents

DESCRIPTION = """\
Reduces the run and trains a few steps in float64 on this machine's CPU, on its mesh (each dimension
reduced to two ranks) and in one process, and compares losses, gradients and weights. Corpus and
tokenizer may be missing. Exits with 0 if results match, 1 if not."""
WORLD_SIZE_HELP = """\
world size of the run; default: the product of the degrees in the configuration, and at least 2 if it leaves out
dp_shard"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="python -m trainer.selfcheck", description=DESCRIPTION, overrides=OVERRIDES_HELP)
    parser.add_config()
    parser.add_argument("--world-size", metavar="N", type=integer(minimum=1), help=WORLD_SIZE_HELP)
    return run_command(argv, parser, run)


def run(options: Namespace, overrides: Sequence[str]) -> int:
    world = None
    try:
        config = load(overrides)
        world = LaunchWorld(nproc_per_node=options.world_size or default_world_size(config))
        if problems := checks.stage_problems(config):
            raise ConfigError(problems)
        return max([check_stage(stage, world.world_size) for stage in config.training_stages])
    except ConfigError as error:
        sys.stderr.write(format_problems(error.problems, overrides, world))
        return EXIT_BAD_CONFIG


def check_stage(stage: TrainingStage, world_size: int) -> int:
    if stage.num_stages > 1:
        print_lines("", stage.summary())
    with tempfile.TemporaryDirectory(prefix="longhaul-") as folder:
        write_sample_documents(Path(folder))
        reduced = reduce_run(stage.config, world_size, Path(folder))
        processes.preload_forkserver()
        return compare_with_reference(reduced, Path(folder), world_size)


def default_world_size(config: Config) -> int:
    meshes = [stage.config.parallelism for stage in config.training_stages]
    product = max(prod(mesh.degrees(1).values()) for mesh in meshes)
    return product if all(mesh.dp_shard is not None for mesh in meshes) else max(2, product)


def compare_with_reference(reduced: ReducedRun, folder: Path, world_size: int) -> int:
    """Runs the reference and every mesh case, prints the comparison, and returns the exit status."""
    start_time, failed = time.monotonic(), list[str]()
    print_lines(f"a run of {pluralize(world_size, 'process', 'es')}, reduced:", *reduced.description)
    reference = folder / "reference.pt"
    try:
        (expected,) = processes.run_ranks(reduced.reference, 1, folder / "reference", reference=reference)
    except RankFailedError as error:
        print_lines(f"one process: FAILED: {error}")
        return EXIT_FAILURE
    for number, case in enumerate(reduced.mesh_cases):
        try:
            ranks = processes.run_ranks(case.config, case.processes, folder / str(number), reference=reference)
        except RankFailedError as error:
            result, table = f"FAILED: {error}", list[str]()
        else:
            steps = worst_over_ranks(expected, ranks)
            result = "match" if within_tolerance(expected, steps) else "MISMATCH"
            table = comparison_table(expected, steps)
        failed += [case.name] * (result != "match")
        print_lines("", f"{case.name}: {result}", *(f"  {line}" for line in table))
    result = f"MISMATCH: {'; '.join(failed)}" if failed else "match"
    limits = f"losses and norms within {SCALAR_TOLERANCE:g}, gradients and weights within {TENSOR_TOLERANCE:g} of a tensor's largest value"
    print_lines("", f"{result} ({limits}; {time.monotonic() - start_time:.0f} s)")
    return EXIT_FAILURE if failed else EXIT_SUCCESS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
