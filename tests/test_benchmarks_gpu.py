"""The GPU benchmark without a GPU: its rehearsal gives every row, and what fails or takes too long gives one too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_parts, gpu_product
from benchmarks.gpu import PARTS, begun_job, main, report_failed, source_digest, supervise
from benchmarks.gpu_parts import VARIANTS, distance
from benchmarks.gpu_rows import Bench, Report, entries, failed_rows, is_right_when_wide, measure_attention
from benchmarks.gpu_steps import Packed, configured, seconds_of, with_length
from models import attention_op, kernels
from tests.ranks import team
from tests.system.runs import become, free_port, train_rank
from trainer.plan.__main__ import main as plan

ROOT = Path(__file__).resolve().parents[1]
POLICIES = [
    "none",
    "full",
    "keep_attention",
    "keep_attention, inputs on the host",
    "keep_attention, inputs_and_attention on the host",
    "keep_attention, tiles of 512 MiB",
    "keep_attention, 2 head groups",
    "keep_attention, 4 head groups",
    "keep_attention, one input of 4",
    "keep_attention, inputs_and_attention on the host, one input of 4, 4 head groups, tiles of 1024 MiB",
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return bench_on(tmp_path / "rows.jsonl")


def bench_on(path: Path, *, run: str = "first", sources: str = "a") -> Bench:
    report = Report(path, run, sources=sources)
    return Bench(torch.device("cpu"), report, time.time() + 60, rehearse=True)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "1"]) == 0
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"


# ---- rehearsals


class Forked:
    """A command in a process that is forked here, where everything is imported: what the script asks of its children."""

    def __init__(self, words: Sequence[str], log: Path, *, is_apart: bool = False) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                if is_apart:
                    os.setsid()
                become(0, 1, free_port(), log)
                status = plan(words[3:]) if words[1:3] == ["-m", "trainer.plan"] else train_rank([*words[1:]])
            except BaseException:  # noqa: BLE001 - the log has it
                traceback.print_exc()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def wait(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, "the command did not end"
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def rehearse(arguments: Sequence[str], path: Path) -> str:
    """What a part of the script prints, in a process of its own that has imported torch.

    Blocks are traced and no code is generated; one file of the gpu tests is collected; the product's commands are forked.
    """
    gpu_parts.GPU_TESTS = ("tests/models/test_attention_op.py",)
    torch.compiler.set_stance("default", force_backend="aot_eager")
    patched: Any = gpu_product
    # Long enough for a signal to come before the end.
    patched.start, patched.STEPS, patched.KILLED_AFTER = Forked, 16, 4
    with redirect_stdout(StringIO()) as printed:
        main([*arguments, "--rehearse", "--worker=first", f"--deadline={time.time() + 540}", f"--output={path}"])
    return printed.getvalue()


def rehearsed(arguments: Sequence[str], path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Output and rows. Raises AssertionError for a row that failed or was left out."""
    with team([partial(rehearse, arguments, path)], fresh=True) as workers:
        outcome = workers.outcomes(540, failed=lambda outcome: not outcome.succeeded).get(0)
    assert outcome is not None, "the rehearsal did not end"
    assert outcome.succeeded, outcome.error
    assert failed_rows(path, "first") == []
    return outcome.value, [row for row in rows(path) if "job" not in row]


def test_truth_and_parity_are_rehearsed(tmp_path: Path) -> None:
    _, found = rehearsed(["--part=1"], tmp_path / "rows.jsonl")
    kernels_seen = [row["heads"] for row in found if "log-sum-exp" in row]
    assert kernels_seen == ["8:2 x 128", "8:2 x 64", "2:2 x 128"]
    beside = {row["variant"]: row["gradients"] for row in found if "variant" in row}
    assert list(beside) == [name for name in VARIANTS if name not in ("cudnn", "efficient")]
    assert {name for name, far in beside.items() if far == "bitwise the same"} >= {"inputs on the host", "tiles"}
    said = {row["what"]: row["result"] for row in found if "what" in row}
    assert said["auto on tensors of more than 131,072 elements"] == "right"
    assert re.search(r"\bskipped\b", said["gpu tests"]), "no test that needs a GPU was found"
    assert said["4 ranks of a ring against one"].startswith("output ")


