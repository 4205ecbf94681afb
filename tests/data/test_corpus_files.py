"""What a corpus holds is read as what it is, refused by name, or left out with a line."""

import gzip
import json
import logging
import os
import runpy
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.artifacts import forge
from tests.data.test_formats import parquet, zstandard
from trainer.config import checks
from trainer.config.parse import load
from trainer.config.source import CorpusSpec
from trainer.data import corpus_files, formats
from trainer.data.corpus import Corpus
from trainer.data.corpus_files import corpus_problems, glob_regex
from trainer.data.prepare import cache_key, prepare
from trainer.data.prepare.__main__ import main
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import CorpusRefusedError, DataError
from trainer.launch.launcher import load_and_validate

Make = Callable[..., CorpusSpec]
Documents = Callable[[CorpusSpec], list[str]]
Prepare = Callable[..., tuple[int, str, str]]
LINES = "".join(
    json.dumps({"id": n, "text": f"text {n}", "meta": {"a": [n]}}) + "\n" for n in range(3)
)
TEXTS = ["text 0", "text 1", "text 2"]
CARD = "---\ndataset_info:\n  features:\n  - name: text\n---\n# A dataset\n"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
CONFIG = '[model]\nfamily = "llama3"\n[data]\ncorpus = "."\n[[data.mix]]\nsource = "corpus"\n'


def refusals(spec: CorpusSpec) -> list[str]:
    """What `--check` says, and preparing too."""
    problems = corpus_problems(spec)
    if problems:
        with pytest.raises(CorpusRefusedError) as error:
            prepare(spec, ByteTokenizer())
        assert error.value.problems == problems
    return problems


@pytest.fixture
def command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Prepare:
    """`longhaul prepare` in the folder that holds the corpus; returns exit code, stdout and stderr
    with the log.
    """
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def run(*arguments: str) -> tuple[int, str, str]:
        caplog.clear()
        status = main(arguments)
        out = capsys.readouterr()
        return status, out.out, out.err + caplog.text

    return run


# ---- JSON


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.JSONL",
        "a.json",
        "a.ndjson",
        "a.json.gz",
        "a.jsonl.gz",
        "a.JSON.GZ",
        "a.jsonl.zst",
    ],
)
def test_json_lines_are_read_as_lines_by_any_name(
    name: str, source: Make, documents: Documents
) -> None:
    content = LINES.encode()
    if name.lower().endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".zst"):
        content = zstandard(content)
    assert documents(source({name: content})) == TEXTS


def test_one_record_without_a_line_break_is_a_line(source: Make, documents: Documents) -> None:
    assert documents(source({"a.json": '{"text": "alone"}', "b.json": ""})) == ["alone"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps([{"text": "a"}, {"text": "b"}])),
        ("a.json", json.dumps([{"text": "a"}], indent=1)),
        ("a.json", json.dumps({"text": "a"}, indent=1)),
        ("a.json", "// a comment\n{}"),
        ("a.jsonl", json.dumps([{"text": "a"}])),
        ("a.json.gz", gzip.compress(json.dumps([{"text": "a"}]).encode(), mtime=0)),
    ],
)
def test_json_without_lines_is_refused_unless_it_is_stated(
    name: str, content: str | bytes, source: Make, documents: Documents
) -> None:
    spec = source({name: content, "b.txt": "B"})
    [problem] = refusals(spec)
    assert problem.startswith(
        f'data.corpus = "{spec.corpus}": {name}: JSON, but no record on each line; convert '
    )
    text = gzip.decompress(content) if isinstance(content, bytes) else content.encode()
    assert documents(replace(spec, files=("*",))) == [text.decode(), "B"]


