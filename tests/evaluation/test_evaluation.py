"""`trainer.evaluation.perplexity` and `needle`: results on any mesh, and errors."""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from models.batch import IGNORE_INDEX
from tests.build_datasets import build_validation_sets
from tests.ranks import context
from tests.system.runs import SETS, become, forked, lines, wait_for, write_run
from trainer.config.data import DataSection
from trainer.config.parse import load
from trainer.config.source import corpus_spec
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.evaluation import needle, perplexity
from trainer.evaluation.needle import FillerText, NeedleDataset, PasskeySentences
from trainer.evaluation.perplexity import count_target_bytes

pytestmark = pytest.mark.ranks

RUN = (
    "--training.steps=2",
    "--training.dtype=float64",
    "--data.holdout=0.4",
    "--checkpoint.interval=1",
)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:]
    level = root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, trained on four ranks."""
    config = write_run(tmp_path_factory.mktemp("evaluation"))
    config.write_text(config.read_text() + SETS)
    folder = config.parent / "run"
    mesh = ("--parallelism.dp_shard=2", "--parallelism.tp=2")
    done = forked(config, folder, *RUN, *mesh, processes=4)
    assert done.statuses == [0] * 4, done.said
    return folder


def run_ranks(command: str, argv: list[str], *, processes: int, log: Path) -> list[int | None]:
    """The exit status of every rank, in the environment of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [(rank, processes, port, log, command, argv) for rank in range(processes)]
    ranks = [
        context.Process(target=_evaluate, args=rank_arguments, daemon=True)
        for rank_arguments in arguments
    ]
    for rank in ranks:
        rank.start()
    wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _evaluate(rank: int, size: int, port: int, log: Path, command: str, argv: list[str]) -> None:
    become(rank, size, port, log)
    module = {"needle": needle, "perplexity": perplexity}[command]
    sys.exit(module.main(argv))


def run_perplexity(run: Path, *argv: str, path: Path, processes: int = 1) -> list[dict[str, Any]]:
    log = path.with_suffix(".log")
    statuses = run_ranks(
        "perplexity", [str(run), "--json", str(path), *argv], processes=processes, log=log
    )
    assert statuses == [0] * processes, log.read_text()
    summaries: list[dict[str, Any]] = json.loads(path.read_text())["sets"]
    return summaries


@pytest.fixture(scope="module")
def perplexity_on_one_rank(run: Path) -> list[dict[str, Any]]:
    return run_perplexity(run, path=run.parent / "one_rank.json")


def test_perplexity_equals_the_last_validation_of_training(
    run: Path, perplexity_on_one_rank: list[dict[str, Any]]
) -> None:
    last = [event for event in lines(run / "events.jsonl") if event["event"] == "validation"][-2:]
    assert [summary["set"] for summary in perplexity_on_one_rank] == ["packed", "context"]
    for summary, event in zip(perplexity_on_one_rank, last, strict=True):
        assert summary["step"] == event["step"] == 2
        assert summary["targets"] == event["targets"]
        assert summary["accuracy"] == event["accuracy"]
        assert summary["loss"] == pytest.approx(event["loss"], rel=1e-12)
        assert summary["perplexity"] == pytest.approx(math.exp(event["loss"]))
        for key in ("by_position", "by_context"):
            assert (summary[key] is None) == (event[key] is None)


def test_bits_per_byte_count_the_bytes_of_the_targets(
    perplexity_on_one_rank: list[dict[str, Any]],
) -> None:
    packed, context = perplexity_on_one_rank
    # Every byte is a token. The end of a document is a target without bytes.
    assert context["bytes"] <= context["targets"] <= context["bytes"] + 5
    assert packed["bytes"] < packed["targets"]
    for summary in perplexity_on_one_rank:
        assert summary["bits_per_byte"] == pytest.approx(
            summary["loss"] / math.log(2) * summary["targets"] / summary["bytes"]
        )


