"""Fixtures: a corpus in a temporary folder, and its prepared documents."""

import os
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import context
from trainer.config.data import DataSection
from trainer.config.source import CorpusSpec
from trainer.data.prepare import prepare
from trainer.data.tokenizer import ByteTokenizer

Files = dict[str, str | bytes]


def write(folder: Path, files: Files) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power failure loses what was not synced."""
    monkeypatch.setattr(os, "fsync", int)


@pytest.fixture
def shared_server() -> None:
    """Starts the fork server of the other tests, unless it runs: a test may ask it for other
    imports.
    """
    assert context
    forkserver.ensure_running()


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., DataSection]:
    """`[data]` with a corpus of these files."""

    def make(files: Files, **options: object) -> DataSection:
        values = {
            "corpus": write(tmp_path / "corpus", files),
            "cache_dir": tmp_path / "cache",
            **options,
        }
        return DataSection.model_validate(values)

    return make


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., CorpusSpec]:
    """The spec of a corpus of these files."""

    def make(files: Files, **options: Any) -> CorpusSpec:
        return CorpusSpec(
            **{
                "corpus": write(tmp_path / "corpus", files),
                "cache_dir": tmp_path / "cache",
                **options,
            }
        )

    return make


@pytest.fixture
def documents() -> Callable[..., list[str]]:
    """The documents of a corpus, prepared with the byte tokenizer and decoded."""

    def read(source: CorpusSpec, **options: Any) -> list[str]:
        prepared = prepare(source, ByteTokenizer(), **options)
        texts = []
        for start, stop in pairwise(prepared.document_starts.tolist()):
            ids = prepared.read(start, stop).tolist()
            assert (ids[0], ids[-1]) == (ByteTokenizer.bos, ByteTokenizer.eos)
            texts.append(bytes(ids[1:-1]).decode())
        return texts

    return read
