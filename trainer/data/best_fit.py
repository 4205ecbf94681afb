"""Best-fit packing: the sequence of each segment.

`best_fit_decreasing` fills sequences one after the other, longest segments first: the first hold
long documents alone, the last thousands of short ones. `mixed_best_fit` gives every sequence its
share of both, for the same padding.

    segments  8 8 7 7 3 2 2 2 1    sequences of 10 tokens    decreasing   82 82 73 7 21...      mixed   82 82 73 721
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import partial
from itertools import chain
from math import inf

import torch
from torch import Tensor

from trainer.data.shuffle import shuffled_order

WINDOW_SEQUENCES = 256
WINDOW_SEGMENTS = 8192
"""Least number of sequences and of segments packed at a time.

Windows keep memory from growing with the corpus; few long segments fill sequences badly.
"""
ROOM = 2
TIGHTER_ROOMS = (3, 4)
"""A segment goes to the emptiest sequence if that has room for this many of its length; more, if
that pads too much.
"""
MAX_MORE_PADDING = 0.0025
"""Padding that mixing may add to that of best-fit decreasing, as a fraction of a window's tokens.
"""


def best_fit_decreasing(lengths: Tensor, seq_len: int) -> Tensor:
    """The sequence of each segment, packed longest first (Ding et al., "Fewer Truncations Improve
    Language Modeling", 2024).
    """
    # Stable, so that equal segments keep their order: every rank must find the same packing.
    longest_first = torch.sort(lengths, descending=True, stable=True)
    sequence_of = [0] * lengths.numel()
    sequences_by_space: dict[int, list[int]] = {}  # free space -> sequences
    spaces: list[int] = []  # keys of sequences_by_space, ascending
    num_sequences = 0
    for length, segment in zip(
        longest_first.values.tolist(), longest_first.indices.tolist(), strict=True
    ):
        # The tightest space that fits. Spaces are at most seq_len different numbers, so that the
        # search stays short however many sequences are open.
        slot = bisect_left(spaces, length)
        if slot < len(spaces):
            space = spaces[slot]
            sequence = sequences_by_space[space].pop()
            if not sequences_by_space[space]:
                del sequences_by_space[spaces.pop(slot)]
        else:
            space = seq_len
            sequence = num_sequences
            num_sequences = num_sequences + 1
        sequence_of[segment] = sequence
        if space - length not in sequences_by_space:
            insort(spaces, space - length)
            sequences_by_space[space - length] = []
        sequences_by_space[space - length].append(sequence)
    return torch.tensor(sequence_of, dtype=torch.int64)


def mixed_best_fit(lengths: Tensor, seq_len: int, *, seed: int) -> Tensor:
    """The sequence of each segment; segments are shuffled and packed a window at a time.

    Those that fit nowhere go into the next window.
    """
    order = shuffled_order(lengths.numel(), seed=seed)
    ends = lengths[order].cumsum(0)
    total = int(ends[-1])
    # The second term is the tokens of WINDOW_SEGMENTS segments of mean length.
    window_tokens = max(WINDOW_SEQUENCES * seq_len, WINDOW_SEGMENTS * total // lengths.numel())
    num_windows = max(1, total // window_tokens)
    cuts = torch.searchsorted(ends, torch.arange(1, num_windows) * window_tokens)
    sequence_of = torch.empty_like(order)
    num_sequences = 0
    pending = order[:0]
    for number, window in enumerate(order.tensor_split(cuts), start=1):
        segments = torch.cat((pending, window))
        segments = segments[lengths[segments].argsort(descending=True, stable=True)]
        packed, spaces = _pack_window(
            lengths[segments].tolist(), seq_len, is_last=number == num_windows
        )
        is_packed = packed >= 0
        sequence_of[segments[is_packed]] = packed[is_packed] + num_sequences
        num_sequences = num_sequences + len(spaces)
        # Segments that found no space join the next window, instead of opening sequences that
        # would stay half empty.
        pending = segments[~is_packed]
    return sequence_of


def _pack_window(lengths: list[int], seq_len: int, *, is_last: bool) -> tuple[Tensor, Tensor]:
    """Packs one window and returns what `spread` does.

    Only the last window packs all segments; the others have full sequences.
    """
    total = sum(lengths)
    # Rounded down unless this is the last window: what is left goes to the next one, not to
    # padding.
    num_sequences = -(-total // seq_len) if is_last else total // seq_len
    pack = partial(spread, lengths, seq_len, num_sequences, opens_more=is_last)
    packed = pack(room=ROOM)
    allowed = MAX_MORE_PADDING * total
    if packed[1].sum() <= allowed:
        return packed
    # The loosest rule whose padding is allowed wins. With infinite room `spread` is best-fit
    # decreasing, against which padding is measured.
    tightest = pack(room=inf)
    allowed += float(tightest[1].sum())
    others = (pack(room=room) for room in TIGHTER_ROOMS)
    return next((each for each in chain([packed], others) if each[1].sum() <= allowed), tightest)


def spread(
    lengths: list[int], seq_len: int, num_sequences: int, *, room: float, opens_more: bool
) -> tuple[Tensor, Tensor]:
    """Packs segments, longest first, into `num_sequences` sequences.

    A segment goes to the emptiest sequence if that has space for `room` of its length, otherwise
    where it fits best. Returns the sequence of each segment, and the space left in each sequence.
    A segment that fits nowhere opens another sequence, or has none: -1.
    """
    # (space, sequence) as one integer, ascending. At most one sequence opens per segment, so that
    # no number of a sequence reaches `scale`.
    scale = num_sequences + len(lengths)
    spaces = [seq_len * scale + sequence for sequence in range(num_sequences)]
    packed = [-1] * len(lengths)
    for segment, length in enumerate(lengths):
        size = length * scale
        if spaces and spaces[-1] >= room * size:
            space = spaces.pop()
        # `size` has the sequence number 0: this finds the least space of at least `length`.
        elif (slot := bisect_left(spaces, size)) < len(spaces):
            space = spaces.pop(slot)
        elif opens_more:
            space = seq_len * scale + num_sequences
            num_sequences = num_sequences + 1
        else:
            continue
        packed[segment] = space % scale
        insort(spaces, space - size)
    left = torch.empty(num_sequences, dtype=torch.int64)
    space_of = torch.tensor(spaces, dtype=torch.int64)
    left[space_of % scale] = space_of // scale
    return torch.tensor(packed, dtype=torch.int64), left
