"""Weights in Hugging Face's format: tensor names, reading slices, writing sharded safetensors.

Only this module opens safetensors files, which cannot execute code. It imports safetensors and torch when the first
tensor is read.

Letters of a shape: V vocabulary, h model dim, f feed-forward dim, q query heads x head dim, k KV heads x head dim,
w head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from models.config import ModelConfig
from models.hf_config import HuggingFaceError, parse_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
SUPPORTED_DTYPES = {"F64", "F32", "F16", "BF16"}
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MODEL_TENSORS = {
    "embed": ("model.embed_tokens", "Vh"),
    "head.norm": ("model.norm", "h"),
    "head.proj": ("lm_head", "Vh"),
}
BLOCK_TENSORS = {
    "attention_norm": ("input_layernorm", "h"),
    "attention.q_proj": ("self_attn.q_proj", "qh"),
    "attention.k_proj": ("self_attn.k_proj", "kh"),
    "attention.v_proj": ("self_attn.v_proj", "kh"),
    "attention.o_proj": ("self_attn.o_proj", "hq"),
    "attention.q_norm": ("self_attn.q_norm", "w"),
    "attention.k_norm": ("self_attn.k_norm", "w"),
    "ffn_norm": ("post_attention_layernorm", "h"),
    "feed_forward.gate_proj": ("mlp.gate_proj", "fh"),
    "feed_forward.up_proj": ("mlp.up_proj", "fh"),
    "feed_forward.down_proj": ("mlp.down_proj", "hf"),
}
QK_NORMS = ("attention.q_norm", "attention.k_norm")


class TensorSpec(NamedTuple):
    """Name and shape of a tensor in Hugging Face's format."""

    name: str
    shape: tuple[int, ...]


def tensor_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """The Hugging Face tensor of every parameter, by our name, in model order; without a tied head."""
    sizes = {
        "V": model.vocab_size,
        "h": model.dim,
        "f": model.ffn_dim,
        "q": model.num_heads * model.head_dim,
        "k": model.num_kv_heads * model.head_dim,
        "w": model.head_dim,
    }

    def name_map() -> Iterator[tuple[str, str, str]]:
        yield ("embed", *MODEL_TENSORS["embed"])
        for layer in range(model.num_layers):
            for ours, (theirs, letters) in BLOCK_TENSORS.items():
                if model.qk_norm or ours not in QK_NORMS:
                    yield f"blocks.{layer}.{ours}", f"model.layers.{layer}.{theirs}", letters
        yield ("head.norm", *MODEL_TENSORS["head.norm"])
        if not model.tie_embeddings:
            yield ("head.proj", *MODEL_TENSORS["head.proj"])

    return {
        f"{ours}.weight": TensorSpec(f"{theirs}.weight", tuple(sizes[letter] for letter in letters))
        for ours, theirs, letters in name_map()
    }


# ---- reading


def read_config(folder: Path) -> dict[str, Any]:
    """Parses the folder's config.json. Raises `HuggingFaceError`."""
    try:
        return parse_config((folder / CONFIG_FILE).read_bytes())
    except OSError as error:
        raise HuggingFaceError([f"{folder / CONFIG_FILE} cannot be read: {error.strerror}"]) from None


class SafetensorsReader:
    """Reads tensors of a folder; opens each file on first use."""

    def __init__(self, folder: Path) -> None:
        """Raises `HuggingFaceError` if safetensors files are missing."""
        self._files = _files_by_tensor(folder)
        self._open_files: dict[tuple[Path, str], Any] = {}

    def problems(self, model: ModelConfig) -> list[str]:
        """Every difference between the files' tensors and the model's."""
        shapes: dict[str, tuple[int, ...]] = {}
        file_by_tensor: dict[str, Path] = {}
        problems = []
        for path in dict.fromkeys(self._files.values()):
            try:
                file = self._open(path, "numpy")
            except HuggingFaceError as error:
                problems += error.problems
                continue
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor_slice = file.get_slice(name)
                shapes[name], file_by_tensor[name] = tuple(tensor_slice.get_shape()), path
                if tensor_slice.get_dtype() not in SUPPORTED_DTYPES:
                    problems.append(
                        f"{path.name}: {name} is {tensor_slice.get_dtype()}; supported are {', '.join(sorted(SUPPORTED_DTYPES))}"
                    )
        if problems:
            return problems
        if "" not in self._files:
            misplaced = sorted(
                name for name in file_by_tensor | self._files if file_by_tensor.get(name) != self._files.get(name)
            )
            problems = [f"{name} is not in the file that {INDEX_FILE} names" for name in misplaced]
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
        return problems + missing + unexpected + misshaped

    def read(self, spec: TensorSpec, ranges: Sequence[range] | None = None) -> Tensor:
        """A tensor or, with one range per dimension, a slice; reads nothing else. Raises `HuggingFaceError`."""
        path = self._files.get(spec.name, self._files.get(""))
        if path is None:
            raise HuggingFaceError([f"{spec.name} is missing"])
        try:
            stored = self._open(path, "pt").get_slice(spec.name)
            if tuple(stored.get_shape()) == spec.shape:
                tensor: Tensor = stored[
                    tuple(slice(bounds.start, bounds.stop) for bounds in ranges or map(range, spec.shape))
                ]
                return tensor
        except Exception as error:  # SafetensorError, KeyError, OSError and others.
            raise HuggingFaceError([f"{path}: {spec.name} cannot be read: {error}"]) from error
        raise HuggingFaceError([f"{path}: {spec.name} has shape {stored.get_shape()}, expected {list(spec.shape)}"])

    def has_tensor(self, name: str) -> bool:
        single_file = self._files.get("")
        return name in (self._files if single_file is None else self._open(single_file, "pt").keys())

    def _open(self, path: Path, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if (path, framework) not in self._open_files:
            try:
                self._open_files[path, framework] = safe_open(path, framework)
            except (SafetensorError, OSError) as error:
                raise HuggingFaceError([f"{path} cannot be read: {error}"]) from None
        return self._open_files[path, framework]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor; the key "" stands for all tensors if there is a single file."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).exists():
            return {"": folder / SINGLE_FILE}
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


# ---- writing


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
