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

from trainer.build import ParallelModel
from trainer.checkpoint.initial_weights import find_checkpoint
from trainer.checkpoint.load import MODEL_PREFIX
from trainer.checkpoint.load import load_tensors as load_tensors
from trainer.checkpoint.run_dir import ResumeError, RunDir, read_state
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import COMMAND_LINE, ConfigSource, deep_merge, load, parse_arguments
from trainer.config.training_stages import Recipe
from trainer.distributed import World, process_group, process_rank
from trainer.errors import (
    EXIT_BAD_CONFIG,
    EXIT_FAILURE,
    EXIT_NO_RETRY,
    EXIT_SUCCESS,
    ConfigError,
    DataError,
    RankFailedError,
    RunFailedError,
)
from trainer.metrics import log_setup

log = logging.getLogger("trainer")


@dataclass(frozen=True)
class CheckpointArgs:
    """A command line taken apart: CHECKPOINT, the command's own options, and the configuration's."""

    checkpoint: str
    options: Mapping[str, str]
    overrides: list[str]


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint, the run it is of, and the configuration that its weights are judged under."""

    run_dir: RunDir
    checkpoint: Path
    step: int
    config: Config
    run_config: Recipe
    """The run's, of all stages, which its validation sets are of."""


def parse_args(argv: Sequence[str], option_names: Sequence[str]) -> CheckpointArgs:
    """Raises `ConfigError` for an option that is none of these and none of the configuration's."""
    parsed, overrides, positionals, problems, remaining = (
        dict[str, str](),
        list[str](),
        list[str](),
        list[str](),
        [*argv],
    )
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            positionals.append(argument)
            continue
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                problems.append(f"{name} needs a value")
                continue
            value = remaining.pop(0)
        if "." in name:
            overrides.append(f"{name}={value}")
        elif name in option_names:
            parsed[name] = value
        else:
            suggestions = get_close_matches(name, option_names, n=1)
            hint = (
                f"did you mean {suggestions[0]}?"
                if suggestions
                else f"there are {', '.join(option_names)} and --section.key"
            )
            problems.append(f"there is no option {name}; {hint}")
    if len(positionals) != 1:
        count_text = f"{len(positionals)} are given: {' '.join(positionals)}" if positionals else "none is given"
        problems.append(f"one CHECKPOINT is needed, a run folder or its checkpoints/step-N; {count_text}")
    if problems:
        raise ConfigError([f"{COMMAND_LINE}: {problem}" for problem in problems])
    return CheckpointArgs(positionals[0], parsed, overrides)


def parse_int_list(args: CheckpointArgs, option: str, default: Sequence[int], *, minimum: int) -> list[int]:
    """The value of an option that is a list of integers. Raises `ConfigError` unless each is at least that."""
    if (text := args.options.get(option)) is None:
        return [*default]
    items = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= minimum for word in items):
        raise ConfigError([f"{COMMAND_LINE}: {option} {text} must be integers such as 1,2, each at least {minimum}"])
    return [int(word) for word in items]


def resolve_checkpoint(args: CheckpointArgs) -> ResolvedCheckpoint:
    """The newest checkpoint of a run folder, or the one that is named, and the configuration of its stage.

    The mesh and what is kept in memory are as the command line says, not as the run had them: others judge than train.
    Raises `ConfigError` or `ResumeError`.
    """
    path = Path(args.checkpoint)
    run_dir = RunDir(path.parents[1] if path.parent.name == "checkpoints" else path)
    if not run_dir.config_path.is_file():
        raise ConfigError([f"{path} is no run folder and no checkpoint of one: there is no {run_dir.config_path}"])
    committed = run_dir.committed_checkpoints()
    matches = [(step, one) for step, one in committed if run_dir.path == path or one.name == path.name]
    if not matches:
        available = ", ".join(one.name for _, one in committed) or "nothing"
        raise ConfigError([f"{path} is no checkpoint; {run_dir.checkpoints_dir} holds {available}"])
    checkpoint = find_checkpoint(path if run_dir.path == path else matches[-1][1])
    state = read_state(checkpoint)
    run_config = load(["--config", str(run_dir.config_path.resolve())])
    index = state["stage"]["index"]
    if index >= len(run_config.training_stages):
        raise ResumeError(
            f"{checkpoint} is of stage {index + 1}, but {run_dir.config_path} has {len(run_config.training_stages)}"
        )
    values = run_config.training_stages[index].config.model_dump(
        exclude_unset=True, exclude={"parallelism", "memory", "profiler"}
    )
    override_values = parse_overrides(args)
    run_config = Recipe.model_validate(deep_merge(run_config.model_dump(exclude_unset=True), override_values))
    return ResolvedCheckpoint(
        run_dir, checkpoint, state["step"], Config.model_validate(deep_merge(values, override_values)), run_config
    )


def resolve_for_evaluation(args: CheckpointArgs) -> ResolvedCheckpoint:
    """The same, if its rows can be read and its mesh is that of the processes which were started."""
    resolved = resolve_checkpoint(args)
    _, world_size, _ = process_rank()
    checks.require_valid(resolved.config, world_size)
    return resolved


def parse_overrides(args: CheckpointArgs) -> dict[str, object]:
    """What the command line sets. Raises `ConfigError`."""
    arguments = parse_arguments(args.overrides)
    if arguments.problems:
        raise ConfigError(arguments.problems)
    source = ConfigSource(name=COMMAND_LINE, values=arguments.values, typed=False)
    try:
        return source.parse().model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError([source.format_error(details) for details in error.errors()]) from error


@contextmanager
def load_parallel_model(resolved: ResolvedCheckpoint) -> Iterator[tuple[ParallelModel, World]]:
    """The weights on the mesh of the processes that were started. Raises `ConfigError` or `ResumeError`."""
    with process_group(resolved.config.distributed) as world:
        parallel_model = ParallelModel(resolved.config, world)
        load_weights(parallel_model, resolved)
        log.info("%s on %d x %s", resolved.checkpoint, world.size, world.device.type)
        yield parallel_model, world


def load_weights(parallel_model: ParallelModel, resolved: ResolvedCheckpoint) -> None:
    """Collective. Raises `ResumeError` unless the checkpoint holds this model."""
    stage_modules = parallel_model.stage_modules.values()
    weights: dict[str, torch.Tensor] = {
        f"{MODEL_PREFIX}{name}": parameter.detach()
        for part in stage_modules
        for name, parameter in part.named_parameters()
    }
    load_tensors(resolved.checkpoint, weights, parallel_model.mesh.pp_group, prefix=MODEL_PREFIX)


def run_command(argv: Sequence[str], usage: str, run: Callable[[Sequence[str]], None]) -> int:
    """Runs a command and returns the exit status; what is wrong is told on standard error, by one rank."""
    rank, _, _ = process_rank()
    log_setup.configure(rank)
    if {"-h", "--help"}.intersection(argv):
        if rank == 0:
            sys.stdout.write(usage)
        return EXIT_SUCCESS
    try:
        run(argv)
        return EXIT_SUCCESS
    except ConfigError as error:
        status, problems = EXIT_BAD_CONFIG, error.problems
    except (DataError, ResumeError) as error:
        status, problems = EXIT_NO_RETRY, [str(error)]
    except RunFailedError as error:
        status, problems = EXIT_FAILURE, [str(error)]
    except RankFailedError as error:
        sys.stderr.write(f"error: [rank {rank}] {error}\n")
        return error.status
    except KeyboardInterrupt:
        status, problems = EXIT_FAILURE, ["interrupted"]
    if rank == 0:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status
