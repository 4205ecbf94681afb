"""Losses of every token of long sequences: perplexity, and numbers hidden in text; and whether a
model is the same on ranks.

Shape suffixes: B sequences, S tokens of this rank, T tokens of the full sequence, E model dim, V
vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longhaul_attention.context_parallel import ContextParallel

CHUNK_BYTES = 1 << 28
"""Bytes of float32 logits that exist at once."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, over the largest: transformers computes parts of any model in
float32.
"""
MARKER = "\nThe secret number is: "
END = ".\n"


class TokenScores(NamedTuple):
    """How well each token is predicted from those before it: [B, T - 1], in order, on all
    ranks.
    """

    losses: Tensor
    """Losses in nats, float32."""
    is_likeliest: Tensor


def token_scores(model: Any, cp: ContextParallel, input_ids: Tensor) -> TokenScores:
    """Scores of sequences [B, T], the same on all ranks, by a causal language model of
    transformers. Collective.

    Its attention implementation is that of `register_transformers`. Logits of few tokens exist at
    a time.
    """
    shard = cp.shard_batch({"input_ids": input_ids, "labels": input_ids})
    labels_BS = shard.pop("shift_labels")
    del shard["labels"]
    with torch.no_grad():
        output = model.base_model(**shard)
        hidden_BSE = output.last_hidden_state
        tokens = max(
            1, CHUNK_BYTES // (4 * len(input_ids) * model.config.get_text_config().vocab_size)
        )
        found = [
            _scores(logits, labels)
            for logits, labels in zip(
                _logits(model, output, hidden_BSE.split(tokens, 1)),
                labels_BS.split(tokens, 1),
                strict=True,
            )
        ]
        scores = [
            cp.gather(torch.cat(parts, 1), shard["documents"])[:, :-1]
            for parts in zip(*found, strict=True)
        ]
    return TokenScores(*scores)


def _scores(logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    # Of a sequence's last token, which `token_scores` leaves out.
    labels_BS = labels_BS.clamp(min=0)
    log_probabilities = logits_BSV.float().log_softmax(-1)
    return -log_probabilities.gather(-1, labels_BS[..., None])[..., 0], logits_BSV.argmax(
        -1
    ) == labels_BS


def _logits(model: Any, output: Any, chunks_BSE: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits of chunks of hidden states, by the model's own forward: some scale or cap their
    logits.
    """
    for hidden_BSE in chunks_BSE:
        given = copy(output)
        given["last_hidden_state"] = hidden_BSE
        with _returns(model.base_model, given):
            # The ids are not read, because the base model does not run: they only have the right
            # shape.
            yield model(input_ids=hidden_BSE[..., 0].long(), use_cache=False).logits


@contextmanager
def _returns(module: Any, output: Any) -> Iterator[None]:
    """The module returns this instead of computing it."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


class Needle(NamedTuple):
    """A number hidden in text: tokens [T], of which the last `num_answer` are the number, asked
    for again.
    """

    tokens: Tensor
    num_answer: int


def beginning(tokenizer: Any) -> Tensor:
    """The token that begins a text, if the tokenizer has one."""
    return torch.tensor(
        [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], dtype=torch.int64
    )


def hide_number(tokenizer: Any, text_T: Tensor, length: int, depth: float, trial: int) -> Needle:
    """A five-digit number, at this depth (0 to 1) of as much text as fits. Raises ValueError if it
    does not fit.

    After Mohtashami & Jaggi, 2023 (passkey), and Kamradt, 2023.
    """
    # Each part is encoded by itself, so that the number has the same tokens in both places.
    marker, end, answer = (
        torch.tensor(tokenizer.encode(part, add_special_tokens=False))
        for part in (MARKER, END, str(random.Random(trial).randint(10_000, 99_999)))
    )
    first = beginning(tokenizer)
    room = length - len(first) - 2 * len(marker) - 2 * len(answer) - len(end)
    if room < 0 or len(text_T) < room:
        raise ValueError(
            f"a needle of {length} tokens needs {max(room, 0)} tokens of text; there are {len(text_T)}"
        )
    # Another seed than the number's, so that the place does not follow from it.
    start = random.Random(-trial - 1).randint(0, len(text_T) - room)
    text_T = text_T[start : start + room]
    place = round(depth * room)
    parts = (first, text_T[:place], marker, answer, end, text_T[place:], marker, answer)
    return Needle(torch.cat(parts), len(answer))


def finds(model: Any, cp: ContextParallel, needle: Needle) -> tuple[bool, float]:
    """Whether each token of the number is the likeliest after those before it, and its mean
    log-probability. Collective.
    """
    device = next(model.parameters()).device
    scores = token_scores(model, cp, needle.tokens[None].to(device))
    answer = slice(-needle.num_answer, None)
    return bool(scores.is_likeliest[0, answer].all()), -float(
        scores.losses[0, answer].double().mean()
    )


def check(model: Any, cp: ContextParallel, *, tokens: int = 128) -> float:
    """The largest difference of logits from those of the model's own attention on whole sequences,
    over the largest. Collective.

    Of random tokens, without gradients; for models that nobody has tried. Raises ValueError if
    they are not the same model.
    """
    config = model.config
    parameter = next(model.parameters())
    tokens = min(tokens, getattr(config.get_text_config(), "max_position_embeddings", tokens) // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (1, tokens), generator=generator).to(
        parameter.device
    )
    positions = torch.arange(tokens, device=ids.device)[None]
    ours = config._attn_implementation
    is_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            shard = cp.shard_batch({"input_ids": ids, "position_ids": positions})
            found = cp.gather(model(**shard).logits, shard["documents"])
            model.set_attn_implementation("eager")
            expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        model.set_attn_implementation(ours)
        model.train(is_training)
    largest = expected.abs().max()
    if not largest > 0:
        raise ValueError(
            f"{type(model).__name__} gives logits of {float(largest)} only: they say nothing about its layers"
        )
    difference = float((found - expected).abs().max() / largest)
    if not difference <= TOLERANCES[parameter.dtype]:
        raise ValueError(
            f"{type(model).__name__} gives other logits on {cp.plan.cp} ranks than on one: {difference:.1e} of the largest; "
            "it has layers that need the tokens of other ranks and do not ask attention for them"
        )
    return difference