@pytest.mark.parametrize("name", ["wiki_00", "a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("files", [None, ("*",)])
@pytest.mark.parametrize("first", ["", json.dumps({"id": 1, "text": "long " * 40_000}) + "\n"])
def test_text_that_is_lines_of_records_is_read_as_lines(
    name: str, files: tuple[str, ...] | None, first: str, source: Make, documents: Documents
) -> None:
    content = (first + LINES).encode()
    if name.endswith((".gz", ".zst")):
        content = gzip.compress(content) if name.endswith(".gz") else zstandard(content)
    expected = ["long " * 40_000, *TEXTS] if first else TEXTS
    assert documents(replace(source({name: content, "z.txt": "Z"}), files=files)) == [
        *expected,
        "Z",
    ]


def test_the_report_says_which_texts_are_lines(source: Make, command: Prepare) -> None:
    source({"a.txt": "A", "b.txt": LINES})
    _, _, log = command("--corpus", "corpus")
    assert (
        'corpus: .txt: 1 file, 144 bytes, JSON lines, each a document, from their key "text"'
        in log
    )
    assert "corpus: .txt: 1 file, 1 bytes, text, 1 document" in log


NO_KEY = '{"content": "x", "id": 1}\n' * 3


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "notebook.ipynb"])
@pytest.mark.parametrize(
    "content",
    [
        NO_KEY,
        f"{LINES}no record\n",
        json.dumps([{"text": "a"}]),
        json.dumps({"cells": []}, indent=1),
    ],
)
def test_text_that_looks_like_json_is_refused_unless_it_is_stated(
    name: str, content: str, source: Make, documents: Documents
) -> None:
    spec = source(
        {name: gzip.compress(content.encode()) if name.endswith(".gz") else content, "b.txt": "B"}
    )
    [problem] = refusals(spec)
    assert f": {name}: looks like JSON, not text;" in problem or (
        content == NO_KEY and "content, id" in problem
    )
    assert 'to read it as text, state it in data.files ("**/*" states all)' in problem
    assert refusals(replace(spec, bad_files="error")) == [problem]
    assert sorted(documents(replace(spec, files=("*",)))) == sorted([content, "B"])


@pytest.mark.parametrize(
    "content",
    [
        "[1] A note.\n",
        "[Chapter 1]\n",
        "{curly} text\n",
        "{}\nbody {}\n",
        "[a, b]\n",
        "{% raw %}\n",
    ],
)
def test_text_with_brackets_is_text(content: str, source: Make, documents: Documents) -> None:
    assert documents(source({"a.txt": content})) == [content]


def test_json_lines_without_the_key_are_refused_with_their_keys(
    source: Make, documents: Documents
) -> None:
    spec = source({"a.json.gz": gzip.compress(NO_KEY.encode()), "b.txt": "B"})
    [problem] = refusals(spec)
    assert problem.endswith(
        ': a.json.gz: no JSON record with the key "text" in the first lines; keys: content, id; set data.text_key'
    )
    assert refusals(replace(spec, files=("*",))) == [problem]
    assert documents(replace(spec, text_key="content")) == ["x", "x", "x", "B"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ""])
def test_the_key_is_required_of_each_file(suffix: str, source: Make) -> None:
    contents = [LINES.encode(), NO_KEY.encode()]
    if suffix.endswith(".gz"):
        contents = [*map(gzip.compress, contents)]
    [problem] = refusals(source({f"a{suffix}": contents[0], f"b{suffix}": contents[1]}))
    assert f': b{suffix}: no JSON record with the key "text"' in problem


def test_a_table_without_the_column_is_refused_with_its_columns(
    source: Make, documents: Documents
) -> None:
    spec = source(
        {
            "a.parquet": parquet({"text": ["A"]}),
            "b.parquet": parquet({"content": ["B"], "id": [1]}),
        }
    )
    [problem] = refusals(spec)
    assert problem.endswith(
        ': b.parquet: no column "text"; columns: content, id; set data.text_key'
    )
    Path(spec.corpus, "a.parquet").unlink()
    assert documents(replace(spec, text_key="content")) == ["B"]


def test_a_checkout_of_code_is_read_once_it_is_stated(source: Make, documents: Documents) -> None:
    texts = {
        "a.ipynb": '{\n "cells": []\n}\n',
        "b.md": "# B\n",
        "package.json": '{"name": "p", "scripts": {}}',
        "tsconfig.json": '{\n "a": 1\n}\n',
    }
    spec = source(dict(texts))
    problems = refusals(spec)
    assert len(problems) == 3
    assert all(
        'to read it as text, state it in data.files ("**/*" states all)' in each
        for each in problems
    )
    assert documents(replace(spec, files=("**/*",))) == [*texts.values()]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("b.txt", '{"cells": [\n', "looks like JSON"),
        ("b.txt", NO_KEY, "no JSON record"),
        ("a.jsonl", NO_KEY, "no JSON record"),
    ],
)
def test_a_file_behind_the_sample_is_refused_before_a_token_is_written(
    name: str,
    content: str,
    what: str,
    source: Make,
    command: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus_files, "EXAMINED_FILES", 1)
    spec = source({"0.jsonl": LINES, "a.txt": "A" * 200, name: content + " " * 200})
    assert corpus_problems(spec) == []
    with pytest.raises(CorpusRefusedError, match=f": {name}: {what}"):
        prepare(spec, ByteTokenizer())
    status, _, errors = command("--corpus", "corpus")
    assert status == 2
    assert f": {name}: {what}" in errors
    assert "begins" not in errors


