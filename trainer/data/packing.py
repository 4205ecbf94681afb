"""Which parts of which documents make up a row.

Documents are cut into pieces of at most seq_len tokens, none is dropped, and a row is a range of pieces:

    best_fit   full pieces have a row each; the remainders fill rows, the longest first, each where least space is left
    concat     the stream of tokens is cut every seq_len; only the last row has padding
    single     every piece has a row
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainer.checkpoint.durable_io import write_and_fsync
from trainer.data.errors import DataError
from trainer.data.shuffle import splitmix64
from trainer.data.token_dataset import TokenDataset

log = logging.getLogger(__name__)

Packing = Literal["best_fit", "concat", "single"]
MAGIC = 0x4C48504C414E0002  # "LHPLAN", version 2
HEADER = 6


@dataclass(frozen=True, kw_only=True)
class DocumentFilter:
    """Which documents are taken, and how long they may be, in tokens."""

    min_length: int | None = None
    max_length: int | None = None
    max_len: int | None = None
    """Longer documents are cut into several, which do not see each other."""
    exclude_holdout: float | None = None
    """All but this part of the documents, which is held out."""
    only_holdout: float | None = None
    """That part."""

    def __str__(self) -> str:
        # Part of the names of stored plans: the keys stay as they were first written.
        stored = zip(("at_least", "below", "max_len", "without", "only"), vars(self).values(), strict=True)
        return "".join(f"-{key}-{value}" for key, value in stored if value is not None)


NO_FILTER = DocumentFilter()


@dataclass(frozen=True)
class PackingPlan:
    """Rows of pieces. Row n holds pieces rows[n] to rows[n + 1], in the order of the stream."""

    seq_len: int
    max_segments: int
    """Pieces of the row that has most."""
    sequence_offsets: Tensor
    """[rows + 1] int64."""
    starts: Tensor
    """[pieces] int64: offset in the stream of tokens."""
    lengths: Tensor
    """[pieces] int64: from 1 to seq_len."""

    @property
    def num_sequences(self) -> int:
        return self.sequence_offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_padding_tokens(self) -> int:
        return self.num_sequences * self.seq_len - self.num_tokens


def pack_documents(
    lengths: Tensor, *, seq_len: int, packing: Packing, document_filter: DocumentFilter = NO_FILTER
) -> PackingPlan:
    """lengths: [documents] int64, each at least 1. The same lengths give the same plan.

    Raises DataError if the choice leaves no document.
    """
    starts = lengths.cumsum(0) - lengths
    selected = (lengths >= (document_filter.min_length or 0)) & (lengths < (document_filter.max_length or torch.inf))
    if holdout := document_filter.exclude_holdout or document_filter.only_holdout:
        is_held_out = holdout_mask(lengths.numel(), holdout)
        selected &= is_held_out if document_filter.only_holdout else ~is_held_out
    if not bool(selected.any()):
        conditions = ", ".join(f"{key} = {value}" for key, value in vars(document_filter).items() if value is not None)
        raise DataError(
            f"no document has {conditions}: the longest of {lengths.numel()} has {int(lengths.max())} tokens"
        )
    starts, lengths = starts[selected], lengths[selected]
    max_segment_length = min(document_filter.max_len or seq_len, seq_len)
    if packing == "concat":
        if document_filter.max_len is not None:
            starts, lengths = chunk_documents(starts, lengths, max_segment_length)
        ends = lengths.cumsum(0)  # of the stream of what is taken
        cut_points = torch.unique(torch.cat([ends - lengths, torch.arange(0, int(ends[-1]), seq_len)]))
        document = torch.searchsorted(ends, cut_points, right=True)
        starts = starts[document] + cut_points - (ends - lengths)[document]
        return group_by_sequence(cut_points // seq_len, starts, torch.diff(cut_points, append=ends[-1:]), seq_len)
    starts, segment_lengths = chunk_documents(starts, lengths, max_segment_length)
    sequence_of = torch.arange(segment_lengths.numel())
    if packing == "best_fit":
        full = segment_lengths == seq_len
        num_full = int(full.sum())
        sequence_of[full] = torch.arange(num_full)
        sequence_of[~full] = best_fit(segment_lengths[~full], seq_len) + num_full
    return group_by_sequence(sequence_of, starts, segment_lengths, seq_len)


def holdout_mask(num_documents: int, fraction: float) -> Tensor:
    """[documents] bool: which are held out, by a hash of their number, so that it is the same whatever rows are.

    Raises DataError if that is none or all of them.
    """
    is_held_out = torch.tensor([splitmix64(number) < fraction * 2.0**64 for number in range(num_documents)])
    if bool(is_held_out.any()) and not bool(is_held_out.all()):
        return is_held_out
    which = "all" if bool(is_held_out.any()) else "none"
    raise DataError(
        f"data.holdout = {fraction} holds out {which} of the {num_documents} documents; choose another part"
    )


def chunk_documents(starts: Tensor, lengths: Tensor, max_segment_length: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the pieces of all documents: full ones, then the remainder."""
    counts = (lengths + max_segment_length - 1) // max_segment_length
    document = torch.repeat_interleave(counts)
    offset = (torch.arange(document.numel()) - (counts.cumsum(0) - counts)[document]) * max_segment_length
    return starts[document] + offset, (lengths[document] - offset).clamp(max=max_segment_length)


