"""Rank steps on disk, under a hash of everything that they depend on.

Imports no torch until one has to be traced.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.files import MAX_CONFIG_BYTES, read_regular
from models.kernel_choice import FLASH_VERSIONS
from trainer.config import extension
from trainer.config.job_config import Config
from trainer.storage.durable_io import file_lock, write_atomic
from trainer.trace.collector import uncollected
from trainer.trace.pieces import (
    Arrival,
    AttentionKey,
    Departure,
    Piece,
    Place,
    ProductKey,
    Timeline,
    Work,
)
from trainer.trace.rank_step import RankStep, rank_step
from trainer.trace.tensors import MemoryEstimate, MemoryTensor

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("models", "parallelisms", "trainer")
SECTIONS = {"model", "training", "parallelism", "memory", "optimizer", "checkpoint"}
"""Sections of a configuration that a step depends on."""
MAX_ANSWERS = 2000
"""Files kept: about 50 kB each."""


def traced_rank_steps(config: Config, world_size: int, *, on_gpu: bool = True) -> list[RankStep]:
    """Step of the first rank of every pipeline rank, from the disk if it is known there.

    `memory.recompute`, `memory.loss_chunk_mib` and `training.attention` must be resolved.
    `on_gpu`: with the kernels of a GPU, compiled if the configuration compiles there; else those
    of a CPU. Raises UntraceableError.
    """
    file = _file(config, world_size, on_gpu=on_gpu)
    if (known := _known(file)) is not None:
        return known
    with _alone(file):
        if (known := _known(file)) is not None:
            return known
        text = _encoded(_traced(config, world_size, on_gpu=on_gpu))
        with suppress(OSError):  # Another time, it is traced again.
            _write(file, text)
    # As another process will read them.
    return _decoded(text)


def _known(file: Path) -> list[RankStep] | None:
    """None if the file is missing, or was written by something else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _decoded(read_regular(file, max_bytes=MAX_CONFIG_BYTES))
    return None


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits while another process traces the same step, which writes it to the file."""
    lock = file.with_suffix(".lock")
    with ExitStack() as held:
        # Without a folder to write to, each process traces by itself.
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            held.enter_context(file_lock(lock))
            held.callback(lock.unlink, missing_ok=True)
        yield


def _traced(config: Config, world_size: int, *, on_gpu: bool) -> list[RankStep]:
    # Tracing takes seconds in which nothing else is printed.
    show_progress("tracing a step ...")
    kernel = config.training.attention if on_gpu else None
    compiled = config.compiles_on_gpu if on_gpu else config.training.compile is True
    with uncollected():
        from trainer.trace.record import trace_pp_ranks  # Imports torch.

        traced = trace_pp_ranks(config, world_size, kernel=kernel, compiled=compiled)
    show_progress("")
    return [
        rank_step(config, each.short, each.trace, each.whole, on_gpu=on_gpu) for each in traced
    ]


def is_known(config: Config, world_size: int, *, on_gpu: bool = True) -> bool:
    """Whether the steps are on the disk."""
    return _file(config, world_size, on_gpu=on_gpu).exists()


def _file(config: Config, world_size: int, *, on_gpu: bool) -> Path:
    key = _key(config, world_size, on_gpu=on_gpu)
    return cache_folder() / f"{key}.json"


def show_progress(text: str) -> None:
    """Replaces the current line of a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longhaul" / "traces"


