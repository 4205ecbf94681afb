"""Commands on a checkpoint: find it and its configuration, and load its weights, in one process or
on a mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint.initial_weights import find_checkpoint
from trainer.checkpoint.load import (
    MODEL_PREFIX,
    CheckpointReader,
    load_tensors,
    require_matching_tensors,
)
from trainer.config import checks, extension
from trainer.config.job_config import Config
from trainer.config.parse import (
    COMMAND_LINE,
    ConfigSource,
    deep_merge,
    load,
    merge_sources,
    parse_arguments,
)
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.step.build import ParallelModel
from trainer.step.process_group import World, process_group, rank_from_environment
from trainer.storage import manifest
from trainer.storage.run_dir import ResumeError, RunDir, find_checkpoints

log = logging.getLogger("trainer")


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint and the configuration to evaluate it under."""

    run_dir: RunDir
    checkpoint: Path
    step: int
    config: Config
    """Configuration of the stage that wrote the checkpoint, with the overrides."""
    run_config: Config
    """Configuration of the whole run, which defines its validation sets, with the overrides."""


def resolve_checkpoint(path: Path, overrides: Sequence[str] = ()) -> ResolvedCheckpoint:
    """The checkpoint at `path`, or the newest one of the run folder at `path`, and the
    configuration of its stage.

    Ignores the run's [parallelism], [memory] and [profiler]: only `overrides` set them. Raises
    `ConfigError` or `ResumeError`.
    """
    run_dir, checkpoints = find_checkpoints(path)
    if not run_dir.config_path.is_file():
        raise ConfigError(
            [
                f"{path} is neither a run folder nor a checkpoint in one: {run_dir.config_path} is missing"
            ]
        )
    if not checkpoints:
        available = (
            ", ".join(folder.name for _, folder in run_dir.committed_checkpoints())
            or "no checkpoints"
        )
        raise ConfigError(
            [f"{path} is not a checkpoint; {run_dir.checkpoints_dir} contains {available}"]
        )
    checkpoint = find_checkpoint(path)
    state = manifest.read_state(checkpoint)
    # The run folder may come from a stranger: extensions that it names are only imported if the
    # command line names them, too.
    run_config = load(["--config", str(run_dir.config_path.resolve())], imports_extensions=False)
    index = state.stage.index
    num_stages = len(run_config.training_stages)
    if index >= num_stages:
        raise ResumeError(
            f"{checkpoint} is from stage {index + 1}, but {run_dir.config_path} has {num_stages} stages"
        )
    values = run_config.training_stages[index].config.model_dump(
        exclude_unset=True, exclude={"parallelism", "memory", "profiler"}
    )
    arguments = parse_arguments(overrides)
    command_line = ConfigSource(name=COMMAND_LINE, values=arguments.values, typed=False)
    override_values = merge_sources([command_line], arguments.problems)
    given = override_values.get("job", {}).get("extension", ())
    if problems := extension.recorded_problem(
        run_config.job.extension, given, run_dir.config_path
    ):
        raise ConfigError(problems)
    extension.install(given)
    run_config = Recipe.model_validate(
        deep_merge(run_config.model_dump(exclude_unset=True), override_values)
    )
    return ResolvedCheckpoint(
        run_dir,
        checkpoint,
        state.step,
        Config.model_validate(deep_merge(values, override_values)),
        run_config,
    )


def resolve_for_evaluation(path: Path, overrides: Sequence[str]) -> ResolvedCheckpoint:
    """Resolves a checkpoint as `resolve_checkpoint` does, and validates its configuration for the
    processes that were started.
    """
    resolved = resolve_checkpoint(path, overrides)
    _, world_size, _ = rank_from_environment()
    checks.require_valid(resolved.config, world_size)
    return resolved


@contextmanager
def load_parallel_model(resolved: ResolvedCheckpoint) -> Iterator[tuple[ParallelModel, World]]:
    """The model with the checkpoint's weights, in a new process group.

    Raises `ConfigError` or `ResumeError`.
    """
    with process_group(resolved.config.distributed) as world:
        parallel_model = ParallelModel(resolved.config, world)
        load_weights(resolved.checkpoint, parallel_model)
        log.info("%s on %d x %s", resolved.checkpoint, world.size, world.device.type)
        yield parallel_model, world


def load_weights(checkpoint: Path, parallel_model: ParallelModel) -> None:
    """Fills this rank's parts of the model. Collective. Raises `ResumeError`."""
    weights: dict[str, torch.Tensor] = {
        f"{MODEL_PREFIX}{name}": each
        for module in parallel_model.stage_modules.values()
        for name, each in module.named_tensors().items()
    }
    load_tensors(checkpoint, weights, parallel_model.mesh.pp_group, prefix=MODEL_PREFIX)


def open_model(
    checkpoint: Path, shapes: Mapping[str, Sequence[int]], *, max_shown: int = 10
) -> CheckpointReader:
    """A reader in one process.

    Raises `ResumeError` unless the model in the checkpoint has exactly these parameters.
    """
    reader = CheckpointReader(checkpoint)
    saved = {
        name: (*entry.size,)
        for name, entry in reader.tensor_metadata.items()
        if name.startswith(MODEL_PREFIX)
    }
    expected = {f"{MODEL_PREFIX}{name}": (*shape,) for name, shape in shapes.items()}
    require_matching_tensors(checkpoint, saved, expected, max_shown=max_shown)
    return reader
