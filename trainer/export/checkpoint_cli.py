"""Shared CLI: parse arguments, resolve the checkpoint and its configuration, and load the weights onto a mesh."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import torch
from pydantic import ValidationError

from trainer.build import ParallelModel
from trainer.checkpoint.initial_weights import find_checkpoint
from trainer.checkpoint.load import MODEL_PREFIX
from trainer.checkpoint.load import load_tensors as load_tensors
from trainer.checkpoint.run_dir import ResumeError, RunDir, find_checkpoints, read_state
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import COMMAND_LINE, ConfigSource, deep_merge, load, parse_arguments
from trainer.config.training_stages import Recipe
from trainer.distributed import World, process_group, rank_from_environment
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


class CheckpointParser(ArgumentParser):
    """Parser of `CHECKPOINT [option]... [--section.key VALUE]...`. Raises `ConfigError` instead of exiting."""

    def __init__(self, module: str, description: str, *, overrides_help: str) -> None:
        super().__init__(
            prog=f"python -m {module}",
            usage="%(prog)s CHECKPOINT [option]... [--section.key VALUE]...",
            description=f"{description}\n\n--section.key overrides the run's config.toml. {overrides_help}",
            epilog="Exit status: 0 success, 2 wrong arguments, 78 unusable data or checkpoint, 1 other errors.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "checkpoint",
            type=Path,
            metavar="CHECKPOINT",
            help="run folder (its newest checkpoint), or one of its checkpoints/step-N",
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{COMMAND_LINE}: {message}"])

    def parse(self, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
        """The options, and the `--section.key` overrides. Raises `ConfigError`."""
        arguments, overrides, remaining = list[str](), list[str](), [*argv]
        while remaining:
            name, equals, _ = (argument := remaining.pop(0)).partition("=")
            is_override = name.startswith("--") and "." in name
            (overrides if is_override else arguments).append(argument)
            if is_override and not equals and remaining and not remaining[0].startswith("--"):
                overrides.append(remaining.pop(0))
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            matches = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unknown argument {unknown[0]}" + (f"; did you mean {matches[0]}?" if matches else ""))
        return options, overrides


def integer(*, minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) < 1 << 62:
            raise ArgumentTypeError(f"{text} must be an integer of at least {minimum}")
        return int(text)

    return parse


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint and the configuration to evaluate it under."""

    run_dir: RunDir
    checkpoint: Path
    step: int
    config: Config
    """Configuration of the stage that wrote the checkpoint, with the overrides."""
    run_config: Recipe
    """Configuration of the whole run, which defines its validation sets, with the overrides."""


def resolve_checkpoint(path: Path, overrides: Sequence[str] = ()) -> ResolvedCheckpoint:
    """The checkpoint at `path`, or the newest one of the run folder at `path`, and the configuration of its stage.

    Ignores the run's [parallelism], [memory] and [profiler]: only `overrides` set them. Raises `ConfigError` or
    `ResumeError`.
    """
    run_dir, checkpoints = find_checkpoints(path)
    if not run_dir.config_path.is_file():
        raise ConfigError([f"{path} is neither a run folder nor a checkpoint in one: {run_dir.config_path} is missing"])
    if not checkpoints:
        available = ", ".join(folder.name for _, folder in run_dir.committed_checkpoints()) or "no checkpoints"
        raise ConfigError([f"{path} is not a checkpoint; {run_dir.checkpoints_dir} contains {available}"])
    checkpoint = find_checkpoint(path)
    state = read_state(checkpoint)
    run_config = load(["--config", str(run_dir.config_path.resolve())])
    index, num_stages = state["stage"]["index"], len(run_config.training_stages)
    if index >= num_stages:
        raise ResumeError(f"{checkpoint} is from stage {index + 1}, but {run_dir.config_path} has {num_stages} stages")
    values = run_config.training_stages[index].config.model_dump(
        exclude_unset=True, exclude={"parallelism", "memory", "profiler"}
    )
    override_values = parse_overrides(overrides)
    run_config = Recipe.model_validate(deep_merge(run_config.model_dump(exclude_unset=True), override_values))
    return ResolvedCheckpoint(
        run_dir, checkpoint, state["step"], Config.model_validate(deep_merge(values, override_values)), run_config
    )


def resolve_for_evaluation(path: Path, overrides: Sequence[str]) -> ResolvedCheckpoint:
    """As `resolve_checkpoint`, and validates the configuration for the processes that were started."""
    resolved = resolve_checkpoint(path, overrides)
    _, world_size, _ = rank_from_environment()
    checks.require_valid(resolved.config, world_size)
    return resolved


def parse_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """The nested values that `--section.key VALUE` arguments set. Raises `ConfigError`."""
    arguments = parse_arguments(overrides)
    if arguments.problems:
        raise ConfigError(arguments.problems)
    source = ConfigSource(name=COMMAND_LINE, values=arguments.values, typed=False)
    try:
        return source.parse().model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError([source.format_error(details) for details in error.errors()]) from error


@contextmanager
def load_parallel_model(resolved: ResolvedCheckpoint) -> Iterator[tuple[ParallelModel, World]]:
    """The model with the checkpoint's weights, in a new process group. Raises `ConfigError` or `ResumeError`."""
    with process_group(resolved.config.distributed) as world:
        parallel_model = ParallelModel(resolved.config, world)
        load_weights(parallel_model, resolved)
        log.info("%s on %d x %s", resolved.checkpoint, world.size, world.device.type)
        yield parallel_model, world


def load_weights(parallel_model: ParallelModel, resolved: ResolvedCheckpoint) -> None:
    """Collective. Raises `ResumeError` unless the checkpoint's tensors match the model."""
    weights: dict[str, torch.Tensor] = {
        f"{MODEL_PREFIX}{name}": parameter.detach()
        for module in parallel_model.stage_modules.values()
        for name, parameter in module.named_parameters()
    }
    load_tensors(resolved.checkpoint, weights, parallel_model.mesh.pp_group, prefix=MODEL_PREFIX)


def run_command(argv: Sequence[str], parser: CheckpointParser, run: Callable[[Namespace, Sequence[str]], None]) -> int:
    """Parses `argv`, calls `run(options, overrides)`, and returns the exit status. Rank 0 prints help and errors."""
    rank, _, _ = rank_from_environment()
    log_setup.configure(rank)
    if {"-h", "--help"}.intersection(argv):
        if rank == 0:
            sys.stdout.write(parser.format_help())
        return EXIT_SUCCESS
    try:
        run(*parser.parse(argv))
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
