"""Whether a new run can load its initial weights, before any worker starts. Imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.hf import HuggingFaceError, SafetensorsReader, read_config, text_model_values
from models.hf_config import config_remarks, model_config_from_hf
from models.hf_config_write import config_differences
from models.layers import LayerKind
from models.rope_config import RopeConfig
from trainer.checkpoint.initial_weights import (
    is_absent,
    is_hugging_face,
    is_text_only,
    resolve_initial_path,
)
from trainer.config.data import download_hint
from trainer.config.job_config import Config
from trainer.errors import ConfigError, ResumeError
from trainer.storage import manifest
from trainer.storage.run_dir import RunDir

log = logging.getLogger("trainer")


def model_config_from_values(values: Mapping[str, Any]) -> ModelConfig:
    """The model of a checkpoint's configuration, by dotted key. Raises `ResumeError`."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "model.rope": {}, "model.local_rope": {}}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section in sections:
            # JSON turned tuples into lists, which would differ from the configured model's tuples.
            sections[section][name] = tuple(value) if isinstance(value, list) else value
    try:
        pattern = tuple(LayerKind(**kind) for kind in sections["model"].pop("layers", ()))
        ropes: dict[str, Any] = {
            name: RopeConfig(**sections[f"model.{name}"]) for name in ("rope", "local_rope")
        }
        return ModelConfig(**sections["model"], layers=pattern, **ropes)
    except TypeError as error:
        raise ResumeError(f"state.json is not of this version's models: {error}") from None


def validate_initial_weights(config: Config) -> None:
    """Raises `ConfigError` if a new run cannot load `checkpoint.initial_load_path`.

    Only logs differences in rotary embeddings, which a context extension changes on purpose, and
    keys that are ignored.
    """
    initial = config.checkpoint.initial_load_path
    # A run with checkpoints resumes from them, and the initial weights may be gone by now.
    # Nor does a URL that is not downloaded, which only a launch does.
    if (
        initial is None
        or is_absent(initial, config.data.cache_dir)
        or (config.checkpoint.enabled and RunDir(config.output_dir).committed_checkpoints())
    ):
        return
    try:
        problems, remarks = _compare_with_initial(initial, config)
    except (HuggingFaceError, ResumeError) as error:
        problems = error.problems
        remarks = []
    if problems:
        raise ConfigError(
            [f'checkpoint.initial_load_path = "{initial}": {problem}' for problem in problems]
        )
    for line in remarks:
        log.info("checkpoint.initial_load_path: %s", line)


def _compare_with_initial(initial: str, config: Config) -> tuple[list[str], list[str]]:
    """(problems, remarks) of the configured model against the initial weights."""
    folder = resolve_initial_path(initial, config.data.cache_dir)
    is_hf = is_hugging_face(initial)
    if is_hf and not folder.is_dir():
        return [
            f"{folder} is not a folder (models are not downloaded{download_hint(str(folder))})"
        ], []
    text_only = is_text_only(initial)
    model = config.model.build()
    problems = list[str]()
    remarks = list[str]()
    if is_hf:
        ignore_keys = config.checkpoint.initial_ignore_keys
        values = text_model_values(read_config(folder), text_only=text_only)
        initial_model = model_config_from_hf(values, ignore_keys)
        remarks += config_remarks(values, ignore_keys)
    else:
        initial_model = model_config_from_values(manifest.read_state(folder).config)
    for key, (initial_value, value) in config_differences(initial_model, model).items():
        lines = remarks if key.startswith(("rope.", "local_rope.")) else problems
        lines.append(
            f"model.{key} = {json.dumps(value)}, but the initial weights have {json.dumps(initial_value)}"
        )
    # Tensors are compared last: with another model each would differ.
    if not problems and is_hf:
        problems = SafetensorsReader(folder, text_only=text_only).problems(initial_model)
    return problems, remarks