# ---- other content


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.json.gz", "a.txt.zst"])
def test_a_pointer_of_git_lfs_is_refused(name: str, source: Make) -> None:
    spec = source({name: POINTER, "b.txt": "B"})
    [problem] = refusals(spec)
    assert (
        f": {name}: a Git LFS pointer, whose data was not downloaded; run `git lfs pull`"
        in problem
    )
    assert refusals(replace(spec, files=("*",))) == [problem]


def test_a_pointer_of_git_lfs_among_many_files_is_found(
    source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_files, "EXAMINED_FILES", 1)
    assert (
        "b.jsonl: a Git LFS pointer"
        in corpus_problems(source({"a.jsonl": LINES, "b.jsonl": POINTER}))[0]
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf_16_is_refused_and_utf_8_keeps_its_line_ends(
    encoding: str, name: str, source: Make, documents: Documents
) -> None:
    text = LINES if encoding == "utf-16" else f"\ufeff{LINES}"
    spec = source(
        {
            name: text.encode(encoding),
            "b.txt": "one\r\ntwo\r\n",
            "c.txt": "caf\xe9".encode("latin-1"),
        }
    )
    assert f": {name}: UTF-16, not UTF-8; convert it" in refusals(spec)[0]
    Path(spec.corpus, name).unlink()
    assert documents(spec) == ["one\r\ntwo\r\n"]


def test_text_in_another_compression_is_refused_and_an_archive_is_left_out(source: Make) -> None:
    spec = source(
        {"a.txt": "A", "b.jsonl.xz": b"\xfd7zXZ", "c.tar.xz": b"\xfd7zXZ", "d.TXT.BZ2": b"BZh"}
    )
    [problem] = refusals(spec)
    assert ": b.jsonl.xz, d.TXT.BZ2: compressed in a way that is not read" in problem


BINARY = {
    "image.png": b"\x89PNG\r\n\x1a\n",
    "paper.PDF": b"%PDF-1.4\nonly ASCII\n",
    "all.zip": b"PK\x03\x04",
    "all.tar.gz": gzip.compress(b"a"),
    "rows.arrow": b"ARROW1",
    "model.safetensors": b"{}",
    "paper": b"%PDF-1.4\nonly ASCII\n",
    "tokens.bin": b"\1\0\2\0",
}


def test_binary_files_are_left_out_by_name_or_are_an_error(
    source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    spec = source({"a.txt": "A", **BINARY})
    assert documents(spec) == ["A"]
    for line in (
        "left out image.png: an image",
        "left out all.tar.gz, all.zip: an archive",
        "skipped paper: not text: a PDF",
    ):
        assert line in caplog.text
    assert "skipped tokens.bin: not text: contains a zero byte" in caplog.text
    named = "".join(refusals(replace(spec, bad_files="error")))
    assert [name for name in BINARY if name not in named] == []


def test_dataset_cards_are_left_out_and_other_readmes_are_text(
    source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    spec = source(
        {
            "README.md": CARD,
            "dataset_infos.json": "{}",
            "a/readme.md": "---\ntitle: x\n---\n",
            "b": "B",
        }
    )
    assert documents(replace(spec, bad_files="error")) == ["---\ntitle: x\n---\n", "B"]
    assert "left out README.md: a Hugging Face card" in caplog.text
    assert "left out dataset_infos.json: a description of a Hugging Face dataset" in caplog.text
    assert documents(replace(spec, files=("**/*.md",))) == [CARD, "---\ntitle: x\n---\n"]


# ---- what the project wrote


def test_what_the_project_writes_is_no_text_of_a_corpus_around_it(
    command: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "notes.txt").write_text("notes")
    (project / "my.toml").write_text(CONFIG)
    (project / "other.toml").write_text('[project]\nname = "x"\n')
    first = command("--config", "my.toml")
    assert first[0] == 0
    assert "2 documents" in first[1]
    for name in ("checkpoints/step-1/x.json", "logs/rank-0.log", "config.toml", "STOP"):
        (project / "outputs/mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "outputs/mine" / name).write_text("{}")
    (project / "made.tmp/pieces").mkdir(parents=True)
    fingerprint = first[1].rpartition("; ")[2]
    assert command("--corpus", ".", "--output", "made")[1].rpartition("; ")[2] == fingerprint
    (project / "hf").mkdir()
    (project / "hf/tokenizer.json").write_text("{}")
    again = command("--config", "my.toml", "--data.bad_files", "skip")
    assert again[:2] == first[:2]
    assert not (project / "prepared").joinpath(first[1].split(":")[0] + ".tmp").exists()


def test_a_run_folder_is_refused_unless_files_are_stated(
    source: Make, documents: Documents
) -> None:
    spec = source({"checkpoints/x": "", "logs/x": "", "samples.txt": "S"})
    assert "a run folder, not text" in refusals(spec)[0]
    assert documents(replace(spec, files=("*.txt",))) == ["S"]


# ---- links, pipes


def test_a_link_that_leads_out_is_refused(source: Make, tmp_path: Path) -> None:
    spec = source({"a/b/a.txt": "A"})
    root = Path(spec.corpus)
    (tmp_path / "secret").write_text("SECRET")
    (tmp_path / "corpus-2").mkdir()
    (tmp_path / "corpus-2/c").write_text("C")
    (root / "a/b/key.txt").symlink_to("../../../secret")
    (root / "near").symlink_to(tmp_path / "corpus-2/c")
    (root / "folder").symlink_to(tmp_path)
    [problem] = refusals(spec)
    assert ": folder, near, a/b/key.txt: a link that leads out of the corpus" in problem
    assert len(refusals(replace(spec, files=("**/*.txt",)))) == 1


def test_links_inside_are_read_once_more_and_the_corpus_may_be_a_link(
    source: Make, documents: Documents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = replace(source({"a.txt": "A", "lines": LINES}), files=("*.txt", "*.jsonl"))
    root = Path(spec.corpus)
    (root / "b.jsonl").symlink_to("lines")
    (tmp_path / "named").symlink_to(root)
    assert documents(replace(spec, corpus=str(tmp_path / "named"))) == ["A", *TEXTS]
    assert "b.jsonl: links to files of the corpus, read once more" in caplog.text


def hub(
    folder: Path, content: str, *, repository: str = "datasets--org--name", blob: str | None = None
) -> Path:
    """The newest snapshot of a repository in the cache of the Hugging Face hub."""
    blobs = folder / repository / "blobs"
    snapshot = folder / repository / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    blobs.mkdir()
    blob = blob or sha256(content.encode()).hexdigest()
    (blobs / blob).write_text(content)
    (snapshot / "data/a.jsonl").symlink_to(f"../../../blobs/{blob}")
    return snapshot


def test_a_snapshot_of_the_hub_links_into_its_own_blobs(
    tmp_path: Path, documents: Documents
) -> None:
    snapshot = hub(tmp_path, LINES)
    spec = CorpusSpec(corpus=str(snapshot), cache_dir=tmp_path / "cache")
    assert documents(spec) == TEXTS
    assert documents(replace(spec, corpus=str(snapshot / "data"))) == TEXTS


@pytest.mark.parametrize("other", [{"repository": "mine"}, {"blob": "passwords"}])
def test_blobs_of_another_layout_are_refused(other: dict[str, str], tmp_path: Path) -> None:
    snapshot = hub(tmp_path, LINES, **other)
    spec = CorpusSpec(corpus=str(snapshot), cache_dir=tmp_path / "cache")
    assert "data/a.jsonl: a link that leads out" in refusals(spec)[0]


def test_blobs_of_another_repository_are_refused(tmp_path: Path) -> None:
    mine = hub(tmp_path / "a", LINES)
    other = hub(tmp_path / "b", LINES)
    (mine / "b.jsonl").symlink_to((other / "data/a.jsonl").resolve())
    assert (
        ": b.jsonl: a link"
        in refusals(CorpusSpec(corpus=str(mine), cache_dir=tmp_path / "cache"))[0]
    )


def test_pipes_are_never_opened_and_loops_are_named(source: Make, documents: Documents) -> None:
    spec = source({"a.txt": "A"})
    root = Path(spec.corpus)
    os.mkfifo(root / "pipe.txt")
    (root / "loop.txt").symlink_to("loop.txt")
    (root / "to_pipe.txt").symlink_to("pipe.txt")
    assert documents(spec) == ["A"]
    found = Corpus(spec).found
    assert found is not None
    assert found.left_out == {
        "a link to nothing: Too many levels of symbolic links": ["loop.txt"],
        "not a regular file": ["pipe.txt", "to_pipe.txt"],
    }
    assert len(refusals(replace(spec, bad_files="error"))) == 2


@pytest.mark.parametrize("swap", ["file", "folder", "pipe"])
def test_what_is_swapped_for_a_link_before_it_is_opened_is_not_read(
    swap: str, source: Make, tmp_path: Path
) -> None:
    spec = source({"d/a.txt": "A"})
    [[split]] = Corpus(spec).partitions()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.txt").write_text("SECRET")
    path = Path(split.path)
    path.unlink()
    if swap == "file":
        path.symlink_to(tmp_path / "out/a.txt")
    elif swap == "pipe":
        os.mkfifo(path)
    else:
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path / "out")
    with pytest.raises(
        formats.BadText,
        match=r"^d/a.txt: (Too many levels|Not a directory|it is not a regular file)",
    ):
        [*next(formats.read_texts(split, text_key="text")).blocks]


# ---- data.files


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "en/b.txt", "en/x/c.txt"]),
        ("en/*", ["en/b.txt"]),
        ("en/**/*.txt", ["en/b.txt", "en/x/c.txt"]),
        ("?.?xt", ["a.txt"]),
        ("**", ["a.txt", "en/b.txt", "en/x/c.txt"]),
        ("en/**", ["en/b.txt", "en/x/c.txt"]),
        ("*[ab]*", []),
        ("e*/x/c.txt", ["en/x/c.txt"]),
        ("**/*", ["a.txt", "en/b.txt", "en/x/c.txt"]),
        ("a.tx", []),
        ("**/**/x/**/*", ["en/x/c.txt"]),
        ("**/en/**/c*", ["en/x/c.txt"]),
        ("*.*t*t", ["a.txt"]),
        ("**.txt", ["a.txt"]),
    ],
)
def test_globs_match_neither_slashes_nor_hidden_names(pattern: str, names: list[str]) -> None:
    every = ["a.txt", "en/b.txt", "en/x/c.txt", ".hidden.txt", ".git/d.txt", "en/.e.txt"]
    assert [name for name in every if glob_regex(pattern).fullmatch(name)] == names


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*a" * 30 + "b", "a" * 200, False),
        ("*a" * 30 + "*b", "a" * 200 + "b", True),
        ("**/" * 30 + "x", "a/" * 200 + "y", False),
        ("**/a/" * 30 + "x", "a/" * 200 + "y", False),
        ("**/*a/" * 30 + "**/x", "a/" * 200 + "x", True),
    ],
)
def test_globs_end_although_many_places_match(pattern: str, name: str, *, matches: bool) -> None:
    assert bool(glob_regex(pattern).fullmatch(name)) == matches


