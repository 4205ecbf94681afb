"""Final norm, output projection and cross-entropy, fused over chunks of tokens.

Shape suffixes: B batch, S tokens, R tokens of all sequences, C tokens of a chunk, E model dim, V
vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.batch import IGNORE_INDEX
from models.config import ModelConfig
from models.dtypes import accumulation_dtype
from models.linear import Linear, identity, local_parameter
from models.norm import config_norm
from models.tiling import CompilePiece, each_chunk
from models.wide_products import add_weight_grad, wide_product


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary shard of this rank; the default is the full vocabulary.

    Tensor parallelism sets another one.
    """

    vocab_start_index: int = 0
    """Token id of the projection's first row."""
    num_shards: int = 1
    """Shards of equal size."""
    all_reduce_max: Callable[[Tensor], Tensor] = identity
    """Elementwise maximum over the shards, in place."""
    all_reduce_sum: Callable[[Tensor], Tensor] = identity
    """Elementwise sum over the shards, in place."""

    def argmax(self, local_argmax_C1: Tensor, is_max_C1: Tensor) -> Tensor:
        """Token id of the largest logit over all shards, [C, 1]; the lowest id if several are
        equal.

        `local_argmax_C1`: the row of this shard's largest logit, which `is_max_C1` if no shard has
        a larger one.
        """
        # Shards without the largest logit bid the largest integer. The minimum is taken as
        # -max(-x).
        no_match = torch.iinfo(local_argmax_C1.dtype).max
        candidate_C1 = (local_argmax_C1 + self.vocab_start_index).where(is_max_C1, no_match)
        return -self.all_reduce_max(-candidate_C1)


class LogitTransform(NamedTuple):
    """Logits from products: divided by `scaling` (Granite), then c tanh(logit / c) with c =
    `softcap` (Gemma 2).
    """

    scaling: float = 1.0
    softcap: float | None = None

    def apply(self, product_CV: Tensor) -> tuple[Tensor, Tensor | float]:
        """Logits, in place, and their derivative."""
        logits_CV = product_CV if self.scaling == 1 else product_CV.div_(self.scaling)
        if self.softcap is None:
            return logits_CV, 1 / self.scaling
        # logit = c tanh(p / (s c)), so its derivative is (1 - tanh ** 2) / s.
        saturation_CV = logits_CV.div_(self.softcap).tanh_()
        return saturation_CV * self.softcap, (1 - saturation_CV.square_()).div_(self.scaling)

    def differentiable(self, product_CV: Tensor) -> Tensor:
        """Logits by operators that autograd records."""
        logits_CV = product_CV / self.scaling
        return (
            logits_CV if self.softcap is None else (logits_CV / self.softcap).tanh() * self.softcap
        )


IDENTITY = LogitTransform()


# ---- softmax of a chunk


class RowStatistics(NamedTuple):
    """Statistics of the logits of this rank, [C, 1] each."""

    max_logit: Tensor
    sum_exp: Tensor
    """Sum of exp(logit - max_logit)."""
    target_logit: Tensor
    """0 if the target is not in the vocabulary of this rank."""


