"""How long a run takes to recover from a fault, and its goodput with one fault a minute.

    python -m benchmarks.faults recovery [--ranks 2] [--rounds 1] [--only TEXT]
    python -m benchmarks.faults goodput [--ranks 2] [--minutes 4] [--every 60] [--only TEXT]

A small model on CPU processes, started as a user starts it, with a checkpoint every ten steps.
recovery: seconds from the fault to the first step after the restart, and to the first step that
the run had not reached before. What a start costs is mostly importing torch, on cores that all
ranks share; on a cluster loading a checkpoint comes to it. goodput: a rank is killed at a fixed
interval, with checkpoints on disk only and with in-memory ones. Goodput is the time of the steps
that counted over the time since the first model was built. "Less starts": less what as many starts
cost without any checkpoint, from the new processes to the start of their first step, the median of
several.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.data import machine, say
from trainer.storage.manifest import read_state

CONFIG = """\
[model]
family = "llama3"
size = "debug"
num_layers = 4
dim = 128
num_heads = 8
num_kv_heads = 4
head_dim = 16
ffn_dim = 384
[training]
seq_len = 512
global_batch_size = 4
steps = 1_000_000
[checkpoint]
interval = 10
[metrics]
log_interval = 1
tensorboard = false
[distributed]
restart_seconds = 1
hang_minutes = 0.1
"""


class Run:
    """A run and the process that started it."""

    def __init__(self, root: Path, ranks: int, *options: str) -> None:
        self.folder = root / "run"
        self.ranks = ranks
        self.options = options
        self.config = root / "run.toml"
        self.config.write_text(CONFIG)
        self.log = (root / "log").open("a")
        self.launcher = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "trainer.launch", "--config", str(self.config)]
        command += [
            "--job.output_dir",
            str(self.folder),
            "--data.cache_dir",
            str(self.folder.parent / "prepared"),
        ]
        command += self.options
        environment = os.environ | {
            "NGPU": str(self.ranks),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        return subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def lines(self, name: str) -> list[dict[str, object]]:
        try:
            content = (self.folder / name).read_bytes()
        except OSError:
            return []
        return [
            json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")
        ]

    def step(self) -> int:
        return max((int(str(line["step"])) for line in self.lines("metrics.jsonl")), default=0)

    def starts(self) -> int:
        return sum(line["event"] == "start" for line in self.lines("events.jsonl"))

    def workers(self) -> list[int]:
        path = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def wait_for_steps(self, steps: int = 25, *, saved: bool = True) -> None:
        """Wait for that many steps and, if `saved`, a checkpoint."""
        wait_for(
            lambda: (
                self.step() >= steps
                and (not saved or any((self.folder / "checkpoints").glob("step-*")))
            )
        )

    def end(self) -> None:
        """Gently: a run that is done leaves nothing in memory."""
        self.launcher.terminate()
        self.launcher.wait()
        self.log.close()


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not advance")
        time.sleep(0.02)


# ---- faults: each leaves a run that recovers, or that the same command started again


def kill_a_rank(run: Run) -> None:
    os.kill(run.workers()[-1], signal.SIGKILL)


def stop_a_rank(run: Run) -> None:
    os.kill(run.workers()[-1], signal.SIGSTOP)


def kill_everything(run: Run) -> None:
    run.launcher.kill()
    run.launcher.wait()
    run.launcher = run.launch()


def ask_and_start_again(run: Run) -> None:
    run.launcher.send_signal(signal.SIGTERM)
    run.launcher.wait()
    run.launcher = run.launch()


def damage_and_kill(run: Run) -> None:
    newest = max(
        (run.folder / "checkpoints").glob("step-*"),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
    path = next(newest.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    kill_everything(run)


FAULTS: dict[str, Callable[[Run], None]] = {
    "kill -9 of a rank": kill_a_rank,
    "kill -9 of the launcher, started again": kill_everything,
    "SIGTERM, started again": ask_and_start_again,
    "SIGSTOP of a rank (patience 6 s, or ten of the slowest step)": stop_a_rank,
    "a bit of the newest checkpoint flipped, then kill -9, started again": damage_and_kill,
}


def measure_recovery(ranks: int, rounds: int, only: str) -> None:
    say(f"{machine()}; {ranks} ranks, a checkpoint every 10 steps; worst of {rounds}\n")
    say("| fault | seconds to the next step | to the first new step | steps repeated |")
    say("|---|---|---|---|")
    for name, fault in ((name, fault) for name, fault in FAULTS.items() if only in name):
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as root:
                run = Run(Path(root), ranks)
                run.wait_for_steps()
                found.append(recovery(run, fault))
                run.end()
        worst = [max(column) for column in zip(*found, strict=True)]
        say(f"| {name} | {worst[0]:.1f} | {worst[1]:.1f} | {worst[2]:.0f} |")


def recovery(run: Run, fault: Callable[[Run], None]) -> tuple[float, float, float]:
    starts = run.starts()
    began = time.monotonic()
    at = run.step()
    fault(run)
    wait_for(lambda: run.starts() > starts)
    resumed = resumed_step(run)
    wait_for(lambda: run.step() > resumed)
    first = time.monotonic() - began
    wait_for(lambda: run.step() > at)
    return first, time.monotonic() - began, max(0, at - resumed)


def measure_goodput(ranks: int, minutes: float, every: float, only: str) -> None:
    start = start_seconds(ranks)
    say(
        f"{machine()}; {ranks} ranks, kill -9 of one every {every:.0f} s; a start without a checkpoint takes {start:.2f} s\n"
    )
    say(
        "| checkpoints | kill -9 of a rank every | faults | steps | mean step, ms | goodput | less starts |"
    )
    say("|---|---|---|---|---|---|---|")
    for name, options in (
        (name, options) for name, options in CHECKPOINTS.items() if only in name
    ):
        with tempfile.TemporaryDirectory() as root:
            run = Run(Path(root), ranks, *options, "--metrics.log_interval", "10")
            run.wait_for_steps(1, saved=False)
            faults = 0
            began = time.monotonic()
            while time.monotonic() - began < 60 * minutes:
                time.sleep(every - (time.monotonic() - began) % every)
                kill_and_wait(run)
                faults += 1
            time.sleep(every / 2)
            run.end()
            wall, useful, steps = measured(run)
        shares = f"{100 * useful / wall:.1f} % | {100 * useful / (wall - faults * start):.1f} %"
        say(
            f"| {name} | {every:.0f} s | {faults} | {steps} | {1000 * useful / steps:.0f} | {shares} |"
        )


CHECKPOINTS: dict[str, tuple[str, ...]] = {
    "on disk, every 10 steps": (),
    "on disk, every 100 steps": ("--checkpoint.interval", "100"),
    "on disk, every 100 steps, and in memory, every 2": (
        "--checkpoint.interval",
        "100",
        "--checkpoint.memory_interval",
        "2",
    ),
    "on disk, every 100 steps, and in memory, every 4": (
        "--checkpoint.interval",
        "100",
        "--checkpoint.memory_interval",
        "4",
    ),
    "on disk, every 100 steps, and in memory, every step": (
        "--checkpoint.interval",
        "100",
        "--checkpoint.memory_interval",
        "1",
    ),
}


def kill_and_wait(run: Run) -> None:
    starts = run.starts()
    kill_a_rank(run)
    wait_for(lambda: run.starts() > starts)


def measured(run: Run) -> tuple[float, float, int]:
    """Of a run that was told to stop: seconds since its first model was built, those of the steps
    that count, and steps.
    """
    end = next(line for line in run.lines("events.jsonl") if line["event"] == "preempted")
    state = read_state(run.folder / "checkpoints" / f"step-{end['step']}").trainer
    if state.goodput is None:
        raise RuntimeError(f"{run.folder} does not measure goodput")
    return (
        float(str(end["time"])) - state.goodput.start_time,
        state.goodput.productive_seconds,
        state.step,
    )


def resumed_step(run: Run) -> int:
    return int(
        str([line for line in run.lines("events.jsonl") if line["event"] == "start"][-1]["step"])
    )


def start_seconds(ranks: int, rounds: int = 5) -> float:
    """From the processes of a restart to the start of their first step, without a checkpoint to
    resume from.
    """
    options = (
        "--checkpoint.interval",
        "1000000",
        "--distributed.restarts",
        str(rounds),
        "--distributed.restart_seconds",
        "0",
    )
    found = []
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), ranks, *options)
        for _ in range(rounds):
            run.wait_for_steps(5, saved=False)
            found.append(seconds_of_a_start(run))
        run.end()
    return median(found)


def seconds_of_a_start(run: Run) -> float:
    old = set(run.workers())
    starts = run.starts()
    kill_a_rank(run)
    wait_for(lambda: len(set(run.workers()) - old) == run.ranks)
    began = time.monotonic()
    wait_for(lambda: run.starts() > starts and run.step() == 1)
    return time.monotonic() - began - float(str(run.lines("metrics.jsonl")[0]["step_seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recovering = commands.add_parser("recovery")
    working = commands.add_parser("goodput")
    recovering.add_argument("--rounds", type=int, default=1)
    working.add_argument("--minutes", type=float, default=4)
    working.add_argument("--every", type=float, default=60)
    for command in (recovering, working):
        command.add_argument("--ranks", type=int, default=2)
        command.add_argument(
            "--only", default="", metavar="TEXT", help="rows whose name has this text"
        )
    options = parser.parse_args()
    if options.command == "recovery":
        measure_recovery(options.ranks, options.rounds, options.only)
    else:
        measure_goodput(options.ranks, options.minutes, options.every, options.only)


if __name__ == "__main__":
    main()
