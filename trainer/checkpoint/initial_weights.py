"""Weights to begin from: another run's checkpoint, or a model in Hugging Face's format. Imports torch only to read them.

Only weights are taken: the optimizer, the data and the count of updates begin anew. The run's own checkpoints come first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig, RopeConfig
from models.hf import HEAD, Entry, Weights, entries, read_config
from models.hf_config import HuggingFaceError, differences, read_model
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.run_dir import ResumeError, RunFolder, read_state
from trainer.config.job_config import Config
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("trainer")
HUGGING_FACE = "hf:"


def is_hugging_face(initial: str) -> bool:
    return initial.startswith(HUGGING_FACE)


def folder_of(initial: str) -> Path:
    """The folder that `checkpoint.initial` names: of a model, or of the checkpoint itself. Raises `ResumeError`."""
    if is_hugging_face(initial):
        return Path(initial.removeprefix(HUGGING_FACE)).expanduser()
    return checkpoint_of(Path(initial).expanduser())


def checkpoint_of(path: Path) -> Path:
    """The checkpoint at `path`, or the newest of the run folder there, by its manifest. Raises `ResumeError`."""
    if (path / manifest.NAME).is_file() or (path / manifest.STATE).is_file():
        try:
            manifest.sound(path)
        except DamageError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from None
        return path
    newest = RunFolder(path).newest_sound()
    if newest is None:
        raise ResumeError(f"{path} is neither a checkpoint nor a run folder with one")
    return newest


def require_hashes(checkpoint: Path) -> None:
    """Reads all files of a checkpoint in this process. Raises `ResumeError` unless they are as they were written."""
    try:
        about = manifest.sound(checkpoint)
        if found := manifest.damage(checkpoint, about, about.files):
            raise DamageError("; ".join(found))
    except DamageError as error:
        raise ResumeError(f"{checkpoint} cannot be read: {error}") from None


def model_of(state: Mapping[str, Any]) -> ModelConfig:
    """The model of a checkpoint, by its state. Raises `ResumeError`."""
    values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in state["config"].items()}
    names = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope"}
    rope_names = {field.name for field in dataclasses.fields(RopeConfig)}
    model = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    rope: dict[str, Any] = {key.removeprefix("rope."): model.pop(key) for key in list(model) if key.startswith("rope.")}
    unknown = sorted((model.keys() - names) | {f"rope.{key}" for key in rope.keys() - rope_names})
    if unknown:
        raise ResumeError(f"its model has {', '.join(unknown)}, which this version does not know")
    try:
        return ModelConfig(**model, rope=RopeConfig(**rope))
    except TypeError as error:  # A field is missing.
        raise ResumeError(f"its state.json does not describe a model: {error}") from None


def require_initial(config: Config) -> None:
    """Raises `ConfigError` with everything that keeps a run from beginning with `checkpoint.initial`, if it has to.

    That positions are turned otherwise than in what it begins with may be on purpose, and is logged.
    """
    initial = config.checkpoint.initial
    if initial is None or (config.checkpoint.enabled and RunFolder(config.output_dir).committed()):
        return
    turned = list[str]()
    try:
        found, turned = _examine(initial, config.model.build())
    except HuggingFaceError as error:
        found = error.problems
    except ResumeError as error:
        found = [str(error)]
    if found:
        raise ConfigError([f'checkpoint.initial = "{initial}": {problem}' for problem in found])
    for line in turned:
        log.info("checkpoint.initial: %s", line)


def _examine(initial: str, ours: ModelConfig) -> tuple[list[str], list[str]]:
    """What keeps the model from beginning so, and how it turns positions otherwise, in words."""
    folder = folder_of(initial)
    if is_hugging_face(initial) and not folder.is_dir():
        return [f"{folder} is not a folder, and nothing is downloaded"], []
    theirs = read_model(read_config(folder)) if is_hugging_face(initial) else model_of(read_state(folder))
    found, turned = list[str](), list[str]()
    for key, (there, here) in differences(theirs, ours).items():
        lines = turned if key == "nope_every" or key.startswith("rope.") else found
        lines.append(f"model.{key} = {json.dumps(here)} is {json.dumps(there)} there")
    if not found and is_hugging_face(initial):
        found = Weights(folder).problems(theirs)
    return found, turned


def load_hugging_face(folder: Path, model: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills the parameters of this rank, of which each reads its own rows and columns. Raises `HuggingFaceError`."""
    import torch

    from parallelisms.collectives import local
    from parallelisms.init_weights import held

    weights, known = Weights(folder), entries(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = weights.read(known[name], held(parameter))
            local(parameter).copy_(values)
            if model.tie_embeddings and name == "embed.weight" and weights.has(HEAD):
                head = weights.read(Entry(HEAD, known[name].shape), held(parameter))
                if not torch.equal(head, values):
                    raise HuggingFaceError([f"{HEAD} is not model.embed_tokens.weight, though the config ties them"])
