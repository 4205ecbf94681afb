"""Writing a model as a Hugging Face folder: sharded safetensors and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.hf import INDEX_FILE, SINGLE_FILE, HuggingFaceError, TensorSpec, tensor_specs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def write_safetensors(
    folder: Path,
    model: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    file_bytes: int,
    on_file_written: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Writes the tensors that `read` returns for our names: files of about `file_bytes`, with an index if several.

    Holds the tensors of one file in memory at a time. Reads each file back and compares every tensor bitwise. Raises
    `HuggingFaceError` if one differs or has the wrong shape.
    """
    from safetensors.torch import save_file

    specs = tensor_specs(model)
    files = list(_assign_files({name: entry.shape for name, entry in specs.items()}, dtype.itemsize, file_bytes))
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE_FILE]
    for name, members in zip(names, files, strict=True):
        tensors = {specs[ours].name: read(ours).to(dtype).contiguous() for ours in members}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors creates it readable by the owner only.
        _verify_file(folder / name, tensors, {specs[ours] for ours in members})
        on_file_written(name)
    if len(files) > 1:
        total_bytes = sum(prod(entry.shape) for entry in specs.values()) * dtype.itemsize
        weight_map = {specs[ours].name: name for name, members in zip(names, files, strict=True) for ours in members}
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
        names.append(INDEX_FILE)
        on_file_written(INDEX_FILE)
    return [folder / name for name in names]


def _assign_files(shapes: dict[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> Iterator[list[str]]:
    """Names in order, grouped into files of at most `max_bytes`, with at least one per file."""
    members, total_bytes = list[str](), 0
    for name, shape in shapes.items():
        tensor_bytes = prod(shape) * itemsize
        if members and total_bytes + tensor_bytes > max_bytes:
            yield members
            members, total_bytes = [], 0
        members.append(name)
        total_bytes += tensor_bytes
    yield members


def _verify_file(path: Path, tensors: dict[str, Tensor], expected_specs: Iterable[TensorSpec]) -> None:
    """Raises `HuggingFaceError` unless the file holds exactly these tensors."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        is_equal = set(file.keys()) == set(tensors)
        for spec in expected_specs:
            stored, written = file.get_tensor(spec.name), tensors[spec.name]
            # Compared as integers, because NaN != NaN and 0.0 == -0.0.
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[written.itemsize]
            same = stored.dtype == written.dtype and torch.equal(stored.view(bits), written.view(bits))
            is_equal = is_equal and same and tuple(stored.shape) == spec.shape
    if not is_equal:
        raise HuggingFaceError([f"{path} differs from what was written to it"])
