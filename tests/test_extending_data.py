"""A package outside of the checkout that adds a format of files and a kind of tokenizer."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.test_extending import command

PACKAGE = """
import torch

from trainer.config.extension import Extension


def read_notes(file, key):
    for note in file.read().decode().split("%%\\n"):
        if note.startswith("broken"):
            raise ValueError("a broken note")
        if note.startswith("bug"):
            raise KeyError("no such note")
        yield f"{key}: {note}"


class Letters:
    vocab_size, bos, eos, stop_tokens, special_tokens = 28, None, 27, frozenset({27}), {}
    fingerprint = "letters"

    def encode(self, text):
        if "forbidden" in text:
            raise RuntimeError("a forbidden word")
        return torch.tensor([ord(each) - 96 if "a" <= each <= "z" else 0 for each in text.lower()], dtype=torch.uint8)

    def encode_blocks(self, blocks):
        return map(self.encode, blocks)

    def decode(self, ids):
        return "".join(chr(96 + each) if each else " " for each in ids)


def open_letters(stated):
    if stated.path is not None:
        raise LookupError("letters need no file")
    return Letters()


def extension():
    return Extension(name="notes", version="3", sources={".notes": read_notes}, tokenizers={"letters": open_letters})
"""
RUN = """
[job]
extension = "notes_package.parts:extension"
[model]
family = "llama3"
size = "debug"
[training]
seq_len = 64
global_batch_size = 2
steps = 2
dtype = "float32"
[parallelism]
cp = 2
[checkpoint]
interval = 2
[data]
corpus = "own"
text_key = "note"
[tokenizer]
kind = "letters"
"""
GIVEN = ("--job.extension", "notes_package.parts:extension")
PREPARE = ("trainer.data.prepare", "--config", "run.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes_package").mkdir()
    (tmp_path / "notes_package" / "__init__.py").touch()
    (tmp_path / "notes_package" / "parts.py").write_text(PACKAGE)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "own").mkdir()
    notes = "%%\n".join(
        f"the quick brown fox jumps over {number} lazy dogs\n" * 8 for number in range(50)
    )
    for number in range(3):
        (tmp_path / "own" / f"{number}.notes").write_text(notes)
    (tmp_path / "own" / "3.notes.gz").write_bytes(gzip.compress(notes.encode()))
    (tmp_path / "own" / "4.txt").write_text("plain text, as ever\n")
    return tmp_path


@pytest.mark.slow
def test_a_run_reads_its_files_with_its_tokenizer(folder: Path) -> None:
    done = command(folder, "trainer.launch", "--config", "run.toml", "--job.name", "run", ranks=2)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert (
        'texts that extension "notes" reads, each a document; the first begins "note: the quick'
        in said
    )
    assert "201 documents" in said
    sampled = command(
        folder, "trainer.generate", "outputs/run", "--prompt", "fox", "--tokens", "4", *GIVEN
    )
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("fox")


@pytest.mark.slow
def test_workers_of_a_preparation_have_the_extension(folder: Path) -> None:
    for path in (folder / "own").glob("*.notes"):
        path.write_text(
            path.read_text() * 400
            # A partition is at least 8 MB, so that workers have something to share.
        )
    fingerprints = []
    for workers in ("1", "2"):
        done = command(
            folder, *PREPARE, "--workers", workers, "--output", f"prepared by {workers}"
        )
        assert done.returncode == 0, done.stderr
        fingerprints.append(re.findall(r"fingerprint (\w+)", done.stdout))
    assert fingerprints[0] == fingerprints[1] != []


@pytest.mark.slow
def test_changed_code_of_a_reader_prepares_the_corpus_again(folder: Path) -> None:
    for change in (False, False, True):
        if change:
            (folder / "notes_package" / "parts.py").write_text(
                PACKAGE.replace("{key}: ", "{key} is ")
            )
        assert command(folder, *PREPARE).returncode == 0
        assert len([*(folder / "prepared").glob("own-*/meta.json")]) == 1 + change


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("broken", 0, 'extension "notes" 3: ValueError: a broken note ('),
        ("bug", 78, "error: 9.notes: extension \"notes\" 3: KeyError: 'no such note' ("),
        ("forbidden", 78, 'error: extension "notes" 3: RuntimeError: a forbidden word ('),
    ],
)
def test_an_error_names_the_extension(
    folder: Path, text: str, status: int, said: str, workers: str
) -> None:
    big = folder / "own" / "8.notes"
    big.write_text((folder / "own" / "0.notes").read_text() * 400)
    (folder / "own" / "9.notes").write_text(f"{text}\n")
    done = command(folder, *PREPARE, "--workers", workers)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "parts.py:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_opened_or_that_nobody_adds_is_an_error(folder: Path) -> None:
    wrong = command(folder, *PREPARE, "--tokenizer.path", "own/4.txt")
    assert wrong.returncode == 78
    assert (
        'tokenizer.kind = "letters": extension "notes" 3: LookupError: letters need no file ('
        in wrong.stderr
    )
    unknown = command(folder, *PREPARE, "--tokenizer.kind", "words")
    assert unknown.returncode == 2
    known = "byte, tiktoken, sentencepiece, huggingface, letters"
    assert f'tokenizer.kind = "words" is unknown; there are {known}' in unknown.stderr


@pytest.mark.slow
def test_its_version_is_part_of_a_run(folder: Path) -> None:
    words = ("trainer.launch", "--config", "run.toml", "--job.name", "run")
    assert command(folder, *words, ranks=2).returncode == 0
    state = json.loads(
        next((folder / "outputs/run/checkpoints").glob("step-2/state.json")).read_text()
    )
    assert '"extension.notes": "3"' in json.dumps(state)
