"""A step can be followed: it enters few of our files."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from tests.ranks import team
from tests.system.runs import ROOT, arguments, free_port, train_in_pool, write_run

OURS = tuple(str(ROOT / name) for name in ("train.py", "trainer", "models", "parallelisms"))
MAX_FILES = 53


class StepTracer:
    """A profile function: which of our files the third turn of the training loop enters."""

    def __init__(self) -> None:
        self.finished_steps = 0
        self.files = set[str]()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_qualname == "TrainLoop._after_step":
            self.finished_steps += 1
        if self.finished_steps == 2 and code.co_filename.startswith(OURS):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))


def files_of_third_step(
    place: tuple[int, int, int, Path], argv: list[str]
) -> tuple[int, set[str]]:
    """Exit status, and the files."""
    tracer = StepTracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        status = train_in_pool(place, argv)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return status, tracer.files


@pytest.mark.slow
@pytest.mark.ranks
def test_the_third_step_of_a_ring_of_two_ranks_enters_few_files(tmp_path: Path) -> None:
    options = ("--parallelism.cp=2", "--parallelism.cp_method=ring", "--checkpoint.enabled=false")
    argv = arguments(write_run(tmp_path), tmp_path / "run", *options)
    port = free_port()
    log = tmp_path / "run.log"
    with team(
        [partial(files_of_third_step, (rank, 2, port, log), argv) for rank in range(2)]
    ) as ranks:
        outcomes = ranks.outcomes(60, failed=lambda outcome: not outcome.succeeded)
    for outcome in outcomes.values():
        status, files = outcome.value
        assert status == 0, log.read_text()
        assert {
            "parallelisms/context/ring.py",
            "models/feed_forward.py",
            "trainer/step/trainer.py",
        } <= files
        assert len(files) <= MAX_FILES, "\n".join(sorted(files))
