"""Texts of any length, in parts whose tokens are those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from trainer.errors import DataError

MayCut = Callable[[str], bool]
"""Whether a text may be cut between two characters, because no token spans them wherever they
stand.
"""

MIN_YIELDED_IDS = 1 << 16


class EncodingError(DataError):
    """A text that a tokenizer's library cannot encode."""


def cut_nowhere(_: str) -> bool:
    return False


def split_text(
    blocks: Iterable[str], may_cut: MayCut, *, part_chars: int, max_chars: int
) -> Iterator[str]:
    """The text of consecutive blocks in parts of at most `part_chars`, or longer, up to the next
    place for a cut.

    Raises EncodingError for a part of more than `max_chars`.
    """
    # `first` is the first place of `rest` that was not looked at: a long text without a cut is not
    # searched again with every block.
    rest = ""
    first = 1
    for block in blocks:
        text = rest + block
        start = 0
        first = max(first, 1)
        while len(text) - start > part_chars:
            place = find_cut(text, may_cut, first, start + part_chars)
            if place is None:
                break
            require_length(place - start, max_chars)
            yield text[start:place]
            start = place
            first = place + 1
        is_searched = len(text) - start > part_chars
        rest = text[start:]
        first = len(rest) if is_searched else 1
        require_length(len(rest), max_chars)
    if rest:
        yield rest


def find_cut(text: str, may_cut: MayCut, first: int, preferred: int) -> int | None:
    """The last place from `first` to `preferred` between two characters that may be cut, or else
    the next one.
    """
    for place in chain(
        range(preferred, first - 1, -1), range(max(preferred + 1, first), len(text))
    ):
        if may_cut(text[place - 1 : place + 1]):
            return place
    return None


def require_length(num_chars: int, max_chars: int) -> None:
    if num_chars > max_chars:
        raise EncodingError(
            f"a text has {num_chars:,} characters or more without a place where a cut is known to change no token; at "
            f"most {max_chars:,} are encoded at once"
        )


def encode_parts(parts: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[Tensor]:
    """[tokens] int32 of consecutive parts of a text. Raises EncodingError where the tokenizer
    fails.

    A later part is encoded behind the character before it, whose ids are left out: some tokenizers
    put a space before every text.
    """
    ids: list[int] = []
    before = ""
    offset = 0
    for part in parts:
        try:
            # `before` has the same ids alone as in front of the part, since the cut lies behind
            # it.
            skipped = len(encode(before)) if before else 0
            ids += encode(before + part)[skipped:]
        except (KeyboardInterrupt, SystemExit, DataError):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            raise EncodingError(
                f"the tokenizer failed within {len(part)} characters at {offset}: {error}"
            ) from error
        before = part[-1]
        offset = offset + len(part)
        if len(ids) >= MIN_YIELDED_IDS:
            yield torch.tensor(ids, dtype=torch.int32)
            ids = []
    if ids:
        yield torch.tensor(ids, dtype=torch.int32)


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """[tokens] int32 of all parts."""
    parts = [*tensors]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int32), *parts])


def neighbours(tokens: Iterable[str], *, space: str) -> frozenset[str]:
    """Every two characters that stand side by side in a token, also with a space for the character
    that stands for it.
    """
    pairs = {token[at : at + 2] for token in tokens for at in range(len(token) - 1)}
    with_space = {pair for pair in pairs if space in pair}
    left = {pair.replace(space, " ", 1) for pair in with_space}
    right = {pair[0] + pair[1].replace(space, " ") for pair in with_space}
    return frozenset(pairs | left | right | {pair.replace(space, " ") for pair in with_space})
