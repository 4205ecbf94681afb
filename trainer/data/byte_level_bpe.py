"""Byte-level BPE of Hugging Face's tokenizers in tiktoken, which is about four times faster, where
both give the same ids.

Both merge the pair of lowest rank first, the leftmost of equal ones. tokenizers ranks the pairs
that it lists; tiktoken ranks every pair by the id of its concatenation. The ids are the same if
listed pairs are in the order of the ids of their concatenations, and no token T arises from a pair
that is not listed. The latter holds if

- listed pairs build T from its own bytes: where parts (l, r) of T stand side by side, the merges within them were those
  that T alone undergoes, so T alone comes to (l, r) as well, which only a listed pair can join;
- or all splits of T into two tokens are listed.

Two overlapping pairs (x, y) and (y, z) that form the same T are the same pair, because T alone
comes to only one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from trainer.data.text_chunks import MayCut, cut_nowhere

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "o200k": O200K_PATTERN,
}
PATTERNS = tuple(NAMED_PATTERNS.values())
"""Patterns that both libraries read alike: compared at every code point by
tests/data/test_byte_level_bpe.py.
"""

MAX_WHITESPACE = 500_000
"""tiktoken's regular expressions panic at about twice as many whitespace characters in a row."""

# A letter of each release of Unicode from 9 to 17: two libraries of different releases split these
# differently.
RELEASES = "\U000104b0\U0002ceb0\u1c90\U00010fe0\U00030000\U00012f90\U00011f02\U0002ebf0\U00010d4a\U000323b0"
PROBE = (
    "The quick brown fox doesn't, I'LL WE'VE it'\u017f 'tis 12345678 3.14 x_1 a/b//c !\n/ ...\n"
    "def f(x):\n\treturn  {'a': [1, 2]}  # done\r\n\r\n\n   \n\u00a0\u2003 \u3000naïve Ünï ﬁ ½ ² Ⅷ "
    "中文字符 日本語かな 한국어 العربية हिन्दी ไทย e\u0301 A\u030a \u1100\u1161 🙂👩\u200d🚀🇩🇪 \u200b\ufeff"
    + "".join(f"a{letter}1{letter} {letter}'s " for letter in RELEASES)
)


def cuts_before_spaces(pair: str) -> bool:
    """A space ends the word before it in all of the patterns, and only whitespace depends on what
    follows it.
    """
    return pair[1] == " " and not pair[0].isspace()


def cuts_at_lines(pair: str) -> bool:
    """Whitespace up to the last line break is a word of its own, or ends one, in all patterns but
    GPT-2's.

    There the last whitespace before a letter is a word of its own. In o200k's, a slash may follow
    the line break.
    """
    return cuts_before_spaces(pair) or (pair[0] == "\n" and pair[1].isalnum())


def cuts_of_pattern(pattern: str) -> MayCut:
    """The places where a pattern is known to end a word, whatever precedes and follows; none for
    unknown patterns.
    """
    if pattern not in PATTERNS:
        return cut_nowhere
    return cuts_before_spaces if pattern == GPT2_PATTERN else cuts_at_lines


def bytes_to_unicode() -> list[str]:
    """GPT-2's character for each byte: the byte itself if printable, else one from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]


class TiktokenBpe:
    """Gives the ids of a byte-level BPE of tokenizers, or none for the texts that it leaves to
    that library.
    """

    def __init__(
        self,
        ranks: Mapping[str, int],
        pattern: str,
        *,
        normalize: Callable[[str], str],
        added_names: Sequence[str],
    ) -> None:
        import tiktoken

        byte_of = {character: byte for byte, character in enumerate(bytes_to_unicode())}
        ranks_of_bytes = {
            bytes(map(byte_of.__getitem__, token)): rank for token, rank in ranks.items()
        }
        self._encoding = tiktoken.Encoding(
            "byte-level", pat_str=pattern, mergeable_ranks=ranks_of_bytes, special_tokens={}
        )
        self._normalize = normalize
        # tokenizers matches an added token in the given or in the normalized text, as its flag
        # says.
        self._added_names = {form for name in added_names for form in (name, normalize(name))}

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None if it holds an added token, or so much whitespace that tiktoken
        panics.
        """
        # NFC leaves ASCII as it is.
        normalized = text if text.isascii() else self._normalize(text)
        if any(name in text or name in normalized for name in self._added_names):
            return None
        if longest_whitespace(normalized) > MAX_WHITESPACE:
            return None
        return self._encoding.encode_ordinary(normalized)


def longest_whitespace(text: str) -> int:
    """The characters of the longest run of whitespace; 0 if the text is too short to matter."""
    return max(map(len, re.findall(r"\s+", text)), default=0) if len(text) > MAX_WHITESPACE else 0


def split_pattern(definition: Mapping[str, Any]) -> str | None:
    """The pattern of a byte-level pre-tokenizer, None for any other and for unknown patterns."""
    step = definition.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if byte_level.get("use_regex", True) else None
    # ByteLevel splits by GPT-2's pattern unless `use_regex` is off, which it must be after a
    # Split.
    split = {key: value for key, value in steps[0].items() if key != "pattern"}
    pattern = (steps[0].get("pattern") or {}).get("Regex")
    is_isolating = split == {"type": "Split", "behavior": "Isolated", "invert": False}
    matches = (
        len(steps) == 2
        and is_isolating
        and not byte_level.get("use_regex", True)
        and pattern in PATTERNS
    )
    return str(pattern) if matches else None


def is_plain_bpe(definition: Mapping[str, Any]) -> bool:
    """Whether only NFC precedes the splitting, and nothing but merges follows it."""
    model = definition["model"]
    normalizer = definition.get("normalizer") or {"type": "NFC"}
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        model.get("type") == "BPE"
        and normalizer == {"type": "NFC"}
        and not any(map(model.get, options))
    )


def merge_list(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a BPE model, which old files write as one string."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return [(left, right) for left, right in pairs]


def tiktoken_ranks(
    model: Mapping[str, Any], builds: Callable[[str], bool]
) -> dict[str, int] | None:
    """Ranks with which tiktoken gives the model's ids, None if that is not certain.

    `builds`: whether the model's merges build a token from its characters.
    """
    vocab = model["vocab"]
    merges = merge_list(model)
    alphabet = set(bytes_to_unicode())
    products = [vocab[left + right] for left, right in merges]
    # tiktoken needs a rank for every byte, and merges by the id of a pair's concatenation, so that
    # the listed order must be the order of those ids.
    if not alphabet <= vocab.keys() or any(
        later < earlier for earlier, later in pairwise(products)
    ):
        return None
    # A whole word is looked up first, whether merges build it or not.
    has_lookup = bool(model.get("ignore_merges"))
    tokens = vocab if has_lookup else alphabet.union(left + right for left, right in merges)
    # Bytes never form a token of other characters, which only an added token has.
    ranks = {token: vocab[token] for token in tokens if alphabet.issuperset(token)}
    listed = set(merges)
    # No token may arise from a pair that is not listed: see the proof at the head of this file.
    for token in ranks:
        if not builds(token) and (
            not has_lookup or any(pair not in listed for pair in splits_of(token, ranks))
        ):
            return None
    return ranks


def splits_of(token: str, ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
    return (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks)
