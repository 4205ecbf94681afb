"""The commands that judge a checkpoint: what they say, on any mesh, and of what is wrong."""

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
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from models.batch import IGNORE_INDEX
from tests.datasets import build_validation_sets
from tests.ranks import context
from tests.system.runs import SETS, become, forked, lines, wait_for, write_run
from trainer.config.job_config import DataSection
from trainer.config.parse import load
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.source import corpus_spec
from trainer.data.tokenizer import ByteTokenizer
from trainer.evaluation import needle, perplexity, report
from trainer.evaluation.needle import NeedleDataset, PasskeySentences
from trainer.evaluation.perplexity import count_target_bytes

pytestmark = pytest.mark.ranks

RUN = ("--training.steps=2", "--training.dtype=float64", "--data.holdout=0.4", "--checkpoint.interval=1")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained on four ranks."""
    config = write_run(tmp_path_factory.mktemp("evaluation"))
    config.write_text(config.read_text() + SETS)
    folder = config.parent / "run"
    mesh = ("--parallelism.dp_shard=2", "--parallelism.tp=2")
    done = forked(config, folder, *RUN, *mesh, processes=4)
    assert done.statuses == [0] * 4, done.said
    return folder


def evaluated(command: str, words: list[str], *, processes: int, log: Path) -> list[int | None]:
    """The exit status of every rank, in the environment that torchrun gives them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [(rank, processes, port, log, command, words) for rank in range(processes)]
    ranks = [context.Process(target=_evaluate, args=each, daemon=True) for each in arguments]
    for rank in ranks:
        rank.start()
    wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _evaluate(rank: int, size: int, port: int, log: Path, command: str, words: list[str]) -> None:
    become(rank, size, port, log)
    module = {"needle": needle, "perplexity": perplexity}[command]
    sys.exit(module.command(words, module.USAGE, module.run))


def judge(run: Path, *words: str, path: Path, processes: int = 1) -> list[dict[str, Any]]:
    log = path.with_suffix(".log")
    statuses = evaluated("perplexity", [str(run), "--json", str(path), *words], processes=processes, log=log)
    assert statuses == [0] * processes, log.read_text()
    found: list[dict[str, Any]] = json.loads(path.read_text())["sets"]
    return found


@pytest.fixture(scope="module")
def alone(run: Path) -> list[dict[str, Any]]:
    return judge(run, path=run.parent / "alone.json")


def test_perplexity_is_what_training_said_at_the_end(run: Path, alone: list[dict[str, Any]]) -> None:
    last = [event for event in lines(run / "events.jsonl") if event["event"] == "validation"][-2:]
    assert [one["set"] for one in alone] == ["packed", "context"]
    for one, event in zip(alone, last, strict=True):
        assert one["step"] == event["step"] == 2
        assert one["targets"] == event["targets"]
        assert one["accuracy"] == event["accuracy"]
        assert one["loss"] == pytest.approx(event["loss"], rel=1e-12)
        assert one["perplexity"] == pytest.approx(math.exp(event["loss"]))
        for key in ("by_position", "by_context"):
            assert (one[key] is None) == (event[key] is None)


def test_bits_per_byte_are_of_the_bytes_that_targets_stand_for(alone: list[dict[str, Any]]) -> None:
    packed, context = alone
    # Every byte is a token, and a document's end is a target without bytes.
    assert context["bytes"] <= context["targets"] <= context["bytes"] + 5
    assert packed["bytes"] < packed["targets"]
    for one in alone:
        assert one["bits_per_byte"] == pytest.approx(one["loss"] / math.log(2) * one["targets"] / one["bytes"])


