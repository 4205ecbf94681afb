"""Accumulators inside one rank.

Shape suffixes: B batch, S tokens, E model dim, V vocabulary, X query tokens, N query heads, K KV
heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import norm
from models.attention import Attention
from models.attention_core import QKVGrads
from models.dispatch import sort_by_expert, to_rows, to_tokens
from models.dtypes import accumulation_dtype
from models.linear import Embedding
from models.loss_head import LinearCrossEntropy, VocabShard
from models.norm import RMSNormFunction
from models.rope import identity_rotation
from models.score_blocks import ScoreBlocks
from models.tiling import GradAccumulator, bytes_per_token
from models.transformer import TransformerBlock
from parallelisms.activation_checkpoint import BlockRunner, RecomputeConfig
from parallelisms.block_recompute import Tiling
from parallelisms.context import ring
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.context.ring import Ring, Waitable
from tests.models.dense_attention import Inputs
from tests.models.small_models import NORMED, SMALL
from tests.precision.errors import Results, float64, positive
from trainer.config.sections import OptimizerSection
from trainer.step.optimizer import Optimizer

TOKENS = 2048
DIM = 8


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def grads_of(names: tuple[str, ...], found: list[Tensor], exact: list[Tensor]) -> Results:
    return {
        f"d{name}": (cast(Tensor, ours.grad), cast(Tensor, right.grad))
        for name, ours, right in zip(names, found, exact, strict=True)
    }


def loss_head(parts: int) -> Results:
    """Chunks of tokens.

    All targets are token 0, so each row of the weight gradient has a constant sign.
    """
    found = leaves(positive(1, TOKENS, DIM), positive(5, DIM, seed=1))
    exact = float64(*found)
    labels_BS = torch.zeros(1, TOKENS, dtype=torch.int64)
    losses_BS = LinearCrossEntropy.apply(*found, labels_BS, TOKENS // parts, VocabShard())
    losses_BS.sum().backward()
    exact_losses_S = F.cross_entropy((exact[0] @ exact[1].T)[0], labels_BS[0], reduction="none")
    exact_losses_S.sum().backward()
    return {"loss": (losses_BS.detach()[0], exact_losses_S.detach())} | grads_of(
        ("x", "weight"), found, exact
    )


def head_norm(parts: int) -> Results:
    found = leaves(positive(1, TOKENS, DIM), positive(DIM, seed=1))
    exact = float64(*found)
    grad_BSE = positive(1, TOKENS, DIM, seed=2)
    out_BSE = RMSNormFunction.apply(*found, 1e-6, TOKENS // parts)
    out_BSE.backward(grad_BSE)
    exact_BSE = F.rms_norm(exact[0], (DIM,), exact[1], 1e-6)
    exact_BSE.backward(grad_BSE.double())
    return {"out": (out_BSE.detach(), exact_BSE.detach())} | grads_of(
        ("x", "weight"), found, exact
    )


def norm_statistics(parts: int) -> Results:
    """Numbers of one token."""
    x_E = positive(3, parts)
    return {"rstd": (norm.rstd(x_E, 1e-6), norm.rstd(x_E.double(), 1e-6))}


def norm_backward(parts: int) -> Results:
    """Tokens, summed for the weight at once."""
    grad_E = positive(parts, DIM)
    x_E = positive(parts, DIM, seed=1)
    weight_E = positive(DIM, seed=2)
    found, exact = (
        norm.rms_norm_backward(*given, norm.rstd(given[1], 1e-6))
        for given in ((grad_E, x_E, weight_E), (grad_E.double(), x_E.double(), weight_E.double()))
    )
    return {"dweight": (found[1], exact[1])}


def tile_grads(parts: int) -> Results:
    """Tiles, each of which gives gradients in bfloat16."""
    weights = {
        "matrix": torch.empty(4, DIM, dtype=torch.bfloat16),
        "norm": torch.empty(DIM, dtype=torch.bfloat16),
    }
    accumulator = GradAccumulator(weights)
    grads = [positive(parts, 4, DIM), positive(parts, DIM, seed=1)]
    for matrix, vector in zip(*grads, strict=True):
        accumulator.add({"matrix": matrix, "norm": vector})
    found = zip(weights, accumulator.pop_grads(), grads, strict=True)
    return {name: (total, parts_.double().sum(0)) for name, total, parts_ in found}


def expert_rows(parts: int) -> Results:
    """A token of as many experts, on the way back from their rows and in the gradient of the way
    there.
    """
    rows, _ = sort_by_expert(torch.arange(parts)[None], parts)
    given = positive(parts, DIM)
    tokens = torch.zeros(1, DIM, dtype=torch.bfloat16, requires_grad=True)
    taken, _ = to_rows(tokens, torch.ones(1, parts), rows)
    taken.backward(given)
    assert tokens.grad is not None
    exact = given.double().sum(0)
    return {"combine": (to_tokens(given, rows)[0], exact), "dispatch": (tokens.grad[0], exact)}


# ---- a whole block

BLOCK_TOKENS = 256


class SumCore:
    """In place of attention: the sum of queries, keys and values, through which gradients keep
    their sign.
    """

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        del named
        q_BSNH, k_BSKH, v_BSKH, *_ = given
        total: Tensor = q_BSNH + k_BSKH + v_BSKH
        return total

    def prepare(self, boundaries_BD: Tensor) -> object:
        """Nothing."""

    def start(self, *given: Any, **named: Any) -> Inputs:
        del named
        q_BSNH, k_BSKH, v_BSKH, _ = given
        return q_BSNH, k_BSKH, v_BSKH

    def forward(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        del named
        return self(*given[0]), torch.empty(0)

    def backward(self, *given: Any, **named: Any) -> QKVGrads:
        del named
        grad_BSNH = given[0]
        return grad_BSNH, grad_BSNH, grad_BSNH, torch.empty(0)


def positive_block() -> TransformerBlock:
    """Heads are wide enough for a mean over the roundings of their norms."""
    block = TransformerBlock(replace(NORMED, num_heads=8, num_kv_heads=8, head_dim=64, ffn_dim=16))
    cast(Attention, block.attention).core = SumCore()
    for seed, parameter in enumerate(block.parameters()):
        scale = 1.0 if parameter.ndim == 1 else 1.0 / parameter.shape[1]
        parameter.data = positive(*parameter.shape, seed=seed, low=0.5 * scale, high=1.5 * scale)
    return block


def block_grads(block: TransformerBlock) -> dict[str, Tensor]:
    """The gradients of a block's input and weights."""
    dtype = next(block.parameters()).dtype
    x_BSE, grad_BSE = (
        positive(1, BLOCK_TOKENS, NORMED.dim, seed=seed).to(dtype) for seed in (50, 51)
    )
    table = torch.ones(2, 1, BLOCK_TOKENS, 1, 32, dtype=accumulation_dtype(dtype))
    boundaries_BD = torch.tensor([[0, BLOCK_TOKENS]], dtype=torch.int32)
    block(x_BSE.requires_grad_(), identity_rotation(table), boundaries_BD).backward(grad_BSE)
    leaves_by_name = {"x": x_BSE, **dict(block.named_parameters())}
    return {name: cast(Tensor, leaf.grad) for name, leaf in leaves_by_name.items()}