class Softmax(Protocol):
    """Softmax over a chunk of logits on this rank, and its gradient."""

    def argmax(self) -> Tensor:
        """Row of the largest logit, [C, 1], the lowest if several are equal.

        Before `statistics`.
        """

    def statistics(self) -> RowStatistics:
        """Statistics of each row. Called once, before `gradient`."""

    def gradient(self, scale_C1: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of the product, [C, V] in `dtype`: (sum_exp * scale * softmax, less 1 at the
        target) * slope.

        At once, since it may overwrite the product.
        """


class EagerSoftmax:
    """`Softmax` with torch's operators, in the memory of the product.

    For each logit: a read for the maximum and one for the sum, a read and a write to subtract and
    to exponentiate, a read and a narrow write for the gradient.

    `index_C1`: the target's row in this rank's vocabulary, -1 if it has none.
    """

    def __init__(self, product_CV: Tensor, index_C1: Tensor, transform: LogitTransform) -> None:
        self._values_CV, self._slope = transform.apply(product_CV)
        """The logits, and from `statistics` on exp(logit - max_logit)."""
        self._column_C1 = index_C1.clamp(min=0)
        self._is_local_C1 = index_C1 >= 0

    def argmax(self) -> Tensor:
        return self._values_CV.argmax(-1, keepdim=True)

    def statistics(self) -> RowStatistics:
        max_logit_C1 = self._values_CV.amax(-1, keepdim=True)
        target_logit_C1 = self._values_CV.gather(-1, self._column_C1).where(self._is_local_C1, 0)
        sum_exp_C1 = self._values_CV.sub_(max_logit_C1).exp_().sum(-1, keepdim=True)
        return RowStatistics(max_logit_C1, sum_exp_C1, target_logit_C1)

    def gradient(self, scale_C1: Tensor, dtype: torch.dtype) -> Tensor:
        exp_CV = self._values_CV
        slope = self._slope
        # The target's gradient is softmax - 1. It is computed apart, in full precision, and
        # written over its column at the end.
        target_C1 = exp_CV.gather(-1, self._column_C1) * scale_C1 - self._is_local_C1.to(
            exp_CV.dtype
        )
        if isinstance(slope, Tensor):
            target_C1 *= slope.gather(-1, self._column_C1)
            exp_CV.mul_(slope)
        else:
            target_C1 *= slope
            scale_C1 = scale_C1 * slope
        grad_CV = exp_CV if exp_CV.dtype == dtype else torch.empty_like(exp_CV, dtype=dtype)
        torch.mul(exp_CV, scale_C1, out=grad_CV)
        # scatter, because scatter_add has no deterministic kernel on CUDA.
        return grad_CV.scatter_(-1, self._column_C1, target_C1.to(dtype))


class CompiledSoftmax:
    """`Softmax` with compiled functions, which read the product once each: `statistics`, and
    `gradient`, which writes it once.
    """

    def __init__(
        self,
        product_CV: Tensor,
        index_C1: Tensor,
        transform: LogitTransform,
        *,
        compile_piece: CompilePiece,
    ) -> None:
        self._product_CV = product_CV
        self._index_C1 = index_C1
        self._transform = transform
        self._row_statistics: Callable[..., RowStatistics] = compile_piece(row_statistics)
        self._softmax_gradient: Callable[..., Tensor] = compile_piece(softmax_gradient)
        self._max_logit_C1 = torch.empty(0)

    def argmax(self) -> Tensor:
        return self._transform.apply(self._product_CV.clone())[0].argmax(-1, keepdim=True)

    def statistics(self) -> RowStatistics:
        statistics = self._row_statistics(self._product_CV, self._index_C1, self._transform)
        self._max_logit_C1 = statistics.max_logit
        return statistics

    def gradient(self, scale_C1: Tensor, dtype: torch.dtype) -> Tensor:
        row = self._max_logit_C1, scale_C1, self._index_C1
        return self._softmax_gradient(self._product_CV, *row, self._transform, dtype)


def row_statistics(
    product_CV: Tensor, index_C1: Tensor, transform: LogitTransform
) -> RowStatistics:
    """`Softmax.statistics` as one function. Eager, it has temporaries of the product's size."""
    logits_CV, _ = transform.apply(product_CV.clone())
    max_logit_C1 = logits_CV.amax(-1, keepdim=True)
    sum_exp_C1 = (logits_CV - max_logit_C1).exp().sum(-1, keepdim=True)
    # A column of the product: gathered logits would be written in full first.
    target_logit_C1, _ = transform.apply(product_CV.gather(-1, index_C1.clamp(min=0)))
    return RowStatistics(max_logit_C1, sum_exp_C1, target_logit_C1.where(index_C1 >= 0, 0))


def softmax_gradient(
    product_CV: Tensor,
    max_logit_C1: Tensor,
    scale_C1: Tensor,
    index_C1: Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> Tensor:
    """`Softmax.gradient` as one function. Eager, it has temporaries of the product's size."""
    logits_CV, slope = transform.apply(product_CV.clone())
    is_target_CV = torch.arange(product_CV.shape[-1], device=product_CV.device) == index_C1
    grad_CV = (logits_CV - max_logit_C1).exp() * scale_C1 - is_target_CV.to(product_CV.dtype)
    return (grad_CV * slope).to(dtype)


# ---- the loss

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss of each token [C] from its logits [C, V] in `accumulation_dtype` and its target [C]."""


class LinearCrossEntropy(torch.autograd.Function):
    """`cross_entropy(x @ weight.T, labels)` per token, with the logits of one chunk in memory at a
    time.

    The forward pass also computes the gradients, from the same logits: three matrix products
    instead of four. It assumes that every target has weight 1 in the final loss; the backward pass
    scales by the actual weight. That weight must be equal for all targets (in training, 1 / their
    global number). If it is not, every gradient becomes NaN, because a wrong gradient would go
    unnoticed.

    The loss of a label outside the vocabulary is NaN, and so are the gradients of its chunk.

    `correct_BS`, if given, is set to 1 where the target is the argmax of the logits (the lowest
    token id of a tie).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSE: Tensor,
        weight_VE: Tensor,
        labels_BS: Tensor,
        chunk_tokens: int,
        vocab_shard: VocabShard,
        correct_BS: Tensor | None = None,
        transform: LogitTransform = IDENTITY,
        compile_piece: CompilePiece | None = None,
    ) -> Tensor:
        x_RE = x_BSE.flatten(0, 1)
        labels_R1 = labels_BS.flatten().unsqueeze(-1)
        is_target_R1 = labels_R1 != IGNORE_INDEX
        is_token_R1 = (labels_R1 >= 0) & (labels_R1 < vocab_shard.num_shards * weight_VE.shape[0])
        # Rows of the targets on this rank: -1 without a target, and where another rank has it.
        index_R1 = labels_R1 - vocab_shard.vocab_start_index
        index_R1 = index_R1.where(
            is_target_R1 & (index_R1 >= 0) & (index_R1 < weight_VE.shape[0]), -1
        )
        dtype = accumulation_dtype(x_RE.dtype)
        losses_BS = torch.zeros(labels_BS.shape, dtype=dtype, device=x_RE.device)
        losses_R1 = losses_BS.view(-1, 1)
        needs_grad = any(ctx.needs_input_grad)
        grad_x_RE = torch.empty_like(x_RE) if needs_grad else None
        # Chunks add to it in `accumulation_dtype`; the backward pass rounds the sum once.
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=dtype) if needs_grad else None
        make_softmax: Callable[..., Softmax] = EagerSoftmax
        if compile_piece is not None:
            make_softmax = partial(CompiledSoftmax, compile_piece=compile_piece)
        for token_slice in each_chunk(x_RE.shape[0], chunk_tokens):
            x_CE, index_C1, is_target_C1 = (x[token_slice] for x in (x_RE, index_R1, is_target_R1))
            softmax = make_softmax(wide_product(x_CE, weight_VE), index_C1, transform)
            argmax_C1 = None if correct_BS is None else softmax.argmax()
            own = softmax.statistics()
            # A copy, because the maximum is taken in place, and this rank's own is needed below.
            max_logit_C1 = vocab_shard.all_reduce_max(own.max_logit.clone())
            if argmax_C1 is not None and correct_BS is not None:
                prediction_C1 = vocab_shard.argmax(argmax_C1, own.max_logit == max_logit_C1)
                correct_BS.view(-1, 1)[token_slice] = prediction_C1 == labels_R1[token_slice]
            # From the maximum of this rank to that of all.
            factor_C1 = (own.max_logit - max_logit_C1).exp()
            sum_exp_C1, target_logit_C1 = vocab_shard.all_reduce_sum(
                torch.stack((own.sum_exp * factor_C1, own.target_logit))
            ).unbind()
            sum_exp_C1 = sum_exp_C1.where(is_token_R1[token_slice] | ~is_target_C1, torch.nan)
            losses_R1[token_slice] = (
                sum_exp_C1.log() + max_logit_C1 - target_logit_C1
            ) * is_target_C1
            if grad_x_RE is not None and grad_weight_VE is not None:
                scale_C1 = factor_C1 * is_target_C1 / sum_exp_C1
                grad_CV = softmax.gradient(scale_C1, x_RE.dtype)
                torch.mm(grad_CV, weight_VE, out=grad_x_RE[token_slice])
                add_weight_grad(grad_weight_VE, grad_CV, x_CE)
                del grad_CV
            # Otherwise two chunks of logits would be alive at once.
            del softmax
        ctx.save_for_backward(grad_x_RE, grad_weight_VE, labels_BS)
        ctx.weight_dtype = weight_VE.dtype
        return losses_BS

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BS,) = grads
        grad_x_RE, grad_weight_VE, labels_BS = ctx.saved_tensors
        is_target_BS = labels_BS != IGNORE_INDEX
        max_grad = grad_BS.where(is_target_BS, -torch.inf).amax()
        min_grad = grad_BS.where(is_target_BS, torch.inf).amin()
        # Without targets max_grad is -inf, and the stored gradients are zero: scale by 0.
        scale = max_grad.where(max_grad == min_grad, torch.nan).where(is_target_BS.any(), 0)
        grad_x_BSE = (grad_x_RE * scale).to(grad_x_RE.dtype).unflatten(0, labels_BS.shape)
        # Scaled and rounded in one kernel, without another float32 tensor of the weight's size.
        scaled_weight_VE = torch.empty_like(grad_weight_VE, dtype=ctx.weight_dtype)
        torch.mul(grad_weight_VE, scale, out=scaled_weight_VE)
        return grad_x_BSE, scaled_weight_VE, None, None, None, None, None, None


