"""tiktoken stands in for a byte-level BPE of tokenizers only where both give the same ids."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from itertools import groupby, product
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from trainer.data.byte_level_bpe import (
    GPT2_PATTERN,
    MAX_WHITESPACE,
    PATTERNS,
    PROBE,
    TiktokenBpe,
    bytes_to_unicode,
    is_plain_bpe,
    split_pattern,
    tiktoken_ranks,
)
from trainer.data.huggingface_tokenizer import merges_alone

CODE_POINTS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
ALPHABET = bytes_to_unicode()


# ---- patterns


@cache
def all_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of all pairs of bytes: its ids show where words end.

    Pairs at the edge of ASCII merge first.
    """
    edges = sorted(
        product(range(256), repeat=2), key=lambda pair: (pair[0] < 128) == (pair[1] < 128)
    )
    merges = [(ALPHABET[left], ALPHABET[right]) for left, right in edges]
    tokens = [*ALPHABET, *(left + right for left, right in merges)]
    return {token: number for number, token in enumerate(tokens)}, merges


def compare_words(characters: list[str], pattern: str) -> None:
    vocab, merges = all_pairs()
    ours = TiktokenBpe(vocab, pattern, normalize=str, added_names=())
    theirs = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern == GPT2_PATTERN
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    theirs.pre_tokenizer = (
        byte_level if pattern == GPT2_PATTERN else pre_tokenizers.Sequence([split, byte_level])
    )
    words = [
        f"a{each}1{each}{each} {each}b'{each} {each}\n{each}B!{each}/\n" for each in characters
    ]
    for at in range(0, len(words), 2000):
        text = "".join(words[at : at + 2000])
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, words[at]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["gpt2", "llama3", "qwen2", "o200k"])
def test_both_libraries_read_a_pattern_alike_at_every_change_of_category(pattern: str) -> None:
    edges = [[*run] for _, run in groupby(CODE_POINTS, unicodedata.category)]
    compare_words(
        [each for run in edges for each in (run[0], run[-1])] + CODE_POINTS[: 1 << 10], pattern
    )
    compare_words([*PROBE], pattern)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS, ids=["gpt2", "llama3", "qwen2", "o200k"])
def test_both_libraries_read_a_pattern_alike_at_every_code_point(pattern: str) -> None:
    """Of the planes that hold characters; of the others, every 64th."""
    compare_words(
        [each for each in CODE_POINTS if ord(each) < 0x40000 or ord(each) % 64 == 0], pattern
    )


SPLIT = {
    "type": "Split",
    "pattern": {"Regex": PATTERNS[1]},
    "behavior": "Isolated",
    "invert": False,
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([SPLIT, BYTE_LEVEL], PATTERNS[1]),
        ([BYTE_LEVEL | {"use_regex": True}], GPT2_PATTERN),
        ([BYTE_LEVEL], None),
        ([BYTE_LEVEL | {"use_regex": True, "add_prefix_space": True}], None),
        ([SPLIT, BYTE_LEVEL | {"use_regex": True}], None),
        ([SPLIT | {"behavior": "Removed"}, BYTE_LEVEL], None),
        ([SPLIT | {"invert": True}, BYTE_LEVEL], None),
        ([SPLIT | {"pattern": {"Regex": r"\w+"}}, BYTE_LEVEL], None),
        ([SPLIT | {"pattern": {"String": " "}}, BYTE_LEVEL], None),
        ([SPLIT, SPLIT, BYTE_LEVEL], None),
        ([BYTE_LEVEL, SPLIT], None),
        ([{"type": "Metaspace"}], None),
    ],
)
def test_only_known_patterns_are_taken(steps: list[dict[str, Any]], expected: str | None) -> None:
    assert (
        split_pattern({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}) == expected
    )
    if len(steps) == 1:
        assert split_pattern({"pre_tokenizer": steps[0]}) == expected
    assert split_pattern({"pre_tokenizer": None}) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "NFKC"}}, False),
        ({"model": {"type": "BPE", "dropout": 0.1}}, False),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, False),
        ({"model": {"type": "BPE", "byte_fallback": True}}, False),
        ({"model": {"type": "WordPiece"}}, False),
    ],
)
def test_only_plain_models_are_taken(changes: dict[str, Any], expected: bool) -> None:  # noqa: FBT001
    assert (
        is_plain_bpe({"model": {"type": "BPE", "dropout": None}, "normalizer": None} | changes)
        == expected
    )


