"""Whether a new run can load its initial weights, before any worker starts. Imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.hf import HuggingFaceError, SafetensorsReader
from models.hf_config import read_model
from models.hf_config_write import config_differences
from models.layers import LayerKind
from models.rope_config import RopeConfig
from trainer.checkpoint import manifest
from trainer.checkpoint.initial_weights import is_hugging_face, is_text_only, resolve_initial_path
from trainer.checkpoint.run_dir import RunDir
from trainer.config.job_config import Config
from trainer.errors import ConfigError, ResumeError

log = logging.getLogger("trainer")


def model_config_from_values(values: Mapping[str, Any]) -> ModelConfig:
    """The model of a checkpoint's configuration, by dotted key. Raises `ResumeError`."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "model.rope": {}, "model.local_rope": {}}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = tuple(value) if isinstance(value, list) else value
    try:
        pattern = tuple(LayerKind(**kind) for kind in sections["model"].pop("layers", ()))
        ropes: dict[str, Any] = {name: RopeConfig(**sections[f"model.{name}"]) for name in ("rope", "local_rope")}
        return ModelConfig(**sections["model"], layers=pattern, **ropes)
    except TypeError as error:
        raise ResumeError(f"state.json is not of this version's models: {error}") from None


def validate_initial_weights(config: Config) -> None:
    """Raises `ConfigError` if a new run cannot load `checkpoint.initial_load_path`.

    Only logs differences in rotary embeddings: a context extension changes them on purpose.
    """
    initial = config.checkpoint.initial_load_path
    if initial is None or (config.checkpoint.enabled and RunDir(config.output_dir).committed_checkpoints()):
        return
    try:
        problems, rope_differences = _compare_with_initial(initial, config.model.build())
    except (HuggingFaceError, ResumeError) as error:
        problems, rope_differences = error.problems, []
    if problems:
        raise ConfigError([f'checkpoint.initial_load_path = "{initial}": {problem}' for problem in problems])
    for line in rope_differences:
        log.info("checkpoint.initial_load_path: %s", line)


def _compare_with_initial(initial: str, model: ModelConfig) -> tuple[list[str], list[str]]:
    """(problems, rope differences) of the configured model against the initial weights."""
    folder, is_hf = resolve_initial_path(initial), is_hugging_face(initial)
    if is_hf and not folder.is_dir():
        return [f"{folder} is not a folder (models are not downloaded)"], []
    text_only = is_text_only(initial)
    initial_model = (
        read_model(folder, text_only=text_only)
        if is_hf
        else model_config_from_values(manifest.read_state(folder).config)
    )
    problems, rope_differences = list[str](), list[str]()
    for key, (initial_value, value) in config_differences(initial_model, model).items():
        lines = rope_differences if key.startswith(("rope.", "local_rope.")) else problems
        lines.append(f"model.{key} = {json.dumps(value)}, but the initial weights have {json.dumps(initial_value)}")
    if not problems and is_hf:
        problems = SafetensorsReader(folder, text_only=text_only).problems(initial_model)
    return problems, rope_differences