def test_attention_and_the_ways_to_train_are_rehearsed(tmp_path: Path) -> None:
    printed, found = rehearsed(["--part=2"], tmp_path / "rows.jsonl")
    assert printed.count("| part | model |") == 2, "one header for rows of the same columns"
    assert len([row for row in found if "forward_tflops" in row]) == 4
    said = [row["what"] for row in found if "what" in row]
    assert len([what for what in said if what.startswith("forward and backward of 4 ranks")]) == 3
    assert len([what for what in said if what.startswith("head of 8B")]) == 3
    steps = [row for row in found if "s_step" in row]
    assert [row["seq_len"] for row in steps[:4]] == [64, 128, 256, 512], "8K and 32K are as long in a rehearsal"
    steps = steps[-len(POLICIES) :]
    assert [row["policy"] for row in steps] == POLICIES
    assert [row["loss"] for row in steps] == pytest.approx([steps[0]["loss"]] * len(steps), rel=1e-4)
    for row in steps:
        assert (row["seq_len"], row["attended"], row["n"], row["kernel"]) == (128, 64.5, 1, "cpu")
        assert min(row["s_step"], row["tok_s"], row["rss_gib"], row["predicted_gib"], row["predicted_k"]) > 0
        assert row["mfu"] is row["peak_gib"] is row["k"] is None, "a CPU has none"


def test_slices_and_another_library_are_rehearsed(tmp_path: Path) -> None:
    _, found = rehearsed(["--part=3"], tmp_path / "rows.jsonl")
    models = [row["model"] for row in found if "s_step" in row]
    assert models[:-1] == ["1b, 2 layers", "8b, 2 layers", "8b, 4 layers", "8b, 2 layers", "8b, 2 layers"]
    assert models[-1].startswith("1b-128, transformers ")
    assert any("PREDICTED from 2 and 4 layers" in row.get("what", "") for row in found)


def test_the_product_is_rehearsed(tmp_path: Path) -> None:
    _, found = rehearsed(["--part=4"], tmp_path / "rows.jsonl")
    said = {row["what"]: row["result"] for row in found if "what" in row}
    assert said["calibrated"].startswith("width_128")
    assert re.fullmatch(
        r"\d+ s, loss \d\.\d+ to \d\.\d+", said["16 steps of 1B through run_train.sh, with checkpoints"]
    )
    assert re.search(r"of (\d+) losses after step \d+, \1 are bitwise those", said["killed in step 4, started again"])
    assert re.search(r"trace.*MB", said["trace of a step"])


