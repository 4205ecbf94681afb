"""Facts about a tokenizer from the files of its Hugging Face folder, read as transformers reads
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_beneath
from trainer.config.data import TOKENIZER_FILE, tokenizer_folder
from trainer.data.tokenizer_file_types import HUGGING_FACE, detect_file_type
from trainer.errors import DataError

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
OPTIONAL_FILES = (CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, GENERATION_FILE, MODEL_FILE)
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Files = Mapping[str, bytes]
"""Contents by name.

A tokenizer is built from these alone, so that it can be sent to other processes.
"""


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """The files by name. Raises DataError if tokenizer.json cannot be read or is not JSON."""
    folder = tokenizer_folder(path)
    try:
        files = {
            TOKENIZER_FILE: read_beneath(folder, TOKENIZER_FILE, max_bytes=MAX_TOKENIZER_BYTES)
        }
        present = (name for name in OPTIONAL_FILES if os.path.lexists(folder / name))
        files |= {name: read_beneath(folder, name, max_bytes=MAX_CONFIG_BYTES) for name in present}
    except OSError as error:
        raise DataError(
            f'tokenizer.path = "{path}": {error.filename} cannot be read: {error.strerror}'
        ) from error
    if (detected := detect_file_type(files[TOKENIZER_FILE])) != HUGGING_FACE:
        raise DataError(f'tokenizer.path = "{path}": {TOKENIZER_FILE} looks like {detected}')
    return files


def read_object(files: Files, name: str) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file. Raises DataError."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{name} must hold an object, not a {type(content).__name__}")
    return content


def named_special_tokens(files: Files) -> dict[str, str]:
    """Special tokens by role, such as `eos_token`. tokenizer_config.json decides if it also lists
    the added tokens.
    """
    config = read_object(files, CONFIG_FILE)
    special_map = read_object(files, SPECIAL_TOKENS_FILE)
    # The later source wins for a role that both have.
    sources = (special_map, config) if "added_tokens_decoder" in config else (config, special_map)
    return {
        role: content
        for source in sources
        for role, token in source.items()
        if role.endswith("_token") and (content := token_content(token))
    }


def extra_special_tokens(files: Files) -> list[str]:
    """Special tokens without a role."""
    names: list[str] = []
    for name in (CONFIG_FILE, SPECIAL_TOKENS_FILE):
        content = read_object(files, name)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = content.get(key) or []
            names += map(token_content, listed.values() if isinstance(listed, dict) else listed)
    return [*filter(None, dict.fromkeys(names))]


def token_content(token: object) -> str:
    """A token is its text or an object with it; "" for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def configured_added_tokens(files: Files) -> dict[int, dict[str, Any]]:
    """Fields of the added tokens that other files than tokenizer.json list, in the order of ids.

    Raises DataError.
    """
    listed = read_object(files, CONFIG_FILE).get("added_tokens_decoder")
    if listed is None:
        listed = {
            token_id: {"content": name, "special": False, "normalized": True}
            for name, token_id in read_object(files, ADDED_TOKENS_FILE).items()
        }
    try:
        tokens = {int(token_id): token for token_id, token in listed.items()}
        return {token_id: added_token_fields(token) for token_id, token in sorted(tokens.items())}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{CONFIG_FILE} or {ADDED_TOKENS_FILE}: unreadable added tokens: {error!r}"
        ) from error


def added_token_fields(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": str(token["content"])} | {
        key: bool(token[key]) for key in ADDED_TOKEN_FLAGS if key in token
    }


def end_token_ids(files: Files) -> list[int]:
    """Every id in `eos_token_id` of generation_config.json, else of config.json."""
    for name in (GENERATION_FILE, MODEL_FILE):
        listed = read_object(files, name).get("eos_token_id")
        ids = [
            item
            for item in (listed if isinstance(listed, list) else [listed])
            if type(item) is int
        ]
        if ids:
            return ids
    return []
