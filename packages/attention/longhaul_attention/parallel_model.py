"""`parallelize`: a model of transformers that takes whole batches and gives whole outputs, for
losses of every kind.

Two hooks stand around the part of a model that looks at tokens one by one: a causal language model
with its head, or the model below any other head. The first shards what it is given, the second
gathers what it returns. What a trainer computes from whole outputs, it computes alike on every
rank of the group.

Shape suffixes: B sequences, S tokens of this rank, T tokens of the full sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longhaul_attention.context_parallel import ContextParallel
from longhaul_attention.huggingface import NAME, dropout_problems, registered_names

LOSS = "num_items_in_batch"
REFUSED = {
    "inputs_embeds": "tokens are sharded: give input_ids",
    "logits_to_keep": "a rank keeps the logits of its own tokens",
    "output_attentions": "no rank has the scores of all tokens",
    "output_router_logits": "a balance loss is not a mean over tokens (TRL: router_aux_loss_coef=0.0)",
    "past_key_values": "a KV cache of transformers holds no shards; generate with longhaul_attention.generation",
    "use_cache": "a KV cache of transformers holds no shards; generate with longhaul_attention.generation",
}
"""Inputs of a model that none may be given, and why."""


def parallelize(model: nn.Module, cp: ContextParallel) -> nn.Module:
    """Makes a model of transformers take whole batches, the same on the ranks of the group, and
    return whole outputs.

    Every rank then computes the loss of the whole batch from them, and the mean of each gradient
    over the ranks, as DistributedDataParallel and FSDP compute it, is that of the loss. Per-token
    outputs are gathered, [B, T, ...]: hidden states, and of causal models the `log_probs` of fused
    heads; `logits` only where the model is given no labels, or inside `gathers_logits`. Adapters
    of PEFT may stand around the model. Returns the model.

    Raises ValueError for a model whose attention is not that of `register_transformers`, and, when
    it is called, for inputs of which no rank can know its part.
    """
    hooks = _Hooks(cp, _inner(model))
    hooks.part.register_forward_pre_hook(hooks.shard, with_kwargs=True, prepend=True)
    hooks.part.register_forward_hook(hooks.gather, with_kwargs=True)
    _hooks[hooks.model] = hooks
    return model


@contextmanager
def gathers_logits(model: nn.Module, *, when: bool = True) -> Iterator[None]:
    """Makes a parallelized model gather its logits inside of the context, although it is given
    labels.
    """
    hooks = _hooks[_inner(model)]
    before = hooks.gathers_logits
    hooks.gathers_logits = when
    try:
        yield
    finally:
        hooks.gathers_logits = before


def _inner(model: nn.Module) -> Any:
    """The model of transformers inside wrappers."""
    from transformers import PreTrainedModel

    found = next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
    )
    if found is None:
        raise ValueError(f"{type(model).__name__} holds no model of transformers")
    return found


def has_causal_head(model: nn.Module) -> bool:
    """Whether a model of transformers predicts tokens, each from those before it."""
    return any(base.__name__.endswith("ForCausalLM") for base in type(_inner(model)).__mro__)


_hooks: WeakKeyDictionary[nn.Module, _Hooks] = WeakKeyDictionary()


class _Hooks:
    """The two hooks of one model, around `part` of it."""

    def __init__(self, cp: ContextParallel, model: Any) -> None:
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in registered_names:
            raise ValueError(
                f'{type(model).__name__} has attention "{attention}": load it with attn_implementation="{NAME}", after '
                "register_transformers()"
            )
        self.cp = cp
        self.model = model
        self.part: Any = model if has_causal_head(model) else model.base_model
        self.gathers_logits = False
        self._parameters = [*inspect.signature(type(self.part).forward).parameters][1:]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def shard(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Replaces the inputs by those of this rank's tokens."""
        given = dict(zip(self._parameters, arguments, strict=False)) | given
        given = {name: value for name, value in given.items() if value is not None}
        problems = [f"{name}: {why}" for name, why in REFUSED.items() if _is_set(given.get(name))]
        if given.get("return_dict") is False:
            problems.append("return_dict = False: outputs are gathered by their names")
        if "documents" in given:
            problems.append(
                "the batch is sharded already: a parallelized model takes whole batches"
            )
        problems += dropout_problems(module)
        if problems:
            raise ValueError(
                f"{type(self.model).__name__} on ranks that share sequences: {'; '.join(problems)}"
            )
        num_items = given.pop(LOSS, None)
        sharded = self.cp.shard_batch(given)
        if LOSS in sharded:  # Ranks add up their parts of a loss.
            sharded[LOSS] = sharded[LOSS] * self.cp.plan.cp if num_items is None else num_items
        return (), sharded

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, module: nn.Module, arguments: Any, given: dict[str, Any], output: Any) -> Any:
        """Replaces the output by that of whole sequences."""
        del module, arguments
        if not isinstance(output, Mapping):
            raise TypeError(
                f"{type(self.model).__name__} returned a {type(output).__name__}, not outputs by name"
            )
        whole = {name: self._gathered(name, value, given) for name, value in output.items()}
        return type(output)(**whole)

    def _gathered(self, name: str, value: Any, given: dict[str, Any]) -> Any:
        is_labelled = "labels" in given
        if value is None or (name == "logits" and is_labelled and not self.gathers_logits):
            return None
        if isinstance(value, tuple):
            return tuple(self._gathered(name, each, given) for each in value)
        if name == "loss":
            return _SumOverRanks.apply(value, self.cp)
        documents = given["documents"]
        if not isinstance(value, Tensor) or value.shape[:2] != given["input_ids"].shape:
            raise ValueError(
                f"{type(self.model).__name__} returned {name}, which is not one value per token"
            )
        whole_BT = _Gather.apply(value, self.cp, documents)
        # Scores of labels: of one label fewer than there are tokens, as where labels are not
        # sharded.
        return whole_BT[:, :-1] if is_labelled and whole_BT.ndim == 2 else whole_BT


def _is_set(value: Any) -> bool:
    return bool(value) if isinstance(value, bool | int) else value is not None


class _Gather(torch.autograd.Function):
    """[B, S, ...] to [B, T, ...], from which all ranks then compute the same."""

    @staticmethod
    def forward(ctx: Any, x_BS: Tensor, cp: ContextParallel, documents: Any) -> Tensor:
        ctx.cp = cp
        ctx.documents = documents
        return cp.gather(x_BS, documents)

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None]:
        # Their gradients are averaged later, where the parts of the ranks are to be added.
        return ctx.cp.plan.cp * ctx.cp.own_tokens(grad_BT, ctx.documents), None, None


class _SumOverRanks(torch.autograd.Function):
    """A loss of which every rank has a part, as all ranks then have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return cp.all_gather(x.detach()).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Gradients are averaged over the ranks later, where the sum of their parts is wanted.
        return ctx.cp.plan.cp * grad, None