def test_end_tokens_count_no_bytes_even_if_they_decode_to_text(run: Path) -> None:
    class Loud(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return "".join(
                "<eos>" if token == self.eos else super(Loud, self).decode([token])
                for token in ids
            )

    packed, _ = build_validation_sets(load(["--config", str(run / "config.toml")]))
    assert count_target_bytes(packed, Loud()) == count_target_bytes(packed, ByteTokenizer()) > 100


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            ("--parallelism.cp=2", "--parallelism.cp_method=ring"), marks=pytest.mark.slow
        ),
        *(
            pytest.param((f"--parallelism.{axis}=2",), marks=pytest.mark.slow)
            for axis in ("pp", "tp")
        ),
    ],
)
def test_results_are_the_same_on_every_mesh(
    run: Path,
    perplexity_on_one_rank: list[dict[str, Any]],
    needle_cells: list[dict[str, Any]],
    mesh: tuple[str, ...],
    tmp_path: Path,
) -> None:
    for summary, expected in zip(
        run_perplexity(run, *mesh, path=tmp_path / "x.json", processes=2),
        perplexity_on_one_rank,
        strict=True,
    ):
        assert summary["accuracy"] == expected["accuracy"]
        assert summary["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    for cell, other in zip(
        run_needle(run, *mesh, path=tmp_path, processes=2), needle_cells, strict=True
    ):
        assert {**cell, "log_probability": 0} == {**other, "log_probability": 0}
        assert cell["log_probability"] == pytest.approx(other["log_probability"], rel=1e-12)


def test_a_run_without_validation_sets_is_evaluated_on_its_corpus(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        text[: text.index("[validation.sets")] + text[text.index("[metrics]") :]
    )
    packed, context = run_perplexity(folder, path=tmp_path / "perplexity.json")
    assert packed["targets"] > 500
    assert [*context["by_context"]] == ["4", "8", "16", "32", "64"]


def run_needle(run: Path, *argv: str, path: Path, processes: int = 1) -> list[dict[str, Any]]:
    log = path / "needle.log"
    argv = (str(run), "--lengths", "100,161", "--depths", "3", "--output", str(path), *argv)
    statuses = run_ranks("needle", [*argv], processes=processes, log=log)
    assert statuses == [0] * processes, log.read_text()
    cells: list[dict[str, Any]] = json.loads((path / "needle-step-2.json").read_text())["cells"]
    return cells


@pytest.fixture(scope="module")
def needle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("needle")


@pytest.fixture(scope="module")
def needle_cells(run: Path, needle_folder: Path) -> list[dict[str, Any]]:
    return run_needle(run, path=needle_folder)


def test_needle_reports_a_cell_per_length_and_depth(
    needle_folder: Path, needle_cells: list[dict[str, Any]]
) -> None:
    folder = needle_folder
    cells = needle_cells
    assert [(cell["length"], cell["depth"]) for cell in cells] == [
        (a, b) for a in (100, 161) for b in (0, 0.5, 1)
    ]
    assert all(cell["found"] == 0 and cell["log_probability"] < -3 for cell in cells), (
        "two steps teach nothing"
    )
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in events.Scalars("needle/100")] == [(2, 0)]
    mean = sum(cell["log_probability"] for cell in cells[3:]) / 3
    assert events.Scalars("needle_log_probability/161")[0].value == pytest.approx(mean)
    head, *rows, file = (folder / "needle.log").read_text().splitlines()[-5:]
    assert head.split() == ["depth", "100", "161"]
    for row, short, long in zip(rows, cells[:3], cells[3:], strict=True):
        shown = [f"({cell['log_probability']:.2f})" for cell in (short, long)]
        assert row.split() == [f"{short['depth']:.0%}", "0%", shown[0], "0%", shown[1]]
    assert file == f"{folder}/needle-step-2.json"


