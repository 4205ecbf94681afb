"""In the place of a job's interpreter: ranks that do as a plan says and keep the trainer's manners, without torch.

The plan is `RUN/plan.json`: from an attempt, as `<life>.<attempt>`, to what ranks do in it; `finish` where it says
nothing. What they did is in `RUN/did.txt`, in order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PATIENCE = 0.7  # seconds for which a rank that saves waits for the others


class Rank:
    def __init__(self, run: Path) -> None:
        self.run = run
        self.number = int(os.environ["SLURM_PROCID"])
        self.attempt = os.environ["LONGHAUL_ATTEMPT"].partition(".")[2]
        self.heard: list[str] = []
        self.saves = 0
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.hear)

    def hear(self, number: int, _: FrameType | None) -> None:
        self.heard.append(signal.Signals(number).name)

    def did(self, what: str) -> None:
        with (self.run / "did.txt").open("a") as file:
            file.write(f"{self.attempt} rank {self.number} {what}\n")

    # ---- what ranks may do, each of which returns the exit status

    def train(self) -> int:
        """Until it is told to leave; then it saves, if all ranks do."""
        self.wait()
        return self.save("REQUEUE")

    def last(self) -> int:
        """Is told to leave when there is nothing left to do but to save, which takes a while."""
        self.wait()
        time.sleep(2)
        return self.save("DONE")

    def finish(self) -> int:
        return self.save("DONE")

    def crash(self) -> int:
        """Rank 1 dies; its peers are told to leave, and cannot save."""
        return 1 if self.number == 1 else self.train()

    def intruded(self) -> int:
        """Another start in the folder is refused, and then rank 1 dies."""
        if self.number == 0:
            self.mark("STOP", "another")
        return self.crash()

    def progress(self) -> int:
        """Saves, and crashes later."""
        self.save(None)
        return self.crash()

    def stage(self) -> int:
        """Ends well, with a checkpoint and without a marker: the next stage is to begin."""
        return self.save(None)

    def stop(self) -> int:
        if self.number == 0:
            self.mark("STOP")
        return 78

    def refuse(self) -> int:
        return 2

    def deaf(self) -> int:
        """Hangs, whatever it is told."""
        self.did("hangs")
        while True:
            time.sleep(1)

    def wait(self) -> None:
        self.did("trains")
        while not self.heard:
            time.sleep(0.01)

    def save(self, marker: str | None) -> int:
        """A checkpoint, for which every rank has to be there."""
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
            steps = [int(path.name.partition("-")[2]) for path in (self.run / "checkpoints").iterdir()]
            (self.run / "checkpoints" / f"step-{max(steps, default=8) + 1}").mkdir()
            if marker:
                self.mark(marker)
        return 0

    def mark(self, marker: str, attempt: str = "") -> None:
        attempt = attempt or os.environ["LONGHAUL_ATTEMPT"]
        facts = {"step": 1, "reason": "the plan", "attempt": attempt, "time": time.time()}
        (self.run / marker).write_text(json.dumps(facts))


def main(words: list[str]) -> int:
    if "trainer.slurm.node_info" in words:
        sys.stdout.write("a node\n")
        return 0
    place = "--job.output_dir"  # Only of a script that was rendered by hand; else the configuration lies in the folder.
    given = words[words.index(place) + 1] if place in words else words[words.index("--config") + 1]
    rank = Rank(Path(given) if place in words else Path(given).parents[2])
    rank.did(f"meets at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    action = json.loads((rank.run / "plan.json").read_text()).get(rank.attempt, "finish")
    status: int = getattr(rank, action)()
    rank.did(f"left with {status} after {' '.join(rank.heard) or 'nothing'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
