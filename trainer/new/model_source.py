"""The model that a new run starts from: a folder of Hugging Face files, which may lie in the cache
of downloads, or a preset. Imports no torch but for a model's tokenizer.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from models.files import MAX_CONFIG_BYTES, read_regular
from models.hf import CONFIG_FILE, HuggingFaceError
from models.presets import FAMILIES
from trainer.checkpoint.initial_weights import HF_PREFIX
from trainer.commands import text_or_url
from trainer.config.data import TokenizerSection, is_hub_name, tokenizer_folder
from trainer.config.job_config import BYTE_VOCAB_SIZE
from trainer.config.parse import parse_toml
from trainer.config.sections import is_remote
from trainer.errors import ConfigError, DataError
from trainer.hf import read_model
from trainer.metrics.loggers import log_plainly
from trainer.storage.remote_models import fetch_tokenizer

MODEL_HELP = f"a folder of Hugging Face files or its URL, {HF_PREFIX}OWNER/NAME that was downloaded, or a preset as llama3/8b"
TOKENIZER_HELP = "a model's folder, a tokenizer.model, the URL of either, or byte"
PRESET = re.compile(r"([^/\s]+)[/\s]([^/\s]+)")


@dataclass(frozen=True)
class ModelSource:
    """A model, and the sections of a configuration that starts from it."""

    description: str
    values: dict[str, Any]
    max_positions: int | None = None
    """The length that its weights were trained for; None: no weights, or unknown."""
    remarks: Sequence[str] = field(default=())

    @property
    def has_weights(self) -> bool:
        return "checkpoint" in self.values


def open_model(
    name: str,
    environment: Mapping[str, str],
    *,
    text_only: bool = False,
    ignore_keys: Sequence[str] = (),
) -> ModelSource:
    """The model of that name. Raises `ConfigError`."""
    place = name.removeprefix(HF_PREFIX)
    if is_remote(place):
        log_plainly()
        return _from_folder(
            url_option("--model", place), text_only=text_only, ignore_keys=ignore_keys
        )
    path = Path(place).expanduser()
    if name.startswith(HF_PREFIX) and not path.is_dir():
        path = downloaded_folder(name.removeprefix(HF_PREFIX), environment)
    if path.is_dir():
        return _from_folder(path, text_only=text_only, ignore_keys=ignore_keys)
    if given := [
        option
        for option, value in (("--text-only", text_only), ("--ignore-key", ignore_keys))
        if value
    ]:
        raise ConfigError(
            [f'{option} is only used with a folder, not "{name}"' for option in given]
        )
    return _from_preset(name)


def _from_folder(
    folder: Path | str, *, text_only: bool, ignore_keys: Sequence[str]
) -> ModelSource:
    try:
        imported = read_model(folder, text_only=text_only, ignore_keys=ignore_keys)
    except (HuggingFaceError, DataError) as error:
        # No run exists that a retry could continue: a mistake in arguments.
        raise ConfigError(error.problems) from error
    positions = imported.max_positions
    return ModelSource(
        f"{folder}, {imported.model.parameter_summary}",
        parse_toml(imported.toml, str(folder)),
        positions if isinstance(positions, int) else None,
        imported.remarks,
    )


def _from_preset(name: str) -> ModelSource:
    match = PRESET.fullmatch(name)
    if match is None or match[1] not in FAMILIES:
        family = match[1] if match else name
        known = ", ".join(FAMILIES)
        hub = f'a model of the Hub is "{HF_PREFIX}{name}"; ' if is_hub_name(name) else ""
        raise ConfigError(
            [
                f'--model "{name}" is neither a folder with {CONFIG_FILE} nor a preset FAMILY/SIZE; '
                f"{hub}{_nearest(family, FAMILIES)}families: {known}"
            ]
        )
    family, size = match.groups()
    presets = FAMILIES[family]
    if size not in presets:
        others = [f"{each}/{size}" for each, sizes in FAMILIES.items() if size in sizes]
        close = get_close_matches(name, others, n=1)
        raise ConfigError(
            [
                f'--model "{name}": family {family} has no size {size}; '
                f"{''.join(f'did you mean {each}? ' for each in close) or _nearest(size, presets)}sizes: {', '.join(presets)}"
            ]
        )
    model = presets[size]
    values: dict[str, Any] = {"model": {"family": family, "size": size}}
    # Only the debug presets have no other tokenizer than bytes.
    if model.vocab_size == BYTE_VOCAB_SIZE:
        values["tokenizer"] = {"kind": "byte"}
    return ModelSource(f"{family} {size}, {model.parameter_summary}, random weights", values)


def _nearest(given: str, known: Sequence[str] | Mapping[str, object]) -> str:
    matches = get_close_matches(given, known, n=1)
    return f"did you mean {matches[0]}? " if matches else ""


def downloaded_folder(name: str, environment: Mapping[str, str]) -> Path:
    """The folder in which `hf download` keeps the newest revision of a model.

    Raises `ConfigError`.
    """
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{name.replace('/', '--')}"
    revision = "main"
    with suppress(OSError, UnicodeDecodeError):
        revision = (
            read_regular(model / "refs" / "main", max_bytes=MAX_CONFIG_BYTES).decode().strip()
        )
    folder = model / "snapshots" / revision
    # A revision is the name of one folder, whatever the file says.
    if folder.parent != model / "snapshots" or not folder.is_dir():
        raise ConfigError(
            [
                f"--model {HF_PREFIX}{name} is neither a folder nor in {cache}: models are not downloaded "
                f"here; run hf download {name}"
            ]
        )
    return folder


def url_option(option: str, url: str) -> str:
    """A URL that an option names. Raises `ConfigError` for one that breaks a rule."""
    try:
        return text_or_url(url)
    except ArgumentTypeError as error:
        raise ConfigError([f"{option}: {error}"]) from None


def open_tokenizer_section(name: str) -> dict[str, str]:
    """The keys of [tokenizer] for a folder, a file or `byte`. Raises `ConfigError`."""
    from trainer.data.hf_tokenizer import detect_tokenizer, kind_of_file

    if name == TokenizerSection().kind:
        return {"kind": name}
    is_url = is_remote(name)
    local = fetch_tokenizer(url_option("--tokenizer", name)) if is_url else Path(name).expanduser()
    path = tokenizer_folder(local)
    if path.is_dir():
        kind, found = detect_tokenizer(path) or (None, None)
    else:
        kind = kind_of_file(path) if path.is_file() else None
        found = path
    if kind is None:
        raise ConfigError(
            [f'--tokenizer "{name}" must be {TOKENIZER_HELP}: nothing there can be read as one']
        )
    if found is None:
        return {"kind": kind}
    return {"kind": kind, "path": name if is_url else str(found)}
