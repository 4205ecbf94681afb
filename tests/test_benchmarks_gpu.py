"""The GPU benchmark without a GPU: every kind of job gives rows, and the choice of jobs ends in
time by a clock of the test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_kernels, gpu_parity, gpu_product, gpu_rivals, measured, rival_step
from benchmarks.gpu import Process, Schedule, main, measure, run_all
from benchmarks.gpu_bench import Bench, Row
from benchmarks.gpu_jobs import Job, affordable, all_jobs, compilations, digest, next_job, unknown
from benchmarks.gpu_parity import VARIANTS, distance
from benchmarks.gpu_steps import Packed, StepCase
from models import attention_op, kernels
from tests.ranks import team
from tests.system.runs import become, free_port, train_rank
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.__main__ import main as plan
from trainer.plan.run_plan import plan_stage

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}
FIRST_DAY = min(measured.DAYS)


def bench_on(folder: Path, rows: list[Row]) -> Bench:
    return Bench(torch.device("cpu"), rows.append, folder, rehearse=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "1"]) == 0
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"


# ---- rehearsals


class Forked:
    """A command in a process that is forked here, where everything is imported: what jobs ask of
    their children.
    """

    def __init__(self, words: Sequence[str], log: Path, *, own_group: bool = False) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                if own_group:
                    os.setsid()
                become(0, 1, free_port(), log)
                status = (
                    plan(words[3:])
                    if words[1:3] == ["-m", "trainer.plan"]
                    else train_rank([*words[1:]])
                )
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


LEFT_OUT = {"torchtitan", "tests", "mesh"}
"""Kinds that are not rehearsed: torchtitan is not installed here, pytest is not run inside of a
test, and a process of tests starts no ranks.
"""


def rehearsed_jobs() -> list[Job]:
    """One of each kind, and those of a kind that do more than its first."""
    jobs = {job.kind: job for job in reversed(all_jobs()) if job.kind not in LEFT_OUT}
    more = [job for job in all_jobs() if job.name == "calibrate" or "documents of" in job.name]
    return [*jobs.values(), *more, *compilations([jobs["step"]])]


def rehearse(folder: Path) -> dict[str, list[Row]]:
    """Rows of a job of each kind, in this process: blocks are traced, no code is generated, and
    commands are forked.
    """
    # As in the processes of the command: dynamo and transformers warn.
    warnings.filterwarnings("ignore")
    torch.compiler.set_stance("default", force_backend="aot_eager")
    patched: Any = gpu_product
    # Long enough for a signal to come before the end.
    patched.start = Forked
    patched.STEPS = 12
    patched.KILLED_AFTER = 4
    vars(gpu_rivals)["answer_of"] = lambda asked: rival_step.STEPS_OF[asked["library"]](asked)
    found: dict[str, list[Row]] = {}
    for job in rehearsed_jobs():
        rows = found.setdefault(job.kind, [])
        failed = measure(job, bench_on(folder, rows))
        assert failed is None, (job.name, failed)
    return found


@pytest.mark.slow
def test_a_job_of_every_kind_is_rehearsed(tmp_path: Path) -> None:
    with team([partial(rehearse, tmp_path)], fresh=True) as workers:
        outcome = workers.outcomes(540, failed=lambda outcome: not outcome.succeeded).get(0)
    assert outcome is not None, "the rehearsal did not end"
    assert outcome.succeeded, outcome.error
    found: dict[str, list[Row]] = outcome.value
    assert found.keys() == {job.kind for job in all_jobs()} - LEFT_OUT | {"compile"}
    assert all(found.values()), "a job gave no row"

    assert [row["heads"] for row in found["errors"]] == ["8:2 x 128", "8:2 x 64", "2:2 x 128"]
    beside = {row["variant"]: row["gradients"] for row in found["parity"]}
    assert list(beside) == [name for name in VARIANTS if name not in gpu_parity.OF_CUDA]
    assert {name for name, far in beside.items() if far == "bitwise equal"} >= {
        "inputs on the host",
        "tiles",
    }
    results = {
        row["what"]: row["result"] for rows in found.values() for row in rows if "what" in row
    }
    assert results["flash on tensors of more than 131,072 elements"] == "right"
    assert results["4 ranks of a ring against one call"].startswith("output ")
    assert results["calibrated"].startswith("width_128")
    assert re.search(r"last loss \d\.\d+, trace of .* MB", results["12 steps with checkpoints"])
    assert re.search(r"; (\d+) of \1 losses after", results["killed in step 4, started again"])

    step, packed = found["step"]
    assert (packed["tokens"], packed["document"]) == (2048, 16384)
    assert (step["tokens"], step["n"], step["kernel"], step["head"]) == (64, 1, "cpu", "tied")
    assert (step["compile"], step["recompute"]) == (False, "none")
    assert step["mfu"] is step["peak_gib"] is None, "a CPU has none"
    off, on, ratio = found["pair"]
    assert (off["compile"], on["compile"]) == (False, True)
    assert off["loss"] == pytest.approx(on["loss"], rel=1e-3)
    assert float(ratio["result"]) == pytest.approx(on["s_step"] / off["s_step"], abs=1e-3)
    (theirs,) = found["transformers"]
    assert theirs["system"].startswith("transformers ")
    assert (theirs["tokens"], theirs["recompute"], theirs["head"]) == (64, "full", "tied")


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [
        "gpu tests",
        "errors of flash",
        "pair: --training.compile true",
        "transformers",
        "on one GPU",
    ],
)
def test_jobs_are_rehearsed_in_the_processes_that_the_command_starts(
    only: str, tmp_path: Path
) -> None:
    """With generated code, and another library in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--rehearse",
        f"--only={only}",
        f"--out={tmp_path}",
    ]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    again = subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=60
    )
    assert "state measured" not in again.stdout, "a row that is valid was measured again"


