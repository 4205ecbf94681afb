"""`AttentionCore`, the interface through which context parallelism replaces attention, and
attention on one rank.

Shape suffixes: B batch, S tokens of this rank, N query heads, K KV heads, H head dim, D document
boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from models import attention_op, kernels
from models.score_pairs import FULL_SCORES, Scores

QKVGrads = tuple[Tensor, Tensor, Tensor, Tensor]
"""dq, dk, dv and the gradient of the sink: [N], or empty without a sink."""


class AttentionCore(Protocol):
    """Causal attention inside documents, over rotated queries and keys and over values.

    `boundaries_BD` (int32, on the CPU) holds the document starts and the length of the *full*
    sequence, also where the rank holds only a shard of it. Boundaries [2, B, D], of queries and of
    keys, mean attention without a causal mask: a query sees all keys of the document that has the
    number of its own. `sink_N` is a logit per query head that has no key. `__call__` is
    differentiable. `start`, `forward` and `backward` do the same below autograd; only they look
    into what `start` returns. `parallelisms.context.context_parallel.set_attention_core` sets the
    core of each layer.
    """

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Output [B, S, N, H]."""

    def prepare(self, boundaries_BD: Tensor) -> object:
        """Precomputes a batch's host-side plan.

        It is cached weakly: hold the result for the step.
        """

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Any:
        """Starts to send what other ranks need."""

    def forward(
        self, pending: Any, boundaries_BD: Tensor, sink_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H] and log-sum-exp."""

    def backward(
        self,
        grad_BSNH: Tensor,
        pending: Any,
        out_BSNH: Tensor,
        lse: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> QKVGrads: ...


@dataclass(frozen=True)
class LocalAttentionCore:
    """Attention of a rank that holds full sequences."""

    kernel: str = "auto"
    scores: Scores = FULL_SCORES

    def with_scores(self, scores: Scores) -> LocalAttentionCore:
        """The same core for a layer with other scores."""
        return replace(self, scores=scores)

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        return self.attend(self.scores, q_BSNH, k_BSKH, v_BSKH, boundaries_BD, sink_N)

    def attend(self, scores: Scores, *inputs: Tensor | None) -> Tensor:
        """`__call__` for a layer with other scores."""
        out_BSNH: Tensor = attention_op.attend(*inputs, *scores, self.kernel)[0]
        return out_BSNH

    def prepare(self, boundaries_BD: Tensor) -> object:
        seq_len = int(boundaries_BD[0, -1])
        # The loader's thread plans while it reads: otherwise the first layer would wait for the
        # host.
        blocks = attention_op.document_blocks(
            boundaries_BD, len(boundaries_BD), seq_len, self.scores
        )
        kernels.prepare(blocks, self.kernel)
        return blocks

    def start(
        self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, ...]:
        # On one rank nothing is in flight: `start` exists for cores that send keys and values.
        del boundaries_BD
        return q_BSNH, k_BSKH, v_BSKH

    def forward(
        self, pending: tuple[Tensor, ...], boundaries_BD: Tensor, sink_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out_BSNH, lse = attention_op.attend(
            *pending, boundaries_BD, sink_N, *self.scores, self.kernel
        )
        return out_BSNH, lse

    def backward(
        self,
        grad_BSNH: Tensor,
        pending: tuple[Tensor, ...],
        out_BSNH: Tensor,
        lse: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> QKVGrads:
        inputs = (grad_BSNH, [*pending, out_BSNH, lse], boundaries_BD, sink_N)
        dq, dk, dv, grad_sink_N = attention_op.attend_backward(*inputs, *self.scores, self.kernel)
        return dq, dk, dv, grad_sink_N
