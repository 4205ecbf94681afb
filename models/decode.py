"""Incremental decoding of one sequence with a KV cache.

Shape suffixes: B batch (1), S and X new tokens, Y cached tokens, N query heads, K KV heads, H head
dim, D document boundaries, E model dim, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from models import attention_op
from models.attention import Attention
from models.attention_core import AttentionCore
from models.batch import IGNORE_INDEX, Batch
from models.online_softmax import add_sink
from models.score_blocks import CAUSAL, ScoreBlocks, block_rows, rows_before
from models.score_pairs import Scores
from models.transformer import Transformer


class KVCacheCore:
    """Attention of new tokens to the KV cache and to themselves, for at most `capacity` tokens in
    total.
    """

    def __init__(self, capacity: int, kernel: str, scores: Scores) -> None:
        self.capacity = capacity
        self._kernel = kernel
        self._scores = scores
        self.length = 0
        """Number of valid tokens in the cache."""
        self._kv_cache: tuple[Tensor, ...] = ()

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Output [1, S, N, H]. All tokens belong to one document, so the boundaries are ignored."""
        del boundaries_BD
        past_length = self.length
        self.length = self.length + q_BSNH.shape[1]
        (q_XNH,) = q_BSNH
        new_kv = k_BSKH[0], v_BSKH[0]
        # Allocated at full capacity once: growing by concatenation would copy the cache per token.
        self._kv_cache = self._kv_cache or tuple(
            x.new_empty(self.capacity, *x.shape[1:]) for x in new_kv
        )
        for cache, x in zip(self._kv_cache, new_kv, strict=True):
            cache[past_length : self.length] = x
        k_YKH, v_YKH = (cache[: self.length] for cache in self._kv_cache)
        new_12, past_12 = (
            torch.tensor([tokens], device="cpu")
            for tokens in ((past_length, self.length), (0, past_length))
        )
        # A causal square of the new tokens, and rectangles with the cached ones, which a window
        # cuts. Queries are numbered from the first new token, keys from the start of the cache.
        rows_R5 = block_rows(new_12 - past_length, new_12, CAUSAL)
        if past_length:
            shift_12 = torch.tensor([[-past_length, 0]], device="cpu")
            rows_R5 = torch.cat(
                (rows_before(new_12, past_12, self._scores.window, shift_P2=shift_12), rows_R5)
            )
        blocks = ScoreBlocks(rows_R5, scores=self._scores)
        out_XNH, lse_NX = attention_op.forward(q_XNH, k_YKH, v_YKH, blocks, kernel=self._kernel)
        if sink_N is not None:
            out_XNH, _ = add_sink(out_XNH, lse_NX, sink_N)
        return out_XNH[None]


class Decoder:
    """Decodes one sequence of up to `capacity` tokens, with prefill in chunks of at most `chunk`
    tokens.

    Takes the model over: its head and its attention cores are replaced, so it no longer computes
    losses. Raises ValueError for a pipeline stage, and for mixers other than attention.
    """

    def __init__(
        self, model: Transformer, *, capacity: int, chunk: int = 2048, kernel: str = "auto"
    ) -> None:
        if model.embed is None or model.head is None:
            raise ValueError("a pipeline stage without embedding or head cannot decode")
        self.capacity = capacity
        self._chunk = chunk
        self._model = model
        self._head = model.head
        # The model then returns hidden states; logits are needed for the last token only.
        model.head = None
        self._cores = list[KVCacheCore]()
        for block in model.transformer_blocks():
            if not isinstance(block.attention, Attention):
                raise ValueError(f'mixer "{block.kind.mixer}" cannot decode: it has no KV cache')  # noqa: TRY004
            self._cores.append(core := KVCacheCore(capacity, kernel, block.kind.scores))
            # No `start`, `forward` and `backward`: decoding needs no gradients.
            block.attention.core = cast(AttentionCore, core)

    @property
    def length(self) -> int:
        """Number of tokens in the KV cache."""
        return self._cores[0].length

    def rewind(self, length: int) -> None:
        """Truncates the KV cache to `length` tokens. Raises ValueError if it holds fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind to {length} tokens: the KV cache holds {self.length}")
        for core in self._cores:
            core.length = length

    @torch.no_grad()
    def next_token_logits(self, tokens_S: Tensor) -> Tensor:
        """Appends tokens and returns the logits [V] of the next one, in `accumulation_dtype`, on
        the model's device.

        Raises ValueError for no tokens, or for more than the remaining capacity.
        """
        if not 0 < tokens_S.numel() <= self.capacity - self.length:
            remaining = f"{self.capacity - self.length} of the capacity of {self.capacity} tokens"
            raise ValueError(
                f"{tokens_S.numel()} tokens given; at least 1 is needed and {remaining} remain"
            )
        *leading_chunks, last_chunk_S = tokens_S.to(self._head.proj.weight.device).split(
            self._chunk
        )
        # Chunks bound the activations of a prefill. Only their keys and values are needed.
        for chunk_S in leading_chunks:
            self._model(sequence_batch(chunk_S[None], position=self.length))
        hidden_BSE: Tensor = self._model(sequence_batch(last_chunk_S[None], position=self.length))
        return self._head.logits(hidden_BSE[:, -1:])[0, 0]


def sequence_batch(tokens_BS: Tensor, *, position: int) -> Batch:
    """Tokens of one document from `position` on, without targets."""
    num_tokens = tokens_BS.shape[1]
    # A new token sees the `position` tokens before this call, and the new ones up to itself.
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
