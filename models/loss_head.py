"""Final norm, output projection and cross-entropy, fused over chunks of tokens.

Shape suffixes: B batch, S tokens, R tokens of all sequences, C tokens of a chunk, E model dim, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.batch import IGNORE_INDEX
from models.config import ModelConfig
from models.dtypes import accumulation_dtype
from models.linear import Linear, identity, local_parameter
from models.norm import config_norm


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary shard of this rank; the default is the full vocabulary. Tensor parallelism sets another one."""

    vocab_start_index: int = 0
    """Token id of the projection's first row."""
    num_shards: int = 1
    """Shards of equal size."""
    all_reduce_max: Callable[[Tensor], Tensor] = identity
    """Elementwise maximum over the shards."""
    all_reduce_sum: Callable[[Tensor], Tensor] = identity
    """Elementwise sum over the shards."""

    def argmax(self, logits_CV: Tensor, max_logit_C1: Tensor) -> Tensor:
        """Token id of the largest logit over all shards, [C, 1]; the lowest id if several are equal."""
        local_argmax_C1 = logits_CV.argmax(-1, keepdim=True)
        no_match = torch.iinfo(local_argmax_C1.dtype).max
        candidate_C1 = (local_argmax_C1 + self.vocab_start_index).where(
            logits_CV.gather(-1, local_argmax_C1) == max_logit_C1, no_match
        )
        return -self.all_reduce_max(-candidate_C1)


class LogitTransform(NamedTuple):
    """Logits from products: divided by `scaling` (Granite), then c tanh(logit / c) with c = `softcap` (Gemma 2)."""

    scaling: float = 1.0
    softcap: float | None = None

    def apply(self, product_CV: Tensor) -> tuple[Tensor, Tensor | float]:
        """Logits, in place, and their derivative."""
        logits_CV = product_CV if self.scaling == 1 else product_CV.div_(self.scaling)
        if self.softcap is None:
            return logits_CV, 1 / self.scaling
        saturation_CV = logits_CV.div_(self.softcap).tanh_()
        return saturation_CV * self.softcap, (1 - saturation_CV.square_()).div_(self.scaling)


IDENTITY = LogitTransform()


class LinearCrossEntropy(torch.autograd.Function):
    """`cross_entropy(x @ weight.T, labels)` per token, with the logits of one chunk in memory at a time.

    The forward pass also computes the gradients, from the same logits: three matrix products instead of four. It
    assumes that every target has weight 1 in the final loss; the backward pass scales by the actual weight. That weight
    must be equal for all targets (in training, 1 / their global number). If it is not, every gradient becomes NaN,
    because a wrong gradient would go unnoticed.

    The loss of a label outside the vocabulary is NaN, and so are the gradients of its chunk.

    `correct_BS`, if given, is set to 1 where the target is the argmax of the logits (the lowest token id of a tie).
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
    ) -> Tensor:
        x_RE, labels_R = x_BSE.flatten(0, 1), labels_BS.flatten()
        dtype = accumulation_dtype(x_RE.dtype)
        losses_BS = torch.zeros(labels_BS.shape, dtype=dtype, device=x_RE.device)
        losses_R = losses_BS.view(-1)
        needs_grad = any(ctx.needs_input_grad)
        grad_x_RE = torch.empty_like(x_RE) if needs_grad else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=dtype) if needs_grad else None
        for start in range(0, x_RE.shape[0], chunk_tokens):
            token_slice = slice(start, start + chunk_tokens)
            x_CE, labels_C1 = x_RE[token_slice], labels_R[token_slice, None]
            is_target_C1 = labels_C1 != IGNORE_INDEX
            index_C1 = labels_C1 - vocab_shard.vocab_start_index
            is_local_C1 = is_target_C1 & (index_C1 >= 0) & (index_C1 < weight_VE.shape[0])
            index_C1 = index_C1.where(is_local_C1, 0)
            logits_CV, slope_CV = transform.apply((x_CE @ weight_VE.T).to(dtype))
            max_logit_C1 = vocab_shard.all_reduce_max(logits_CV.amax(-1, keepdim=True))
            if correct_BS is not None:
                prediction_C1 = vocab_shard.argmax(logits_CV, max_logit_C1)
                correct_BS.view(-1)[token_slice] = (prediction_C1 == labels_C1).squeeze(-1)
            target_logit_C1 = logits_CV.gather(-1, index_C1).where(is_local_C1, 0)
            grad_CV = logits_CV.sub_(max_logit_C1).exp_()
            sum_exp_C1, target_logit_C1 = vocab_shard.all_reduce_sum(
                torch.stack((grad_CV.sum(-1, keepdim=True), target_logit_C1))
            ).unbind()
            is_token_C1 = (labels_C1 >= 0) & (labels_C1 < vocab_shard.num_shards * weight_VE.shape[0])
            sum_exp_C1 = sum_exp_C1.where(is_token_C1 | ~is_target_C1, torch.nan)
            losses_R[token_slice] = ((sum_exp_C1.log() + max_logit_C1 - target_logit_C1) * is_target_C1).squeeze(-1)
            if grad_x_RE is None or grad_weight_VE is None:
                del logits_CV, grad_CV, slope_CV
                continue
            grad_CV.mul_(is_target_C1 / sum_exp_C1)
            # scatter, because scatter_add has no deterministic kernel on CUDA.
            grad_CV.scatter_(-1, index_C1, grad_CV.gather(-1, index_C1) - is_local_C1.to(dtype))
            if transform != IDENTITY:
                grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.to(x_RE.dtype)
            torch.mm(grad_CV, weight_VE, out=grad_x_RE[token_slice])
            grad_weight_VE += grad_CV.T @ x_CE
            del logits_CV, grad_CV, slope_CV  # Otherwise two chunks of logits would be alive at once.
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
        return grad_x_BSE, (grad_weight_VE * scale).to(ctx.weight_dtype), None, None, None, None, None


class LossHead(nn.Module):
    def __init__(self, config: ModelConfig, *, chunk_mib: int = 256) -> None:
        super().__init__()
        self.norm = config_norm(config, config.dim)
        self.proj = Linear(config.dim, config.vocab_size)
        self.vocab_shard = VocabShard()
        self.transform = LogitTransform(config.logits_scaling, config.logit_softcap)
        self.chunk_mib = chunk_mib
        self.reports_correct = False
        """Whether `forward` also returns which targets were predicted correctly. Evaluation sets it."""

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
            normed_BSE, weight_VE = normed_BSE.detach(), weight_VE.detach()
        correct_BS = torch.zeros_like(labels_BS) if self.reports_correct else None
        losses_BS: Tensor = LinearCrossEntropy.apply(
            normed_BSE, weight_VE, labels_BS, chunk_tokens, self.vocab_shard, correct_BS, self.transform
        )
        return losses_BS if correct_BS is None else torch.stack((losses_BS, correct_BS.to(losses_BS.dtype)), dim=-1)

    def logits(self, x_BSE: Tensor) -> Tensor:
        """[B, S, V] in `accumulation_dtype`, not chunked: for few tokens."""
        product_BSV: Tensor = self.proj(self.norm(x_BSE)).to(accumulation_dtype(x_BSE.dtype), copy=True)
        return self.transform.apply(product_BSV)[0]
