"""Prefill and generation by the ranks of a `ContextParallel`: each holds its share of keys and
values, and no more.

The prompt is prefilled like a training batch, every rank its tokens. Then all ranks compute every
new token, and attend to it with the keys that they hold; what they find is merged exactly, by the
log-sum-exp. A new token's keys and values are kept by the rank that holds the fewest. Sampling,
stopping and streaming are those of transformers' `generate`.

Shape suffixes: B sequences, S new tokens, C tokens that a buffer has room for, N query heads, K KV
heads, H head dim.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Cache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from longhaul_attention.batch import Documents
from longhaul_attention.context_parallel import ContextParallel
from longhaul_attention.huggingface import of_equal_width
from models import attention_op
from models.online_softmax import OnlineSoftmax, add_sink
from models.ranges import concatenated_ranges
from models.score_blocks import FULL, ScoreBlocks, block_rows
from models.score_pairs import Scores
from parallelisms.mesh import collectives

GROWTH = 256
"""Tokens for which a buffer gets room at once."""


def generate(model: Any, cp: ContextParallel, input_ids: Tensor, **options: Any) -> Any:
    """Runs `model.generate(input_ids, **options)` on all ranks, and returns its result.
    Collective.

    The model's attention implementation is that of `register_transformers`; `input_ids` [B, T] are
    the same on all ranks, prompts of equal length. Raises ValueError for what needs a cache that
    is rearranged, such as beams.
    """
    stated = options.get("generation_config") or model.generation_config
    if options.get("max_time", stated.max_time) is not None:
        raise ValueError(
            "max_time is read from each rank's clock, and ranks would stop at different tokens"
        )
    if options.get("use_cache") is False:
        raise ValueError(
            "use_cache = False leaves nothing to share: every rank would compute the whole sequence"
        )
    # The last token is left to `generate`, which needs its logits.
    cache = prefill(model, cp, input_ids[:, :-1])
    decided = [
        FirstRanksDecision(cp, each) for each in options.pop("stopping_criteria", None) or []
    ]
    scores = LogitsProcessorList(
        [*(options.pop("logits_processor", None) or []), FirstRanksScores(cp)]
    )
    options |= {_cache_argument(model): cache, "logits_processor": scores, "use_cache": True}
    options |= {"stopping_criteria": StoppingCriteriaList(decided)} if decided else {}
    # Without a mask, transformers would guess which tokens are padding from their ids.
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    _share_random_state(cp, input_ids.device)
    with torch.no_grad():
        return model.generate(input_ids, **options)


def prefill(model: Any, cp: ContextParallel, input_ids: Tensor) -> ShardedCache:
    """The keys and values of a prompt [B, T], each rank's share: a cache for `model`, and for its
    `generate`. Collective.

    Raises ValueError for models that attend to something else than what they keep.
    """
    if not input_ids.shape[1]:
        return ShardedCache(cp)
    shard = cp.shard_batch({"input_ids": input_ids})
    cache = ShardedCache(cp, shard["documents"])
    argument = _cache_argument(model)
    with torch.no_grad():
        # One token first: what would be refused after the prompt is refused before it.
        model.base_model(input_ids[:, :1], **{argument: ShardedCache(cp)}, use_cache=True)
        model.base_model(**shard | {argument: cache, "use_cache": True})
    if not cache.layers:
        raise ValueError(f"{type(model).__name__} has no layer that keeps keys and values")
    cache.prompt = None
    return cache


def _cache_argument(model: Any) -> str:
    # Since transformers 5.24; the other is deprecated.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _share_random_state(cp: ContextParallel, device: torch.device) -> None:
    """Rank 0's on all ranks, which then draw the same tokens."""
    torch.set_rng_state(_of_first_rank(cp, torch.get_rng_state().to(device)).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(
            _of_first_rank(cp, torch.cuda.get_rng_state(device).to(device)).cpu(), device
        )


class FirstRanksDecision(StoppingCriteria):
    """Whether rank 0 stops: one that stopped alone would leave the others waiting."""

    def __init__(self, cp: ContextParallel, criterion: Any) -> None:
        self._cp = cp
        self._criterion = criterion

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        decision = torch.as_tensor(
            self._criterion(input_ids, scores, **options), device=input_ids.device
        )
        return _of_first_rank(self._cp, decision.expand(len(input_ids)).to(torch.uint8)).bool()


class FirstRanksScores(LogitsProcessor):
    """Gives rank 0's scores to all ranks: one that chose another token would attend with other
    keys from there on.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        return _of_first_rank(self._cp, scores)


class ShardedCache(Cache):
    """Keys and values that are sharded over the tokens of a sequence."""

    def __init__(self, cp: ContextParallel, prompt: Documents | None = None) -> None:
        super().__init__(layer_class_to_replicate=cast(Any, partial(ShardedLayer, self)))
        self.cp = cp
        self.prompt = prompt
        """While it is prefilled: its documents, one per sequence, and padding."""

    @property
    def held_tokens(self) -> int:
        """Tokens of a sequence that this rank holds."""
        return max((len(cast(ShardedLayer, layer).positions) for layer in self.layers), default=0)


class ShardedLayer(DynamicLayer):
    """Keys and values of one layer that this rank holds, in the order of their positions."""

    def __init__(self, cache: ShardedCache) -> None:
        super().__init__()
        self._cache = cache
        self.positions: list[int] = []
        self._buffers: tuple[Tensor, ...] = ()
        """Keys and values [B, C, K, H], of equal width."""
        self._batch_size = 0
        self._new: tuple[Tensor, ...] = ()
        self._is_kept = False
        """Whether the newest keys and values are held already: layers may attend to those of
        another.
        """
        self._counts = [0] * cache.cp.plan.cp
        """Tokens that each rank holds."""

    def get_seq_length(self) -> int:
        return sum(self._counts)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        del value_states
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps a prompt's tokens of this rank, or marks new ones for `attend`; returns what was
        given.
        """
        self.lazy_initialization(key_states)
        if self._cache.prompt is None:
            self._new = (key_states, value_states)
            self._is_kept = False
            # `attention_forward` finds the layer by its keys, because models pass no cache to
            # attention.
            cast(Any, key_states).sharded_layer = self
        else:
            self._keep_prompt(self._cache.prompt, key_states, value_states)
        return key_states, value_states

    def _keep_prompt(self, prompt: Documents, key_states: Tensor, value_states: Tensor) -> None:
        cp = self._cache.cp
        positions = concatenated_ranges(*cp.spans(prompt.boundaries_BD[0]))
        # The padding that made the prompt divisible is not kept.
        is_token = positions < prompt.seq_len
        self.positions = positions[is_token].tolist()
        index = is_token.nonzero().flatten().to(key_states.device)
        self._buffers = tuple(
            x.transpose(1, 2)[:, index].contiguous()
            for x in of_equal_width(key_states, value_states)
        )
        self._batch_size, self._counts = len(key_states), cp.all_gather_values(len(self.positions))

    def attend(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        *,
        window: int | None = None,
        sink: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of new tokens to all before them and to themselves: [B, S, N, H], equal on all
        ranks. Collective.

        Raises ValueError if the cache holds another number of sequences.
        """
        cp = self._cache.cp
        held = self._batch_size or len(q_BSNH)
        if held != len(q_BSNH):
            raise ValueError(
                f"the sharded cache holds {held} sequences and {len(q_BSNH)} are generated: beams and several answers to a "
                "prompt are not supported; repeat the prompt instead"
            )
        if not self._is_kept:
            for k_BKH, v_BKH in zip(k_BSKH.unbind(1), v_BSKH.unbind(1), strict=True):
                self._append(k_BKH, v_BKH)
        self._is_kept, first = True, self.get_seq_length() - q_BSNH.shape[1]
        found = []
        for position, q_BNH in enumerate(q_BSNH.unbind(1), first):
            out_BNH, lse_NB = self._attend_held(q_BNH, position, Scores(window, softcap))
            # Output and log-sum-exp in one tensor: one all-gather brings both.
            found.append(torch.cat((out_BNH.to(lse_NB.dtype), lse_NB.T[..., None]), dim=-1))
        by_rank = cp.all_gather(torch.cat(found))
        softmax = OnlineSoftmax.of_no_keys(q_BSNH.transpose(0, 1).flatten(0, 1))
        for found_XNH in by_rank:
            softmax.merge(slice(None), found_XNH[..., :-1], found_XNH[..., -1].T)
        out_XNH = softmax.out_XNH
        if sink is not None:
            out_XNH, _ = add_sink(out_XNH, softmax.lse_NX, sink)
        out_SBNH: Tensor = out_XNH.to(q_BSNH.dtype).unflatten(0, (q_BSNH.shape[1], -1))
        return out_SBNH.transpose(0, 1)

    def _append(self, k_BKH: Tensor, v_BKH: Tensor) -> None:
        """A new token, to the rank that holds the fewest."""
        position = self.get_seq_length()
        owner = self._counts.index(min(self._counts))
        self._counts[owner] += 1
        if owner != self._cache.cp.rank:
            return
        if not self._buffers or len(self.positions) == self._buffers[0].shape[1]:
            old = self._buffers or tuple(
                x.new_empty(len(x), 0, *x.shape[1:]) for x in (k_BKH, v_BKH)
            )
            self._buffers = tuple(F.pad(x, (0, 0, 0, 0, 0, GROWTH)) for x in old)
        for buffer, x_BKH in zip(self._buffers, (k_BKH, v_BKH), strict=True):
            buffer[:, len(self.positions)] = x_BKH
        self.positions.append(position)

    def keeps(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether these are the newest keys and values."""
        return len(self._new) == 2 and key_states is self._new[0] and value_states is self._new[1]

    def _attend_held(self, q_BNH: Tensor, position: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a token over the keys of this rank."""
        held = bisect_right(self.positions, position)
        first = (
            0 if scores.window is None else bisect_right(self.positions, position - scores.window)
        )
        if first == held:
            softmax = OnlineSoftmax.of_no_keys(q_BNH)
            return softmax.out_XNH, softmax.lse_NX
        # In a flattened buffer, sequence b has its tokens from b * capacity on.
        sequences_B1 = torch.arange(len(q_BNH), device="cpu")[:, None]
        capacity = self._buffers[0].shape[1]
        queries_B2 = torch.cat((sequences_B1, sequences_B1 + 1), dim=1)
        keys_B2 = sequences_B1 * capacity + torch.tensor([first, held], device="cpu")
        k_XKH, v_XKH = (x.flatten(0, 1) for x in self._buffers)
        blocks = ScoreBlocks(block_rows(queries_B2, keys_B2, FULL), scores=scores)
        return attention_op.forward(q_BNH, k_XKH, v_XKH, blocks, kernel=self._cache.cp.kernel)

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "a sharded cache cannot be cropped, repeated or reordered: no beams, and no assisted generation"
        )

    crop = batch_repeat_interleave = batch_select_indices = reorder_cache = offload = prefetch = (
        reset
    ) = _refuse


def _of_first_rank(cp: ContextParallel, x: Tensor) -> Tensor:
    x = x.contiguous()
    for group in cp.groups:
        collectives.broadcast(x, group)
    return x
