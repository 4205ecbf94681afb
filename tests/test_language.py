"""The field's words: names and phrases of the project's earlier dialect do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *sorted(
        path
        for pattern in ("*.py", "*.md", "*.sh", "*.toml", "*.j2")
        for folder in (
            "models",
            "parallelisms",
            "trainer",
            "docs",
            "train_configs",
            "examples",
            "packages",
        )
        for path in (ROOT / folder).rglob(pattern)
    ),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "train.py",
]
# Pages that map old names to new ones.
MAPS = {"docs/glossary.md", "trainer/config/migrations.py"}

PHRASES = (
    *(
        "told",
        "goes on",
        "go on from",
        "so many",
        "in passing",
        "is to be",
        "anew",
        "put aside",
        "made up",
        "as if nothing",
    ),
    *(
        "leaves with",
        "its time is over",
        "has no use with",
        "begins with 0",
        "kept free",
        "crowded out",
        "computed again",
    ),
    *("eaten", "what a model eats", "ledger", "levers", "lives of a run", "rows of an update of"),
)
IDENTIFIERS = (
    *(
        "Tally",
        "Slots",
        "Placed",
        "Halves",
        "Bodies",
        "HostMemory",
        "Rectangle",
        "Arriving",
        "Cutter",
    ),
    *(
        "sum_over",
        "gather_over",
        "max_over",
        "largest_over",
        "RunFolder",
        "Requests",
        "Asked",
        "Stops",
        "Verdict",
    ),
    *(
        "LostError",
        "HeldOut",
        "CopyRows",
        "Haystacks",
        "judge",
        "farewell",
        "settled",
        "node_ranks",
    ),
    *("input_every", "head_chunk_mib", "skipped_in_a_row", "data_rank", "pass_on", "one_by_one"),
)


def found_in(path: Path, pattern: str, flags: int) -> list[str]:
    # Names may be words at the beginning of a sentence.
    if not flags and path.suffix != ".py":
        return []
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"<!-- aliases:begin -->.*?<!-- aliases:end -->", "", text, flags=re.DOTALL)
    return [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in re.finditer(pattern, line, flags)
    ]


@pytest.mark.parametrize(
    ("words", "flags"),
    [(PHRASES, re.IGNORECASE), (IDENTIFIERS, 0)],
    ids=["phrases", "identifiers"],
)
def test_the_old_dialect_stays_out(words: tuple[str, ...], flags: int) -> None:
    pattern = rf"\b(?:{'|'.join(map(re.escape, words))})\b"
    files = [path for path in FILES if str(path.relative_to(ROOT)) not in MAPS]
    assert len(files) > 150, "the files were not found"
    assert [line for path in files for line in found_in(path, pattern, flags)] == []


def test_a_training_step_is_a_step() -> None:
    """An update is what an optimizer does to weights, or a dict's or a scheduler's method."""
    allowed = r"optimizer|weights?|deferred|pending|embedding|scontrol|flush|bias-update-rate|\.update\(|update=|last_updated|def update"
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in FILES
        if str(path.relative_to(ROOT)) not in MAPS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bupdates?\b", line) and not re.search(allowed, line, re.IGNORECASE)
    ]
    assert wrong == []
