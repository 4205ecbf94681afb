"""Weights in Hugging Face's format: which tensor is which, reading any part of one, writing all of them.

Only this file opens safetensors, which hold numbers and nothing that could be executed. Neither they nor torch are
imported before a tensor is read.

Letters of a shape: V vocabulary, h width of the residual stream, f inner width of the feed-forward, q heads x head
width, k key/value heads x head width, w head width.
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

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
UNUSED = "rotary_emb.inv_freq"
FLOATS = {"F64", "F32", "F16", "BF16"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MODEL = {"embed": ("model.embed_tokens", "Vh"), "head.norm": ("model.norm", "h"), "head.proj": ("lm_head", "Vh")}
BLOCK = {
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


class Entry(NamedTuple):
    """A tensor as it is named there."""

    name: str
    shape: tuple[int, ...]


def entries(model: ModelConfig) -> dict[str, Entry]:
    """Every parameter by the name it has here, in the order of the model; a tied head is none."""
    sizes = {
        "V": model.vocab_size,
        "h": model.dim,
        "f": model.ffn_dim,
        "q": model.num_heads * model.head_dim,
        "k": model.num_kv_heads * model.head_dim,
        "w": model.head_dim,
    }

    def rows() -> Iterator[tuple[str, str, str]]:
        yield ("embed", *MODEL["embed"])
        for layer in range(model.num_layers):
            for ours, (theirs, letters) in BLOCK.items():
                if model.qk_norm or ours not in QK_NORMS:
                    yield f"blocks.{layer}.{ours}", f"model.layers.{layer}.{theirs}", letters
        yield ("head.norm", *MODEL["head.norm"])
        if not model.tie_embeddings:
            yield ("head.proj", *MODEL["head.proj"])

    return {
        f"{ours}.weight": Entry(f"{theirs}.weight", tuple(sizes[letter] for letter in letters))
        for ours, theirs, letters in rows()
    }


# ---- reading


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of its config.json. Raises `HuggingFaceError`."""
    try:
        return parse_config((folder / CONFIG).read_bytes())
    except OSError as error:
        raise HuggingFaceError([f"{folder / CONFIG} cannot be read: {error.strerror}"]) from None


