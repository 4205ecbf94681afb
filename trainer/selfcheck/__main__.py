"""`python -m trainer.selfcheck`: checks that a run on its mesh computes the same as in one process.

The run is reduced (`shrink.py`) and trained on this machine's CPU, whatever its target cluster. Exits with 0 if results
match, 1 if they differ or a run fails, 2 if the configuration is wrong. Imports no torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

from trainer.config import checks
from trainer.config.help_text import render_help
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

USAGE = """\
python -m trainer.selfcheck [--config NAME|PATH] [--world-size N] [--section.key VALUE]... [--help]

Reduces the run and trains a few steps in float64 on this machine's CPU, on its mesh (each dimension
reduced to two ranks) and in one process, and compares losses, gradients and weights. Corpus and
tokenizer may be missing. Exits with 0 if results match, 1 if not, 2 if the configuration is wrong.

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --world-size N      world size of the run; default: the product of the degrees in the
                      configuration, and at least 2 if it leaves out dp_shard
  --help              this text

Every key below can be set in the file, under its [section], and on the command line, which takes
precedence. The last of repeated options wins. Lists are written 0.9,0.95; null unsets a value.
"""
WORLD_SIZE_OPTION = "--world-size"


def main(args: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(args):
        print_lines(render_help(USAGE))
        return EXIT_SUCCESS
    argv, world_size = split_world_size(args)
    cluster = None
    try:
        if world_size is not None and not (world_size.isdecimal() and int(world_size) > 0):
            raise ConfigError([f"command line: {WORLD_SIZE_OPTION} {world_size} must be an integer, at least 1"])
        config = load(argv)
        cluster = LaunchWorld(nproc_per_node=int(world_size) if world_size else default_world_size(config))
        if problems := checks.stage_problems(config):
            raise ConfigError(problems)
        statuses = [check_stage(stage, cluster.world_size) for stage in config.training_stages]
        return EXIT_FAILURE if any(statuses) else EXIT_SUCCESS
    except ConfigError as error:
        sys.stderr.write(format_problems(error.problems, argv, cluster))
        return EXIT_BAD_CONFIG


def check_stage(stage: TrainingStage, world_size: int) -> int:
    if stage.num_stages > 1:
        print_lines("", stage.summary())
    with tempfile.TemporaryDirectory(prefix="longhaul-") as folder:
        write_sample_documents(Path(folder))
        reduced = reduce_run(stage.config, world_size, Path(folder))
        processes.preload_forkserver()
        return compare_with_reference(reduced, Path(folder), world_size)


def split_world_size(args: Sequence[str]) -> tuple[list[str], str | None]:
    """Splits off --world-size; returns the other arguments and its last value."""
    run_args, world_size, remaining_args = list[str](), None, iter(args)
    for arg in remaining_args:
        option, equals, value = arg.partition("=")
        if option == WORLD_SIZE_OPTION:
            world_size = value if equals else next(remaining_args, "")
        else:
            run_args.append(arg)
    return run_args, world_size


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
        (reference_steps,) = processes.run_ranks(reduced.reference, 1, folder / "reference", reference=reference)
    except RankFailedError as error:
        print_lines(f"one process: FAILED: {error}")
        return EXIT_FAILURE
    for number, mesh_case in enumerate(reduced.mesh_cases):
        try:
            ranks = processes.run_ranks(
                mesh_case.config, mesh_case.processes, folder / str(number), reference=reference
            )
        except RankFailedError as error:
            print_lines("", f"{mesh_case.name}: FAILED: {error}")
            failed.append(mesh_case.name)
            continue
        mesh_steps = worst_over_ranks(reference_steps, ranks)
        failed += [] if within_tolerance(reference_steps, mesh_steps) else [mesh_case.name]
        result_text = "MISMATCH" if mesh_case.name in failed else "match"
        print_lines(
            "",
            f"{mesh_case.name}: {result_text}",
            *(f"  {line}" for line in comparison_table(reference_steps, mesh_steps)),
        )
    limits = f"losses and norms within {SCALAR_TOLERANCE:g}, gradients and weights within {TENSOR_TOLERANCE:g} of a tensor's largest value"
    result = f"MISMATCH: {'; '.join(failed)}" if failed else "match"
    print_lines("", f"{result} ({limits}; {time.monotonic() - start_time:.0f} s)")
    return EXIT_FAILURE if failed else EXIT_SUCCESS


def print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(EXIT_FAILURE)
