"""What ranks left of themselves when they hung, read by whoever starts the next ones. Imports no torch.

All ranks of a run that hangs write where they are (trainer/resilience/watchdog.py). The one that the others wait for is elsewhere,
or wrote nothing at all.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
MAIN = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)


def suspects(folder: Path, ranks: int) -> list[str]:
    """A line for each place where ranks hung, and one for those that said nothing; nothing if none of them hung.

    The files are put away, so that they are told once.
    """
    stacks = {rank: _place(folder / f"rank-{rank}.txt") for rank in range(ranks)}
    told = {rank: place for rank, place in stacks.items() if place}
    if not told:
        return []
    by_place = Counter(told.values())
    (common, _), *others = by_place.most_common()
    found = [f"ranks {_ranks(told, common)} waited in {common}: stacks in {folder}"]
    found += [f"suspect: rank {_ranks(told, place)} was in {place}" for place, _ in others]
    if silent := sorted(stacks.keys() - told.keys()):
        found.append(f"suspect: rank {', '.join(map(str, silent))} did not say where it was")
    for rank in told:
        path = folder / f"rank-{rank}.txt"
        path.replace(path.with_suffix(".last"))
    return found


def _ranks(told: dict[int, str], place: str) -> str:
    return ", ".join(str(rank) for rank in sorted(told) if told[rank] == place)


def _place(path: Path) -> str:
    """The innermost function of ours that the main thread was in, and where it was outside; "" if it is not said."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    # The main thread is told last.
    frames = [match.groupdict() for match in FRAME.finditer(MAIN.split(text)[-1])]
    if not frames:
        return ""
    innermost = frames[0]["name"]
    ours = next((frame for frame in frames if _is_ours(frame["file"])), None)
    if ours is None:
        return innermost
    return f"{innermost} below {ours['name']} ({Path(ours['file']).name}:{ours['line']})"


def _is_ours(file: str) -> bool:
    return Path(file).parent.is_relative_to(Path(__file__).resolve().parents[2]) and "site-packages" not in file