def best_fit(lengths: Tensor, seq_len: int) -> Tensor:
    """Row of each piece, by best-fit decreasing. Ding et al., "Fewer Truncations Improve Language Modeling", 2024."""
    longest_first = torch.sort(lengths, descending=True, stable=True)
    sequence_of = [0] * lengths.numel()
    sequences_by_space: dict[int, list[int]] = {}  # free space -> the rows that have it
    spaces: list[int] = []  # the keys of rows_with, ascending
    num_sequences = 0
    for length, segment in zip(longest_first.values.tolist(), longest_first.indices.tolist(), strict=True):
        slot = bisect_left(spaces, length)
        if slot < len(spaces):
            space = spaces[slot]
            sequence = sequences_by_space[space].pop()
            if not sequences_by_space[space]:
                del sequences_by_space[spaces.pop(slot)]
        else:
            space, sequence, num_sequences = seq_len, num_sequences, num_sequences + 1
        sequence_of[segment] = sequence
        if space - length not in sequences_by_space:
            insort(spaces, space - length)
            sequences_by_space[space - length] = []
        sequences_by_space[space - length].append(sequence)
    return torch.tensor(sequence_of, dtype=torch.int64)


def group_by_sequence(sequence_of: Tensor, starts: Tensor, lengths: Tensor, seq_len: int) -> PackingPlan:
    """Pieces, given in the order of the stream, sorted by row."""
    order = sequence_of.argsort(stable=True)
    segments_per_sequence = sequence_of.bincount()
    sequence_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), segments_per_sequence.cumsum(0)])
    return PackingPlan(seq_len, int(segments_per_sequence.max()), sequence_offsets, starts[order], lengths[order])


def load_or_build_plan(
    dataset: TokenDataset, *, seq_len: int, packing: Packing, document_filter: DocumentFilter = NO_FILTER
) -> PackingPlan:
    """The plan beside the shards, mapped into memory; made, and if possible written, if it is not there."""
    path, max_document = dataset.folder / f"{packing}-{seq_len}{document_filter}.plan", dataset.meta.max_document
    if max_document is not None and (document_filter.exclude_holdout or document_filter.only_holdout):
        raise DataError(
            f"{dataset.folder} was prepared with data.max_document = {max_document}: holding out some of its documents would "
            "part what belongs together; data.mix can cut them too (max_len)"
        )
    if not path.exists():
        packing_plan = pack_documents(
            dataset.document_lengths, seq_len=seq_len, packing=packing, document_filter=document_filter
        )
        try:
            write_plan(packing_plan, path, num_tokens=dataset.num_tokens)
        except OSError as error:
            log.warning("%s cannot be written and will be made again by every run: %s", path, error)
            return packing_plan
    return load_plan(path, seq_len=seq_len, num_tokens=dataset.num_tokens)


def write_plan(packing_plan: PackingPlan, path: Path, *, num_tokens: int) -> None:
    """The whole file or nothing, of a corpus of so many tokens; several ranks may do this at once."""
    header = torch.tensor(
        [
            MAGIC,
            num_tokens,
            packing_plan.seq_len,
            packing_plan.max_segments,
            packing_plan.sequence_offsets.numel(),
            packing_plan.starts.numel(),
        ]
    )
    numbers = torch.cat([header, packing_plan.sequence_offsets, packing_plan.starts, packing_plan.lengths])
    content = bytearray(numbers.numel() * 8)
    torch.frombuffer(content, dtype=torch.int64).copy_(numbers)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_and_fsync(temporary, content)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_plan(path: Path, *, seq_len: int, num_tokens: int) -> PackingPlan:
    size = path.stat().st_size // 8
    numbers = torch.from_file(str(path), shared=False, size=size, dtype=torch.int64) if size else torch.empty(0)
    header = numbers[:HEADER].tolist()
    if len(header) < HEADER or header[0] != MAGIC or size != HEADER + header[4] + 2 * header[5]:
        raise DataError(f"{path} is damaged; delete it")
    _, plan_num_tokens, plan_seq_len, max_pieces, num_offsets, num_segments = header
    if (plan_seq_len, plan_num_tokens) != (seq_len, num_tokens):
        raise DataError(f"{path} is not a plan of these {num_tokens} tokens; delete it")
    sequence_offsets, starts, lengths = torch.split(numbers[HEADER:], [num_offsets, num_segments, num_segments])
    return PackingPlan(seq_len, max_pieces, sequence_offsets, starts, lengths)
