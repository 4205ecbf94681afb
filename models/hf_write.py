"""Writing a model as a Hugging Face folder: sharded safetensors and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.hf import INDEX_FILE, SINGLE_FILE, HuggingFaceError
from models.hf_tensors import stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PARTS = 3
"""Parameters in one tensor, at most. Each is read once for the tensors of all its experts, which
follow each other.
"""


def write_safetensors(
    folder: Path,
    model: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    file_bytes: int,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Iterator[Path]:
    """Writes the tensors that `read` returns for our names: files of about `file_bytes`, with an
    index if several.

    Yields each file once it is written. Holds the tensors of one file in memory at a time. Reads
    each file back and compares every tensor bitwise. Raises `HuggingFaceError` if one differs.
    `on_bytes` is called with the size of each tensor that was read.
    """
    from safetensors.torch import save_file

    stored = stored_tensors(model)
    read_once = lru_cache(maxsize=MAX_PARTS)(lambda ours: read(ours).to(dtype))
    files = _assign_files(
        {name: each.shape for name, each in stored.items()}, dtype.itemsize, file_bytes
    )
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    names = names if count > 1 else [SINGLE_FILE]
    for name, members in zip(names, files, strict=True):
        tensors: dict[str, Tensor] = {}
        for each in members:
            tensors[each] = stored[each].join(read_once)
            on_bytes(tensors[each].nbytes)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        # safetensors creates it readable by the owner only.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
        _verify_file(folder / name, tensors)
        yield folder / name
    if len(files) > 1:
        weight_map = {
            each: name for name, members in zip(names, files, strict=True) for each in members
        }
        content = {
            "metadata": {"total_size": model.num_parameters * dtype.itemsize},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
        yield folder / INDEX_FILE


def _assign_files(
    shapes: dict[str, tuple[int, ...]], itemsize: int, max_bytes: int
) -> list[list[str]]:
    """Names of tensors in order, grouped into files of at most `max_bytes`, with at least one per
    file.
    """
    files = list[list[str]]()
    remaining_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = prod(shape) * itemsize
        if not files or tensor_bytes > remaining_bytes:
            files.append([])
            remaining_bytes = max_bytes
        files[-1].append(name)
        remaining_bytes -= tensor_bytes
    return files


def _verify_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises `HuggingFaceError` unless the file holds exactly these tensors."""
    import torch
    from safetensors import safe_open

    def is_same(stored: Tensor, written: Tensor) -> bool:
        # Compared as bytes, because NaN != NaN and 0.0 == -0.0.
        same_bytes = torch.equal(stored.view(torch.uint8), written.view(torch.uint8))
        return stored.dtype == written.dtype and same_bytes

    with safe_open(path, "pt") as file:
        same_names = set(file.keys()) == set(tensors)
        is_equal = same_names and all(
            is_same(file.get_tensor(name), x) for name, x in tensors.items()
        )
    if not is_equal:
        raise HuggingFaceError([f"{path} differs from what was written to it"])
