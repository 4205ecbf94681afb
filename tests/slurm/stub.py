"""Replaces a job's interpreter: ranks that follow a plan and the trainer's conventions, without
torch.

`RUN/plan.json` maps an attempt, `<requeue>.<attempt>`, to the action of its ranks; the default is
`finish`. Ranks append their actions to `RUN/actions.txt`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

# seconds that a saving rank waits for the others
PATIENCE = 0.7


class Rank:
    def __init__(self, run: Path) -> None:
        self.run = run
        self.number = int(os.environ["SLURM_PROCID"])
        self.attempt = os.environ["LONGHAUL_ATTEMPT"].partition(".")[2]
        self.signals: list[str] = []
        self.saves = 0
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        self.signals.append(signal.Signals(number).name)

    def record(self, action: str) -> None:
        with (self.run / "actions.txt").open("a") as file:
            file.write(f"{self.attempt} rank {self.number} {action}\n")

    # ---- actions, which return the exit status

    def train(self) -> int:
        """Trains until signalled; then saves, if all ranks do."""
        self.wait()
        return self.save("REQUEUE")

    def last(self) -> int:
        """Is signalled after the last step, during a slow save."""
        self.wait()
        time.sleep(2)
        return self.save("DONE")

    def finish(self) -> int:
        return self.save("DONE")

    def crash(self) -> int:
        """Rank 1 fails; its peers are signalled and cannot save."""
        return 1 if self.number == 1 else self.train()

    def intruded(self) -> int:
        """Another run in the folder is refused, then rank 1 fails."""
        if self.number == 0:
            self.mark("STOP", "another")
        return self.crash()

    def progress(self) -> int:
        """Saves, then crashes."""
        self.save(None)
        return self.crash()

    def stage(self) -> int:
        """Succeeds with a checkpoint and without a marker: the next stage follows."""
        return self.save(None)

    def stop(self) -> int:
        """Every rank says so: the scheduler ends the others when the first exits."""
        self.mark("STOP")
        return 78

    def refuse(self) -> int:
        return 2

    def deaf(self) -> int:
        """Hangs and ignores signals."""
        self.record("hangs")
        while True:
            time.sleep(1)

    def wait(self) -> None:
        self.record("trains")
        while not self.signals:
            time.sleep(0.01)

    def save(self, marker: str | None) -> int:
        """Saves a checkpoint, which needs every rank."""
        self.saves += 1
        meeting = self.run / f"meeting-{self.attempt}-{self.saves}"
        meeting.mkdir(exist_ok=True)
        (meeting / str(self.number)).touch()
        deadline = time.monotonic() + PATIENCE
        while len([*meeting.iterdir()]) < int(os.environ["SLURM_NTASKS"]):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.01)
        if self.number == 0:
            steps = [
                int(path.name.partition("-")[2]) for path in (self.run / "checkpoints").iterdir()
            ]
            (self.run / "checkpoints" / f"step-{max(steps, default=8) + 1}").mkdir()
            if marker:
                self.mark(marker)
        return 0

    def mark(self, marker: str, attempt: str = "") -> None:
        attempt = attempt or os.environ["LONGHAUL_ATTEMPT"]
        fields = {"step": 1, "reason": "the plan", "attempt": attempt, "time": time.time()}
        temporary = self.run / f"{marker}-{self.number}"
        temporary.write_text(json.dumps(fields))
        temporary.replace(self.run / marker)


def main(words: list[str]) -> int:
    if "trainer.slurm.node_info" in words:
        sys.stdout.write("a node\n")
        return 0
    # Present in rendered scripts; submitted ones read the configuration in the run folder.
    given = [word.partition("=")[2] for word in words if word.startswith("--job.output_dir=")]
    rank = Rank(Path(given[0]) if given else Path(words[words.index("--config") + 1]).parents[2])
    rank.record(f"meets at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    action = json.loads((rank.run / "plan.json").read_text()).get(rank.attempt, "finish")
    status: int = getattr(rank, action)()
    rank.record(f"exited with {status} after {' '.join(rank.signals) or 'nothing'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