@cache
def exact_block_grads() -> dict[str, Tensor]:
    return block_grads(positive_block().double())


def recomputed_block(tiling: Tiling) -> Results:
    block = positive_block()
    block.forward_fn = BlockRunner(
        RecomputeConfig("full", tiling=tiling), None, saves_input=True, is_last=True
    )
    return {name: (found, exact_block_grads()[name]) for name, found in block_grads(block).items()}


def block_tiles(parts: int) -> Results:
    per_token = bytes_per_token(NORMED.dim, 16, torch.bfloat16.itemsize)
    return recomputed_block(Tiling(tile_bytes=per_token * BLOCK_TOKENS // parts))


def head_groups(parts: int) -> Results:
    return recomputed_block(Tiling(head_groups=parts))


# ---- attention


@dataclass
class RehearsedExchange:
    """Yields remote KV in pieces, each in blocks of queries, and keeps the gradients of each
    piece.

    The rank's own keys and values are 0, its queries and the remote values positive, the remote
    keys so negative that half of the weight is the rank's own. Every remote token then raises the
    loss: no gradient changes its sign.
    """

    tokens: int
    queries: int = 64
    pieces: int = 1
    blocks_per_piece: int = 1
    grads: list[Tensor] = field(default_factory=list)

    @cached_property
    def kv(self) -> Tensor:
        """[2, Y, K, H]."""
        return positive(2, self.tokens, 1, 8) * torch.tensor([-2, 1], dtype=torch.bfloat16).view(
            2, 1, 1, 1
        )

    @property
    def plan(self) -> RankAttentionPlan:
        return RankAttentionPlan(
            BatchLayout("contiguous", 1, torch.tensor([[0, self.queries]])), 0
        )

    def prepare(self) -> Sequence[ScoreBlocks]:
        raise NotImplementedError

    def start(self, k_XKH: Tensor, v_XKH: Tensor) -> Waitable:
        raise NotImplementedError

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        del pending_kv
        for kv_2YKH in self.kv.chunk(self.pieces, dim=1):
            queries = self.queries // self.blocks_per_piece
            keys = kv_2YKH.shape[1]
            spans = [
                (start, start + queries, 0, keys) for start in range(0, self.queries, queries)
            ]
            yield kv_2YKH, ScoreBlocks(spans, causal=False)

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        del pending_dkv
        self.grads.append(dkv_2YKH)
        return Arrived(torch.zeros(2, self.queries, *dkv_2YKH.shape[2:]))


@dataclass(frozen=True)
class Arrived:
    """A transfer that is over."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


def remote_attention(exchange: RehearsedExchange, group: int = 1) -> Results:
    """Forward and backward of the ring's attention, with the product's plain kernel."""
    q_BSNH, grad_BSNH = (positive(1, exchange.queries, group, 8, seed=seed) for seed in (1, 2))
    zeros = torch.zeros(1, exchange.queries, 1, 8, dtype=torch.bfloat16)
    given = (q_BSNH, zeros, zeros, Arrived(zeros))
    out_BSNH, lse_BNS = ring.forward(given, exchange, kernel="plain")
    dq_BSNH, *_ = ring.backward(grad_BSNH, given, out_BSNH, lse_BNS, exchange, kernel="plain")
    dk_YKH, dv_YKH = torch.cat(exchange.grads, dim=1)
    exact = float64(q_BSNH.requires_grad_(), *exchange.kv.clone().requires_grad_())
    exact_kv = [torch.cat((zeros[0].double(), x)) for x in exact[1:]]
    exact_out, exact_lse = partially_causal_attention(exact[0][0], *exact_kv)
    exact_grads = torch.autograd.grad(exact_out, exact, grad_BSNH[0].double())
    pairs = zip((dq_BSNH, dk_YKH, dv_YKH), exact_grads, strict=True)
    results = dict(zip(("dq", "dk", "dv"), pairs, strict=True))
    return results | {
        "out": (out_BSNH[0], exact_out.detach()),
        "lse": (lse_BNS[0], exact_lse.detach()),
    }


def partially_causal_attention(
    q_XNH: Tensor, k_YKH: Tensor, v_YKH: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention to the rank's own keys, which come first, up to the query, and to all remote
    keys.
    """
    scores_NXY = torch.einsum("xnh,ykh->nxy", q_XNH, k_YKH) * q_XNH.shape[-1] ** -0.5
    later_XY = torch.ones(scores_NXY.shape[1:], dtype=torch.bool).triu(1) & (
        torch.arange(len(k_YKH)) < len(q_XNH)
    )
    scores_NXY = scores_NXY.masked_fill(later_XY, -torch.inf)
    out_XNH = torch.einsum("nxy,ykh->xnh", scores_NXY.softmax(-1), v_YKH)
    return out_XNH, scores_NXY.logsumexp(-1)


def remote_pieces(parts: int) -> Results:
    """Pieces of KV: dq and the online softmax."""
    return remote_attention(RehearsedExchange(TOKENS, pieces=parts))


def score_blocks(parts: int) -> Results:
    """Blocks of queries with the same keys: dk and dv."""
    return remote_attention(RehearsedExchange(32, queries=1024, blocks_per_piece=parts))


def query_heads(parts: int) -> Results:
    """Query heads that share a KV head."""
    return remote_attention(RehearsedExchange(32), group=parts)


def ring_hops(parts: int, reduce_dtype: torch.dtype = torch.float32) -> Results:
    """The gradients of a KV shard, which collect a contribution per hop."""
    dkv_R2YKH = positive(parts, 2, 64, 1, 8).float()
    exchange = Ring(cast(Any, None), Arrived, reduce_dtype)
    pending: Waitable | None = None
    for dkv_2YKH in dkv_R2YKH.clone():
        pending = exchange.send_grads(dkv_2YKH, pending)
    assert pending is not None
    return {"dkv": (pending.wait(), dkv_R2YKH.double().sum(0))}


# ---- embedding and optimizer


def embedding(parts: int) -> Results:
    """Occurrences of one token."""
    module = Embedding(3, DIM).bfloat16()
    grad_SE = positive(parts, DIM)
    module(torch.ones(parts, dtype=torch.int64)).backward(grad_SE)
    return {"dweight": (cast(Tensor, module.weight.grad)[1], grad_SE.double().sum(0))}


def grad_norm(parts: int, *, tensor_elements: int = 16) -> Results:
    """Tensors of a model."""
    grads = positive(parts, tensor_elements).float()
    blocks = [
        nn.ModuleDict({"ffn_norm": nn.LayerNorm(tensor_elements, bias=False)}) for _ in grads
    ]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
    cast(Any, model).config = replace(SMALL, num_layers=len(grads))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    exact = grads.double().norm()
    return {"norm": (Optimizer([model], OptimizerSection()).step(0.0)[0], exact)}


def grad_norm_elements(parts: int) -> Results:
    """Elements of one tensor, in units of 2^14."""
    return grad_norm(1, tensor_elements=parts << 14)


def moments(parts: int, moment_dtype: torch.dtype | None = None) -> Results:
    """Steps with positive gradients: the moments of AdamW."""
    model = nn.ModuleDict(
        {"head": nn.ModuleDict({"norm": (module := nn.LayerNorm(256, bias=False))})}
    )
    cast(Any, model).config = SMALL
    section = OptimizerSection(betas=(0.9, 0.95), max_grad_norm=1e9)
    optimizer = Optimizer([model], section, moment_dtype=moment_dtype)
    exact = {
        "exp_avg": torch.zeros(256, dtype=torch.float64),
        "exp_avg_sq": torch.zeros(256, dtype=torch.float64),
    }
    for step in range(parts):
        module.weight.grad = (grad := positive(256, seed=step)).float()
        optimizer.step(0.0)
        for (key, value), beta, power in zip(exact.items(), section.betas, (1, 2), strict=True):
            exact[key] = beta * value + (1 - beta) * grad.double() ** power
    state = optimizer.state_dict()
    return {key: (state[f"head.norm.weight.{key}"], value) for key, value in exact.items()}
