"""The weights of a checkpoint as a checkpoint of their own, which `checkpoint.initial` takes.

Bytes are copied as they lie there, and never become tensors: a model may be larger than the memory of this machine.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import manifest
from trainer.checkpoint.durable_io import sync, write_synced
from trainer.checkpoint.load import WEIGHTS, Reader

PIECE = 1 << 24  # bytes copied at once


def slim(checkpoint: Path, output: Path) -> int:
    """Writes `output`, which is not there yet, under another name first; returns its bytes. Raises as `Reader` does."""
    reader = Reader(checkpoint)
    temporary = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        files = _copy(reader, temporary)
        about = replace(manifest.read(checkpoint), files=files)
        manifest.write(temporary, about)
        sync(temporary)
        temporary.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return about.bytes


def _copy(reader: Reader, output: Path) -> dict[str, tuple[int, str]]:
    by_file: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for index, place in reader.metadata.storage_data.items():
        if index.fqn.startswith(WEIGHTS):
            by_file[place.relative_path].append((index, place))
    moved: dict[Any, Any] = {}
    for name, places in sorted(by_file.items()):
        with (reader.checkpoint / name).open("rb") as source, (output / name).open("wb") as target:
            for index, place in sorted(places, key=lambda found: found[1].offset):
                moved[index] = replace(place, offset=target.tell())
                source.seek(place.offset)
                left = place.length
                while left:
                    piece = source.read(min(left, PIECE))
                    target.write(piece)
                    left -= len(piece)
            target.flush()
            os.fsync(target.fileno())
    metadata = reader.metadata
    kept = {name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith(WEIGHTS)}
    planned = {name: path for name, path in (metadata.planner_data or {}).items() if name in kept}
    slimmed = replace(metadata, state_dict_metadata=kept, storage_data=moved, planner_data=planned)
    write_synced(output / manifest.METADATA, pickle.dumps(slimmed))
    write_synced(output / manifest.STATE, (reader.checkpoint / manifest.STATE).read_bytes())
    return {path.name: manifest.hash_of(path) for path in sorted(output.iterdir())}
