"""Damaged, forged and hostile files in every place that the trainer reads, and what may happen
then.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from tests.artifacts import forge
from tests.system.runs import reseal
from trainer.storage.artifact import HEADER_BYTES, seal_object

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
    "another kind": lambda path: path.write_text(
        '{\n "kind": "another",\n "schema": 1,\n "content": {}\n}\n'
    ),
    "a megabyte in a string": lambda path: path.write_text(json.dumps({"kind": "x" * (1 << 20)})),
    "a folder": replaced_by(Path.mkdir),
    "a pipe": replaced_by(os.mkfifo),
    "a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": replaced_by(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replaced_by(lambda path: path.symlink_to(path.name)),
}
ABSENT = object()
VALUES: dict[str, Any] = {
    "absent": ABSENT,
    "null": None,
    "text": "x",
    "a name of another folder": "../../text",
    "an escape of the terminal": "\x1b[2J\x1b]0;x\x07",
    "64 digits": "0" * 64,
    "true": True,
    "zero": 0,
    "a fraction": 0.5,
    "negative": -1,
    "2^40": 1 << 40,
    "huge": 10**30,
    "a list": [],
    "a list of it": [1],
    "an object": {"__reduce__": "os.system"},
}
MANY = 12
"""Keys of a large object that are forged, always the same."""
NUMBERS = ("zero", "negative", "2^40", "-2^63", "one more", "the last", "the first")
"""What a number of a binary file becomes."""


def other_number(name: str, numbers: list[int], at: int) -> int:
    return {
        "zero": 0,
        "negative": -numbers[at] - 1,
        "2^40": 1 << 40,
        "-2^63": -(1 << 63),
        "one more": numbers[at] + 1,
        "the last": numbers[-1],
        "the first": numbers[0],
    }[name]


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


Place = tuple[str | int, ...]
"""Of a value in nested objects and lists."""


def places(values: dict[str, Any] | list[Any]) -> Iterator[Place]:
    """Of every value; of long lists the first and last, of large objects some."""
    keys: list[Any] = [*values] if isinstance(values, dict) else [*range(len(values))]
    if isinstance(values, list):
        keys = keys[:1] + keys[1:][-1:]
    for key in (
        random.Random(0).sample(keys, min(MANY, len(keys))) if len(keys) > 2 * MANY else keys
    ):
        yield (key,)
        if isinstance(values[key], dict | list):
            yield from ((key, *rest) for rest in places(values[key]))


def put(values: Any, place: Place, value: object) -> None:
    *outer, last = place
    for key in outer:
        values = values[key]
    if value is ABSENT:
        del values[last]
    else:
        values[last] = value


def forged(place: Place, value: object, *, then: Damage = lambda _: None) -> Damage:
    """A content with another value, or without it, sealed again; `then` makes what lists the file
    fit.
    """

    def damage(path: Path) -> None:
        forge(path, lambda content: put(content, place, value))
        then(path)

    return damage


def forged_plan(number: str, place: Place, value: object) -> Damage:
    """A packing plan with another value in its header, or with another number at a place, sealed
    again.
    """

    def damage(path: Path) -> None:
        data = path.read_bytes()
        envelope = json.loads(data[:HEADER_BYTES])
        numbers = [*memoryview(data[HEADER_BYTES:]).cast("q")]
        if number:
            (at,) = place
            numbers[int(at)] = other_number(number, numbers, int(at))
        content = array("q", numbers).tobytes()
        envelope["content"]["sha256"] = hashlib.sha256(content).hexdigest()
        if not number:
            put(envelope["content"], place, value)
        header = seal_object({key: value for key, value in envelope.items() if key != "sha256"})
        path.write_bytes(header[:-1].ljust(HEADER_BYTES - 1) + b"\n" + content)

    return damage


def forged_index(number: str, at: int) -> Damage:
    """The index of a shard with another number, which `meta.json` lists."""

    def damage(path: Path) -> None:
        numbers = [*memoryview(path.read_bytes()).cast("q")]
        numbers[at] = other_number(number, numbers, at)
        path.write_bytes(array("q", numbers).tobytes())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        forge(
            path.with_name("meta.json"),
            lambda content: content["shards"][0].update(idx_sha256=digest),
        )

    return damage


def broken_rules(corpus: Path) -> list[str]:
    """Of a prepared corpus with one shard and one plan, read number by number."""
    index = [*memoryview((corpus / SHARD[1]).read_bytes()).cast("q")]
    tokens = (corpus / SHARD[0]).stat().st_size // 2
    steps = [last - first for first, last in pairwise(index)]
    broken = ["the index"] * (index[0] != 0 or index[-1] != tokens or min(steps) < 1)
    data = (corpus / Path(PLAN).name).read_bytes()
    header = json.loads(data[:HEADER_BYTES])["content"]
    numbers = [*memoryview(data[HEADER_BYTES:]).cast("q")]
    segments = (len(numbers) - header["num_offsets"]) // 2
    offsets = numbers[: -2 * segments]
    starts = numbers[-2 * segments : -segments]
    lengths = numbers[-segments:]
    counts = [last - first for first, last in pairwise(offsets)]
    broken += ["the offsets"] * (offsets[0] != 0 or offsets[-1] != segments or min(counts) < 1)
    if not broken:
        broken += ["the most segments"] * (max(counts) != header["max_segments"])
        filled = [sum(lengths[first:last]) for first, last in pairwise(offsets)]
        broken += ["the sequences"] * (max(filled) > 64)
    outside = any(
        start < 0 or length < 1 or start + length > tokens
        for start, length in zip(starts, lengths, strict=True)
    )
    return broken + ["the segments"] * outside


def older_manifest(value: object) -> Damage:
    """One of before the envelope, whose format is this value."""

    def damage(path: Path) -> None:
        body = json.loads(path.read_text())["content"] | (
            {} if value is ABSENT else {"format": value}
        )
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(body | {"sha256": digest}))

    return damage


SHARD = tuple(f"shard-00000.{suffix}" for suffix in ("bin", "idx", "blocks"))
PLAN = "prepared/corpus/best_fit-64-version-2-seed-0.plan"
SEALED = {
    "train": (
        *(f"{CHECKPOINT}/{name}" for name in ("manifest.json", "state.json")),
        *("prepared/corpus/meta.json", "run/REQUEUE", "run/prediction.json", "run/logs/lease"),
    ),
    "fresh": ("prepared/corpus/meta.json",),
    "branched": ("branched/lineage.json",),
    "runs": ("branched/lineage.json",),
    "status": ("run/slurm/1/job.json", "run/REQUEUE"),
}
FILES = {
    "train": (
        *(
            f"{CHECKPOINT}/{name}"
            for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")
        ),
        *(
            f"run/{name}"
            for name in (
                "config.toml",
                "metrics.jsonl",
                "events.jsonl",
                "prediction.json",
                "REQUEUE",
            )
        ),
        *(f"prepared/corpus/{name}" for name in ("meta.json", *SHARD)),
        PLAN,
        "run/logs/lease",
    ),
    "verify": tuple(
        f"{CHECKPOINT}/{name}"
        for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")
    ),
    "inspect": tuple(f"prepared/corpus/{name}" for name in ("meta.json", *SHARD)),
    "prepare": ("text/00.txt",),
    "branched": ("branched/lineage.json",),
    "runs": ("branched/lineage.json", "run/config.toml", "run/REQUEUE"),
    "import": ("hf/config.json", "hf/model.safetensors", "hf/tokenizer.json"),
    "status": ("run/slurm/1/job.json", "run/metrics.jsonl", "run/REQUEUE"),
}


QUICK = {
    "train": 6,
    "fresh": 4,
    "verify": 12,
    "inspect": 10,
    "prepare": 6,
    "import": 10,
    "status": 12,
}
"""Cases by command. To resume a run takes longest."""


def cases(content_of: Callable[[str], dict[str, Any]]) -> Iterator[Case]:
    """`content_of`: the content of a sealed file, as it was before."""
    for command, files in FILES.items():
        for file, (name, damage) in product(files, ANY_FILE.items()):
            yield Case(command, file, name, damage)
    for command, files in SEALED.items():
        for file in files:
            then: Damage = (
                (lambda path: reseal(path.parent))
                if file.endswith("state.json")
                else lambda _: None
            )
            for place, name, value in forgeries(content_of(file)):
                yield Case(
                    command,
                    file,
                    f"{show(place)} is {name}, sealed again",
                    forged(place, value, then=then),
                )
    yield from binary_cases(content_of(PLAN))
    for name, value in VALUES.items():
        yield Case(
            "train",
            f"{CHECKPOINT}/manifest.json",
            f"unsealed, its format {name}",
            older_manifest(value),
        )


def quick_cases(every: Sequence[Case]) -> list[Case]:
    """Sixty cases, of each command some at equal distances: so they are of many files and kinds of
    damage.
    """
    found = []
    for command, wanted in QUICK.items():
        own = [case for case in every if case.command == command]
        found += [own[(2 * number + 1) * len(own) // (2 * wanted)] for number in range(wanted)]
    return found


def binary_cases(header: dict[str, Any]) -> Iterator[Case]:
    """Of a packing plan with this header, and of the index of a shard."""
    for place, name, value in forgeries(header):
        yield Case(
            "fresh", PLAN, f"{show(place)} is {name}, sealed again", forged_plan("", place, value)
        )
    for at, name in product((0, 1, 5, 20, -2, -1), NUMBERS):
        yield Case(
            "fresh", PLAN, f"number {at} is {name}, sealed again", forged_plan(name, (at,), None)
        )
    for at, name in product((0, 1, 2, -2, -1), NUMBERS):
        yield Case(
            "fresh",
            "prepared/corpus/shard-00000.idx",
            f"number {at} is {name}",
            forged_index(name, at),
        )


def forgeries(content: dict[str, Any]) -> Iterator[tuple[Place, str, object]]:
    """Every place of a content with every value that it does not have."""
    for place in places(content):
        for name, value in VALUES.items():
            yield place, name, value


def show(place: Place) -> str:
    return ".".join(map(str, place))
