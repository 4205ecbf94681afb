"""What commands on a checkpoint begin with: a command line, the configuration, and the weights on a mesh."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from pydantic import ValidationError

from trainer.build import Placed
from trainer.checkpoint.initial_weights import checkpoint_of
from trainer.checkpoint.load import WEIGHTS
from trainer.checkpoint.load import load as load_tensors
from trainer.checkpoint.run_dir import ResumeError, RunFolder, read_state
from trainer.config.job_config import Config
from trainer.config.parse import COMMAND_LINE, Source, load, overlay, split
from trainer.config.training_stages import Recipe
from trainer.data import DataError
from trainer.distributed import World, here, process_group
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, ConfigError, RankError, RunError
from trainer.metrics import log_setup

log = logging.getLogger("trainer")


@dataclass(frozen=True)
class Asked:
    """A command line taken apart: CHECKPOINT, the command's own options, and the configuration's."""

    checkpoint: str
    options: Mapping[str, str]
    overrides: list[str]


@dataclass(frozen=True)
class Found:
    """A checkpoint, the run it is of, and the configuration that its weights are judged under."""

    folder: RunFolder
    checkpoint: Path
    step: int
    config: Config
    whole: Recipe
    """The run's, of all stages, which its validation sets are of."""


def take(words: Sequence[str], options: Sequence[str]) -> Asked:
    """Raises `ConfigError` for an option that is none of these and none of the configuration's."""
    given, overrides, places, problems, rest = dict[str, str](), list[str](), list[str](), list[str](), [*words]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            places.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                problems.append(f"{name} needs a value")
                continue
            value = rest.pop(0)
        if "." in name:
            overrides.append(f"{name}={value}")
        elif name in options:
            given[name] = value
        else:
            near = get_close_matches(name, options, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(options)} and --section.key"
            problems.append(f"there is no option {name}; {meant}")
    if len(places) != 1:
        said = f"{len(places)} are given: {' '.join(places)}" if places else "none is given"
        problems.append(f"one CHECKPOINT is needed, a run folder or its checkpoints/step-N; {said}")
    if problems:
        raise ConfigError([f"{COMMAND_LINE}: {problem}" for problem in problems])
    return Asked(places[0], given, overrides)


def integers(asked: Asked, option: str, default: Sequence[int], *, least: int) -> list[int]:
    """The value of an option that is a list of integers. Raises `ConfigError` unless each is at least that."""
    if (text := asked.options.get(option)) is None:
        return [*default]
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        raise ConfigError([f"{COMMAND_LINE}: {option} {text} must be integers such as 1,2, each at least {least}"])
    return [int(word) for word in words]


def find(asked: Asked) -> Found:
    """The newest checkpoint of a run folder, or the one that is named, and the configuration of its stage.

    The mesh and what is kept in memory are as the command line says, not as the run had them: others judge than train.
    Raises `ConfigError` or `ResumeError`.
    """
    path = Path(asked.checkpoint)
    folder = RunFolder(path.parents[1] if path.parent.name == "checkpoints" else path)
    if not folder.config.is_file():
        raise ConfigError([f"{path} is no run folder and no checkpoint of one: there is no {folder.config}"])
    committed = folder.committed()
    wanted = [(step, one) for step, one in committed if folder.path == path or one.name == path.name]
    if not wanted:
        there = ", ".join(one.name for _, one in committed) or "nothing"
        raise ConfigError([f"{path} is no checkpoint; {folder.checkpoints} holds {there}"])
    checkpoint = checkpoint_of(path if folder.path == path else wanted[-1][1])
    state = read_state(checkpoint)
    whole = load(["--config", str(folder.config.resolve())])
    index = state["stage"]["index"]
    if index >= len(whole.stages):
        raise ResumeError(f"{checkpoint} is of stage {index + 1}, but {folder.config} has {len(whole.stages)}")
    values = whole.stages[index].config.model_dump(exclude_unset=True, exclude={"parallelism", "memory", "profiler"})
    over = overrides(asked)
    whole = Recipe.model_validate(overlay(whole.model_dump(exclude_unset=True), over))
    return Found(folder, checkpoint, state["step"], Config.model_validate(overlay(values, over)), whole)


def find_to_judge(asked: Asked) -> Found:
    """The same, if its rows can be read and its mesh is that of the processes which were started."""
    found = find(asked)
    _, world_size, _ = here()
    found.config.require(world_size)
    return found


def overrides(asked: Asked) -> dict[str, object]:
    """What the command line sets. Raises `ConfigError`."""
    arguments = split(asked.overrides)
    if arguments.problems:
        raise ConfigError(arguments.problems)
    source = Source(name=COMMAND_LINE, values=arguments.values, typed=False)
    try:
        return source.check().model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError([source.explain(details) for details in error.errors()]) from error


@contextmanager
def opened(found: Found) -> Iterator[tuple[Placed, World]]:
    """The weights on the mesh of the processes that were started. Raises `ConfigError` or `ResumeError`."""
    with process_group(found.config.distributed) as world:
        placed = Placed(found.config, world)
        load_weights(placed, found)
        log.info("%s on %d x %s", found.checkpoint, world.size, world.device.type)
        yield placed, world


def load_weights(placed: Placed, found: Found) -> None:
    """Collective. Raises `ResumeError` unless the checkpoint holds this model."""
    parts = placed.parts.values()
    weights: dict[str, torch.Tensor] = {
        f"{WEIGHTS}{name}": parameter.detach() for part in parts for name, parameter in part.named_parameters()
    }
    load_tensors(found.checkpoint, weights, placed.mesh.pp, prefix=WEIGHTS)


def command(words: Sequence[str], usage: str, run: Callable[[Sequence[str]], None]) -> int:
    """Runs a command and returns the exit status; what is wrong is told on standard error, by one rank."""
    rank, _, _ = here()
    log_setup.configure(rank)
    if {"-h", "--help"}.intersection(words):
        if rank == 0:
            sys.stdout.write(usage)
        return DONE
    try:
        run(words)
        return DONE
    except ConfigError as error:
        status, problems = BAD_CONFIGURATION, error.problems
    except (DataError, ResumeError) as error:
        status, problems = NO_RETRY, [str(error)]
    except RunError as error:
        status, problems = FAILED, [str(error)]
    except RankError as error:
        sys.stderr.write(f"error: [rank {rank}] {error}\n")
        return error.status
    except KeyboardInterrupt:
        status, problems = FAILED, ["interrupted"]
    if rank == 0:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status
