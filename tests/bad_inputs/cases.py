"""Damaged, forged and hostile files in every place that the trainer reads, and what may happen then."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.artifacts import forge
from tests.system.runs import reseal

Damage = Callable[[Path], object]
CHECKPOINT = "run/checkpoints/step-4"
EXECUTED = "executed"
"""A file that hostile content creates if anything executes it."""


def replaced_by(make: Damage) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def flipped(where: float) -> Damage:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(where * len(content)), len(content) - 1)] ^= 4
        path.write_bytes(content)

    return damage


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {EXECUTED}",)


def pickled(path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps(Hostile()))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 41)


ANY_FILE: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit at the start": flipped(0.0),
    "a bit in a quarter": flipped(0.25),
    "a bit in the middle": flipped(0.5),
    "a bit at the end": flipped(1.0),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "a pickle": pickled,
    "two terabytes": sparse,
    "deep lists": lambda path: path.write_bytes(b"[" * 200_000),
    "deep objects": lambda path: path.write_bytes(b'{"a":' * 50_000),
    "a long number": lambda path: path.write_bytes(b'{"step": ' + b"9" * 10_000 + b"}"),
    "a lone surrogate": lambda path: path.write_text('{"step": "\\ud800", "kind": "\\udfff"}'),
    "not finite": lambda path: path.write_text('{"step": NaN, "loss": Infinity}'),
    "another kind": lambda path: path.write_text('{\n "kind": "another",\n "schema": 1,\n "content": {}\n}\n'),
    "a megabyte in a string": lambda path: path.write_text(json.dumps({"kind": "x" * (1 << 20)})),
    "a folder": replaced_by(Path.mkdir),
    "a pipe": replaced_by(os.mkfifo),
    "a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": replaced_by(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replaced_by(lambda path: path.symlink_to(path.name)),
}
VALUES: dict[str, Any] = {
    "null": None,
    "text": "x",
    "negative": -1,
    "huge": 10**30,
    "a list": [],
    "an object": {"__reduce__": "os.system"},
}


@dataclass(frozen=True)
class Case:
    command: str
    file: str
    """Below the case's folder."""
    damage: str
    apply: Damage

    @property
    def name(self) -> str:
        return f"{self.command}: {self.file}: {self.damage}"


def forged(key: str, value: object, *, then: Damage = lambda _: None) -> Damage:
    """A content with another value, or without the key, sealed again; `then` makes what lists it fit."""

    def damage(path: Path) -> None:
        forge(path, lambda content: content.pop(key) if value is ABSENT else content.update({key: value}))
        then(path)

    return damage


ABSENT = object()
SHARD = tuple(f"shard-00000.{suffix}" for suffix in ("bin", "idx", "blocks"))
SEALED = {
    "train": (f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/state.json", "prepared/corpus/meta.json", "run/REQUEUE"),
    "status": ("run/slurm/1/job.json", "run/REQUEUE"),
}
FILES = {
    "train": (
        *(f"{CHECKPOINT}/{name}" for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")),
        *(f"run/{name}" for name in ("config.toml", "metrics.jsonl", "events.jsonl", "prediction.json", "REQUEUE")),
        *(f"prepared/corpus/{name}" for name in ("meta.json", *SHARD, "best_fit-64-version-2-seed-0.plan")),
        "run/logs/lease",
    ),
    "verify": tuple(f"{CHECKPOINT}/{name}" for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")),
    "inspect": tuple(f"prepared/corpus/{name}" for name in ("meta.json", *SHARD)),
    "prepare": ("text/00.txt",),
    "import": ("hf/config.json", "hf/model.safetensors", "hf/tokenizer.json"),
    "status": ("run/slurm/1/job.json", "run/metrics.jsonl", "run/REQUEUE"),
}


def cases(content_of: Callable[[str], dict[str, Any]]) -> Iterator[Case]:
    """`content_of`: the content of a sealed file, as it was before."""
    for command, files in FILES.items():
        for file in files:
            for name, damage in ANY_FILE.items():
                yield Case(command, file, name, damage)
    for command, files in SEALED.items():
        for file in files:
            then: Damage = (lambda path: reseal(path.parent)) if file.endswith("state.json") else lambda _: None
            for key in content_of(file):
                for name, value in {"absent": ABSENT, **VALUES}.items():
                    yield Case(command, file, f"{key} is {name}, sealed again", forged(key, value, then=then))