# ---- merges


def draw_bpe(draw: random.Random, *, lookup: bool) -> models.BPE:
    """A BPE of a few merges over two letters, in an order that training would hardly make."""
    tokens = ["a", "b"]
    merges = list[tuple[str, str]]()
    for _ in range(draw.randint(1, 7)):
        pair = draw.choice(tokens), draw.choice(tokens)
        if pair not in merges:
            merges.append(pair)
            tokens += [pair[0] + pair[1]] * (pair[0] + pair[1] not in tokens)
    if draw.random() < 0.3:
        tokens[2:] = draw.sample(tokens[2:], len(tokens) - 2)
    elif draw.random() < 0.5:
        merges.sort(key=lambda pair: tokens.index(pair[0] + pair[1]))
    if lookup and draw.random() < 0.5:
        tokens += [word for word in ("abba", "aab") if word not in tokens]
    vocab = {
        token: number
        for number, token in enumerate([*(each for each in ALPHABET if each not in "ab"), *tokens])
    }
    return models.BPE(vocab=vocab, merges=merges, ignore_merges=lookup)


def ranks_of(model: models.BPE) -> tuple[dict[str, int] | None, Tokenizer]:
    theirs = Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    definition = json.loads(theirs.to_str())["model"]
    with merges_alone(theirs.model) as builds:
        return tiktoken_ranks(definition, builds), theirs


WORDS = " ".join("".join(word) for length in range(1, 9) for word in product("ab", repeat=length))


@pytest.mark.parametrize("lookup", [False, True])
def test_ranks_are_only_given_where_the_ids_are_equal(lookup: bool) -> None:  # noqa: FBT001
    draw = random.Random(0)
    taken = 0
    refused = 0
    for _ in range(150):
        ranks, theirs = ranks_of(draw_bpe(draw, lookup=lookup))
        if ranks is None:
            refused += 1
            continue
        taken += 1
        ours = TiktokenBpe(ranks, GPT2_PATTERN, normalize=str, added_names=())
        assert ours.encode(WORDS) == theirs.encode(WORDS).ids, theirs.to_str()
    assert min(taken, refused) > 15


@pytest.mark.parametrize(
    ("tokens", "merges", "taken"),
    [
        (["ab", "abb"], [("a", "b"), ("ab", "b")], True),
        (["abb", "ab"], [("a", "b"), ("ab", "b")], False),
        (["ab", "bb", "abb"], [("a", "b"), ("b", "b"), ("a", "bb")], False),
        (["aa", "aaa"], [("a", "a"), ("aa", "a")], True),
    ],
)
def test_each_condition_on_merges_is_needed(
    tokens: list[str],
    merges: list[tuple[str, str]],
    taken: bool,  # noqa: FBT001
) -> None:
    vocab = {token: number for number, token in enumerate([*ALPHABET, *tokens])}
    ranks, _ = ranks_of(models.BPE(vocab=vocab, merges=merges))
    assert (ranks is not None) == taken


@pytest.mark.parametrize(("token", "taken"), [("abb", False), ("zzz", True)])
def test_looked_up_tokens_must_not_arise_from_pairs(token: str, taken: bool) -> None:  # noqa: FBT001
    """(ab, b) is no merge, but tiktoken would merge it."""
    vocab = {name: number for number, name in enumerate([*ALPHABET, "ab", token])}
    ranks, _ = ranks_of(models.BPE(vocab=vocab, merges=[("a", "b")], ignore_merges=True))
    assert (ranks is not None) == taken


def test_texts_with_added_tokens_or_long_runs_are_left_to_tokenizers() -> None:
    vocab, _ = all_pairs()
    ours = TiktokenBpe(vocab, GPT2_PATTERN, normalize=str.upper, added_names=("<think>", "é"))
    assert ours.encode("a <think> b") is None
    assert ours.encode("É") is None, "an added token may match the normalized text"
    assert ours.encode(" " * (MAX_WHITESPACE + 1)) is None
    assert ours.encode("a" * 25_001) is not None
    assert ours.encode("") == []
