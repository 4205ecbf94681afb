"""The GPU benchmark without a GPU: its rehearsal gives every row, and what fails or takes too long gives one too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import begun_job, main, source_digest, supervise
from benchmarks.gpu_parts import VARIANTS, distance
from benchmarks.gpu_rows import Bench, Report, entries, is_right_when_wide, measure_attention
from benchmarks.gpu_steps import Packed, configured, seconds_of, with_length
from models import attention_op, kernels

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


@pytest.mark.slow
def test_a_rehearsal_has_a_row_for_every_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for part in ("1", "2"):
        command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--part", part, "--output", str(out)]
        done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("| part | model |") == (2 if part == "2" else 0), (
            "one header for rows of the same columns"
        )
    found = rows(out)
    assert [row["result"] for row in found if "failed" in str(row.get("result"))] == []
    beside = {row["variant"]: row["gradients"] for row in found if "variant" in row}
    assert list(beside) == [name for name in VARIANTS if name not in ("cudnn", "efficient")]
    assert {name for name, far in beside.items() if far == "bitwise the same"} >= {"inputs on the host", "tiles"}
    steps = [row for row in found if "s_step" in row]
    assert [row["seq_len"] for row in steps[:4]] == [64, 128, 256, 512], "8K and 32K are as long in a rehearsal"
    steps = steps[-len(POLICIES) :]
    assert [row["policy"] for row in steps] == POLICIES
    assert [row["loss"] for row in steps] == pytest.approx([steps[0]["loss"]] * len(steps), rel=1e-4)
    for row in steps:
        assert (row["seq_len"], row["attended"], row["n"], row["kernel"]) == (128, 64.5, 1, "cpu")
        assert min(row["s_step"], row["tok_s"], row["rss_gib"], row["predicted_gib"], row["predicted_k"]) > 0
        assert row["mfu"] is row["peak_gib"] is row["k"] is None, "a CPU has none"


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
