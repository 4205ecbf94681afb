"""Corpora and tokenizers for runs of a few steps."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

WORDS = [
    "fox",
    "river",
    "stone",
    "light",
    "bridge",
    "morning",
    "the",
    "a",
    "and",
    "of",
    "under",
    "over",
    "runs",
    "jumps",
    "rests",
]
MERGES = (b"  ", b"th", b"the", b"er", b"ri", b"st", b"an", b"and")


def write_inputs(root: Path) -> None:
    """Corpora `corpus`, `others`, `damaged` and `lines.jsonl`; tokenizers `first.model` and
    `second.model`.
    """
    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))

    for corpus in ("corpus", "others", "damaged"):
        for number in range(24):
            path = root / corpus / "abc"[number % 3] / f"{number:02}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(12))
    (root / "damaged" / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    rows = [json.dumps({"text": text(12), "body": text(12)}) for _ in range(24)]
    (root / "lines.jsonl").write_text("\n".join(rows) + "\n")
    for name, merges in (("first.model", MERGES), ("second.model", MERGES[:4])):
        tokens = [*(bytes([byte]) for byte in range(256)), *merges]
        ranks = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
        (root / name).write_bytes(b"".join(ranks))