@pytest.mark.slow
def test_a_process_that_dies_ends_its_job(tmp_path: Path) -> None:
    worker = Process(tmp_path, rehearse=True)
    worker.begin(all_jobs()[0])
    os.kill(worker._process.pid or 0, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not (rows := worker.answers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rows == [{"state": "failed", "result": "its process ended with -9"}]
    worker.close()


# ---- what jobs measure


def test_what_fails_becomes_a_row(tmp_path: Path) -> None:
    def full(_: Bench) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB\nand more")

    def wrong(_: Bench) -> int:
        return [][1]

    bench = bench_on(tmp_path, [])
    failed = [measure(job("x", seconds=1, measure=work), bench) for work in (full, wrong)]
    assert failed == [
        {"state": "failed", "result": "out of memory: tried to allocate 2 GiB"},
        {"state": "failed", "result": "IndexError: list index out of range"},
    ]
    assert measure(job("x", seconds=1), bench) is None


def test_the_ranks_of_a_ring_agree_with_one_call(tmp_path: Path) -> None:
    rows: list[Row] = []
    gpu_kernels.ring_errors(bench_on(tmp_path, rows))
    far = dict(part.split() for part in rows[0]["result"].split(", "))
    assert list(far) == ["output", "dq", "dk", "dv"]
    assert max(map(float, far.values())) < 0.01


def test_a_ring_that_differs_from_one_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(*_: Any) -> tuple[Callable[[], list[torch.Tensor]], ...]:
        return (
            (lambda: [torch.ones(2)] * 4),
            list,
            (lambda: [torch.ones(2)] * 3 + [torch.ones(2) * 1.05]),
        )

    monkeypatch.setattr(gpu_kernels, "ring_job", differing)
    with pytest.raises(ValueError, match=r"dv 5\.0e-02"):
        gpu_kernels.ring_errors(bench_on(tmp_path, []))


def test_a_gradient_of_rounding_errors_counts_as_none() -> None:
    ones = torch.ones(4)
    zeros = torch.zeros(4)
    theirs = {"weight": ones, "bias of keys": zeros}
    assert distance({"weight": ones, "bias of keys": zeros + 1e-9}, theirs) == pytest.approx(1e-3)
    assert distance({"weight": ones, "bias of keys": zeros + 1e-3}, theirs) == pytest.approx(1e3)
    assert not distance({"bias of keys": zeros + 1e-9}, {"bias of keys": zeros}) < 1


def test_parity_fails_for_gradients_that_differ_or_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {
        "one": torch.ones(2),
        "far": torch.ones(2) * 1.1,
        "nan": torch.tensor([1.0, torch.nan]),
    }
    firsts = iter(seen.values())
    monkeypatch.setattr(
        gpu_parity, "VARIANTS", {"one": ("", ""), "far": ("one", ""), "nan": ("one", "")}
    )
    monkeypatch.setattr(gpu_parity, "first_step", lambda *_: (1.0, 1.0, {"weight": next(firsts)}))
    with pytest.raises(
        ValueError, match=r"^far: 1.0e-01 of a tensor's norm; nan: nan of a tensor's norm$"
    ):
        gpu_parity.parity(bench_on(tmp_path, []))


def test_a_kernel_whose_last_query_is_wrong_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = kernels.DENSE_KERNELS["cpu"]

    def without_dq(*inputs: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = backward(*inputs)
        return dq * torch.nan, dk, dv

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (forward, without_dq))
    with pytest.raises(ValueError, match="flash: the last of 64 queries errs by nan"):
        gpu_kernels.rates(bench_on(tmp_path, []), "flash", 32, 64)


def test_gpu_tests_that_fail_fail_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = subprocess.CompletedProcess([], 0, "...\n43 passed in 3 s\n", "")
    failed = subprocess.CompletedProcess(
        [], 1, "FAILED tests/models/test_x.py::test_y\n1 failed in 3 s\n", ""
    )
    ends = iter([passed, failed])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: next(ends))
    rows: list[Row] = []
    gpu_parity.gpu_tests(bench_on(tmp_path, rows))
    assert rows == [{"what": "gpu tests", "result": "43 passed in 3 s"}]
    with pytest.raises(
        RuntimeError, match=r"1 failed in 3 s / FAILED tests/models/test_x.py::test_y"
    ):
        gpu_parity.gpu_tests(bench_on(tmp_path, []))


def test_losses_that_differ_after_a_kill_fail_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{"5": 2.0}, {"5": 2.0, "6": 1.5}])
    monkeypatch.setattr(gpu_product, "losses", lambda _: next(found))
    monkeypatch.setattr(gpu_product, "command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(gpu_product, "run_to_end", lambda *_: 3.0)
    with pytest.raises(RuntimeError, match="1 of 2 losses after step 0 bitwise"):
        gpu_product.compare_after_kill(
            bench_on(tmp_path, []), tmp_path / "run", {"5": 2.0, "6": 1.25}
        )


def test_sequences_are_packed_with_documents_of_the_lengths_asked_for() -> None:
    config = StepCase("1.24B", 10).config(tiny=True)
    packed = Packed(config, [4, 100])
    short = packed.read([0])
    whole = packed.read([5])
    assert short.boundaries.tolist() == [[0, 4, 8, 10]]
    assert (short.num_pairs, whole.num_pairs) == (23, 55)
    assert short.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert short.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2]]
    assert len(attention_op.document_blocks(short.boundaries, 1, 10).blocks) == 3