def test_data_files_states_what_is_read(
    source: Make, documents: Documents, command: Prepare
) -> None:
    spec = source({"a.txt": "A", "en/b.txt": "B", "en/c.md": "C", ".d.txt": "D"})
    assert documents(replace(spec, files=("en/*.txt", "a.*"))) == ["A", "B"]
    assert refusals(replace(spec, files=("*.text", "a.txt")))[0].endswith(
        'data.files = "*.text": matches no file'
    )
    status, out, errors = command("--corpus", "corpus", "--data.files", "*.txt")
    assert (status, "1 documents" in out) == (0, True)
    assert "left out 3 files by data.files" in errors


def test_an_exclamation_mark_excludes(source: Make, documents: Documents) -> None:
    spec = source({"a.txt": "A", "b.json": '{"a": 1}', "en/c.json": '{"a": 1}', "en/d.txt": "D"})
    assert documents(replace(spec, files=("**/*", "!**/*.json"))) == ["A", "D"]
    assert documents(replace(spec, files=("!en/*", "**/*"))) == ["A", '{"a": 1}']
    assert documents(replace(spec, files=("!**/*.json",))) == ["A", "D"]
    # Without another glob nothing is stated to be text.
    assert ": b.json: no JSON record" in refusals(replace(spec, files=("!en/*",)))[0]
    assert refusals(replace(spec, files=("!*.md",)))[0].endswith(
        'data.files = "!*.md": matches no file'
    )


