"""A folder in Hugging Face's format: its config.json, names of tensors, and slices of them.

Only this module opens safetensors files, which cannot execute code. It imports safetensors and
torch when the first tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import mxfp4
from models.config import ModelConfig
from models.files import (
    MAX_CONFIG_BYTES,
    MAX_TENSOR_INDEX_BYTES,
    UnusableFileError,
    open_regular,
    read_beneath,
)
from models.hf_tensors import (
    FUSED_TENSORS,
    LAYERS,
    RENAMED_TENSORS,
    TensorSpec,
    stored_tensors,
    tensor_specs,
)
from models.strict_json import load_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
TEXT_CONFIG = "text_config"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""Prefixes of the language model's tensors in a model of several modalities (of transformers 4;
5), and what replaces them.
"""
TIED_HEAD_ROWS = 4096
"""Rows of the head and the embedding that are compared at once."""
QUANTIZED_SUFFIXES = (mxfp4.BLOCKS, mxfp4.SCALES)
IGNORED_SUFFIX = "rotary_emb.inv_freq"
SUPPORTED_DTYPES = {"F64", "F32", "F16", "BF16"}
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceError(Exception):
    """A model cannot be converted from or to Hugging Face's format; one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json. Raises `HuggingFaceError`."""
    try:
        values = load_json(read_beneath(folder, CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES))
    except OSError as error:
        raise HuggingFaceError(
            [
                f"{folder / CONFIG_FILE} cannot be read: {error.strerror} (models are not downloaded)"
            ]
        ) from None
    except ValueError as error:
        raise HuggingFaceError([f"config.json is not valid JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise HuggingFaceError([f"config.json must be an object, not {format_value(values)}"])
    return values


def text_model_values(values: Mapping[str, Any], *, text_only: bool) -> Mapping[str, Any]:
    """The config.json of the language model.

    Raises `HuggingFaceError` for one of several modalities, unless `text_only`.
    """
    text = values.get(TEXT_CONFIG)
    if not isinstance(text, dict):
        return values
    if not text_only:
        raise HuggingFaceError(
            [
                f"config.json: {TEXT_CONFIG}: the model has other modalities besides text (model_type = "
                f"{format_value(values.get('model_type'))}); --text-only imports its language model alone"
            ]
        )
    key = "tie_word_embeddings"
    if key in values and values[key] != text.get(key, values[key]):
        whole = format_value(values[key])
        part = format_value(text[key])
        stated = f"{key} = {whole} and {TEXT_CONFIG}.{key} = {part}"
        raise HuggingFaceError([f"config.json: {stated} disagree"])
    return {key: values[key]} | text if key in values else text


def format_value(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def is_extra(name: str, model: ModelConfig) -> bool:
    """Whether a tensor is of the layer after the last with which GLM-4.5 predicts further tokens.
    transformers ignores it.
    """
    return model.model_type == "glm4_moe" and name.startswith(f"{LAYERS}{model.num_layers}.")


# ---- reading


class SafetensorsReader:
    """Reads tensors of a folder; opens each file on first use."""

    def __init__(self, folder: Path, *, text_only: bool = False) -> None:
        """`text_only`: of a model of several modalities, the tensors of its language model, by the
        names they have in one.

        Raises `HuggingFaceError` if safetensors files are missing.
        """
        self._open_files: dict[tuple[Path, str], Any] = {}
        single_file = folder / SINGLE_FILE
        if (folder / INDEX_FILE).exists() or not single_file.exists():
            self._file_of = _read_index(folder)
        else:
            # "numpy", because reading names then imports no torch.
            self._file_of = dict.fromkeys(self._open(single_file, "numpy").keys(), single_file)
        self._text_only = text_only
        self._stored_names = {
            text: name for name in self._file_of if (text := self._text_name(name)) is not None
        }

    @property
    def left_out(self) -> Counter[str]:
        """Number of the tensors that are not read, by the parts of the model."""
        others = self._file_of.keys() - self._stored_names.values()
        return Counter(name.removeprefix("model.").split(".")[0] for name in sorted(others))

    def num_extra_tensors(self, model: ModelConfig) -> int:
        """Number of tensors that are not read because they are extra; see `is_extra`."""
        return sum(is_extra(name, model) for name in self._stored_names)

    def _text_name(self, name: str) -> str | None:
        """A tensor's name in the language model; None if it does not belong to it."""
        if not self._text_only:
            return name
        found = (
            (prefix, ours) for prefix, ours in TEXT_PREFIXES.items() if name.startswith(prefix)
        )
        return next((ours + name.removeprefix(prefix) for prefix, ours in found), None)

    @property
    def num_files(self) -> int:
        return len({*self._file_of.values()})

    def problems(
        self, model: ModelConfig, *, on_file: Callable[[], object] = lambda: None
    ) -> list[str]:
        """Every difference between the files' tensors and the model's. `on_file` is called after
        each file.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        found_in: dict[str, Path] = {}
        problems = list[str]()
        twice = list[str]()
        for path in dict.fromkeys(self._file_of.values()):
            try:
                file = self._open(path, "numpy")
            except HuggingFaceError as error:
                problems += error.problems
                continue
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_slice(name)
                if name in found_in:
                    twice.append(f"{name} is in {found_in[name].name} and in {path.name}")
                shapes[name] = tuple(tensor.get_shape())
                found_in[name] = path
                dtype = tensor.get_dtype()
                allowed = {"U8"} if name.endswith(QUANTIZED_SUFFIXES) else SUPPORTED_DTYPES
                if dtype not in allowed:
                    supported = ", ".join(sorted(allowed))
                    problems.append(f"{path.name}: {name} is {dtype}; supported are {supported}")
            on_file()
        if problems:
            return problems
        misplaced = [
            f"{name} is not in the file that {INDEX_FILE} names"
            for name in sorted(found_in | self._file_of)
            if found_in.get(name) != self._file_of.get(name)
        ]
        shapes = {text: shapes[name] for text, name in self._stored_names.items()}
        expected = self._expected_shapes(model)
        # Some exports store the tied head as well. Its values are compared where they are read.
        tied_head = {LM_HEAD: (model.vocab_size, model.dim)} if model.tie_embeddings else {}
        missing = [f"{name} is missing" for name in expected if name not in shapes]
        unexpected = [
            f"{name} {list(shapes[name])} is unexpected"
            for name in shapes
            if name not in expected
            and not name.endswith(IGNORED_SUFFIX)
            and not is_extra(name, model)
            and shapes[name] != tied_head.get(name)
        ]
        misshaped = [
            f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ]
        return twice or misplaced + missing + unexpected + misshaped

    def _expected_shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, quantized or not as the files are."""
        expected = dict[str, tuple[int, ...]]()
        for name, stored in stored_tensors(model).items():
            if self.has_tensor(f"{name}{mxfp4.BLOCKS}") and mxfp4.can_store(stored.shape):
                experts, inputs, outputs = stored.shape
                shapes = mxfp4.stored_shapes((experts, outputs, inputs))
                expected |= {f"{name}{suffix}": shape for suffix, shape in shapes.items()}
            else:
                expected[name] = stored.shape
        return expected

    def tied_head_problems(
        self, model: ModelConfig, ranges: Sequence[range] | None = None
    ) -> list[str]:
        """Problems of a head of its own, where the model's is the embedding.

        `ranges`: the part of both to compare.
        """
        if not model.tie_embeddings or not self.has_tensor(LM_HEAD):
            return []
        embedding = tensor_specs(model)["embed.weight"]
        rows, columns = ranges or map(range, embedding.shape)
        # In parts of rows: each matrix may take gigabytes.
        for first in range(rows.start, rows.stop, TIED_HEAD_ROWS):
            part = [range(first, min(first + TIED_HEAD_ROWS, rows.stop)), columns]
            head, values = (
                self.read(embedding._replace(name=name), part)
                for name in (LM_HEAD, embedding.name)
            )
            if not bool((head == values).all()):
                return [
                    f"{LM_HEAD} differs from {embedding.name}, but tie_word_embeddings is true"
                ]
        return []

    def read(self, spec: TensorSpec, ranges: Sequence[range] | None = None) -> Tensor:
        """A tensor or, with one range per dimension, a slice; reads nothing else.

        Raises `HuggingFaceError`.
        """
        ranges = [*(ranges or map(range, spec.shape))]
        if spec.is_per_expert:
            import torch

            experts = [self.read(spec.of_expert(expert), ranges[1:]) for expert in ranges[0]]
            # FSDP leaves ranks without an expert where there are fewer experts than ranks, or the
            # division has a rest.
            return torch.stack(experts) if experts else torch.empty([len(each) for each in ranges])
        if self.has_tensor(f"{spec.name}{mxfp4.BLOCKS}"):
            return self._read_quantized(spec, ranges)
        return spec.select(self._slice(spec.name, spec.stored_shape, spec.stored_ranges(ranges)))

    def _read_quantized(self, spec: TensorSpec, ranges: list[range]) -> Tensor:
        """Reads a slice of an MXFP4 weight, whose outputs come before the inputs."""
        experts, outputs, inputs = spec._replace(is_transposed=False).stored_ranges(ranges)
        # Blocks of 32 inputs share a scale, so whole blocks are read and the rest is cut off
        # after.
        blocks = mxfp4.block_range(inputs)
        stored = spec._replace(is_transposed=False).stored_shape
        shapes = mxfp4.stored_shapes((stored[0], stored[1], stored[2]))
        of_blocks, of_scales = (
            self._slice(
                f"{spec.name}{suffix}", shape, [experts, outputs, blocks, *map(range, shape[3:])]
            )
            for suffix, shape in shapes.items()
        )
        first = inputs.start - blocks.start * mxfp4.BLOCK_SIZE
        values = mxfp4.dequantize(of_blocks, of_scales)[..., first : first + len(inputs)]
        return spec._replace(is_transposed=False).select(values)

    def _slice(self, name: str, shape: tuple[int, ...], ranges: Sequence[range]) -> Tensor:
        if not self.has_tensor(name):
            raise HuggingFaceError([f"{name} is missing"])
        name = self._stored_names[name]
        path = self._file_of[name]
        try:
            stored = self._open(path, "pt").get_slice(name)
            if tuple(stored.get_shape()) == shape:
                tensor: Tensor = stored[tuple(slice(bound.start, bound.stop) for bound in ranges)]
                return tensor
        except Exception as error:
            # SafetensorError, KeyError, OSError and others.
            raise HuggingFaceError([f"{path}: {name} cannot be read: {error}"]) from error
        raise HuggingFaceError(
            [f"{path}: {name} has shape {stored.get_shape()}, expected {list(shape)}"]
        )

    def specs(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """The `tensor_specs` for the tensors that the files have, whatever `model_type` the model
        has.
        """
        model_types = (model.model_type, "", *FUSED_TENSORS, *RENAMED_TENSORS)
        found = [
            tensor_specs(dataclasses.replace(model, model_type=each))
            for each in dict.fromkeys(model_types)
        ]
        return next((specs for specs in found if all(map(self._has, specs.values()))), found[0])

    def _has(self, spec: TensorSpec) -> bool:
        name = spec.name.format(0)
        return self.has_tensor(name) or self.has_tensor(f"{name}{mxfp4.BLOCKS}")

    def has_tensor(self, name: str) -> bool:
        return name in self._stored_names

    def _open(self, path: Path, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if (path, framework) not in self._open_files:
            try:
                # safetensors would wait for a pipe that nobody writes to.
                open_regular(path).close()
                self._open_files[path, framework] = safe_open(path, framework)
            except (SafetensorError, OSError) as error:
                reason = error.strerror if isinstance(error, UnusableFileError) else error
                raise HuggingFaceError([f"{path} cannot be read: {reason}"]) from None
        return self._open_files[path, framework]


def _read_index(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index = folder / INDEX_FILE
    if not index.exists():
        pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
        problem = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        if pickles:
            problem += (
                f"; {pickles[0]} is a pickle file, which is not read because it can execute code"
            )
        raise HuggingFaceError([problem])
    try:
        content = load_json(read_beneath(folder, INDEX_FILE, max_bytes=MAX_TENSOR_INDEX_BYTES))
    except (OSError, ValueError) as error:
        raise HuggingFaceError([f"{index} cannot be read: {error}"]) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise HuggingFaceError([f"{index} has no weight_map from tensors to files"])
    file_names = sorted(set(weight_map.values()))
    # Only files of this folder are opened, whatever path a name contains.
    invalid = [
        name for name in file_names if Path(name).name != name or not name.endswith(".safetensors")
    ]
    if invalid:
        raise HuggingFaceError(
            [
                f"{index} names {json.dumps(name)}, which is not a safetensors file of its folder"
                for name in invalid
            ]
        )
    missing = [name for name in file_names if not (folder / name).is_file()]
    if missing:
        raise HuggingFaceError([f"{index} names {name}, which does not exist" for name in missing])
    if SINGLE_FILE not in file_names and (folder / SINGLE_FILE).exists():
        raise HuggingFaceError(
            [
                f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}, which does not name it; delete one"
            ]
        )
    return {name: folder / file for name, file in weight_map.items()}