class LinearTokenLoss(LinearCrossEntropy):
    """`loss(x @ weight.T, labels)` per token, differentiated by autograd a chunk at a time.

    Memory and weights are those of `LinearCrossEntropy`, whose backward pass it shares, plus what
    autograd saves of a chunk. Needs the whole vocabulary on this rank.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_BSE: Tensor,
        weight_VE: Tensor,
        labels_BS: Tensor,
        chunk_tokens: int,
        vocab_shard: VocabShard,
        correct_BS: Tensor | None,
        transform: LogitTransform,
        loss: TokenLoss,
    ) -> Tensor:
        if vocab_shard.num_shards > 1 or correct_BS is not None:
            raise ValueError("a loss of an extension needs the whole vocabulary, and only trains")
        x_RE = x_BSE.flatten(0, 1)
        labels_R = labels_BS.flatten()
        dtype = accumulation_dtype(x_RE.dtype)
        # Written through a view: FSDP warns of a function that returns one.
        losses_BS = torch.zeros(labels_BS.shape, dtype=dtype, device=x_RE.device)
        losses_R = losses_BS.view(-1)
        grad_x_RE = torch.empty_like(x_RE)
        # Chunks add to it in `accumulation_dtype`; the backward pass rounds the sum once.
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=dtype)
        for token_slice in each_chunk(x_RE.shape[0], chunk_tokens):
            x_CE = x_RE[token_slice]
            labels_C = labels_R[token_slice]
            is_target_C = labels_C != IGNORE_INDEX
            # Inside a Function nothing is recorded: the chunk has a small graph of its own.
            with torch.enable_grad():
                product_CV = wide_product(x_CE, weight_VE).detach().requires_grad_()
                losses_C = loss(transform.differentiable(product_CV), labels_C.clamp(min=0))
                _require_loss_per_token(losses_C, labels_C)
                # A label outside the vocabulary has no loss; that of a token without a target is 0.
                losses_C = losses_C.where(labels_C < weight_VE.shape[0], torch.nan) * is_target_C
                (grad_CV,) = torch.autograd.grad(losses_C.sum(), product_CV)
            losses_R[token_slice] = losses_C.detach()
            grad_CV = grad_CV.to(x_RE.dtype)
            torch.mm(grad_CV, weight_VE, out=grad_x_RE[token_slice])
            add_weight_grad(grad_weight_VE, grad_CV, x_CE)
        ctx.save_for_backward(grad_x_RE, grad_weight_VE, labels_BS)
        ctx.weight_dtype = weight_VE.dtype
        return losses_BS


def _require_loss_per_token(losses_C: Tensor, labels_C: Tensor) -> None:
    if losses_C.shape != labels_C.shape:
        raise ValueError(
            f"training.loss must return a loss per token, {list(labels_C.shape)}, "
            f"not {list(losses_C.shape)}"
        )


class LossHead(nn.Module):
    def __init__(self, config: ModelConfig, *, chunk_mib: int = 256) -> None:
        super().__init__()
        self.norm = config_norm(config, config.dim)
        self.proj = Linear(config.dim, config.vocab_size)
        self.vocab_shard = VocabShard()
        self.transform = LogitTransform(config.logits_scaling, config.logit_softcap)
        self.chunk_mib = chunk_mib
        self.compile_piece: CompilePiece | None = None
        """Compiles the softmax of a chunk and its gradient; None: torch's operators.

        `training.compile` sets it.
        """
        self.loss: TokenLoss | None = None
        """Minimized in training in place of cross-entropy, which evaluation reports anyway."""
        self.reports_correct = False
        """Whether `forward` also returns which targets were predicted correctly.

        Evaluation sets it.
        """

    def forward(self, x_BSE: Tensor, labels_BS: Tensor) -> Tensor:
        """Loss per token [B, S] in `accumulation_dtype`, zero where there is no target.

        With `reports_correct`, [B, S, 2]: the loss, and 1 where the target is the argmax, else 0.
        """
        weight_VE = local_parameter(self.proj)
        bytes_per_token = weight_VE.shape[0] * accumulation_dtype(x_BSE.dtype).itemsize
        chunk_tokens = max(1, (self.chunk_mib << 20) // bytes_per_token)
        self.norm.chunk_tokens = chunk_tokens
        normed_BSE = self.norm(x_BSE)
        if not torch.is_grad_enabled():
            # An autograd.Function cannot see grad mode, only whether its inputs require gradients.
            normed_BSE = normed_BSE.detach()
            weight_VE = weight_VE.detach()
        elif self.loss is not None:
            trained_BS: Tensor = LinearTokenLoss.apply(
                normed_BSE,
                weight_VE,
                labels_BS,
                chunk_tokens,
                self.vocab_shard,
                None,
                self.transform,
                self.loss,
            )
            return trained_BS
        correct_BS = torch.zeros_like(labels_BS) if self.reports_correct else None
        # Evaluation is eager: its lengths would add graphs.
        compile_piece = self.compile_piece if torch.is_grad_enabled() else None
        losses_BS: Tensor = LinearCrossEntropy.apply(
            normed_BSE,
            weight_VE,
            labels_BS,
            chunk_tokens,
            self.vocab_shard,
            correct_BS,
            self.transform,
            compile_piece,
        )
        return (
            losses_BS
            if correct_BS is None
            else torch.stack((losses_BS, correct_BS.to(losses_BS.dtype)), dim=-1)
        )

    def logits(self, x_BSE: Tensor) -> Tensor:
        """[B, S, V] in `accumulation_dtype`, not chunked: for few tokens."""
        # The transform writes in place, so it gets a copy.
        product_BSV: Tensor = self.proj(self.norm(x_BSE)).to(
            accumulation_dtype(x_BSE.dtype), copy=True
        )
        return self.transform.apply(product_BSV)[0]