@pytest.mark.parametrize("pattern", ["en/{a", "[ab].txt", "../a.txt"])
def test_what_is_no_pattern_is_said(pattern: str, source: Make) -> None:
    problem = refusals(replace(source({"a.txt": "A"}), files=(pattern,)))[0]
    assert problem.endswith(
        "matches no file; only *, ? and **/ are patterns; braces, brackets and .. are not, and commas separate globs"
    )


def test_files_of_a_source_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "my.toml").write_text(
        f'[data]\nfiles = "*.txt"\ncorpus = "{tmp_path}"\n[data.sources.web]\npath = "{tmp_path}/web"\nfiles = ["*.md"]\n'
        '[[data.mix]]\nsource = "web"\n'
    )
    config = load(["--config", str(tmp_path / "my.toml")])
    from trainer.config.source import corpus_spec

    assert (corpus_spec(config.data, "corpus").files, corpus_spec(config.data, "web").files) == (
        ("*.txt",),
        ("*.md",),
    )
    problems = corpus_problems(corpus_spec(config.data, "web"))
    assert problems[0].startswith(
        f'data.sources.web.path = "{tmp_path}/web": data.files = "*.md": matches no file'
    )


def test_data_files_needs_a_folder() -> None:
    config = load(["--data.files=*.txt"])
    assert (
        'data.files = ["*.txt"] is only used with a file or folder, not "python-stdlib"'
        in checks.data_section_problems(config.data)
    )


