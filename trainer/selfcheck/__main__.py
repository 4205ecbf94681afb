"""`longhaul selfcheck`: checks that a run on its mesh computes the same as in one process.

The run is reduced (`shrink.py`) and trained on this machine's CPU, whatever its target cluster; or
random configurations are (`random_configs.py`). Exits with 0 if results match, 1 if they differ or
a run fails, 2 if the configuration is wrong. Imports no torch.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from math import prod
from pathlib import Path

from trainer.command_table import typed
from trainer.commands import (
    CommandParser,
    integer,
    number,
    overrides_help,
    print_lines,
    run_command,
)
from trainer.config import checks
from trainer.config.job_config import Config, TrainingStage
from trainer.config.parse import load
from trainer.errors import (
    EXIT_BAD_CONFIG,
    EXIT_FAILURE,
    EXIT_SUCCESS,
    ConfigError,
    RankFailedError,
)
from trainer.launch.cluster import LaunchWorld, count_gpus, pluralize
from trainer.launch.launcher import format_problems
from trainer.selfcheck.comparison import (
    SCALAR_TOLERANCE,
    TENSOR_TOLERANCE,
    comparison_table,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.processes import RankPool
from trainer.selfcheck.random_check import RandomCheck
from trainer.selfcheck.random_configs import draw_cases, parse_case, problems, world_size
from trainer.selfcheck.shrink import MAX_PROCESSES, ReducedRun, reduce_run, write_sample_documents

DESCRIPTION = """\
Reduces the run and trains a few steps in float64 on this machine's CPU, on its mesh (each dimension
reduced to two ranks) and in one process, and compares losses, weights and moments. Corpus and
tokenizer may be missing. --random checks random legal configurations instead: what they have in
common with the run is the code. Exits with 0 if results match, 1 if not."""
WORLD_SIZE_HELP = """\
world size of the run; default: the product of the degrees in the configuration, and at least 2 if it leaves out
dp_shard"""
MAX_PROCESSES_HELP = f"processes of a random configuration; default: {MAX_PROCESSES}"
DEVICE_HELP = """\
cpu (default), or cuda: processes share the GPUs, over gloo and host memory, where they are more than those"""


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("selfcheck"), DESCRIPTION, run=run, overrides=overrides_help())
    parser.add_config()
    parser.add_argument("--world-size", metavar="N", type=integer(minimum=1), help=WORLD_SIZE_HELP)
    parser.add_argument(
        "--random", metavar="N", type=integer(minimum=1), help="check N random configurations"
    )
    parser.add_argument(
        "--seed", metavar="N", type=integer(minimum=0), help="seed of --random; default: a new one"
    )
    parser.add_argument(
        "--minutes", metavar="M", type=number(positive=True), help="time limit of --random"
    )
    parser.add_argument(
        "--case", metavar="SETTINGS", help="check one configuration that --random printed"
    )
    parser.add_argument(
        "--max-processes", metavar="N", type=integer(minimum=1), help=MAX_PROCESSES_HELP
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=DEVICE_HELP)
    return parser


def run(options: Namespace, overrides: Sequence[str]) -> int:
    unused = [
        name for name in ("seed", "minutes", "max_processes") if getattr(options, name) is not None
    ]
    if unused and options.random is None:
        raise ConfigError(
            [
                f"command line: --{name.replace('_', '-')} is only used with --random"
                for name in unused
            ]
        )
    if options.device == "cuda" and not count_gpus():
        raise ConfigError(["command line: --device cuda: this machine has no GPU"])
    if options.random or options.case is not None:
        return check_random(options, overrides)
    world = None
    try:
        config = load(overrides)
        world = LaunchWorld(nproc_per_node=options.world_size or default_world_size(config))
        if found := checks.stage_problems(config):
            raise ConfigError(found)
        return max(
            [
                check_stage(stage, world.world_size, options.device)
                for stage in config.training_stages
            ]
        )
    except ConfigError as error:
        sys.stderr.write(format_problems(error.problems, overrides, world))
        return EXIT_BAD_CONFIG


def check_random(options: Namespace, overrides: Sequence[str]) -> int:
    """Checks random configurations, or the one of --case."""
    if overrides or options.world_size or (options.random and options.case is not None):
        given = f": {' '.join(overrides)}" if overrides else ""
        raise ConfigError(
            [
                f"command line: give --random or --case, and no configuration, override or --world-size{given}"
            ]
        )
    max_processes = options.max_processes or MAX_PROCESSES
    if max_processes > MAX_PROCESSES:
        raise ConfigError(
            [f"command line: --max-processes {max_processes} is above {MAX_PROCESSES}"]
        )
    case = None if options.case is None else parse_case(options.case)
    if found := problems(case) if case is not None else []:
        raise ConfigError(found)
    if case is not None and world_size(case) > MAX_PROCESSES:
        raise ConfigError([f"--case: {world_size(case)} processes are more than {MAX_PROCESSES}"])
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    cases = draw_cases(seed, max_processes=max_processes) if case is None else [case]
    # Documents and the pool are shared by all cases: preparing a corpus and importing torch take
    # most of the time.
    with (
        tempfile.TemporaryDirectory(prefix="longhaul-") as folder,
        RankPool(device_type=options.device) as pool,
    ):
        write_sample_documents(Path(folder))
        device = " --device cuda" if options.device == "cuda" else ""
        check = RandomCheck(pool, Path(folder), options=device)
        total = options.random or 1
        if case is None:
            size = f"{pluralize(total, 'random configuration')} of up to {pluralize(max_processes, 'process', 'es')}"
            print_lines(f"{size}, seed {seed}")
        check.run(cases, total=total, max_seconds=options.minutes and 60 * options.minutes)
        print_lines(*check.summary())
    return EXIT_FAILURE if check.failed else EXIT_SUCCESS


def check_stage(stage: TrainingStage, world_size: int, device_type: str) -> int:
    if stage.num_stages > 1:
        print_lines("", stage.summary())
    with (
        tempfile.TemporaryDirectory(prefix="longhaul-") as folder,
        RankPool(device_type=device_type) as pool,
    ):
        write_sample_documents(Path(folder))
        return compare_with_reference(
            reduce_run(stage.config, world_size, Path(folder)), Path(folder), world_size, pool
        )


def default_world_size(config: Config) -> int:
    meshes = [stage.config.parallelism for stage in config.training_stages]
    product = max(prod(mesh.degrees(1).values()) for mesh in meshes)
    # A dp_shard that is left out takes all remaining ranks: two show that it shards.
    return product if all(mesh.dp_shard is not None for mesh in meshes) else max(2, product)


def compare_with_reference(
    reduced: ReducedRun, folder: Path, world_size: int, pool: RankPool
) -> int:
    """Runs the reference and every mesh case, prints the comparison, and returns the exit
    status.
    """
    start_time = time.monotonic()
    failed = list[str]()
    print_lines(
        f"a run of {pluralize(world_size, 'process', 'es')}, reduced:", *reduced.description
    )
    try:
        (expected,) = pool.run(reduced.reference, reference=folder / "tensors")
    except RankFailedError as error:
        print_lines(f"one process: FAILED: {error}")
        return EXIT_FAILURE
    for case in reduced.mesh_cases:
        try:
            ranks = pool.run(case.launch, reference=folder / "tensors")
        except RankFailedError as error:
            result = f"FAILED: {error}"
            table = list[str]()
        else:
            steps = worst_over_ranks(expected, ranks)
            result = "match" if within_tolerance(expected, steps) else "MISMATCH"
            table = comparison_table(expected, steps)
        if result != "match":
            failed.append(case.name)
        print_lines("", f"{case.name}: {result}", *(f"  {line}" for line in table))
    result = f"MISMATCH: {'; '.join(failed)}" if failed else "match"
    limits = f"losses and norms within {SCALAR_TOLERANCE:g}, weights and moments within {TENSOR_TOLERANCE:g} of a tensor's largest value"
    print_lines("", f"{result} ({limits}; {time.monotonic() - start_time:.0f} s)")
    return EXIT_FAILURE if failed else EXIT_SUCCESS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
