"""Weights in Hugging Face's format: tensor names, reading slices, writing sharded safetensors.

Only this module opens safetensors files, which cannot execute code. It imports safetensors and torch when the first
tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
SUPPORTED_DTYPES = {"F64", "F32", "F16", "BF16"}
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceError(Exception):
    """A model cannot be converted from or to Hugging Face's format; one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TensorSpec(NamedTuple):
    """Name and shape of a tensor in Hugging Face's format."""

    name: str
    shape: tuple[int, ...]


def tensor_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """The Hugging Face tensor of every parameter, by our name, in model order; without a tied head."""
    return {name: TensorSpec(each.hf_name, each.shape_of(model.sizes)) for name, each in model.parameters.items()}


# ---- reading


class SafetensorsReader:
    """Reads tensors of a folder; opens each file on first use."""

    def __init__(self, folder: Path) -> None:
        """Raises `HuggingFaceError` if safetensors files are missing."""
        self._open_files: dict[tuple[Path, str], Any] = {}
        single_file = folder / SINGLE_FILE
        if (folder / INDEX_FILE).exists() or not single_file.exists():
            self._file_of = _read_index(folder)
        else:
            self._file_of = dict.fromkeys(self._open(single_file, "numpy").keys(), single_file)

    def problems(self, model: ModelConfig) -> list[str]:
        """Every difference between the files' tensors and the model's."""
        shapes: dict[str, tuple[int, ...]] = {}
        found_in: dict[str, Path] = {}
        problems = []
        for path in dict.fromkeys(self._file_of.values()):
            try:
                file = self._open(path, "numpy")
            except HuggingFaceError as error:
                problems += error.problems
                continue
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_slice(name)
                shapes[name], found_in[name], dtype = tuple(tensor.get_shape()), path, tensor.get_dtype()
                if dtype not in SUPPORTED_DTYPES:
                    supported = ", ".join(sorted(SUPPORTED_DTYPES))
                    problems.append(f"{path.name}: {name} is {dtype}; supported are {supported}")
        if problems:
            return problems
        misplaced = [
            f"{name} is not in the file that {INDEX_FILE} names"
            for name in sorted(found_in | self._file_of)
            if found_in.get(name) != self._file_of.get(name)
        ]
        expected = {entry.name: entry.shape for entry in tensor_specs(model).values()}
        tied_head = {LM_HEAD: (model.vocab_size, model.dim)} if model.tie_embeddings else {}
        missing = [f"{name} is missing" for name in expected if name not in shapes]
        unexpected = [
            f"{name} {list(shapes[name])} is unexpected"
            for name in shapes
            if name not in expected and not name.endswith(IGNORED_SUFFIX) and shapes[name] != tied_head.get(name)
        ]
        misshaped = [
            f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ]
        return misplaced + missing + unexpected + misshaped

    def read(self, spec: TensorSpec, ranges: Sequence[range] | None = None) -> Tensor:
        """A tensor or, with one range per dimension, a slice; reads nothing else. Raises `HuggingFaceError`."""
        if not self.has_tensor(spec.name):
            raise HuggingFaceError([f"{spec.name} is missing"])
        path, bounds = self._file_of[spec.name], ranges or [*map(range, spec.shape)]
        try:
            stored = self._open(path, "pt").get_slice(spec.name)
            if tuple(stored.get_shape()) == spec.shape:
                tensor: Tensor = stored[tuple(slice(bound.start, bound.stop) for bound in bounds)]
                return tensor
        except Exception as error:  # SafetensorError, KeyError, OSError and others.
            raise HuggingFaceError([f"{path}: {spec.name} cannot be read: {error}"]) from error
        raise HuggingFaceError([f"{path}: {spec.name} has shape {stored.get_shape()}, expected {list(spec.shape)}"])

    def has_tensor(self, name: str) -> bool:
        return name in self._file_of

    def _open(self, path: Path, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if (path, framework) not in self._open_files:
            try:
                self._open_files[path, framework] = safe_open(path, framework)
            except (SafetensorError, OSError) as error:
                raise HuggingFaceError([f"{path} cannot be read: {error}"]) from None
        return self._open_files[path, framework]


def _read_index(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index = folder / INDEX_FILE
    if not index.exists():
        pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
        problem = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        if pickles:
            problem += f"; {pickles[0]} is a pickle file, which is not read because it can execute code"
        raise HuggingFaceError([problem])
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise HuggingFaceError([f"{index} cannot be read: {error}"]) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise HuggingFaceError([f"{index} has no weight_map from tensors to files"])
    file_names = sorted(set(weight_map.values()))
    # Only files of this folder are opened, whatever path a name contains.
    invalid = [name for name in file_names if Path(name).name != name or not name.endswith(".safetensors")]
    if invalid:
        raise HuggingFaceError(
            [f"{index} names {json.dumps(name)}, which is not a safetensors file of its folder" for name in invalid]
        )
    missing = [name for name in file_names if not (folder / name).is_file()]
    if missing:
        raise HuggingFaceError([f"{index} names {name}, which does not exist" for name in missing])
    return {name: folder / file for name, file in weight_map.items()}