def test_the_record_and_the_longest_sequence_are_rehearsed(tmp_path: Path) -> None:
    _, found = rehearsed(["--part=5"], tmp_path / "record.jsonl")
    assert [row["seq_len"] for row in found if "s_step" in row] == [1536, 2048]
    _, found = rehearsed(["--longest=8b"], tmp_path / "longest.jsonl")
    said = {row["what"]: row["result"] for row in found if "what" in row}
    assert re.match(r"[1-9]\d* tokens", said["longest sequence of 8b by device memory, from truncated depth"])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_rehearsed_in_the_processes_that_it_starts(part: int, tmp_path: Path) -> None:
    """With generated code, all tests that need a GPU, and runs that are launched."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        f"--part={part}",
        "--rehearse",
        f"--output={tmp_path}/rows.jsonl",
    ]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "row",
    [
        {"what": "ring", "result": "failed: IndexError: index 0 is out of bounds"},
        {"what": "1M", "result": "out of memory: tried to allocate 2 GiB"},
        {"what": "1M", "result": "skipped: about 300 s, 20 s are left"},
        {"variant": "tiles", "gradients": "WRONG: not finite"},
    ],
)
def test_a_rehearsal_fails_with_the_row_that_does(
    row: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    Report(path, "earlier").row(**row)
    report = Report(path, "first")
    report.row(what="ring", result="right")
    assert report_failed(path, "first") == 0
    report.row(**row)
    capsys.readouterr()
    assert report_failed(path, "first") == 1
    assert [*row.values()][-1] in capsys.readouterr().err


def test_the_ranks_of_a_ring_agree_with_one_call(bench: Bench) -> None:
    assert gpu_parts.ring_parity(bench)
    (row,) = rows(bench.report.path)
    far = dict(part.split() for part in row["result"].split(", "))
    assert list(far) == ["output", "dq", "dk", "dv"]
    assert max(map(float, far.values())) < 0.01


def test_a_gradient_of_rounding_errors_counts_as_none() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    theirs = {"weight": ones, "bias of keys": zeros}
    assert distance({"weight": ones, "bias of keys": zeros + 1e-9}, theirs) == "1.0e-03 of a tensor's norm apart"
    assert distance({"weight": ones, "bias of keys": zeros + 1e-3}, theirs) == "1.0e+03 of a tensor's norm apart"
    assert distance({"bias of keys": zeros + 1e-9}, {"bias of keys": zeros}) == "WRONG: not finite"


def test_gpu_tests_that_fail_become_a_row_that_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "GPU_TESTS", ("no/such/test.py",))
    gpu_parts.gpu_tests(bench)
    (row,) = failed_rows(bench.report.path, "first")
    assert row["what"] == "gpu tests"


def test_losses_that_differ_after_a_kill_become_a_row_that_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"7": 2.0}, {"7": 2.0, "8": 1.5}])
    monkeypatch.setattr(gpu_product, "losses", lambda _: next(found))
    monkeypatch.setattr(gpu_product, "command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(gpu_product, "run_to_end", lambda *_: 3.0)
    expected = {"7": 2.0, "8": 1.25}
    assert (
        bench.attempt("killed", partial(gpu_product.resumed, bench, bench.report.path.parent / "run", expected)) is None
    )
    (row,) = failed_rows(bench.report.path, "first")
    assert "of 2 losses after step 0, 1 are bitwise" in row["result"]


# ---- rows


def test_what_fails_or_takes_too_long_becomes_a_row(bench: Bench) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB\nand more")

    assert bench.attempt("first", full) is None
    assert bench.attempt("second", lambda: [][1]) is None
    assert bench.attempt("third", lambda: 3, needs=1e6) is None
    assert bench.attempt("fourth", lambda: 4, needs=1) == 4
    found = [row["result"] for row in rows(bench.report.path) if "result" in row]
    assert found[:2] == ["out of memory: tried to allocate 2 GiB", "failed: IndexError: list index out of range"]
    assert found[2].startswith("skipped: about 1000000 s")


def test_rows_are_packed_with_documents_of_the_lengths_asked_for(bench: Bench) -> None:
    config = with_length(configured(bench, "8b", 1 << 16), 10)
    packed = Packed(config, [4, 100])
    short, whole = packed.read([0]), packed.read([5])
    assert short.boundaries.tolist() == [[0, 4, 8, 10]]
    assert (short.num_pairs, whole.num_pairs) == (23, 55)
    assert short.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert short.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2]]
    assert len(attention_op.document_blocks(short.boundaries, 1, 10).blocks) == 3


def test_a_prediction_counts_what_is_computed_again(bench: Bench) -> None:
    policies = ("none", "keep_attention", "full")
    configs = [configured(bench, "8b", 1 << 16, f"--memory.recompute {policy}") for policy in policies]
    none, keep, full = (seconds_of(bench, config, 8256) for config in configs)
    assert none < keep < full
    model, tokens = configs[0].model.build(), configs[0].training.seq_len
    # Queries, keys and values are projected once more, too.
    projected = 2 * tokens * 2 * model.dim * model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    assert full - keep == pytest.approx(1e4 * (4 * 2 * 64 * 8256 / 360e12 + projected / 650e12))


@pytest.mark.slow
def test_nan_is_told_and_a_kernel_that_gives_it_is_not_chosen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert distance({"a": good, "b": 2 * good}, {"a": good, "b": good}) == "1.0e+00 of a tensor's norm apart"
    for ours in ({"a": bad, "b": good}, {"a": good, "b": bad}):
        assert distance(ours, {"a": good, "b": good}) == "WRONG: not finite"
    forward, backward = kernels.DENSE_KERNELS["cpu"]

    def without_dq(*inputs: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = backward(*inputs)
        return dq * torch.nan, dk, dv

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (forward, without_dq))
    with pytest.raises(ValueError, match="auto: the last of 64 queries errs by nan"):
        measure_attention(bench, "auto", 32, 64, 4, 2)
    assert not is_right_when_wide(bench, "auto")
    assert bench.rates == {}


# ---- going on


def fail() -> int:
    raise RuntimeError("no")


def test_a_part_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bench = bench_on(path)
    assert bench.attempt("one", lambda: 3) == 3
    assert bench.attempt("none", lambda: None) is None
    assert bench.attempt("two", fail) is None
    with path.open("a") as file:
        file.write('{"job": "cut o')
    again = bench_on(path)
    assert again.attempt("one", fail) == 3, "measured before"
    assert again.attempt("none", fail) is None
    assert again.attempt("two", lambda: 4) is None, "failed in this run"
    later = bench_on(path, run="second")
    assert later.attempt("two", lambda: 4) == 4
    assert bench_on(path, run="third", sources="b").attempt("one", lambda: 5) == 5, "from other sources"
    found = [row["result"] for row in entries(path) if "result" in row]
    assert found == ["failed: RuntimeError: no", "measured before", "measured before", "failed before"]


WORKER = """
import os, sys, time
from pathlib import Path
import torch
from benchmarks import gpu_rows
gpu_rows.LONGEST_WAIT = 1
bench = gpu_rows.Bench(torch.device("cpu"), gpu_rows.Report(Path(sys.argv[1]), "run", sources="a"), time.time() + 60)
bench.attempt("crashes", lambda: os.kill(os.getpid(), 11))
bench.attempt("hangs", lambda: time.sleep(60))
bench.attempt("works", lambda: bench.report.row(what="works", result="yes"))
"""


@pytest.mark.slow
def test_a_job_that_crashes_or_hangs_becomes_a_row_and_the_next_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert supervise([sys.executable, "-c", WORKER, str(path)], path, "run") == 0
    found = [(row["what"], row["result"]) for row in entries(path) if "result" in row]
    assert found[0] == ("crashes", "failed: ended its process with status -11")
    assert ("hangs", "failed: ended its process with status -9") in found
    assert found[-1] == ("works", "yes")


def test_a_job_that_measured_another_first_is_still_the_one_that_has_begun(tmp_path: Path) -> None:
    bench, seen = bench_on(tmp_path / "rows.jsonl"), list[str | None]()

    def look() -> None:
        job = begun_job(bench.report.path, "first")
        seen.append(None if job is None else job["job"])

    def outer() -> None:
        bench.attempt("inner", look)
        look()

    bench.attempt("outer", outer)
    look()
    assert seen == ["inner", "outer", None]


def test_a_process_that_fails_outside_of_a_job_is_not_started_again(tmp_path: Path) -> None:
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "rows.jsonl", "run") == 3


def test_every_row_names_what_it_was_measured_with(tmp_path: Path) -> None:
    report = Report(tmp_path / "rows.jsonl", "run", commit="c", torch="2", sources=source_digest())
    report.row(what="x", result="y")
    (row,) = rows(report.path)
    assert row.keys() >= {"part", "run", "date", "clocks", "commit", "torch", "sources"}
    assert re.fullmatch("[0-9a-f]{8}", row["sources"])