def test_every_configuration_is_valid_and_every_source_exists() -> None:
    jobs = all_jobs()
    assert len({job.name for job in jobs}) == len(jobs), "rows are found by the names of jobs"
    for case in {
        job.measure.keywords["case"]
        for job in jobs
        if isinstance(job.measure, partial) and job.kind == "step"
    }:
        assert case.config().training.seq_len == case.tokens
    assert [
        pattern for job in jobs for pattern in job.sources if not list(ROOT.glob(pattern))
    ] == []


# ---- other libraries


def test_a_library_is_absent_unless_it_is_installed_or_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_rivals.is_absent("no_such_library")
    assert not gpu_rivals.is_absent("torch")
    (tmp_path / "no_such_library.py").touch()
    monkeypatch.setenv(gpu_rivals.INSTALLED, str(tmp_path))
    assert not gpu_rivals.is_absent("no_such_library")


def test_a_rival_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "rival_step.py").write_text("raise SystemExit('no such model')")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match="status 1: no such model"),
    ):
        patch.setattr(gpu_rivals, "ROOT", tmp_path)
        gpu_rivals.answer_of({})


# ---- which jobs


def job(name: str, seconds: float = 10, **more: Any) -> Job:
    return replace(Job(name, name, lambda _: None, seconds, sources=("train.py",)), **more)


def ended(job: Job, changes: Row | None = None) -> Row:
    return {
        "job": job.name,
        "state": "measured",
        "sources": digest(job.sources),
        **MACHINE,
        **(changes or {}),
    }


