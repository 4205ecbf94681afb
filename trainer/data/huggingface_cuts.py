"""Where a text may be cut for a tokenizer.json: proved from the file, or nowhere.

- Byte-level tokenizers split a text into words by a pattern, and encode each word by itself. Known patterns end a word at
  some places whatever stands around them (`byte_level_bpe.cuts_of_pattern`).
- A BPE of converted sentencepiece models joins neighbours only into a token. Where no token holds the characters on both
  sides of a place side by side, none spans it.

The normalizer must work character by character, but for composition (NFC), which joins nothing to
what follows a place of the first kind, and for a space before the text, which does not matter,
like a run of unknown characters that becomes one token: a later part is encoded behind the
character before it, whose ids are left out. Added tokens are matched before that, and cut the text
themselves: they may not span the place, reach it by taking whitespace, or look at the characters
beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.byte_level_bpe import cuts_of_pattern, split_pattern
from trainer.data.text_chunks import MayCut, cut_nowhere, neighbours

SPACE = "▁"
JOINED_BYTES = re.compile(r"<0x[0-9A-F]{2}>.|.<0x[0-9A-F]{2}>", re.DOTALL)
TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
SPLIT_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


@dataclass(frozen=True)
class TokenCuts:
    """Allows cuts between characters that stand together in no token, and where no added token
    begins or ends.
    """

    together: frozenset[str]
    starts: frozenset[str]
    ends: frozenset[str]
    takes_left: bool
    takes_right: bool

    def __call__(self, pair: str) -> bool:
        left = pair[0]
        right = pair[1]
        if pair in self.together or left in self.ends or right in self.starts:
            return False
        return not (self.takes_left and right.isspace()) and not (
            self.takes_right and left.isspace()
        )


def proved_cuts(
    definition: Mapping[str, Any], added: Sequence[Any], normalize: Callable[[str], str]
) -> MayCut:
    """The places where a text may be cut, as far as the definition proves.

    `added`: the added tokens, of which special ones are matched as text, and may only hide another
    token.
    """
    matched = [token for token in added if not token.special]
    if definition["model"].get("type") != "BPE" or any(token.single_word for token in matched):
        return cut_nowhere
    takes_left = any(token.lstrip for token in matched)
    takes_right = any(token.rstrip for token in matched)
    pattern = split_pattern(definition)
    if pattern is not None and (definition.get("normalizer") or {"type": "NFC"}) == {
        "type": "NFC"
    }:
        # Added tokens are matched before words are split, in either form: no cut may fall in one.
        ends_word = cuts_of_pattern(pattern)
        names = {form for token in added for form in (token.content, normalize(token.content))}
        is_spanned = any(
            ends_word(name[at : at + 2]) for name in names for at in range(len(name) - 1)
        )
        return cut_nowhere if is_spanned or takes_left or takes_right else ends_word
    if not is_by_character(definition) or any(token.normalized for token in matched):
        return cut_nowhere
    if not keeps_unknown_apart(definition["model"]):
        return cut_nowhere
    return TokenCuts(
        together=neighbours(
            [*definition["model"]["vocab"], *(token.content for token in added)], space=SPACE
        ),
        starts=frozenset(token.content[:1] for token in matched),
        ends=frozenset(token.content[-1:] for token in matched),
        takes_left=takes_left,
        takes_right=takes_right,
    )


def is_by_character(definition: Mapping[str, Any]) -> bool:
    """Whether a BPE reads characters as they are, with another one for a space, and at most splits
    at spaces.
    """
    model = definition["model"]
    normalizer = definition.get("normalizer")
    # With `ignore_merges`, a whole word may be a token that merges do not build.
    if any(
        map(
            model.get,
            ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"),
        )
    ):
        return False
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if any(step not in (TO_SPACE, PREPEND) for step in steps):
        return False
    splitting = definition.get("pre_tokenizer")
    is_metaspace = (
        splitting is not None
        and splitting["type"] == "Metaspace"
        and splitting["replacement"] == SPACE
    )
    return (
        splitting is None or is_metaspace or (splitting == SPLIT_AT_SPACES and TO_SPACE in steps)
    )


def keeps_unknown_apart(model: Mapping[str, Any]) -> bool:
    """Whether a BPE has a token, or 256 for bytes, for every unknown character, and joins them to
    nothing else.

    Characters without a token are dropped, and what stands on both sides of them is joined.
    """
    vocab = model["vocab"]
    unknown = model.get("unk_token")
    if unknown is not None and any(unknown in token and token != unknown for token in vocab):
        return False
    if not model.get("byte_fallback"):
        return unknown in vocab
    # The token of one byte, such as `<0x0A>`, has 6 characters. Longer ones that hold such a name
    # would join a byte to its neighbours.
    joins_bytes = any(
        len(token) > 6 and "<0x" in token and JOINED_BYTES.search(token) for token in vocab
    )
    return not joins_bytes and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
