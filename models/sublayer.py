"""A half of a block, in the pieces that recomputation, tiles and tensor parallelism act between,
and their gradients.

    x --> before --> linears --> inner --> core --> last --> after --> + x
          norm       products    heads,    attention product norm, if
                                 gate      only              it has one

`before`, `inner` and `after` are ordinary forward functions that treat each token by itself, and
`inner` of attention each head (unless heads are normed together), so that any tile of tokens and
group of heads gives the same numbers. They take their weights by name. To differentiate one of
them alone, `LocalGraph` runs it on detached inputs. Products and their gradients, communication
and attention are up to the caller (`parallelisms/block_recompute.py`).

Shape suffixes: B batch, S tokens of this rank, E model dim, F rotary frequencies, D document
boundaries; I inputs and O outputs of a linear layer, after any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F

from models.config import ModelConfig
from models.layers import LayerKind
from models.linear import Linear, local_parameter, local_parameters
from models.norm import RMSNorm, config_norm
from models.tiling import bytes_per_token

Weights = Mapping[str, Tensor]
"""Parameters as this rank computes with them, by name."""
Piece = Callable[[Sequence[Tensor], Weights], Sequence[Tensor]]
Restore = Callable[[int], Tensor]


class ExpertWeights(nn.Module):
    """The parameters of experts. FSDP gathers them while it runs something."""

    def forward(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return run(*inputs)


class SublayerModule(nn.Module):
    """A sublayer between its norms: linear layers, and what computes between them."""

    module_name: ClassVar[str] = "feed_forward"
    """Name of the module in a block."""
    linears: ClassVar[tuple[str, ...]] = ()
    """The linear layers that take the input."""
    last: ClassVar[str] = ""
    """The linear layer that gives the output, to which `Sublayer.after` adds its bias.

    Empty: the sublayer is one piece.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        """Adds the linear layers, norms and other parameters that are declared."""
        super().__init__()
        declared = kind.parameters_of(self.module_name)
        last = declared.get(f"{self.last}.weight")
        if self.last and (last is None or last.initial != "residual"):
            raise ValueError(
                f'{self.module_name}.{self.last} gives the output: its weight must be declared with initial "residual"'
            )
        for name, parameter in declared.items():
            layer, _, attribute = name.rpartition(".")
            shape = parameter.shape_of(config.sizes)
            if parameter.per_expert:
                experts = self._modules.setdefault(layer, ExpertWeights())
                cast(ExpertWeights, experts).register_parameter(
                    attribute, nn.Parameter(torch.empty(shape))
                )
            elif not layer:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            elif attribute == "weight" and parameter.is_matrix:
                self.add_module(
                    layer, Linear(shape[1], shape[0], bias=f"{layer}.bias" in declared)
                )
            elif attribute == "weight":
                self.add_module(layer, config_norm(config, *shape))
        for name, buffer in kind.buffers_of(self.module_name).items():
            initial = torch.ones if buffer.initial == "ones" else torch.zeros
            self.register_buffer(
                name, initial(buffer.shape_of(config.sizes), dtype=torch.get_default_dtype())
            )

    def inner(
        self, products: Sequence[Tensor], rotation_2BS1F: Tensor, weights: Weights
    ) -> Sequence[Tensor]:
        """Computes queries, keys and values for `core`, or the input of `last`, from the products
        of `linears`.
        """
        raise NotImplementedError

    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        """Runs a sublayer without a core. The backward pass runs `inner` again."""
        del boundaries_BD
        weights = local_parameters(self)
        products = self.products(x_BSE, weights)
        last_EI = weights[f"{self.last}.weight"]
        # Compiled, the partitioner chooses what to recompute. Dynamo of torch 2.11 differentiates
        # some autograd functions wrongly (`parallelisms/gradient_check.py`).
        if torch.compiler.is_compiling():
            return F.linear(self.inner(products, rotation_2BS1F, weights)[0], last_EI)
        inner_weights = {
            name: weight for name, weight in weights.items() if not self.is_in_product(name)
        }
        out: Tensor = LinearOfPiece.apply(
            lambda inputs, given: self.inner(inputs, rotation_2BS1F, given),
            (*inner_weights,),
            last_EI,
            *products,
            *inner_weights.values(),
        )
        return out

    def products(self, x_BSE: Tensor, weights: Weights) -> list[Tensor]:
        """Products of `linears`, in their order."""
        return [self.product(name, x_BSE, weights) for name in self.linears]

    def product(self, name: str, x_BSE: Tensor, weights: Weights) -> Tensor:
        return F.linear(x_BSE, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, weights: Weights) -> Tensor:
        """The norm of this name, applied to x if it is declared."""
        norm = self._modules.get(name)
        return norm.normalize(x, weights[f"{name}.weight"]) if isinstance(norm, RMSNorm) else x

    def gathered(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`run(*inputs)` while the weights that FSDP gathers apart from those of the block are
        gathered.
        """
        experts = self._modules.get("experts")
        return run(*inputs) if experts is None else experts(run, *inputs)

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes per token of the backward pass of a tile."""
        ffn_dim, dim = local_parameter(self.get_submodule(self.linears[0])).shape
        return bytes_per_token(dim, ffn_dim, itemsize)

    def is_in_product(self, name: str) -> bool:
        """Whether a parameter belongs to one of the linear layers, rather than to `inner`."""
        return name.rpartition(".")[0] in self.linears or name == f"{self.last}.weight"


class Sublayer:
    """Attention or feed-forward with its residual connection and a norm of its input, of its
    output, or of both. Errors call it by `name`, such as `mixer "attention"`.
    """

    def __init__(
        self,
        module: SublayerModule,
        *,
        name: str = "sublayer",
        norm: RMSNorm | None = None,
        post_norm: RMSNorm | None = None,
        multiplier: float = 1.0,
    ) -> None:
        self.module = module
        self.name = name
        self.norm = norm
        self.post_norm = post_norm
        self.multiplier = multiplier
        bias = f"{getattr(module, 'last', '')}.bias"
        self.bias_name = (
            bias if any(name == bias for name, _ in module.named_parameters()) else None
        )
        """Name of the bias of the last product."""
        self.has_after = post_norm is not None or multiplier != 1 or self.bias_name is not None

    def __call__(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        """Leaves the backward pass to autograd."""
        weights = self.own_weights()
        out_BSE = self.module(self.before(x_BSE, weights), rotation_2BS1F, boundaries_BD)
        # Another shape could broadcast into the residual stream unnoticed.
        if not isinstance(out_BSE, Tensor) or out_BSE.shape != x_BSE.shape:
            raise ValueError(f"{self.name} must return {_shown(x_BSE)}, not {_shown(out_BSE)}")
        return x_BSE + self.after(out_BSE, weights)

    def own_weights(self) -> dict[str, Tensor]:
        """Weights that `before` and `after` take."""
        norms = {"norm.weight": self.norm, "post_norm.weight": self.post_norm}
        weights = {name: local_parameter(norm) for name, norm in norms.items() if norm is not None}
        if self.bias_name is not None:
            weights[self.bias_name] = local_parameter(
                self.module.get_submodule(self.module.last), "bias"
            )
        return weights

    def weights(self) -> dict[str, Tensor]:
        """Every parameter as this rank computes with it, by name."""
        return local_parameters(self.module) | self.own_weights()

    def before(self, x_BSE: Tensor, weights: Weights) -> Tensor:
        """The input of `linears`."""
        return x_BSE if self.norm is None else self.norm.normalize(x_BSE, weights["norm.weight"])

    def after(self, out_BSE: Tensor, weights: Weights) -> Tensor:
        """The term that the residual connection adds, from the product of `last`."""
        if self.bias_name is not None:
            out_BSE = out_BSE + weights[self.bias_name]
        if self.post_norm is not None:
            out_BSE = self.post_norm.normalize(out_BSE, weights["post_norm.weight"])
        return out_BSE if self.multiplier == 1 else out_BSE * self.multiplier


def _shown(value: object) -> str:
    return f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


# ---- gradients of a piece


class LocalGraph:
    """The autograd graph of `piece(inputs, weights)`, whose results are in `outputs` until
    `backward`.

    `weights` are leaves that require gradients. Keeps what the piece saves for its backward pass,
    except `restorable`: tensors that `backward` can ask for again.
    """

    def __init__(
        self,
        piece: Piece,
        inputs: Sequence[Tensor],
        weights: Weights,
        *,
        restorable: Sequence[Tensor] = (),
    ) -> None:
        self._weights = weights
        self._hooks = SavedTensorHooks()
        with (
            torch.enable_grad(),
            self._hooks.pack_as_index(restorable) if restorable else nullcontext(),
        ):
            # The inputs require no gradient: `_ANCHOR` does, and so begins the graph.
            entered = Enter.apply(_ANCHOR, *inputs)
            outputs = piece(entered, self._weights)
        # Edges name the ends of the graph without keeping tensors alive.
        self._input_edges = [get_gradient_edge(x) for x in entered]
        self._output_edges = [get_gradient_edge(x) for x in outputs]
        self.outputs = [x.detach() for x in outputs]

    def backward(
        self, grads: Sequence[Tensor], restore: Restore | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the inputs, and of the weights that the piece uses; `restore(i)` gives
        `restorable[i]`.
        """
        self.outputs = []
        self._hooks.restore = restore
        num_inputs = len(self._input_edges)
        wanted: Any = [*self._input_edges, *self._weights.values()]
        found = torch.autograd.grad(self._output_edges, wanted, [*grads], allow_unused=True)
        used = {
            name: grad
            for name, grad in zip(self._weights, found[num_inputs:], strict=True)
            if grad is not None
        }
        return [*found[:num_inputs]], used


class SavedTensorHooks:
    """Saves a tensor that shares the memory of `restorable[i]` as i and its layout."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._restored: dict[int, Tensor] = {}
        self.restore: Restore | None = None

    @contextmanager
    def pack_as_index(self, restorable: Sequence[Tensor]) -> Iterator[None]:
        # By storage, because autograd may save a view, such as one head, of a restorable tensor.
        self._storages = [x.untyped_storage() for x in restorable]
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._storages.clear()  # The graph keeps the hooks.

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        index = next((index for index, each in enumerate(self._storages) if each is storage), None)
        return x if index is None else (index, x.shape, x.stride(), x.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index, *layout = packed
        if self.restore is None:
            raise RuntimeError("the backward pass of this piece needs a tensor that was not kept")
        # Several saved views may belong to one tensor, which is restored once.
        if index not in self._restored:
            self._restored[index] = self.restore(index)
        return self._restored[index].as_strided(*layout)


class Enter(torch.autograd.Function):
    """The inputs of a piece, where its graph begins.

    Unlike leaves of autograd, the graph does not keep them alive.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        del ctx, anchor
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        del ctx, grads
        raise RuntimeError("gradients of a piece are taken before they get here")


_ANCHOR = torch.empty(0, requires_grad=True, device="cpu")


class LinearOfPiece(torch.autograd.Function):
    """`F.linear(piece(inputs, weights), weight)`, which saves the inputs and recomputes the piece
    in the backward pass.

    `tensors` are the inputs of the piece, then its weights, whose names are `names`.
    """

    @staticmethod
    def forward(
        ctx: Any, piece: Piece, names: Sequence[str], weight_OI: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.piece = piece
        ctx.names = names
        ctx.save_for_backward(weight_OI, *tensors)
        (x_I,) = piece(*_split([x.detach() for x in tensors], names))
        return F.linear(x_I, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_O,) = grads
        weight_OI, *tensors = ctx.saved_tensors
        inputs, weights = _split(tensors, ctx.names)
        graph = LocalGraph(ctx.piece, inputs, as_leaves(weights))
        # Popped, so that the output is freed before the backward pass of the piece.
        grad_weight_OI = weight_grad(grad_O, graph.outputs.pop())
        input_grads, weight_grads = graph.backward([grad_O @ weight_OI])
        return (
            None,
            None,
            grad_weight_OI,
            *input_grads,
            *(weight_grads.get(name) for name in ctx.names),
        )


def as_leaves(weights: Weights) -> dict[str, Tensor]:
    """The weights, apart from any graph, as `LocalGraph` takes them."""
    return {name: weight.detach().requires_grad_() for name, weight in weights.items()}


def _split(tensors: Sequence[Tensor], names: Sequence[str]) -> tuple[Sequence[Tensor], Weights]:
    num_inputs = len(tensors) - len(names)
    return tensors[:num_inputs], dict(zip(names, tensors[num_inputs:], strict=True))


def weight_grad(grad_O: Tensor, x_I: Tensor, *, out_OI: Tensor | None = None) -> Tensor:
    """Weight gradient of `x @ weight.T`, from the gradient of the product."""
    return torch.mm(grad_O.flatten(0, -2).T, x_I.flatten(0, -2), out=out_OI)


def input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Gradient of an input that several weights multiply: sum of `grad @ weight`."""
    # `addmm_` adds in place: the gradient of the input is allocated once.
    total = grads[0].flatten(0, -2) @ weights[0]
    for grad_O, weight_OI in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad_O.flatten(0, -2), weight_OI)
    return total.view(*grads[0].shape[:-1], -1)