@pytest.mark.parametrize(
    ("changes", "is_measured_again"),
    [
        ({}, False),
        ({"commit": "another"}, False),
        ({"sources": "those of yesterday"}, True),
        ({"device": "NVIDIA H100 80GB HBM3"}, True),
        ({"torch": "2.13.0"}, True),
        ({"state": "failed"}, True),
        ({"job": "another"}, True),
    ],
)
def test_a_row_of_the_same_sources_and_machine_is_not_measured_again(
    changes: Row, *, is_measured_again: bool
) -> None:
    one = job("one")
    assert unknown([one], [ended(one, changes)], MACHINE) == [one] * is_measured_again


def test_a_row_of_a_rehearsal_is_no_measurement() -> None:
    one = job("one")
    assert unknown([one], [ended(one, gpu.machine(rehearse=True))], gpu.machine()) == [one]
    assert unknown([one], [ended(one, gpu.machine())], gpu.machine()) == []


def test_one_job_of_each_kind_comes_first_and_then_the_most_valuable() -> None:
    names = ("step 1", "step 2", "pair 1", "step 3", "pair 2")
    jobs = {name: job(name, kind=name.split()[0]) for name in names}
    assert [job.name for job in unknown(jobs.values(), [], MACHINE)] == [
        *("step 1", "pair 1"),
        *("step 2", "step 3", "pair 2"),
    ]
    rows = [ended(jobs["step 1"]), ended(jobs["pair 1"])]
    assert [job.name for job in unknown(jobs.values(), rows, MACHINE)] == [
        "step 2",
        "step 3",
        "pair 2",
    ]


def test_sources_that_change_make_a_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu_jobs.ROOT", tmp_path)
    (tmp_path / "kernel.py").write_text("a = 1")
    before = digest(("kernel*.py",))
    digest.cache_clear()
    (tmp_path / "kernel.py").write_text("a = 2")
    assert digest(("kernel*.py",)) != before
    digest.cache_clear()


def test_the_first_job_that_fits_is_next() -> None:
    long = job("long", 100)
    large = job("large", gib=80)
    fits = job("fits")
    assert next_job([long, large, fits], seconds=50, gib=40) is fits
    assert next_job([long, large, fits], seconds=5, gib=40) is None


def test_only_jobs_that_will_fit_are_affordable() -> None:
    jobs = [job("a", 30), job("long", 100), job("b", 20), job("c", 11)]
    assert [each.name for each in affordable(jobs, 60)] == ["a", "b"]


def test_only_what_is_compiled_is_compiled_before() -> None:
    found = {each.name for each in compilations(all_jobs())}
    assert "compile pair: --training.compile true" in found
    assert not any("--training.compile false" in name for name in found)


# ---- in time


@dataclass
class Time:
    now: float = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)


@dataclass
class Fake:
    """A worker whose jobs take what the test says, or their estimate."""

    clock: Time
    takes: dict[str, float]
    running: list[tuple[float, str]]
    job: Job | None = None
    begun: float = 0.0
    closed: bool = False

    def begin(self, job: Job) -> None:
        assert not self.closed
        self.running.append((self.clock.now, job.name))

    def answers(self) -> list[Row]:
        assert self.job is not None
        if self.clock.now < self.begun + self.takes.get(self.job.name, self.job.seconds):
            return []
        failed = self.job.name.startswith("failing")
        return [
            {"what": self.job.name},
            {"state": "failed" if failed else "measured", "result": ""},
        ]

    def close(self) -> None:
        self.closed = True


@dataclass
class Day:
    """A schedule on a clock of its own, and what it did."""

    takes: dict[str, float] = field(default_factory=dict)
    gib: float = 100
    clock: Time = field(default_factory=Time)
    begun: list[tuple[float, str]] = field(default_factory=list)
    workers: list[Fake] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    def open(self) -> Fake:
        self.workers.append(Fake(self.clock, self.takes, self.begun))
        return self.workers[-1]

    def report(self, job: Job, row: Row) -> None:
        if "state" in row:
            self.states[job.name] = row["state"]

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.open, self.report, self.gib, clock=self.clock)