# ---- what is said


def test_what_is_read_is_said_before_a_token_is_written(command: Prepare, source: Make) -> None:
    source(
        {
            "a.txt": "\x1b[31mred \u202e\u200b é 漢\n" + "x" * 100,
            "b.txt": "",
            "c.json.gz": gzip.compress((LINES + '{"text": ""}\n{"text": 1}\n').encode()),
            "d.parquet": parquet({"text": ["row", ""]}),
        }
    )
    status, out, log = command("--corpus", "corpus")
    first = '"\\x1b[31mred \\u202e\\u200b é 漢\\n' + "x" * 64 + '"'
    lines = [
        f"corpus: .txt: 2 files, 123 bytes, text, 2 documents; the first begins {first}",
        'JSON lines, each a document, from their key "text"; the first begins "text 0"',
        'rows of a table, each a document, from their column "text"; the first begins "row"',
        "corpus: .txt: 1 text, 1 empty, 0 skipped",
        "corpus: .json.gz: 3 texts, 1 empty, 1 skipped",
        "corpus: .parquet: 1 text, 1 empty, 0 skipped",
    ]
    assert [line for line in lines if line not in log] == [], log
    places = [log.index(line) for line in lines]
    assert max(places[:3]) < min(places[3:])
    assert (status, "1 skipped, 3 empty;" in out) == (0, True)


def test_an_empty_corpus_is_named(source: Make) -> None:
    spec = source(
        {"a.txt": "", "b.jsonl": '{"text": ""}\n', "c.txt": b"\xff"}, key="data.sources.x.path"
    )
    with pytest.raises(DataError) as error:
        prepare(spec, ByteTokenizer())
    assert str(error.value) == (
        f'data.sources.x.path = "{spec.corpus}" has no text: 3 files, 2 empty texts, 1 skipped, '
        "the first c.txt: not UTF-8 text: byte 0xff at offset 0"
    )


def test_what_is_left_out_is_not_skipped_and_the_end_is_said_once(
    source: Make, command: Prepare
) -> None:
    source({"a.txt": "A", "b.png": "", "c.txt": b"\xff"})
    _, out, log = command("--corpus", "corpus")
    assert "1 documents, the longest 3, 1 skipped, 0 empty; fingerprint" in out
    assert "fingerprint" not in log
    assert "left out b.png: an image" in log


def test_folders_whose_names_are_not_utf_8_are_documents_of_their_own(
    source: Make, documents: Documents
) -> None:
    spec = source({"a/a.txt": "A"}, documents="folder")
    for name in (b"\xfe", b"\xff"):
        folder = Path(os.fsdecode(os.fsencode(spec.corpus) + b"/" + name))
        folder.mkdir()
        (folder / "b.txt").write_text("B")
    texts = documents(spec)
    assert [text.splitlines()[0] for text in texts] == [
        r"# \xfe/b.txt",
        r"# \xff/b.txt",
        "# a/a.txt",
    ]


