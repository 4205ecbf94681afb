"""Initial weights of a run: another run's checkpoint or a Hugging Face model. Imports no torch.

Only weights are loaded: optimizer, data position and step start from zero. A checkpoint of the run
itself takes precedence.
"""

from __future__ import annotations

from pathlib import Path

from trainer.config.data import is_hub_name
from trainer.config.sections import is_remote
from trainer.storage import manifest
from trainer.storage.artifact import DamageError
from trainer.storage.lineage import local_copy
from trainer.storage.run_dir import ResumeError, RunDir
from trainer.storage.train_state import STATE_FILE

HF_PREFIX = "hf:"
HF_TEXT_PREFIX = "hf-text:"
"""The language model of a model of several modalities."""


def is_hugging_face(initial: str) -> bool:
    return initial.startswith((HF_PREFIX, HF_TEXT_PREFIX))


def is_text_only(initial: str) -> bool:
    return initial.startswith(HF_TEXT_PREFIX)


def initial_url(initial: str) -> str | None:
    """The URL that `checkpoint.initial_load_path` names; None for a local path."""
    place = initial.partition(":")[2] if is_hugging_face(initial) else initial
    return place if is_remote(place) else None


def is_absent(initial: str, cache: Path) -> bool:
    """Whether it is at a URL and was not downloaded to `cache`, which a launch does."""
    url = initial_url(initial)
    return url is not None and local_copy(url, cache) is None


def resolve_initial_path(initial: str, cache: Path) -> Path:
    """The Hugging Face folder or the checkpoint that `checkpoint.initial_load_path` names; of a
    URL, the copy in `cache`.

    Raises `ResumeError`.
    """
    url = initial_url(initial)
    if url is not None:
        folder = local_copy(url, cache)
        if folder is None:
            raise ResumeError(f"{initial} was not downloaded; the same command downloads it")
        return folder if is_hugging_face(initial) else find_checkpoint(folder)
    if is_hugging_face(initial):
        return Path(initial.partition(":")[2]).expanduser()
    if is_hub_name(initial):
        raise ResumeError(
            f'there is no such run or checkpoint; a model in Hugging Face\'s format is "{HF_PREFIX}{initial}"'
        )
    return find_checkpoint(Path(initial).expanduser())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one of the run folder at `path`.

    Raises `ResumeError`.
    """
    # A folder with either file is meant as a checkpoint, so a missing other one is damage.
    if (path / manifest.MANIFEST_FILE).is_file() or (path / STATE_FILE).is_file():
        try:
            manifest.read_validated(path)
        except DamageError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from None
        return path
    newest = RunDir(path).latest_valid_checkpoint()
    if newest is None:
        raise ResumeError(f"{path} is neither a checkpoint nor a run folder with a checkpoint")
    return newest