def test_jobs_share_the_device_as_far_as_processes_and_memory_reach() -> None:
    day = Day(gib=50)
    jobs = [job("a", gib=20), job("b", gib=20), job("large", gib=40), job("c", gib=10)]
    assert day.schedule.run(jobs, deadline=100, lanes=4) == []
    assert day.begun == [(0, "a"), (0, "b"), (0, "c"), (10, "large")]
    day = Day()
    day.schedule.run([job(name) for name in "abc"], deadline=100, lanes=2)
    assert day.begun == [(0, "a"), (0, "b"), (10, "c")]
    assert len(day.workers) == 2, "a worker takes one job after another"


def test_a_job_that_does_not_fit_into_the_time_left_is_named_and_a_shorter_one_runs() -> None:
    day = Day()
    left = day.schedule.run(
        [job("a", 60), job("long", 50), job("short", 30)], deadline=100, lanes=1
    )
    assert [job.name for job in left] == ["long"]
    assert [name for _, name in day.begun] == ["a", "short"]


def test_all_ends_at_the_deadline() -> None:
    day = Day(takes={"slow": 1000})
    day.schedule.run([job("slow", 60), job("b", 5)], deadline=100, lanes=1)
    assert day.clock.now == 100
    assert day.states == {"slow": "failed"}


def test_a_job_that_hangs_or_fails_ends_with_its_process_and_the_next_has_a_new_one() -> None:
    day = Day(takes={"hangs": 1000})
    assert (
        day.schedule.run(
            [job("hangs", 10), job("failing", 10), job("c", 10)], deadline=1000, lanes=1
        )
        == []
    )
    assert day.states == {"hangs": "failed", "failing": "failed", "c": "measured"}
    assert day.begun[1][0] == job("hangs", 10).limit
    assert [worker.closed for worker in day.workers] == [True, True, False]


def test_checks_and_compilations_come_first_for_half_of_the_time_and_timings_are_alone() -> None:
    compiled = job("timed", 30, alone=True, compilation=lambda _: None)
    too_long = job("too long", 90, alone=True, compilation=lambda _: None)
    jobs = [
        compiled,
        job("check 1", 100),
        job("check 2", 45),
        job("second", 30, alone=True),
        too_long,
    ]
    day = Day(takes={"compile timed": 20})
    left = run_all(day.schedule, jobs, deadline=200)
    assert day.begun == [
        (0, "check 1"),
        (0, "check 2"),
        (0, "compile timed"),
        (100, "timed"),
        (130, "second"),
    ]
    assert left == [too_long], "and it was not compiled"
    day = Day()
    assert (
        run_all(day.schedule, [job("check", 101), job("timed", 30, alone=True)], deadline=200)
        == []
    )
    assert day.begun == [(0, "timed"), (30, "check")], (
        "a check that takes longer than half waits for the timings"
    )


def test_four_minutes_touch_every_kind_of_job_and_seven_more_measure_what_is_left() -> None:
    """On the 140 GiB of an H200, if every job takes its estimate."""
    jobs = {job.name: job for job in all_jobs()}
    first = Day(gib=gpu.FREE * 140)
    run_all(
        first.schedule, unknown(jobs.values(), [], MACHINE), deadline=4 * 60 - gpu.PAGE_SECONDS
    )
    touched = [name for _, name in first.begun if name in jobs]
    assert {jobs[name].kind for name in touched} == {job.kind for job in jobs.values()}
    second = Day(gib=gpu.FREE * 140)
    rows = [ended(jobs[name]) for name in touched]
    left = run_all(
        second.schedule, unknown(jobs.values(), rows, MACHINE), deadline=7 * 60 - gpu.PAGE_SECONDS
    )
    assert {job.kind for job in left} <= {
        "step",
        "machine",
        "mesh",
        "torchtitan",
        "transformers",
    }, "the last and the longest"
    assert not {job.name for job in jobs.values() if not job.alone} & {job.name for job in left}


# ---- rows and pages


def test_rows_are_on_disk_as_they_come_and_say_what_they_were_measured_with(
    tmp_path: Path,
) -> None:
    report = gpu.Report(tmp_path / "rows.jsonl", MACHINE | {"commit": "c"})
    report(job("one"), {"s_step": 0.5})
    with report.path.open("a") as file:
        file.write('{"job": "cut o')
    (row,) = measured.read_rows(report.path)
    assert row.pop("date").startswith("20")
    assert row == {
        "job": "one",
        "s_step": 0.5,
        "sources": digest(("train.py",)),
        "commit": "c",
        **MACHINE,
    }
    assert measured.read_rows(tmp_path / "none.jsonl") == []


