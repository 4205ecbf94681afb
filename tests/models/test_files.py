"""What is no file is named at once, and not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from models.files import UnusableFileError, open_regular, read_beneath, read_regular
from models.hf import HuggingFaceError, read_config
from trainer.config.parse import load
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import MAX_PROBLEM_CHARS, ConfigError, DataError, RunError

NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(params=NO_FILES)
def no_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    NO_FILES[request.param](tmp_path / "config.json")
    return tmp_path / "config.json"


def test_only_regular_files_are_read(no_file: Path) -> None:
    for read in (open_regular, partial(read_regular, max_bytes=9)):
        with pytest.raises(UnusableFileError, match="it is not a regular file"):
            read(no_file)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, max_bytes=5) == b"12345"
    with pytest.raises(UnusableFileError, match="it has 5 bytes, more than 4"):
        read_regular(path, max_bytes=4)


@pytest.mark.parametrize("place", ["a/x", "x"])
def test_a_link_that_leads_out_of_a_folder_is_refused(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    outside = tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    (folder / "own").write_bytes(b"own")
    outside.write_bytes(b"secret")
    (folder / place).symlink_to(folder / "own")
    assert read_beneath(folder, place, max_bytes=9) == b"own"
    (folder / place).unlink()
    (folder / place).symlink_to(outside)
    with pytest.raises(
        UnusableFileError, match="it is a link that leads out of its folder; copy the file there"
    ):
        read_beneath(folder, place, max_bytes=9)
    (folder / "b").symlink_to(tmp_path)
    with pytest.raises(UnusableFileError, match="leads out of its folder"):
        read_beneath(folder, "b/outside", max_bytes=9)


@pytest.mark.parametrize(
    ("repository", "blob", "problem"),
    [
        ("models--a--b", "1" * 40, ""),
        ("models--a--b", "x", "leads out"),
        ("elsewhere", "1" * 40, "leads out"),
    ],
)
def test_links_of_the_hub_lead_to_its_blobs(
    repository: str, blob: str, problem: str, tmp_path: Path
) -> None:
    snapshot = tmp_path / repository / "snapshots/1"
    blobs = tmp_path / repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / blob).write_bytes(b"12345")
    (snapshot / "config.json").symlink_to(f"../../blobs/{blob}")
    with pytest.raises(UnusableFileError, match=problem) if problem else nullcontext():
        assert read_beneath(snapshot, "config.json", max_bytes=5) == b"12345"
    with pytest.raises(UnusableFileError):
        read_beneath(snapshot, "config.json", max_bytes=4)


def test_readers_name_what_is_no_file(no_file: Path) -> None:
    with pytest.raises(
        HuggingFaceError,
        match=r"config.json cannot be read: it is (not a regular file|a link that leads out)",
    ):
        read_config(no_file.parent)
    with pytest.raises(ConfigError, match=r"--config needs a TOML file, not"):
        load(["--config", str(no_file)])
    with pytest.raises(DataError, match="cannot be read: it is not a regular file"):
        load_tokenizer("tiktoken", no_file)


def test_a_problem_that_quotes_something_long_is_cut_in_its_middle() -> None:
    error = RunError(f'model.x = "{"a" * 10**6}" is wrong')
    assert len(str(error)) < MAX_PROBLEM_CHARS + 100
    assert str(error).startswith('model.x = "aaa')
    assert str(error).endswith('aaa" is wrong')
    assert "[... 996,021 characters ...]" in str(error)