def test_ends_of_documents_have_no_bytes_whatever_they_are_written_as(run: Path) -> None:
    class Loud(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return "".join("<eos>" if token == self.eos else super(Loud, self).decode([token]) for token in ids)

    packed, _ = build_validation_sets(load(["--config", str(run / "config.toml")]))
    assert count_target_bytes(packed, Loud()) == count_target_bytes(packed, ByteTokenizer()) > 100


@pytest.mark.parametrize(
    "mesh",
    [
        ("--parallelism.cp=2", "--parallelism.cp_method=ring"),
        *(pytest.param((f"--parallelism.{axis}=2",), marks=pytest.mark.slow) for axis in ("pp", "tp")),
    ],
)
def test_both_commands_say_the_same_on_every_mesh(
    run: Path, alone: list[dict[str, Any]], found: list[dict[str, Any]], mesh: tuple[str, ...], tmp_path: Path
) -> None:
    for one, expected in zip(judge(run, *mesh, path=tmp_path / "x.json", processes=2), alone, strict=True):
        assert one["accuracy"] == expected["accuracy"]
        assert one["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    for cell, other in zip(hide(run, *mesh, path=tmp_path, processes=2), found, strict=True):
        assert {**cell, "log_probability": 0} == {**other, "log_probability": 0}
        assert cell["log_probability"] == pytest.approx(other["log_probability"], rel=1e-12)


def test_a_run_without_sets_is_judged_by_its_corpus(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text[: text.index("[validation.sets")] + text[text.index("[metrics]") :])
    packed, context = judge(folder, path=tmp_path / "found.json")
    assert packed["targets"] > 500
    assert [*context["by_context"]] == ["4", "8", "16", "32", "64"]


def hide(run: Path, *words: str, path: Path, processes: int = 1) -> list[dict[str, Any]]:
    log = path / "needle.log"
    words = (str(run), "--lengths", "100,161", "--depths", "3", "--output", str(path), *words)
    statuses = evaluated("needle", [*words], processes=processes, log=log)
    assert statuses == [0] * processes, log.read_text()
    cells: list[dict[str, Any]] = json.loads((path / "needle-step-2.json").read_text())["cells"]
    return cells


@pytest.fixture(scope="module")
def found(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return hide(run, path=tmp_path_factory.mktemp("found"))


def test_needles_are_told_by_length_and_depth(run: Path, tmp_path: Path) -> None:
    cells = hide(run, path=tmp_path)
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(a, b) for a in (100, 161) for b in (0, 0.5, 1)]
    assert all(cell["found"] == 0 and cell["log_probability"] < -3 for cell in cells), "two updates teach nothing"
    with Image.open(tmp_path / "needle-step-2.png") as image:
        assert image.size > (100, 100)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in board.Images("needle")] == [2]
    mean = sum(cell["log_probability"] for cell in cells[3:]) / 3
    assert board.Scalars("needle_log_probability/161")[0].value == pytest.approx(mean)
    assert "161" in (tmp_path / "needle.log").read_text()


def test_a_haystack_hides_the_number_and_asks_for_it(run: Path) -> None:
    data = DataSection(corpus=str(run.parent / "corpus"), cache_dir=run.parent / "prepared")
    tokenizer = ByteTokenizer()
    prepared = prepare(corpus_spec(data, "corpus"), tokenizer)
    source = NeedleDataset(PasskeySentences(tokenizer), prepared, [3, 7, 9], length=300, depths=3, trials=2)
    said = []
    for number in range(source.num_sequences):
        batch = BlendedDataset([source], seq_len=300).read([number])
        text, labels = tokenizer.decode(batch.tokens[0].tolist()), batch.labels[0]
        (at,) = (labels != IGNORE_INDEX).nonzero()[:1].flatten().tolist()
        answer = tokenizer.decode([token for token in labels.tolist() if token != IGNORE_INDEX])
        assert len(answer) == 5 and answer.isdigit()
        assert text.endswith(f"\nThe secret number is: {answer}"), "it is fed, and its last token asks for nothing"
        assert labels[at:-1].tolist() == batch.tokens[0][at + 1 :].tolist()
        hidden = [*f"\nThe secret number is: {answer}.\n".encode()]
        tokens = batch.tokens[0].tolist()
        (place,) = (at for at in range(300) if tokens[at : at + len(hidden)] == hidden)
        assert place == [0, 121, 242][number % 3]
        assert text.count(answer) == 2
        said.append((text.replace(f"\nThe secret number is: {answer}.\n", ""), answer))
    assert said[0] == said[1] == said[2] != said[3] == said[4] == said[5]
    assert said[0][1] != said[3][1]


@pytest.mark.parametrize(
    ("command", "words", "status", "said"),
    [
        (needle, [], 2, "one CHECKPOINT is needed, a run folder or its checkpoints/step-N; none is given"),
        (needle, ["a", "b"], 2, "2 are given: a b"),
        (perplexity, ["nowhere"], 2, "nowhere is no run folder and no checkpoint of one"),
        (perplexity, ["RUN", "--jsno", "x"], 2, "there is no option --jsno; did you mean --json?"),
        (perplexity, ["RUN", "--json"], 2, "--json needs a value"),
        (perplexity, ["RUN/checkpoints/step-9"], 2, "holds step-1, step-2"),
        (perplexity, ["RUN", "--data.corpsu=x"], 2, "did you mean corpus?"),
        (perplexity, ["RUN", "--training.seq_len=0"], 2, "must be at least 2"),
        (
            perplexity,
            ["RUN", "--parallelism.tp=2"],
            2,
            "needs 2 processes, but the world size is 1 (NGPU x NNODES, or torchrun's)",
        ),
        (perplexity, ["RUN", "--model.dim=32"], 78, "does not hold this model"),
        (perplexity, ["RUN", "--json", "/nowhere/x.json"], 78, "/nowhere/x.json cannot be written"),
        (needle, ["RUN", "--lengths", "12,x"], 2, "--lengths 12,x must be integers such as 1,2"),
        (needle, ["RUN", "--lengths", "40"], 2, "--lengths 40 leaves no text beside the"),
        (needle, ["RUN", "--depths", "0"], 2, "--depths 0 must be integers"),
        (needle, ["RUN", "--depths", "1,2"], 2, "must be one integer"),
        (needle, ["RUN", "--data.corpus=copy"], 2, 'source = "corpus" is "copy"'),
        (needle, ["RUN", "--data.corpus=/nowhere"], 2, "nor an existing file or folder"),
        (needle, ["--help"], 0, "--lengths N,..."),
    ],
)
def test_what_is_wrong_is_said(
    run: Path, capfd: pytest.CaptureFixture[str], command: Any, words: list[str], status: int, said: str
) -> None:
    words = [word.replace("RUN", str(run)) for word in words]
    assert command.command(words, command.USAGE, command.run) == status
    told = capfd.readouterr()
    assert said in told.err + told.out
    assert "Traceback" not in told.err


def test_a_picture_needs_pillow_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    grid = report.ScoreGrid(title="x", columns=["1"], rows=["0%"], values={("0%", "1"): (1.0, 0.0)})
    assert report.draw_grid(grid, tmp_path / "x.png") is None
    assert "pip install pillow" in caplog.text
