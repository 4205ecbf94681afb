import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sentencepiece_model import train_sentencepiece
from trainer.data.prepare.__main__ import main
from trainer.data.token_dataset import TokenDataset

Run = Callable[..., tuple[int, str, str]]
STORY = (
    "Once upon a time there was a document, and 12345 more of them.\n\n    And they were long.\n"
)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs the command in a folder with a corpus `text`; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for n in range(5):
        path = tmp_path / "text" / f"{n}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{n} {STORY}" * 10**n)

    def command(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out = capsys.readouterr()
        return status, out.out, out.err

    return command


def test_the_corpus_of_a_configuration_is_prepared_in_the_cache(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("--data.corpus", "text", "--data.cache_dir", "made")
    assert status == 0
    [folder] = (tmp_path / "made").glob("text-*")
    made = TokenDataset(folder)
    tokens = sum(path.stat().st_size + 2 for path in (tmp_path / "text").iterdir())
    assert out == (
        f"made/{folder.name}: {tokens:,} tokens, 5 documents, the longest {made.meta.longest:,}, "
        f"0 skipped, 0 empty; fingerprint {made.fingerprint}\n"
    )
    assert run("--data.corpus=text", "--data.cache_dir=made")[:2] == (0, out)


def test_corpus_and_output_override_the_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "some text"}) + "\n{\n")
    status, out, _ = run("--corpus", "a.jsonl", "--data.text_key", "body", "--output", "new/made")
    assert (status, out.split(":")[0]) == (0, "new/made")
    assert TokenDataset(tmp_path / "new" / "made").num_documents == 1
    assert "1 skipped" in out
    # A run can use the folder as its corpus.
    assert run("--corpus", "new/made")[:2] == (0, out)
    assert run("--corpus", "a.jsonl", "--data.text_key", "body", "--output", "new/made") == (
        2,
        "",
        "error: command line: --output new/made is not empty\n",
    )


@pytest.mark.ranks
def test_the_number_of_workers_does_not_change_the_output(run: Run, tmp_path: Path) -> None:
    one = run("--corpus", "text", "--output", "one")
    two = run("--corpus", "text", "--output", "two", "--workers", "2")
    assert (one[0], two[0], one[1].replace("one:", "two:")) == (0, 0, two[1])
    assert [path.read_bytes() for path in sorted((tmp_path / "one").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "two").iterdir())
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--workers", "0"], 2, "command line: --workers 0 must be an integer, at least 1"),
        (["--workers", "many"], 2, "command line: --workers many must be an integer, at least 1"),
        (["--output"], 2, "command line: --output needs a value"),
        (["--output", "--workers", "2"], 2, "command line: --output needs a value"),
        (
            ["--outputs", "x"],
            2,
            "command line: unknown argument --outputs; did you mean --output?",
        ),
        (["--verify"], 2, "command line: unknown argument --verify"),
        (["--corpus", "nowhere"], 2, "command line: --corpus nowhere does not exist"),
        (["--corpus", ""], 2, 'command line: --corpus "" does not exist'),
        (["--data.corpus", "nowhere"], 2, 'data.corpus = "nowhere" is neither'),
        (
            ["--data.corpus", "copy"],
            2,
            'data.corpus = "copy" is synthetic: there is nothing to prepare',
        ),
        (["--config", "nowhere"], 2, "nowhere: no such file"),
        (["--tokenizer.kind", "tiktoken"], 2, 'tokenizer.kind = "tiktoken" needs tokenizer.path'),
        (
            ["--tokenizer.kind", "tiktoken", "--tokenizer.path", "text/0.txt"],
            78,
            "looks like plain text",
        ),
        (["--corpus", "text/empty"], 78, 'data.corpus = "text/empty" has no text: 1 files'),
        (["--corpus", "hf:"], 78, "must be hf:NAME"),
        (
            ["--corpus", "text", "--output", "text/0.txt/made"],
            78,
            "text/0.txt/made cannot be written",
        ),
        (["inspect"], 2, "command line: inspect needs a folder or --config"),
        (["inspect", "text"], 2, "command line: text is not a prepared folder"),
        (
            ["inspect", "text", "--samples", "x"],
            2,
            "command line: --samples x must be an integer, at least 1",
        ),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    arguments: list[str], status: int, message: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "text" / "empty").touch()
    exit_code, out, errors = run(*arguments)
    assert (exit_code, out) == (status, "")
    assert re.fullmatch(rf"error: [^\n]*{re.escape(message)}[^\n]*\n", errors)


def test_inspect_shows_counts_lengths_and_samples(run: Run) -> None:
    run("--corpus", "text", "--output", "made")
    status, out, _ = run("inspect", "made", "--verify", "--samples", "5")
    assert status == 0
    flat = re.sub(r"[│┃\s]+", " ", out)
    lengths = [(len(STORY) + 2) * 10**n + 2 for n in range(5)]
    for fact in (
        f"tokens {sum(lengths):,}",
        "documents 5",
        f"longest {max(lengths):,}",
        "byte-264",
        "checksums match",
        "0 to 256 1 92 0.0 % 100.0 %",
        f"256K to 1M 1 {lengths[4]:,} 90.0 % 90.0 %",
        f"64K to 256K 1 {lengths[3]:,} 9.0 % 99.0 %",
        "at least 1M 0 0 0.0 % 0.0 %",
        r"0 92 0 Once upon a time",
        "4 900,002 4 Once upon a time",
    ):
        assert fact in flat, fact


def test_inspect_of_a_configuration_prepares_its_corpus(run: Run) -> None:
    status, out, _ = run(
        "inspect", "--config", "debug", "--data.corpus", "text", "--data.cache_dir", "made"
    )
    assert status == 0
    assert "made/text-" in out


def test_inspect_with_another_tokenizer_shows_no_samples(run: Run, tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "made.model", [STORY] * 5, vocab_size=300)
    run("--corpus", "text", "--output", "made")
    status, out, _ = run(
        "inspect", "made", "--tokenizer.kind", "sentencepiece", "--tokenizer.path", "made.model"
    )
    assert status == 0
    assert "No samples: [tokenizer] is sentencepiece-" in out


def test_verify_detects_a_changed_token(run: Run, tmp_path: Path) -> None:
    run("--corpus", "text", "--output", "made")
    path = tmp_path / "made" / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    status, out, errors = run("inspect", "made", "--verify")
    assert (status, out) == (78, "")
    assert re.fullmatch(
        r"error: made/shard-00000.bin is damaged: checksum mismatch; delete made .*\n", errors
    )


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--help"], ("--config", "--corpus", "--workers", "--output", "inspect")),
        (["inspect", "--help"], ("--config", "--verify", "--samples")),
    ],
)
def test_help_lists_every_option(arguments: list[str], options: tuple[str, ...], run: Run) -> None:
    status, out, _ = run(*arguments)
    assert status == 0
    assert all(f"\n  {option} " in out for option in options)
    assert "Exit codes: 0 success, 2 " in out


@pytest.mark.slow
@pytest.mark.ranks
def test_the_module_runs_with_workers(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "trainer.data.prepare",
        "--corpus",
        str(tmp_path),
        "--output",
        str(tmp_path / "o"),
    ]
    (tmp_path / "a.txt").write_text("text")
    done = subprocess.run(
        [*command, "--workers", "2"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, str(tmp_path / "o")), (
        done.stderr
    )
