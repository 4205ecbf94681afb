"""Hang report: finds the suspect rank in the stacks of a hung launch. Imports no torch.

All ranks of a hung run write their stacks (trainer/resilience/watchdog.py). The suspect, for which the others wait, is
in a different function or wrote no stack.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)


def summarize_hang(folder: Path, num_ranks: int) -> list[str]:
    """One line per location where ranks hung and one for ranks without a stack; empty if no rank hung.

    Renames the stack files, so that each hang is reported once.
    """
    locations = {rank: _stack_location(folder / f"rank-{rank}.txt") for rank in range(num_ranks)}
    reported = {rank: location for rank, location in locations.items() if location}
    if not reported:
        return []
    location_counts = Counter(reported.values())
    (most_common, _), *others = location_counts.most_common()
    lines = [f"ranks {_format_ranks(reported, most_common)} waited in {most_common}: stacks in {folder}"]
    lines += [f"suspect: rank {_format_ranks(reported, place)} was in {place}" for place, _ in others]
    if missing := sorted(locations.keys() - reported.keys()):
        lines.append(f"suspect: rank {', '.join(map(str, missing))} wrote no stack")
    for rank in reported:
        path = folder / f"rank-{rank}.txt"
        path.replace(path.with_suffix(".last"))
    return lines


def _format_ranks(reported: dict[int, str], location: str) -> str:
    return ", ".join(str(rank) for rank in sorted(reported) if reported[rank] == location)


def _stack_location(path: Path) -> str:
    """The main thread's innermost frame and its innermost frame in this project; "" without a stack."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    # faulthandler writes the main thread last.
    frames = [match.groupdict() for match in FRAME.finditer(THREAD_HEADER.split(text)[-1])]
    if not frames:
        return ""
    innermost = frames[0]["name"]
    project_frame = next((frame for frame in frames if _is_project_file(frame["file"])), None)
    if project_frame is None:
        return innermost
    return f"{innermost} below {project_frame['name']} ({Path(project_frame['file']).name}:{project_frame['line']})"


def _is_project_file(file: str) -> bool:
    return Path(file).parent.is_relative_to(Path(__file__).resolve().parents[2]) and "site-packages" not in file
