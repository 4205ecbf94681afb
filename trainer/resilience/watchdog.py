"""Watchdog: a rank without progress writes its stacks and exits, so that a run never hangs.

faulthandler writes the stacks without the GIL, so also while an extension holds it. Shortly
before, a Python thread writes the collectives that torch recorded. On `STACK_DUMP_SIGNAL` a rank
writes its stacks and continues.
"""

from __future__ import annotations

import faulthandler
import logging
import re
import time
from math import inf
from pathlib import Path
from threading import Event, Thread

from models.files import MAX_CONFIG_BYTES, read_regular
from trainer.errors import STACK_DUMP_SIGNAL

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
WARNING_FRACTION = 0.2
"""Share of the timeout, at most a minute, that remains when the collectives are written."""


class Watchdog:
    """Within this context, the process exits with 1 if a phase exceeds the timeout given to
    `arm`.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        folder.mkdir(exist_ok=True)
        self._stacks_path = folder / f"rank-{rank}.txt"
        self._collectives_path = folder / f"rank-{rank}-collectives.jsonl"
        # Opened now: faulthandler writes to the descriptor without Python, when it may be too late
        # to open a file.
        self._stacks_file = self._stacks_path.open("w")
        self._phase = ""
        self._warn_time = inf
        self._stop_event = Event()
        self._thread = Thread(target=self._poll, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        faulthandler.register(STACK_DUMP_SIGNAL, file=self._stacks_file)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(STACK_DUMP_SIGNAL)
        self._stop_event.set()
        self._thread.join()
        self._stacks_file.close()
        self._stacks_path.unlink(missing_ok=True)

    def arm(self, phase: str, timeout_seconds: float) -> None:
        """Starts the timeout of a phase, in place of the previous one.

        Cheap enough to call every step.
        """
        self._phase = phase
        self._warn_time = time.monotonic() + max(
            (1 - WARNING_FRACTION) * timeout_seconds, timeout_seconds - 60
        )
        # A new call replaces the timer of the previous one, which runs in a C thread without the
        # GIL.
        faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=self._stacks_file)

    def _poll(self) -> None:
        while not self._stop_event.wait(POLL_SECONDS):
            if time.monotonic() >= self._warn_time:
                # Reset before the dump, during which `arm` may set the time of the next phase.
                self._warn_time = inf
                message = "%s takes too long; exiting soon, stacks of all threads in %s"
                log.error(message, self._phase, self._stacks_path.parent)
                self._collectives_path.write_text(dump_collectives())


def dump_collectives() -> str:
    """The collectives that torch recorded, one line of JSON per recorder. torch has no public API
    for this.
    """
    from torch._C import _distributed_c10d

    # Some versions of torch have a separate recorder for NCCL.
    dumps = [
        getattr(_distributed_c10d, f"_dump_{kind}_trace_json", None) for kind in ("fr", "nccl")
    ]
    return "\n".join(dump().decode() for dump in dumps if dump is not None)


PROJECT = Path(__file__).resolve().parents[2]
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)


def summarize_hang(folder: Path, num_ranks: int) -> list[str]:
    """One line per location where ranks hung and one for ranks without a stack; empty if no rank
    hung.

    Renames the stack files, so that each hang is reported once.
    """
    locations = {rank: _stack_location(folder / f"rank-{rank}.txt") for rank in range(num_ranks)}
    ranks_by_location = dict[str, list[str]]()
    for rank, location in locations.items():
        ranks_by_location.setdefault(location, []).append(str(rank))
    missing = ranks_by_location.pop("", [])
    if not ranks_by_location:
        return []
    # Most ranks wait in the same collective; the few that are elsewhere never entered it, and are
    # suspect.
    (place, ranks), *others = sorted(ranks_by_location.items(), key=lambda item: -len(item[1]))
    lines = [f"ranks {', '.join(ranks)} waited in {place}: stacks in {folder}"]
    lines += [f"suspect: rank {', '.join(ranks)} was in {place}" for place, ranks in others]
    if missing:
        lines.append(f"suspect: rank {', '.join(missing)} wrote no stack")
    for rank, location in locations.items():
        if location:
            path = folder / f"rank-{rank}.txt"
            path.replace(path.with_suffix(".last"))
    return lines


def _stack_location(path: Path) -> str:
    """The main thread's innermost frame and its innermost frame in this project; "" without a
    stack.
    """
    try:
        text = read_regular(path, max_bytes=MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    # faulthandler writes the main thread last.
    frames = [match.groupdict() for match in FRAME.finditer(THREAD_HEADER.split(text)[-1])]
    innermost = frames[0]["name"] if frames else ""
    for frame in frames:
        file = Path(frame["file"])
        if file.parent.is_relative_to(PROJECT) and "site-packages" not in file.parts:
            return f"{innermost} below {frame['name']} ({file.name}:{frame['line']})"
    return innermost