def test_the_command_line_is_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "trainer.cli", raising=False)
    monkeypatch.setattr(sys, "argv", ["cli", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("trainer.cli", run_name="__main__")
    assert end.value.code == 0
    assert "usage: longhaul COMMAND" in capsys.readouterr().out


def test_names_are_escaped(source: Make) -> None:
    assert (
        r": bad\x1b[2Jname.txt: looks like JSON"
        in refusals(source({"bad\x1b[2Jname.txt": '[{"a": 1}]'}))[0]
    )


def test_check_and_a_run_refuse_all_at_once(source: Make, tmp_path: Path) -> None:
    spec = source({"a.txt": '{"cells":\n1}', "b.txt": POINTER})
    argv = [
        f"--data.corpus={spec.corpus}",
        f"--job.output_dir={tmp_path / 'run'}",
        f"--data.cache_dir={spec.cache_dir}",
    ]
    _, _, problems = load_and_validate(argv, {"NGPU": "1"}, checking=True)
    assert [problem.rpartition(": ")[2].split(",")[0] for problem in problems] == [
        "looks like JSON",
        "a Git LFS pointer",
    ]
    # A launch looks when it prepares: 78.
    assert load_and_validate(argv, {"NGPU": "1"})[2] == []
    with pytest.raises(CorpusRefusedError) as error:
        prepare(spec, ByteTokenizer())
    assert (error.value.status, error.value.problems) == (78, problems)


# ---- prepared folders of before


def test_a_corpus_that_is_read_as_before_is_found_again(source: Make) -> None:
    spec = source(
        {"a.txt": "A", "b.jsonl": LINES, "c.jsonl.gz": b"", "d.parquet": b"", "e.png": b""},
        documents="folder",
    )
    corpus = Corpus(spec)
    files = [
        (each.name, each.size, each.mtime_ns)
        for each in [*corpus.files, *corpus.found.binary]  # type: ignore[union-attr]
    ]
    assert corpus.identity == [False, *files]
    for changed in ("f.json.gz", "f.ndjson", "f.JSONL", "f.TXT.GZ"):
        Path(spec.corpus, changed).write_bytes(
            gzip.compress(LINES.encode()) if changed.lower().endswith("gz") else LINES.encode()
        )
        if changed == "f.TXT.GZ":
            Path(spec.corpus, changed).write_bytes(gzip.compress(b"text"))
        assert Corpus(spec).identity[0] == "json lines"
        Path(spec.corpus, changed).unlink()


def test_a_folder_prepared_before_first_bytes_were_looked_at_is_looked_at(
    source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_files, "EXAMINED_FILES", 1)
    spec = source({"a.txt": "A", "b.txt": "x" * len(LINES)})
    folder = prepare(spec, ByteTokenizer()).folder
    path = Path(spec.corpus, "b.txt")
    before = path.stat().st_mtime_ns
    forge(folder / "meta.json", lambda meta: meta.update(counts=None))
    for content, problem in [
        (LINES, "was prepared when b.txt was read as text; delete it"),
        (LINES.replace("text", "body"), "b.txt: no JSON record"),
    ]:
        path.write_text(content)
        os.utime(path, ns=(before, before))
        with pytest.raises(CorpusRefusedError, match=problem):
            prepare(spec, ByteTokenizer())


def test_the_key_knows_files_only_if_they_are_set(source: Make) -> None:
    spec = source({"a.txt": "A"})
    keys = {
        cache_key(Corpus(each), each, ByteTokenizer(), 1 << 29)
        for each in (spec, replace(spec, key="data.sources.x.path"), replace(spec, files=("*",)))
    }
    assert len(keys) == 2


def test_a_library_whose_files_are_links_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib"
    (library / "package").mkdir(parents=True)
    (library / "package/a.py").write_text("x = 1\n")
    (tmp_path / "elsewhere.py").write_text("y = 2\n")
    (library / "sitecustomize.py").symlink_to(tmp_path / "elsewhere.py")
    (library / "linked").symlink_to(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    found = Corpus(CorpusSpec(corpus="python-stdlib"))
    splits = [split for partition in found.partitions() for split in partition]
    texts = [
        "".join(text.blocks)
        for split in splits
        for text in formats.read_texts(split, text_key="text")
    ]
    assert texts == ["# package/a.py\nx = 1\n", "# sitecustomize.py\ny = 2\n"]
