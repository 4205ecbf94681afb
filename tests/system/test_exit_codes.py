"""Exit codes, and which runs may continue."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.system.runs import (
    checkpoints,
    end,
    fork,
    forked,
    launch,
    launched,
    lines,
    steps,
    wait_for,
    workers,
    write_run,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.toml`, its corpus, and a finished run in `run`."""
    root = tmp_path_factory.mktemp("finished")
    assert forked(write_run(root), root / "run", "--training.steps", "3").statuses == [0]
    return root


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished / "run", tmp_path / "moved"))


def end_and_workers(launcher: subprocess.Popen[str]) -> tuple[int, set[int]]:
    """The exit status of the launcher, and all workers that it ever had."""
    seen: set[int] = set()
    while (status := launcher.poll()) is None:
        seen.update(workers(launcher.pid))
        time.sleep(0.005)
    return status, seen


# ---- through the launcher


@pytest.mark.ranks
def test_a_finished_run_starts_no_worker(finished: Path, copied: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    status, seen = end_and_workers(
        launch(finished / "run.toml", copied, "--training.steps", "3", processes=2)
    )
    said = copied.with_suffix(".log").read_text()
    assert status == 0, said
    assert said.count("already done") == 1
    assert (
        f"{copied}/checkpoints/step-3 is at step 3 of 3. To continue, raise --training.steps"
        in said
    )
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before
    assert seen == set()


def test_a_bad_configuration_exits_with_2_before_any_worker(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launcher = launch(
        finished / "run.toml",
        folder,
        "--parallelism.dp_shard",
        "3",
        "--model.num_heads",
        "3",
        processes=2,
    )
    assert end_and_workers(launcher) == (2, set())
    assert folder.with_suffix(".log").read_text().count("error: ") == 2
    assert not folder.exists()


@pytest.mark.ranks
def test_the_launcher_exits_with_78_on_a_data_error(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = launched(config, tmp_path / "run", "--data.corpus", str(empty), processes=2)
    assert done.statuses == [78]
    assert f'error: data.corpus = "{empty}": no text file' in done.said
    assert "Traceback" not in done.said


# ---- decided by workers


def test_raising_steps_resumes(finished: Path, copied: Path) -> None:
    done = forked(finished / "run.toml", copied, "--training.steps", "5")
    assert done.statuses == [0]
    assert "continuing with step 4, sequence 18" in done.said
    assert steps(copied) == [1, 2, 3, 4, 5]
    assert checkpoints(copied) == ["step-3", "step-5"]


def test_lowering_steps_below_the_checkpoint_is_finished(finished: Path, copied: Path) -> None:
    done = forked(finished / "run.toml", copied, "--training.steps", "2")
    assert done.statuses == [0]
    assert "is at step 3 of 2" in done.said
    assert steps(copied) == [1, 2, 3]


CHANGES = {
    "model": (
        ("--model.dim", "32", "--model.tie_embeddings", "true"),
        ["model.dim was 64 and is now 32"],
    ),
    "data": (("--data.packing", "concat"), ['data.packing was "best_fit" and is now "concat"']),
    "mask": (("--data.mask", "none"), ['data.mask was "document" and is now "none"']),
    "seed": (("--training.seed", "1"), ["training.seed was 0 and is now 1"]),
    "length": (("--training.seq_len", "32"), ["training.seq_len was 64 and is now 32"]),
}


@pytest.mark.parametrize("options,messages", CHANGES.values(), ids=list(CHANGES))
def test_a_changed_run_identity_is_rejected_with_its_differences(
    finished: Path, copied: Path, options: tuple[str, ...], messages: list[str]
) -> None:
    before = (copied / "metrics.jsonl").read_bytes()
    done = forked(finished / "run.toml", copied, "--training.steps", "5", *options)
    assert done.statuses == [78]
    assert f"error: {copied}/checkpoints/step-3 belongs to another run:\n  " in done.said
    assert all(f"  {line}\n" in done.said for line in messages)
    assert done.said.count(" was ") == len(options) // 2
    assert "Traceback" not in done.said
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert checkpoints(copied) == ["step-3"]


def test_a_changed_corpus_is_rejected(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    assert forked(config, folder, "--training.steps", "3").statuses == [0]
    (tmp_path / "corpus" / "07.txt").write_text("not what it was\n")
    done = forked(config, folder, "--training.steps", "5")
    assert done.statuses == [78]
    assert f"error: {folder}/checkpoints/step-3 was trained on other data: corpus was" in done.said
    assert steps(folder) == [1, 2, 3]


def test_another_weight_dtype_is_rejected_and_another_compute_dtype_is_not(
    finished: Path, copied: Path
) -> None:
    done = forked(
        finished / "run.toml", copied, "--training.steps", "5", "--training.dtype", "float64"
    )
    assert done.statuses == [78]
    assert "does not match the model: 63 tensors differ" in done.said
    assert (
        "model.blocks.0.attention.k_proj.weight is ((32, 64), torch.float32) in the checkpoint"
        in done.said
    )
    assert steps(copied) == [1, 2, 3]
    assert forked(
        finished / "run.toml", copied, "--training.steps", "5", "--training.dtype", "bfloat16"
    ).statuses == [0]


@pytest.mark.ranks
def test_settings_outside_the_run_identity_may_change(finished: Path, copied: Path) -> None:
    how = (
        "--training.micro_batch_size",
        "3",
        "--parallelism.dp_replicate",
        "2",
        "--memory.recompute",
        "full",
    )
    what = (
        "--metrics.log_interval",
        "2",
        "--checkpoint.keep",
        "1",
        "--job.name",
        "other",
        "--optimizer.lr",
        "1e-3",
    )
    done = forked(finished / "run.toml", copied, "--training.steps", "7", *how, *what, processes=2)
    assert done.statuses == [0, 0], done.said
    assert steps(copied) == [1, 2, 3, 4, 6, 7], "the first of this launch, every second, the last"
    assert checkpoints(copied) == ["step-3", "step-7"], "the resumed one and the newest"


def test_too_small_a_vocabulary_exits_with_2(finished: Path, tmp_path: Path) -> None:
    done = forked(finished / "run.toml", tmp_path / "run", "--model.vocab_size", "200")
    assert done.statuses == [2]
    assert "error: model.vocab_size = 200 must be at least 264" in done.said


def test_a_checkpoint_without_its_state_exits_with_78(finished: Path, copied: Path) -> None:
    (copied / "checkpoints" / "step-3" / "state.json").write_text('{"step": 3, "tra')
    done = forked(finished / "run.toml", copied, "--training.steps", "5")
    assert done.statuses == [78]
    assert (
        f"error: no checkpoint in {copied}/checkpoints is intact:\n  step-3: state.json has "
        in done.said
    )


def test_a_bad_file_is_skipped_unless_bad_files_is_error(finished: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    (tmp_path / "corpus" / "latin.txt").write_bytes(b"caf\xe9 au lait\n")
    done = forked(config, folder, "--training.steps", "2")
    assert done.statuses == [0]
    assert "skipped latin.txt: not UTF-8 text: byte 0xe9 at offset 3" in done.said
    assert steps(folder) == [1, 2]
    refused = forked(config, tmp_path / "refused", "--data.bad_files", "error")
    assert refused.statuses == [78]
    assert "latin.txt" in refused.said
    # The bad file is not part of the data.
    assert forked(finished / "run.toml", tmp_path / "other", "--training.steps", "2").statuses == [
        0
    ]
    clean, dirty = (lines(tmp_path / name / "metrics.jsonl") for name in ("other", "run"))
    assert [line["loss"] for line in clean] == [line["loss"] for line in dirty]


# ---- differences between ranks


@pytest.mark.ranks
def test_ranks_with_different_configurations_exit_with_2(finished: Path, tmp_path: Path) -> None:
    config = finished / "run.toml"
    folder = tmp_path / "run"
    done = forked(
        config, folder, processes=2, of_rank={1: ("--training.seed", "1", "--optimizer.lr", "0.5")}
    )
    assert done.statuses == [2, 2]
    assert "error: training.seed is 0 on rank 0 and 1 on rank 1" in done.said
    assert "error: optimizer.lr is 0.01 on rank 0 and 0.5 on rank 1" in done.said
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.ranks
def test_ranks_with_different_data_exit_with_2(finished: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path)
    (tmp_path / "corpus" / "00.txt").write_text("other words")
    of_rank = {
        1: (
            "--data.corpus",
            str(tmp_path / "corpus"),
            "--data.cache_dir",
            str(tmp_path / "prepared"),
        )
    }
    done = forked(finished / "run.toml", tmp_path / "run", processes=2, of_rank=of_rank)
    assert other.exists()
    assert done.statuses == [2, 2]
    assert "error: fingerprint of corpus is " in done.said


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_rank_that_reads_damaged_tokens_names_the_file(tmp_path: Path, processes: int) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    assert forked(config, folder, "--training.steps", "1").statuses == [0]
    (shard,) = (tmp_path / "prepared").glob("*/shard-00000.bin")
    content = bytearray(shard.read_bytes())
    content[1::2] = b"\xff" * len(content[1::2])  # Every token is outside the vocabulary.
    shard.write_bytes(content)
    done = forked(config, folder, "--training.steps", "3", processes=processes)
    assert 78 in done.statuses
    assert "error: [rank " in done.said
    assert str(shard) in done.said
    assert "Traceback" not in done.said


@pytest.mark.parametrize("damage", ["cut", "gone", "metadata"])
def test_an_unreadable_checkpoint_exits_with_78(finished: Path, copied: Path, damage: str) -> None:
    checkpoint = copied / "checkpoints" / "step-3"
    data = checkpoint / (
        "" if damage == "gone" else ".metadata" if damage == "metadata" else "__0_0.distcp"
    )
    if damage == "gone":
        (checkpoint / "__0_0.distcp").unlink()
    else:
        data.write_bytes(data.read_bytes()[:100])
    done = forked(finished / "run.toml", copied, "--training.steps", "5")
    assert done.statuses == [78]
    assert f"error: no checkpoint in {copied}/checkpoints is intact:\n  bad-step-3-" in done.said
    assert f": {'.metadata' if damage == 'metadata' else '__0_0.distcp'} " in done.said
    assert "Traceback" not in done.said
    again = forked(finished / "run.toml", copied, "--training.steps", "5")
    assert (again.statuses, "Traceback" in again.said) == ([78], False)
    assert f"error: no checkpoint in {copied}/checkpoints is intact:\n  bad-step-3-" in again.said


@pytest.mark.ranks
def test_a_second_run_in_the_folder_is_rejected_and_the_first_continues(
    finished: Path, tmp_path: Path
) -> None:
    config = finished / "run.toml"
    folder = tmp_path / "run"
    (first,) = fork(
        config,
        folder,
        "--training.steps",
        "100000",
        "--checkpoint.interval",
        "100000",
        processes=1,
    )
    try:
        assert wait_for(lambda: (folder / "metrics.jsonl").exists())
        (folder / "REQUEUE").touch()
        predicted = (folder / "prediction.json").stat()
        done = forked(config, folder)
        assert done.statuses == [2]
        assert (folder / "REQUEUE").exists(), "markers belong to the first run"
        assert (folder / "prediction.json").stat().st_ino == predicted.st_ino, (
            "and so does the prediction"
        )
        assert not (folder / "STOP").exists()
        assert f"error: job.output_dir = {folder} is in use by process " in done.said
        assert first.is_alive()
    finally:
        end([first])
    assert forked(config, folder, "--training.steps", "1").statuses == [0]
    assert not (folder / "REQUEUE").exists()