def test_a_sequence_hides_the_number_and_ends_with_it(run: Path) -> None:
    data = DataSection(corpus=str(run.parent / "corpus"), cache_dir=run.parent / "prepared")
    tokenizer = ByteTokenizer()
    prepared = prepare(corpus_spec(data, "corpus"), tokenizer)
    filler = FillerText(prepared, [3, 7, 9])
    dataset = NeedleDataset(filler, PasskeySentences(tokenizer), length=300, depths=3, trials=2)
    sequences = []
    for number in range(dataset.num_sequences):
        batch = BlendedDataset([dataset], seq_len=300).read([number])
        text = tokenizer.decode(batch.tokens[0].tolist())
        labels = batch.labels[0]
        (at,) = (labels != IGNORE_INDEX).nonzero()[:1].flatten().tolist()
        answer = tokenizer.decode([token for token in labels.tolist() if token != IGNORE_INDEX])
        assert len(answer) == 5 and answer.isdigit()
        assert text.endswith(f"\nThe secret number is: {answer}"), (
            "the number is teacher-forced, and its last token has no target"
        )
        assert labels[at:-1].tolist() == batch.tokens[0][at + 1 :].tolist()
        hidden = [*f"\nThe secret number is: {answer}.\n".encode()]
        tokens = batch.tokens[0].tolist()
        (position,) = (at for at in range(300) if tokens[at : at + len(hidden)] == hidden)
        assert position == [0, 121, 242][number % 3]
        assert text.count(answer) == 2
        sequences.append((text.replace(f"\nThe secret number is: {answer}.\n", ""), answer))
    assert (
        sequences[0]
        == sequences[1]
        == sequences[2]
        != sequences[3]
        == sequences[4]
        == sequences[5]
    )
    assert sequences[0][1] != sequences[3][1]


@pytest.mark.parametrize(
    ("command", "argv", "status", "message"),
    [
        (needle, [], 2, "trainer.evaluation.needle needs CHECKPOINT"),
        (needle, ["a", "b"], 2, "unknown argument b"),
        (perplexity, ["nowhere"], 2, "nowhere is neither a run folder nor a checkpoint in one"),
        (perplexity, ["RUN", "--jsno", "x"], 2, "unknown argument --jsno; did you mean --json?"),
        (perplexity, ["RUN", "--json"], 2, "--json needs a value"),
        (perplexity, ["RUN/checkpoints/step-9"], 2, "contains step-1, step-2"),
        (perplexity, ["RUN", "--data.corpsu=x"], 2, "did you mean corpus?"),
        (perplexity, ["RUN", "--training.seq_len=0"], 2, "must be at least 2"),
        (
            perplexity,
            ["RUN", "--parallelism.tp=2"],
            2,
            "needs 2 processes, but the world size is 1 (NGPU x NNODES, or torchrun's)",
        ),
        (perplexity, ["RUN", "--model.dim=32"], 78, "does not match the model"),
        (
            perplexity,
            ["RUN", "--json", "/nowhere/x.json"],
            78,
            "/nowhere/x.json cannot be written",
        ),
        (
            needle,
            ["RUN", "--lengths", "12,x"],
            2,
            "--lengths 12,x must be integers, at least 2, such as 1024,4096",
        ),
        (needle, ["RUN", "--lengths", "40"], 2, "--lengths 40 must exceed the"),
        (needle, ["RUN", "--depths", "0"], 2, "--depths 0 must be an integer, at least 1"),
        (needle, ["RUN", "--depths", "1,2"], 2, "--depths 1,2 must be an integer, at least 1"),
        (
            needle,
            ["RUN", "--data.corpus=copy"],
            2,
            'source = "corpus" is the synthetic "copy" corpus',
        ),
        (needle, ["RUN", "--data.corpus=/nowhere"], 2, "nor an existing file or folder"),
        (needle, ["--help"], 0, "--lengths N,..."),
    ],
)
def test_an_error_is_reported_without_traceback(
    run: Path,
    capfd: pytest.CaptureFixture[str],
    command: Any,
    argv: list[str],
    status: int,
    message: str,
) -> None:
    argv = [argument.replace("RUN", str(run)) for argument in argv]
    assert command.main(argv) == status
    captured = capfd.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err
