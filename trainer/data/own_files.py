"""Files and folders that the project itself writes, which no corpus around them should read.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from models.files import MAX_SEALED_BYTES
from trainer.config.training_stages import Recipe
from trainer.storage.artifact import DamageError, read_regular

META_FILENAME = "meta.json"
"""The last file that is written into a prepared folder."""
RECORDS_FOLDER = "pieces"
"""Folder in an unfinished preparation that holds a record for each finished partition."""
RUN_FOLDERS = {"checkpoints", "logs"}
"""The first entries that a launch creates in its run folder."""
MODEL_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
}
A_MODEL = "a model's folder"
TABLE_NAME = re.compile(rb"^\[+([A-Za-z_-]+)", re.MULTILINE)


def is_token_dataset(folder: Path) -> bool:
    """Whether a folder holds prepared tokens, damaged or not, rather than text."""
    try:
        return b'"shards"' in read_regular(folder / META_FILENAME, max_bytes=MAX_SEALED_BYTES)
    except (OSError, DamageError):
        return False


def describe_own_folder(folder: Path, folders: Collection[str], files: Collection[str]) -> str:
    """The kind of the project's own folders that this is; "" if it is none.

    `folders` and `files` are the names in it.
    """
    if META_FILENAME in files and is_token_dataset(folder):
        return "a prepared folder"
    if ".tmp" in folder.name and RECORDS_FOLDER in folders:
        return "an unfinished preparation"
    if RUN_FOLDERS.issubset(folders):
        return "a run folder"
    if not MODEL_FILES.isdisjoint(files):
        return A_MODEL
    return ""


def is_configuration(content: bytes) -> bool:
    """Whether a TOML file has the sections of a run, and no others."""
    names = {name.decode() for name in TABLE_NAME.findall(content)}
    return bool(names) and names.issubset(Recipe.model_fields)
