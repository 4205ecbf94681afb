"""One row, a few tokens at a time: keys and values of what came before are kept, so that each token is computed once.

Shape suffixes: B rows (one), S tokens given at once, X the same laid end to end, Y tokens kept, N query heads,
K key/value heads, H head width, D document starts and the row's end, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from models import kernels
from models.attention import AttentionCore
from models.batch import IGNORE_INDEX, Batch
from models.kernels import ScoreBlock, ScoreBlocks
from models.transformer import Transformer


class KVCacheCore:
    """Attention of new tokens to themselves and to all that were given before, up to `capacity` tokens in all."""

    def __init__(self, capacity: int, kernel: str) -> None:
        self.capacity = capacity
        self.kernel = kernel
        self.length = 0
        """Tokens kept; what is beyond is overwritten."""
        self._kv_cache: tuple[Tensor, ...] = ()

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        """[1, S, N, H]. One document, however its bits are given."""
        del boundaries_BD
        past_length, self.length = self.length, self.length + q_BSNH.shape[1]
        (q_XNH,), new_kv = q_BSNH, (k_BSKH[0], v_BSKH[0])
        self._kv_cache = self._kv_cache or tuple(x.new_empty(self.capacity, *x.shape[1:]) for x in new_kv)
        for kept, x in zip(self._kv_cache, new_kv, strict=True):
            kept[past_length : self.length] = x
        k_YKH, v_YKH = (kept[: self.length] for kept in self._kv_cache)
        if q_XNH.shape[0] == 1:
            return self._attend(q_XNH, k_YKH, v_YKH, causal=False)[0][None]
        out_XNH, lse_NX = self._attend(q_XNH, *new_kv, causal=True)
        if past_length:
            past_XNH, past_lse_NX = self._attend(q_XNH, k_YKH[:past_length], v_YKH[:past_length], causal=False)
            past_weight_XN1 = (past_lse_NX - lse_NX).sigmoid().T.unsqueeze(-1)
            out_XNH = torch.lerp(
                out_XNH.to(past_weight_XN1.dtype), past_XNH.to(past_weight_XN1.dtype), past_weight_XN1
            ).to(q_XNH.dtype)
        return out_XNH[None]

    def _attend(self, q_XNH: Tensor, k_YKH: Tensor, v_YKH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        blocks = ScoreBlocks([ScoreBlock(0, q_XNH.shape[0], 0, k_YKH.shape[0])], causal=causal)
        ((_, out_XNH, lse_NX),) = kernels.attend_blocks(q_XNH, k_YKH, v_YKH, blocks, kernel=self.kernel)
        return out_XNH, lse_NX


class Decoder:
    """A model that reads one row as it comes. The model is the decoder's from then on: it computes no losses.

    `capacity` is the longest row, `chunk` the most tokens that go through the model at once. Raises ValueError for a
    part of a model.
    """

    def __init__(self, model: Transformer, *, capacity: int, chunk: int = 2048, kernel: str = "auto") -> None:
        if model.embed is None or model.head is None:
            raise ValueError("a part of a model without embedding or head cannot decode")
        self.capacity, self._chunk = capacity, chunk
        self._model, self._head = model, model.head
        model.head = None  # The model then returns the stream, of which the last token is all that is wanted.
        self._cores = [KVCacheCore(capacity, kernel) for _ in model.layers()]
        for block, core in zip(model.layers(), self._cores, strict=True):
            # Not all of a core: decoding takes no steps below autograd.
            block.attention.core = cast(AttentionCore, core)

    @property
    def length(self) -> int:
        """Tokens read."""
        return self._cores[0].length

    def rewind(self, length: int) -> None:
        """Forgets all but the first `length` tokens. Raises ValueError for more than there are."""
        if not 0 <= length <= self.length:
            raise ValueError(f"{length} tokens cannot be kept of {self.length}")
        for core in self._cores:
            core.length = length

    @torch.no_grad()
    def next_token_logits(self, tokens_S: Tensor) -> Tensor:
        """Logits [V] of the token after these, float32 (float64 for float64), on the model's device.

        Raises ValueError for none or too many.
        """
        if not 0 < tokens_S.numel() <= self.capacity - self.length:
            remaining = f"{self.capacity - self.length} of {self.capacity}"
            raise ValueError(
                f"{tokens_S.numel()} tokens cannot be read: there is room for {remaining}, and one is needed"
            )
        *leading_chunks, last_chunk_S = tokens_S.to(self._head.proj.weight.device).split(self._chunk)
        for chunk_S in leading_chunks:
            self._model(_sequence_batch(chunk_S[None], position=self.length))
        hidden_BSE: Tensor = self._model(_sequence_batch(last_chunk_S[None], position=self.length))
        return self._head.logits(hidden_BSE[:, -1:])[0, 0]


def _sequence_batch(tokens_BS: Tensor, *, position: int) -> Batch:
    """Tokens that go on at a position."""
    num_tokens = tokens_BS.shape[1]
    num_pairs = num_tokens * position + num_tokens * (num_tokens + 1) // 2
    return Batch(
        tokens=tokens_BS,
        labels=torch.full_like(tokens_BS, IGNORE_INDEX),
        positions=torch.arange(position, position + num_tokens, device=tokens_BS.device)[None],
        document_ids=torch.zeros_like(tokens_BS),
        boundaries=torch.tensor([[0, num_tokens]], dtype=torch.int32, device="cpu"),
        num_tokens=num_tokens,
        num_pairs=num_pairs,
        num_computed_pairs=num_pairs,
    )
