"""Location of our parameters in the tensors of Hugging Face's format. Imports no torch until a
tensor is made.

A tensor may hold several parameters: one after the other (phi3), or in turns (gpt-oss). The
weights of experts are a tensor for each expert, or one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = "model.layers."
Dim = TypeVar("Dim")
FUSED_TENSORS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {
        "self_attn.qkv_proj.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    }
}
"""Fused tensors by `model_type`: those of a layer that hold several of the others, one after the
other.
"""
RENAMED_TENSORS: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.{}.gate_proj.weight": "block_sparse_moe.experts.{}.w1.weight",
        "mlp.experts.{}.up_proj.weight": "block_sparse_moe.experts.{}.w3.weight",
        "mlp.experts.{}.down_proj.weight": "block_sparse_moe.experts.{}.w2.weight",
    },
    "gpt_oss": {
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.bias": "mlp.router.bias",
        "mlp.experts.{}.gate_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.{}.gate_proj.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.{}.up_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.{}.up_proj.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.{}.down_proj.weight": "mlp.experts.down_proj",
        "mlp.experts.{}.down_proj.bias": "mlp.experts.down_proj_bias",
    },
}
"""Renamed tensors by `model_type`: those of a layer that have other names than in most."""
TURNS = {"gate_proj": 0, "up_proj": 1}
"""Turns in a tensor of all experts: which outputs of each pair are those of gate, and of up."""


class TensorSpec(NamedTuple):
    """Location of a parameter in Hugging Face's format: some rows of a tensor, or all of it."""

    name: str
    """Name of the tensor; `{}` is the index of an expert, if each has a tensor."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    first_row: int = 0
    fused_rows: int | None = None
    """Rows of the tensor, if it holds several parameters one after the other."""
    turn: int | None = None
    """Which of each two outputs of an expert is the parameter's, 0 or 1, if the tensor holds two
    parameters in turns.
    """
    is_transposed: bool = False
    """Whether the tensor is [experts, inputs, outputs]."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each stored tensor."""
        if self.is_per_expert:
            return self.shape[1:]
        if self.fused_rows is not None:
            return self.fused_rows, *self.shape[1:]
        if self.turn is not None:
            return self._transposed((self.shape[0], 2 * self.shape[1], *self.shape[2:]))
        return self._transposed(self.shape)

    @property
    def is_per_expert(self) -> bool:
        return "{}" in self.name

    def of_expert(self, expert: int) -> TensorSpec:
        return self._replace(name=self.name.format(expert), shape=self.shape[1:])

    def stored_ranges(self, ranges: list[range]) -> list[range]:
        """Ranges of the tensor to read; `select` then gives the parameter's part."""
        rows, *others = ranges
        # Outputs take turns: output i of a parameter is 2 i or 2 i + 1 of the tensor.
        if self.turn is not None:
            others[0] = range(2 * others[0].start, 2 * others[0].stop)
        stored = (range(self.first_row + rows.start, self.first_row + rows.stop), *others)
        return [*self._transposed(stored)]

    def select(self, stored: Tensor) -> Tensor:
        outputs = stored.mT if self.is_transposed else stored
        return outputs if self.turn is None else outputs[:, self.turn :: 2]

    def _transposed(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return (dims[0], dims[2], dims[1]) if self.is_transposed else dims


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorSpec, int | None], ...]
    """Our parameters in it, and the expert whose part they are."""

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor, from our parameters."""
        import torch

        values = [
            read(ours) if expert is None else read(ours)[expert] for ours, _, expert in self.parts
        ]
        spec = self.parts[0][1]
        # [experts, outputs, 2, ...], flattened, gives the outputs in turns.
        if spec.turn is not None:
            values = [torch.stack(values, dim=2).flatten(1, 2)]
        joined = values[0] if len(values) == 1 else torch.cat(values)
        return (joined.mT if spec.is_transposed else joined).contiguous()


def tensor_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """The Hugging Face tensor of every parameter and buffer, by our name, in model order; without
    a tied head.
    """
    declared = model.parameters | {
        name: each for name, each in model.buffers.items() if each.hf_name
    }
    specs = {
        name: _spec(model.model_type, each.hf_name, each.shape_of(model.sizes))
        for name, each in declared.items()
    }
    return dict(_fuse(specs, FUSED_TENSORS.get(model.model_type, {})))


def stored_tensors(model: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a model's files, by name, in model order."""
    found = dict[str, StoredTensor]()
    for ours, spec in tensor_specs(model).items():
        for expert in range(spec.shape[0]) if spec.is_per_expert else (None,):
            name = spec.name if expert is None else spec.name.format(expert)
            before = found[name].parts if name in found else ()
            found[name] = StoredTensor(spec.stored_shape, (*before, (ours, spec, expert)))
    return found


def _spec(model_type: str, name: str, shape: tuple[int, ...]) -> TensorSpec:
    renamed = RENAMED_TENSORS.get(model_type, {})
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    if not name.startswith(LAYERS) or rest not in renamed:
        return TensorSpec(name, shape)
    theirs = f"{LAYERS}{layer}.{renamed[rest]}"
    if "{}" in theirs or "experts" not in rest:
        return TensorSpec(theirs, shape)
    turn = next((turn for part, turn in TURNS.items() if part in rest), None)
    return TensorSpec(theirs, shape, turn=turn, is_transposed=len(shape) == 3)


def _fuse(
    specs: dict[str, TensorSpec], fused: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, TensorSpec]]:
    """Replaces our tensors by those of layers that hold several of them, one after the other."""
    rows = {spec.name: spec.shape[0] for spec in specs.values()}
    for ours, spec in specs.items():
        layer, _, name = spec.name.removeprefix(LAYERS).partition(".")
        for whole, parts in fused.items() if spec.name.startswith(LAYERS) else ():
            # A layer of another kind may have some of the parts alone, such as a feed-forward
            # without a gate.
            sizes = [rows.get(f"{LAYERS}{layer}.{part}", 0) for part in parts]
            if name in parts and all(sizes):
                first_row = sum(sizes[: parts.index(name)])
                yield (
                    ours,
                    TensorSpec(f"{LAYERS}{layer}.{whole}", spec.shape, first_row, sum(sizes)),
                )
                break
        else:
            yield ours, spec