def test_the_page_has_measured_predicted_rival_and_ratio() -> None:
    # Each step takes a trace.
    rows = [row for row in measured.read_rows(FIRST_DAY) if "8K" in str(row["job"])]
    (line,) = (
        line
        for line in measured.page(rows, ["a long one"]).splitlines()
        if "8K, --memory.recompute none" in line
    )
    ours = next(row for row in rows if row["job"] == line.split(" | ")[0].removeprefix("| "))
    prediction = plan_stage(measured.case(ours).config(), 1, load_device("h200"))
    assert ours["kernel"] == prediction.config.training.attention == "cudnn"
    peak = prediction.peak_memory.device_bytes / GIB
    assert line.split(" | ")[1:] == [
        "0.1845 s, 40.5 %, 26.2 GiB",
        f"{prediction.step_seconds:.4g} s, {100 * prediction.mfu:.1f} %, {peak:.1f} GiB",
        "torchtitan, 1.24B, 8K, none, compiled: 0.1632 s, 45.8 %, 32.9 GiB",
        "0.88 |",
    ]


def test_the_page_says_what_failed_and_what_did_not_run() -> None:
    rows: list[Row] = [MACHINE | {"job": "one", "state": "failed", "result": "out of memory"}]
    rows.append(
        MACHINE
        | {"job": "rate", "kernel": "flash", "forward_tflops": 351.619, "clocks": "1980 MHz"}
    )
    text = measured.page(rows, ["another"])
    assert "- rate: kernel flash, forward_tflops 351.6\n" in text
    assert "- one: FAILED: out of memory" in text
    assert "FAILED" not in measured.page([*rows, rows[0] | {"state": "measured"}], []), (
        "it went well later"
    )
    assert "- did not run: another" in text


def test_packed_documents_are_not_compared_with_one_document() -> None:
    packed = {
        "model": "1.24B",
        "tokens": 32768,
        "document": 4096,
        "s_step": 1.0,
        "options": "",
        **MACHINE,
    }
    rival = {"model": "1.24B", "tokens": 32768, "s_step": 1.0, "system": "another", **MACHINE}
    assert measured.planned(packed) is None
    assert measured.fastest_rival(packed, [rival]) is None
    assert measured.fastest_rival(packed | {"document": None}, [rival]) is rival
    assert measured.planned(rival) is None


@pytest.mark.parametrize("name", measured.BLOCKS)
def test_tables_of_measured_rows_are_those_that_the_script_makes(name: str) -> None:
    assert measured.regenerated(name) == (ROOT / name).read_text()


@pytest.mark.parametrize("day", measured.DAYS, ids=lambda day: day.stem)
def test_measured_rows_are_of_one_card_and_say_when_and_with_what(day: Path) -> None:
    rows = measured.read_rows(day)
    assert {(row["device"], row["torch"]) for row in rows} == {("NVIDIA H200", "2.11.0+cu130")}
    assert {row["date"][:10] for row in rows} == {day.stem.removesuffix("-h200")}
    commits = {"e39bdbc", "cfe3e14", "45f98b9", "b539190", "0d7a383", "9a253b3"}
    assert {row.get("commit") for row in rows if "system" not in row} <= commits
    for row in measured.steps(rows):
        assert row.keys() >= {"recompute", "compile", "head", "peak_gib"}, (
            "what differs between libraries"
        )
    assert len(day.read_text()) < 25_000


def test_the_newest_of_rows_that_are_alike_counts_and_of_one_day_that_with_the_fewest_options() -> (
    None
):
    def row(seconds: float, day: str, options: str = "") -> Row:
        return {"tokens": 1, "s_step": seconds, "date": f"2026-01-0{day}T00", "options": options}

    rows = [row(1, "1"), row(2, "2", "--a b"), row(3, "2"), {**row(4, "1"), "tokens": 2}]
    assert sorted(each["s_step"] for each in measured.newest(rows, "tokens")) == [3, 4]


def test_other_libraries_mfu_counts_the_same_flops() -> None:
    rows = [
        row for row in measured.steps(measured.read_rows(FIRST_DAY)) if measured.is_beside(row)
    ]
    theirs = next(row for row in rows if row.get("system", "").startswith("transformers"))
    assert measured.mfu(theirs | {"mfu": None}) == pytest.approx(theirs["mfu"], rel=1e-12)