class Weights:
    """The tensors of a folder, whose files are opened when one of them is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises `HuggingFaceError` unless the folder has safetensors, and all that its index names."""
        self._files = _files(folder)
        self._opened: dict[tuple[Path, str], Any] = {}

    def problems(self, model: ModelConfig) -> list[str]:
        """Everything by which the files' tensors are not those of the model."""
        found: dict[str, tuple[int, ...]] = {}
        placed: dict[str, Path] = {}
        problems = []
        for path in dict.fromkeys(self._files.values()):
            try:
                file = self._open(path, "numpy")
            except HuggingFaceError as error:
                problems += error.problems
                continue
            for name in file.keys():  # noqa: SIM118 - no dict
                part = file.get_slice(name)
                found[name], placed[name] = tuple(part.get_shape()), path
                if part.get_dtype() not in FLOATS:
                    problems.append(f"{path.name}: {name} is {part.get_dtype()}; only {', '.join(sorted(FLOATS))}")
        if problems:
            return problems
        if "" not in self._files:
            strays = sorted(name for name in placed | self._files if placed.get(name) != self._files.get(name))
            problems = [f"{name} is not in the file where {INDEX} has it" for name in strays]
        wanted = {entry.name: entry.shape for entry in entries(model).values()}
        tied = {HEAD: (model.vocab_size, model.dim)} if model.tie_embeddings else {}
        missing = [f"{name} is missing" for name in wanted if name not in found]
        unexpected = [
            f"{name} {list(found[name])} is unexpected"
            for name in found
            if name not in wanted and not name.endswith(UNUSED) and found[name] != tied.get(name)
        ]
        misshaped = [
            f"{name} is {list(found[name])} and not {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ]
        return problems + missing + unexpected + misshaped

    def read(self, entry: Entry, part: Sequence[range] | None = None) -> Tensor:
        """These rows, and columns, of a tensor, or all; nothing else is read. Raises `HuggingFaceError`."""
        path = self._files.get(entry.name, self._files.get(""))
        if path is None:
            raise HuggingFaceError([f"{entry.name} is missing"])
        try:
            there = self._open(path, "pt").get_slice(entry.name)
            if tuple(there.get_shape()) == entry.shape:
                found: Tensor = there[tuple(slice(side.start, side.stop) for side in part or map(range, entry.shape))]
                return found
        except Exception as error:  # safetensors' own, KeyError and OSError among them.
            raise HuggingFaceError([f"{path}: {entry.name} cannot be read: {error}"]) from error
        raise HuggingFaceError([f"{path}: {entry.name} is {there.get_shape()} and not {list(entry.shape)}"])

    def has(self, name: str) -> bool:
        only = self._files.get("")
        return name in (self._files if only is None else self._open(only, "pt").keys())

    def _open(self, path: Path, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if (path, framework) not in self._opened:
            try:
                self._opened[path, framework] = safe_open(path, framework)
            except (SafetensorError, OSError) as error:
                raise HuggingFaceError([f"{path} cannot be read: {error}"]) from None
        return self._opened[path, framework]


def _files(folder: Path) -> dict[str, Path]:
    """By tensor the file that it is in; "" for all, where there is but one file."""
    index = folder / INDEX
    if not index.exists():
        if (folder / ONE_FILE).exists():
            return {"": folder / ONE_FILE}
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        problem = f"{folder} holds neither {ONE_FILE} nor {INDEX}"
        if pickles:
            problem += f"; {pickles[0]} is a pickle, which can execute anything when it is read, and is not"
        raise HuggingFaceError([problem])
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise HuggingFaceError([f"{index} cannot be read: {error}"]) from None
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise HuggingFaceError([f"{index} has no weight_map from tensors to files"])
    names = sorted(set(named.values()))
    # Whatever a name leads to would be opened: files of this folder only.
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if wrong:
        raise HuggingFaceError(
            [f"{index} names {json.dumps(name)}, no safetensors file of its folder" for name in wrong]
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise HuggingFaceError([f"{index} names {name}, which is not there" for name in missing])
    return {name: folder / file for name, file in named.items()}


# ---- writing


def write(
    folder: Path,
    model: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    file_bytes: int,
    written: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Writes what `read` gives for each of our names, in files of about `file_bytes`, and an index if there are several.

    Of tensors no more than a file's are in memory at a time. Each file is read again, and every tensor compared bit by
    bit. Raises `HuggingFaceError` where one is not what was written, or does not fit into the model.
    """
    from safetensors.torch import save_file

    known = entries(model)
    files = list(_files_of({name: entry.shape for name, entry in known.items()}, dtype.itemsize, file_bytes))
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [ONE_FILE]
    for name, members in zip(names, files, strict=True):
        tensors = {known[ours].name: read(ours).to(dtype).contiguous() for ours in members}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read it.
        _compare(folder / name, tensors, {known[ours] for ours in members})
        written(name)
    if len(files) > 1:
        total = sum(prod(entry.shape) for entry in known.values()) * dtype.itemsize
        placed = {known[ours].name: name for name, members in zip(names, files, strict=True) for ours in members}
        content = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
        names.append(INDEX)
        written(INDEX)
    return [folder / name for name in names]


def _files_of(shapes: dict[str, tuple[int, ...]], item: int, most: int) -> Iterator[list[str]]:
    """Names in order, as many to a file as `most` bytes hold, and at least one."""
    members, size = list[str](), 0
    for name, shape in shapes.items():
        bytes_of = prod(shape) * item
        if members and size + bytes_of > most:
            yield members
            members, size = [], 0
        members.append(name)
        size += bytes_of
    yield members


def _compare(path: Path, tensors: dict[str, Tensor], wanted: Iterable[Entry]) -> None:
    """Raises `HuggingFaceError` unless the file holds exactly these."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        right = set(file.keys()) == set(tensors)
        for entry in wanted:
            there, here = file.get_tensor(entry.name), tensors[entry.name]
            # As integers: a NaN is not equal to itself, and zero is to minus zero.
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[here.itemsize]
            same = there.dtype == here.dtype and torch.equal(there.view(bits), here.view(bits))
            right = right and same and tuple(there.shape) == entry.shape
    if not right:
        raise HuggingFaceError([f"{path} does not hold what was written to it"])
