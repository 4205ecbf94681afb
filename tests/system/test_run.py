"""The run folder, the last log line, and the loss of whole runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli

from tests.system.runs import (
    Done,
    checkpoints,
    digests,
    forked,
    launched,
    lines,
    metrics,
    state,
    steps,
    tensors,
    write_run,
)


@pytest.fixture(scope="module")
def launched_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A launched run of two ranks with TensorBoard."""
    root = tmp_path_factory.mktemp("launched")
    return root / "run", launched(
        write_run(root), root / "run", "--metrics.tensorboard", "true", processes=2
    )


@pytest.mark.ranks
def test_the_last_log_line_has_the_result_and_the_next_command(
    launched_run: tuple[Path, Done],
) -> None:
    folder, done = launched_run
    assert done.statuses == [0]
    last = done.said.splitlines()[-1]
    assert "done: all 6 steps; loss 5." in last
    assert (
        f"Results in {folder} (newest checkpoint {folder}/checkpoints/step-6, metrics.jsonl)"
        in last
    )
    assert "To continue, run the same command with a higher --training.steps" in last
    assert "Traceback" not in done.said
    assert "Warning" not in done.said
    assert re.findall(" step +([0-9]/6)", done.said) == [f"{n}/6" for n in range(1, 7)]


@pytest.mark.ranks
def test_the_run_folder_has_the_files_of_the_contract(launched_run: tuple[Path, Done]) -> None:
    folder, _ = launched_run
    listed = {
        "config.toml",
        "metrics.jsonl",
        "events.jsonl",
        "tensorboard",
        "checkpoints",
        "logs",
        "prediction.json",
        "DONE",
    }
    assert {path.name for path in folder.iterdir()} == listed
    assert checkpoints(folder) == ["step-3", "step-6"]
    assert [
        path.name.startswith("events.out") for path in (folder / "tensorboard" / "run").iterdir()
    ] == [True]
    assert {path.name for path in (folder / "logs").iterdir()} - {"rank-1.log"} == {
        "hang",
        "rank-0.log",
    }
    assert "done: all 6 steps" in (folder / "logs" / "rank-0.log").read_text()
    events = [line["event"] for line in lines(folder / "events.jsonl")]
    assert events == ["start", "checkpoint", "checkpoint", "end"]
    saved = state(folder / "checkpoints" / "step-6")
    assert (saved["step"], saved["trainer"]["next_sequence"], saved["degrees"]["dp_shard"]) == (
        6,
        36,
        2,
    )
    assert saved["trainer"]["tokens"] == metrics(folder, "tokens")[-1][0]


@pytest.mark.ranks
def test_the_written_configuration_reproduces_the_run(
    launched_run: tuple[Path, Done], tmp_path: Path
) -> None:
    folder, _ = launched_run
    again = tmp_path / "again"
    assert forked(folder / "config.toml", again, processes=2).statuses == [0, 0]
    exact = ("step", "tokens", "loss", "grad_norm", "lr")
    assert metrics(again, *exact) == metrics(folder, *exact)
    assert digests(again / "checkpoints" / "step-6") == digests(folder / "checkpoints" / "step-6")
    ours, theirs = (tomli.loads((path / "config.toml").read_text()) for path in (again, folder))
    assert ours.pop("job")["output_dir"] == str(again)
    assert theirs.pop("job")["output_dir"] == str(folder)
    assert ours == theirs


@pytest.mark.ranks
def test_the_loss_falls(launched_run: tuple[Path, Done]) -> None:
    losses = [loss for (loss,) in metrics(launched_run[0], "loss")]
    assert 5.3 < losses[0] < 5.9, "loss of a uniform prediction: log(264) = 5.58"
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_the_shipped_debug_run_learns(tmp_path: Path) -> None:
    options = (
        "--training.steps",
        "8",
        "--data.cache_dir",
        str(tmp_path / "prepared"),
        "--training.seq_len",
        "256",
    )
    done = forked(Path("debug.toml"), tmp_path / "run", *options, seconds=300)
    assert done.statuses == [0], done.said
    losses = [loss for (loss,) in metrics(tmp_path / "run", "loss")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
@pytest.mark.ranks
def test_the_shipped_run_of_a_million_tokens_needs_less_than_4_gib(tmp_path: Path) -> None:
    options = (
        "--training.steps",
        "1",
        "--data.cache_dir",
        str(tmp_path / "prepared"),
        "--checkpoint.enabled",
        "false",
    )
    done = forked(Path("debug_1m.toml"), tmp_path / "run", *options, processes=2, seconds=1200)
    assert done.statuses == [0, 0], done.said
    ((tokens, loss, rss),) = metrics(tmp_path / "run", "tokens", "loss", "rss_gib")
    assert 0.98 * (1 << 20) < tokens <= 1 << 20, "the rest is padding"
    assert 5.3 < loss < 5.9, "loss of a uniform prediction: log(264) = 5.58"
    assert rss < 4


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_with_a_non_finite_gradient_is_skipped_and_logged(
    tmp_path: Path, processes: int
) -> None:
    folder = tmp_path / "run"
    # After one step at this learning rate, matmuls overflow float32.
    rate = ("--optimizer.lr", "1e30", "--schedule.kind", "constant")
    options = (
        "--checkpoint.interval",
        "1",
        "--training.steps",
        "3",
        "--metrics.log_interval",
        "100",
    )
    done = forked(write_run(tmp_path), folder, *rate, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    first, *skipped = lines(folder / "metrics.jsonl")
    assert (first["step"], "skipped" in first) == (1, False)
    assert [(line["step"], line["skipped"]) for line in skipped] == [(2, True), (3, True)]
    assert [line["grad_norm"] for line in skipped] == [None, None]
    assert [
        line["step"] for line in lines(folder / "events.jsonl") if line["event"] == "skipped"
    ] == [2, 3]
    assert done.said.count("step 2 skipped: non-finite gradient") == 1
    assert state(folder / "checkpoints" / "step-3")["trainer"]["skipped"] == 2
    assert digests(folder / "checkpoints" / "step-1") == digests(folder / "checkpoints" / "step-3")
    assert all(
        tensor.isfinite().all() for tensor in tensors(folder / "checkpoints" / "step-3").values()
    )
    assert steps(folder) == [1, 2, 3]
