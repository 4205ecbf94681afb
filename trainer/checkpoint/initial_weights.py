"""Initial weights of a run: another run's checkpoint or a Hugging Face model. Imports torch only to read tensors.

Loads weights only: optimizer, data position and step start from zero. A checkpoint of the run itself takes precedence.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig, RopeConfig
from models.hf import LM_HEAD, SafetensorsReader, TensorSpec, read_config, tensor_specs
from models.hf_config import HuggingFaceError, config_differences, model_config_from_hf
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.run_dir import ResumeError, RunDir, read_state
from trainer.config.job_config import Config
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("trainer")
HF_PREFIX = "hf:"


def is_hugging_face(initial: str) -> bool:
    return initial.startswith(HF_PREFIX)


def resolve_initial_path(initial: str) -> Path:
    """The Hugging Face folder or the checkpoint that `checkpoint.initial_load_path` names. Raises `ResumeError`."""
    if is_hugging_face(initial):
        return Path(initial.removeprefix(HF_PREFIX)).expanduser()
    return find_checkpoint(Path(initial).expanduser())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one of the run folder at `path`. Raises `ResumeError`."""
    if (path / manifest.MANIFEST_FILE).is_file() or (path / manifest.STATE_FILE).is_file():
        try:
            manifest.read_validated(path)
        except DamageError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from None
        return path
    newest = RunDir(path).latest_valid_checkpoint()
    if newest is None:
        raise ResumeError(f"{path} is neither a checkpoint nor a run folder with a checkpoint")
    return newest


def model_config_from_state(state: Mapping[str, Any]) -> ModelConfig:
    """The model configuration stored in a checkpoint. Raises `ResumeError`."""
    values: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in state["config"].items()
    }
    names = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope"}
    rope_names = {field.name for field in dataclasses.fields(RopeConfig)}
    model = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    rope: dict[str, Any] = {key.removeprefix("rope."): model.pop(key) for key in list(model) if key.startswith("rope.")}
    unknown = sorted((model.keys() - names) | {f"rope.{key}" for key in rope.keys() - rope_names})
    if unknown:
        raise ResumeError(f"state.json has unknown model fields: {', '.join(unknown)}")
    try:
        return ModelConfig(**model, rope=RopeConfig(**rope))
    except TypeError as error:
        raise ResumeError(f"state.json lacks model fields: {error}") from None


def validate_initial_weights(config: Config) -> None:
    """Raises `ConfigError` if a new run cannot load `checkpoint.initial_load_path`.

    Only logs differences in rotary embeddings: a context extension changes them on purpose.
    """
    initial = config.checkpoint.initial_load_path
    if initial is None or (config.checkpoint.enabled and RunDir(config.output_dir).committed_checkpoints()):
        return
    rope_differences = list[str]()
    try:
        problems, rope_differences = _compare_with_initial(initial, config.model.build())
    except HuggingFaceError as error:
        problems = error.problems
    except ResumeError as error:
        problems = [str(error)]
    if problems:
        raise ConfigError([f'checkpoint.initial_load_path = "{initial}": {problem}' for problem in problems])
    for line in rope_differences:
        log.info("checkpoint.initial_load_path: %s", line)


def _compare_with_initial(initial: str, model: ModelConfig) -> tuple[list[str], list[str]]:
    """(problems, rope differences) of the configured model against the initial weights."""
    folder = resolve_initial_path(initial)
    if is_hugging_face(initial) and not folder.is_dir():
        return [f"{folder} is not a folder (models are not downloaded)"], []
    initial_model = (
        model_config_from_hf(read_config(folder))
        if is_hugging_face(initial)
        else model_config_from_state(read_state(folder))
    )
    problems, rope_differences = list[str](), list[str]()
    for key, (initial_value, value) in config_differences(initial_model, model).items():
        lines = rope_differences if key == "nope_every" or key.startswith("rope.") else problems
        lines.append(f"model.{key} = {json.dumps(value)}, but the initial weights have {json.dumps(initial_value)}")
    if not problems and is_hugging_face(initial):
        problems = SafetensorsReader(folder).problems(initial_model)
    return problems, rope_differences


def load_hf_weights(folder: Path, model: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters, reading only its shards from safetensors. Raises `HuggingFaceError`."""
    import torch

    from parallelisms.collectives import to_local
    from parallelisms.init_weights import local_ranges

    weights, hf_entries = SafetensorsReader(folder), tensor_specs(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = weights.read(hf_entries[name], local_ranges(parameter))
            to_local(parameter).copy_(values)
            if model.tie_embeddings and name == "embed.weight" and weights.has_tensor(LM_HEAD):
                head = weights.read(TensorSpec(LM_HEAD, hf_entries[name].shape), local_ranges(parameter))
                if not torch.equal(head, values):
                    raise HuggingFaceError(
                        [f"{LM_HEAD} differs from model.embed_tokens.weight, but tie_word_embeddings is true"]
                    )