def _key(config: Config, world_size: int, *, on_gpu: bool) -> str:
    sections = config.model_dump(mode="json", include=SECTIONS)
    # No step depends on them, so runs that differ in them share a trace.
    for name in ("steps", "seed"):
        del sections["training"][name]
    # A run has resolved whether it compiles, a plan has not.
    if on_gpu:
        sections["training"]["compile"] = config.compiles_on_gpu
    # A trace runs all versions of FlashAttention as one.
    if sections["training"]["attention"] in FLASH_VERSIONS:
        sections["training"]["attention"] = "flash"
    # A trace is of this code under this torch: any change of either makes it unknown.
    sources = [_hash_of_sources(), version("torch"), extension.source_hashes()]
    described = [*sources, sections, repr(config.context_plan())]
    text = json.dumps([*described, world_size, on_gpu], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _write(file: Path, text: str) -> None:
    write_atomic(file, text.encode())
    known = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
    # Another process may prune the same folder, so a file may be gone already.
    for oldest in known[:-MAX_ANSWERS]:
        oldest.unlink(missing_ok=True)


# ---- as JSON


def _encoded(steps: Sequence[RankStep]) -> str:
    """Ranks of a pipeline have most timelines in common, and each is stored once."""
    numbers = dict[str, int]()
    encoded = [_encoded_step(step, numbers) for step in steps]
    return json.dumps({"timelines": [*numbers], "steps": encoded})


def _encoded_step(step: RankStep, numbers: dict[str, int]) -> dict[str, Any]:
    """`numbers`: the timelines so far; new ones are added."""
    timelines = (
        json.dumps([_encoded_moment(each) for each in piece.timeline]) for piece in step.pieces
    )
    return {
        "world_size": step.world_size,
        "memory": [
            step.memory.phase,
            step.memory.pp_rank,
            step.memory.pp,
            [list(each) for each in step.memory.tensors],
        ],
        "pieces": [
            [list(piece.place), numbers.setdefault(timeline, len(numbers))]
            for piece, timeline in zip(step.pieces, timelines, strict=True)
        ],
        "order": list(step.order),
        "windows": [[*place, window] for place, window in step.windows.items()],
        "state_ratio": step.state_ratio,
    }


def _encoded_moment(moment: Work | Departure | Arrival) -> Any:
    if isinstance(moment, Departure):
        return [list(moment.key), *moment[1:]]
    if isinstance(moment, Arrival):
        return moment.number
    counts: dict[str, Mapping[Any, int]] = {
        "products": moment.products,
        "attention": moment.attention,
        "calls": moment.calls,
    }
    return {
        **{
            name: [[*key, count] for key, count in each.items()]
            for name, each in counts.items()
            if each
        },
        "sent_bytes": [[*key, size] for key, size in moment.sent_bytes.items()],
        "moved_bytes": dict(moment.moved_bytes),
        "kernels": dict(moment.kernels),
    }


def _decoded(text: str | bytes) -> list[RankStep]:
    """Pieces that have a timeline in common share it."""
    stored = json.loads(text)
    timelines = []
    for text_of_one in stored["timelines"]:
        moments = json.loads(text_of_one)
        timelines.append([*map(_decoded_moment, moments)])
    return [_decoded_step(each, timelines) for each in stored["steps"]]


def _decoded_step(stored: Mapping[str, Any], timelines: Sequence[Timeline]) -> RankStep:
    phase, pp_rank, pp, tensors = stored["memory"]
    estimate = MemoryEstimate(
        phase, pp_rank, pp, tuple(_decoded_tensor(*each) for each in tensors)
    )
    pieces = tuple(
        Piece(Place(*place), [], timelines[number]) for place, number in stored["pieces"]
    )
    windows = {(stage, block): window for stage, block, window in stored["windows"]}
    return RankStep(
        stored["world_size"],
        estimate,
        pieces,
        tuple(stored["order"]),
        windows,
        stored["state_ratio"],
    )


def _decoded_tensor(name: str, shape: list[int], *rest: Any) -> MemoryTensor:
    return MemoryTensor(name, tuple(shape), *rest)


def _decoded_moment(moment: Any) -> Work | Departure | Arrival:
    if isinstance(moment, int):
        return Arrival(moment)
    if isinstance(moment, list):
        (channel, kind, phase), *rest = moment
        return Departure((channel, kind, phase), *rest)
    return Work(
        Counter({ProductKey(*key): count for *key, count in moment.get("products", ())}),
        Counter({AttentionKey(*key): count for *key, count in moment.get("attention", ())}),
        Counter(moment["moved_bytes"]),
        Counter(moment["kernels"]),
        Counter({(a, b, c): count for a, b, c, count in moment.get("calls", ())}),
        Counter({(a, b, c): size for a, b, c, size in moment["sent_bytes"]}),
    )
