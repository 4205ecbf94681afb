"""What ranks left of themselves when they hung, read by whoever starts the next ones. Imports no torch.

All ranks of a run that hangs write where they are (trainer/resilience/watchdog.py). The one that the others wait for is elsewhere,
or wrote nothing at all.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)


def summarize_hang(folder: Path, num_ranks: int) -> list[str]:
    """A line for each place where ranks hung, and one for those that said nothing; nothing if none of them hung.

    The files are put away, so that they are told once.
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
        lines.append(f"suspect: rank {', '.join(map(str, missing))} did not say where it was")
    for rank in reported:
        path = folder / f"rank-{rank}.txt"
        path.replace(path.with_suffix(".last"))
    return lines


def _format_ranks(reported: dict[int, str], location: str) -> str:
    return ", ".join(str(rank) for rank in sorted(reported) if reported[rank] == location)


def _stack_location(path: Path) -> str:
    """The innermost function of ours that the main thread was in, and where it was outside; "" if it is not said."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    # The main thread is told last.
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
