"""`python -m trainer.selfcheck`: whether a run computes on its mesh what one process computes.

The run is made small (`shrink.py`) and carried out on this machine's CPU, whatever cluster it is meant for. Leaves with
0 if all is the same, 1 if something differs or fails, 2 when the configuration is wrong. Nothing here imports torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

from trainer.config.docs import help_text
from trainer.config.job_config import Config, Stage
from trainer.config.parse import load
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, ConfigError, RankError
from trainer.launch.cluster import Cluster, count
from trainer.launch.launcher import complaint
from trainer.selfcheck import processes
from trainer.selfcheck.comparison import NUMBERS, TENSORS, farthest, same, table
from trainer.selfcheck.shrink import Shrunk, shrink, write_documents

USAGE = """\
python -m trainer.selfcheck [--config NAME|PATH] [--world-size N] [--section.key VALUE]... [--help]

Makes the run small, carries out a few updates in float64 on this machine's CPU, on its mesh with two
ranks for many and in one process, and compares losses, gradients and weights. Corpus and tokenizer
need not be there. Leaves with 0 if all is the same, 1 if not, 2 when the configuration is wrong.

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --world-size N      processes of the run; default: the product of the degrees that the
                      configuration states, and at least 2 where it leaves out dp_shard
  --help              this text

Every key below can stand in the file, under its [section], and on the command line, where it counts
more. Of a repeated option the last one counts. Lists are written 0.9,0.95; null takes a value back.
"""
OPTION = "--world-size"


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        say(help_text(USAGE))
        return DONE
    argv, asked = split(words)
    cluster = None
    try:
        if asked is not None and not (asked.isdecimal() and int(asked) > 0):
            raise ConfigError([f"command line: {OPTION} {asked} must be an integer, at least 1"])
        config = load(argv)
        cluster = Cluster(processes=int(asked) if asked else default_processes(config))
        if problems := config.stage_problems():
            raise ConfigError(problems)
        statuses = [check_stage(stage, cluster.world_size) for stage in config.stages]
        return FAILED if any(statuses) else DONE
    except ConfigError as error:
        sys.stderr.write(complaint(error.problems, argv, cluster))
        return BAD_CONFIGURATION


def check_stage(stage: Stage, world_size: int) -> int:
    if stage.count > 1:
        say("", stage.summary())
    with tempfile.TemporaryDirectory(prefix="longhaul-") as folder:
        write_documents(Path(folder))
        small = shrink(stage.config, world_size, Path(folder))
        processes.preload()
        return check(small, Path(folder), world_size)


def split(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The command line without --world-size, and the last value given for that."""
    rest, asked, given = list[str](), None, iter(words)
    for word in given:
        option, equals, value = word.partition("=")
        if option == OPTION:
            asked = value if equals else next(given, "")
        else:
            rest.append(word)
    return rest, asked


def default_processes(config: Config) -> int:
    meshes = [stage.config.parallelism for stage in config.stages]
    stated = max(prod(mesh.degrees(1).values()) for mesh in meshes)
    return stated if all(mesh.dp_shard is not None for mesh in meshes) else max(2, stated)


def check(small: Shrunk, folder: Path, world_size: int) -> int:
    """Carries out the reference and every pairing, tells how they compare, and returns the exit status."""
    began, wrong = time.monotonic(), list[str]()
    say(f"a run of {count(world_size, 'process', 'es')}, made small:", *small.told)
    reference = folder / "reference.pt"
    try:
        (alone,) = processes.run(small.reference, 1, folder / "alone", reference=reference)
    except RankError as error:
        say(f"one process: FAILED: {error}")
        return FAILED
    for number, pairing in enumerate(small.pairings):
        try:
            ranks = processes.run(pairing.config, pairing.processes, folder / str(number), reference=reference)
        except RankError as error:
            say("", f"{pairing.name}: FAILED: {error}")
            wrong.append(pairing.name)
            continue
        mesh = farthest(alone, ranks)
        wrong += [] if same(alone, mesh) else [pairing.name]
        said = "DIFFERENT" if pairing.name in wrong else "the same"
        say("", f"{pairing.name}: {said}", *(f"  {line}" for line in table(alone, mesh)))
    limits = f"numbers within {NUMBERS:g}, gradients and weights within {TENSORS:g} of a tensor's largest value"
    result = f"NOT the same: {'; '.join(wrong)}" if wrong else "the same"
    say("", f"{result} ({limits}; {time.monotonic() - began:.0f} s)")
    return FAILED if wrong else DONE


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(FAILED)
