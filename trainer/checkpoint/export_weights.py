"""Exports the weights of a checkpoint as a checkpoint for `checkpoint.initial_load_path`.

Copies bytes between files without creating tensors, because a model may be larger than the host's
memory.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.load import MODEL_PREFIX, CheckpointReader
from trainer.storage import manifest
from trainer.storage.durable_io import atomic_folder, write_and_fsync
from trainer.storage.progress import progress
from trainer.storage.train_state import STATE_FILE

COPY_CHUNK_BYTES = 1 << 24


def export_weights(checkpoint: Path, output: Path) -> int:
    """Writes the folder `output` atomically and returns its bytes.

    Raises as `CheckpointReader`.
    """
    reader = CheckpointReader(checkpoint)
    with atomic_folder(output) as folder:
        checkpoint_manifest = manifest.read(checkpoint).model_copy(
            update={"files": _copy_weights(reader, folder)}
        )
        manifest.write(folder, checkpoint_manifest)
    return checkpoint_manifest.bytes


def _copy_weights(reader: CheckpointReader, output: Path) -> dict[str, tuple[int, str]]:
    by_file: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    num_bytes = 0
    for index, storage_info in reader.metadata.storage_data.items():
        if index.fqn.startswith(MODEL_PREFIX):
            by_file[storage_info.relative_path].append((index, storage_info))
            num_bytes += storage_info.length
    new_storage_data: dict[Any, Any] = {}
    with progress("exporting weights", total=num_bytes) as shown:
        for name, entries in sorted(by_file.items()):
            new_storage_data |= _copy_entries(
                reader.checkpoint / name, output / name, entries, shown.advance
            )
    metadata = reader.metadata
    weight_metadata = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(MODEL_PREFIX)
    }
    planner_data = {
        name: path
        for name, path in (metadata.planner_data or {}).items()
        if name in weight_metadata
    }
    weights_only = replace(
        metadata,
        state_dict_metadata=weight_metadata,
        storage_data=new_storage_data,
        planner_data=planner_data,
    )
    # torch's format is a pickle. The restricted unpickler read this one, so it holds torch's
    # classes only.
    write_and_fsync(output / manifest.METADATA_FILE, pickle.dumps(weights_only))
    write_and_fsync(output / STATE_FILE, (reader.checkpoint / STATE_FILE).read_bytes())
    return {path.name: manifest.hash_file(path) for path in sorted(output.iterdir())}


def _copy_entries(
    source_path: Path,
    target_path: Path,
    entries: list[tuple[Any, Any]],
    on_bytes: manifest.OnBytes,
) -> dict[Any, Any]:
    """Copies the (index, storage info) of a file's weights; returns where they are in the copy."""
    copied: dict[Any, Any] = {}
    with source_path.open("rb") as source, target_path.open("wb") as target:
        # In the order of the file, so that a disk reads forward.
        for index, storage_info in sorted(entries, key=lambda item: item[1].offset):
            # Only the offset changes: moments that lay between the weights are left out.
            copied[index] = replace(storage_info, offset=target.tell())
            source.seek(storage_info.offset)
            remaining = storage_info.length
            # In pieces: a shard may be larger than what the host has free.
            while remaining:
                chunk = source.read(min(remaining, COPY_CHUNK_BYTES))
                target.write(chunk)
                remaining -= len(chunk)
                on_bytes(len(chunk))
        target.flush()
        os.fsync(target.fileno())
    return copied
