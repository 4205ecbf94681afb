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

from trainer.checkpoint.durable_io import write_synced
from trainer.data.errors import DataError
from trainer.data.shuffle import mix
from trainer.data.token_dataset import Prepared

log = logging.getLogger(__name__)

Packing = Literal["best_fit", "concat", "single"]
MAGIC = 0x4C48504C414E0002  # "LHPLAN", version 2
HEADER = 6


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which documents are taken, and how long they may be, in tokens."""

    at_least: int | None = None
    below: int | None = None
    max_len: int | None = None
    """Longer documents are cut into several, which do not see each other."""
    without: float | None = None
    """All but this part of the documents, which is held out."""
    only: float | None = None
    """That part."""

    def __str__(self) -> str:
        return "".join(f"-{key}-{value}" for key, value in vars(self).items() if value is not None)


ALL = Choice()


@dataclass(frozen=True)
class Plan:
    """Rows of pieces. Row n holds pieces rows[n] to rows[n + 1], in the order of the stream."""

    seq_len: int
    max_pieces: int
    """Pieces of the row that has most."""
    rows: Tensor
    """[rows + 1] int64."""
    starts: Tensor
    """[pieces] int64: offset in the stream of tokens."""
    lengths: Tensor
    """[pieces] int64: from 1 to seq_len."""

    @property
    def num_rows(self) -> int:
        return self.rows.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_padding(self) -> int:
        return self.num_rows * self.seq_len - self.num_tokens


def plan(lengths: Tensor, *, seq_len: int, packing: Packing, choice: Choice = ALL) -> Plan:
    """lengths: [documents] int64, each at least 1. The same lengths give the same plan.

    Raises DataError if the choice leaves no document.
    """
    starts = lengths.cumsum(0) - lengths
    taken = (lengths >= (choice.at_least or 0)) & (lengths < (choice.below or torch.inf))
    if part := choice.without or choice.only:
        held = held_out(lengths.numel(), part)
        taken &= held if choice.only else ~held
    if not bool(taken.any()):
        said = ", ".join(f"{key} = {value}" for key, value in vars(choice).items() if value is not None)
        raise DataError(f"no document has {said}: the longest of {lengths.numel()} has {int(lengths.max())} tokens")
    starts, lengths = starts[taken], lengths[taken]
    longest = min(choice.max_len or seq_len, seq_len)
    if packing == "concat":
        if choice.max_len is not None:
            starts, lengths = cut(starts, lengths, longest)
        ends = lengths.cumsum(0)  # of the stream of what is taken
        cuts = torch.unique(torch.cat([ends - lengths, torch.arange(0, int(ends[-1]), seq_len)]))
        piece = torch.searchsorted(ends, cuts, right=True)
        starts = starts[piece] + cuts - (ends - lengths)[piece]
        return collect(cuts // seq_len, starts, torch.diff(cuts, append=ends[-1:]), seq_len)
    starts, pieces = cut(starts, lengths, longest)
    row_of = torch.arange(pieces.numel())
    if packing == "best_fit":
        full = pieces == seq_len
        num_full = int(full.sum())
        row_of[full] = torch.arange(num_full)
        row_of[~full] = best_fit(pieces[~full], seq_len) + num_full
    return collect(row_of, starts, pieces, seq_len)


def held_out(documents: int, part: float) -> Tensor:
    """[documents] bool: which are held out, by a hash of their number, so that it is the same whatever rows are.

    Raises DataError if that is none or all of them.
    """
    held = torch.tensor([mix(number) < part * 2.0**64 for number in range(documents)])
    if bool(held.any()) and not bool(held.all()):
        return held
    rest = "all" if bool(held.any()) else "none"
    raise DataError(f"data.holdout = {part} holds out {rest} of the {documents} documents; choose another part")


def cut(starts: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the pieces of all documents: full ones, then the remainder."""
    counts = (lengths + longest - 1) // longest
    document = torch.repeat_interleave(counts)
    offset = (torch.arange(document.numel()) - (counts.cumsum(0) - counts)[document]) * longest
    return starts[document] + offset, (lengths[document] - offset).clamp(max=longest)


def best_fit(lengths: Tensor, seq_len: int) -> Tensor:
    """Row of each piece, by best-fit decreasing. Ding et al., "Fewer Truncations Improve Language Modeling", 2024."""
    longest_first = torch.sort(lengths, descending=True, stable=True)
    row_of = [0] * lengths.numel()
    rows_with: dict[int, list[int]] = {}  # free space -> the rows that have it
    spaces: list[int] = []  # the keys of rows_with, ascending
    num_rows = 0
    for length, piece in zip(longest_first.values.tolist(), longest_first.indices.tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[spaces.pop(at)]
        else:
            space, row, num_rows = seq_len, num_rows, num_rows + 1
        row_of[piece] = row
        if space - length not in rows_with:
            insort(spaces, space - length)
            rows_with[space - length] = []
        rows_with[space - length].append(row)
    return torch.tensor(row_of, dtype=torch.int64)


def collect(row_of: Tensor, starts: Tensor, lengths: Tensor, seq_len: int) -> Plan:
    """Pieces, given in the order of the stream, sorted by row."""
    order = row_of.argsort(stable=True)
    per_row = row_of.bincount()
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), per_row.cumsum(0)])
    return Plan(seq_len, int(per_row.max()), rows, starts[order], lengths[order])


def saved_plan(prepared: Prepared, *, seq_len: int, packing: Packing, choice: Choice = ALL) -> Plan:
    """The plan beside the shards, mapped into memory; made, and if possible written, if it is not there."""
    path, cut = prepared.folder / f"{packing}-{seq_len}{choice}.plan", prepared.meta.max_document
    if cut is not None and (choice.without or choice.only):
        raise DataError(
            f"{prepared.folder} was prepared with data.max_document = {cut}: holding out some of its documents would "
            "part what belongs together; data.mix can cut them too (max_len)"
        )
    if not path.exists():
        made = plan(prepared.lengths, seq_len=seq_len, packing=packing, choice=choice)
        try:
            write(made, path, of=prepared.num_tokens)
        except OSError as error:
            log.warning("%s cannot be written and will be made again by every run: %s", path, error)
            return made
    return load(path, seq_len=seq_len, of=prepared.num_tokens)


def write(made: Plan, path: Path, *, of: int) -> None:
    """The whole file or nothing, of a corpus of so many tokens; several ranks may do this at once."""
    header = torch.tensor([MAGIC, of, made.seq_len, made.max_pieces, made.rows.numel(), made.starts.numel()])
    numbers = torch.cat([header, made.rows, made.starts, made.lengths])
    content = bytearray(numbers.numel() * 8)
    torch.frombuffer(content, dtype=torch.int64).copy_(numbers)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, content)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, *, seq_len: int, of: int) -> Plan:
    size = path.stat().st_size // 8
    numbers = torch.from_file(str(path), shared=False, size=size, dtype=torch.int64) if size else torch.empty(0)
    header = numbers[:HEADER].tolist()
    if len(header) < HEADER or header[0] != MAGIC or size != HEADER + header[4] + 2 * header[5]:
        raise DataError(f"{path} is damaged; delete it")
    _, tokens, length, max_pieces, num_offsets, num_pieces = header
    if (length, tokens) != (seq_len, of):
        raise DataError(f"{path} is not a plan of these {of} tokens; delete it")
    rows, starts, lengths = torch.split(numbers[HEADER:], [num_offsets, num_pieces, num_pieces])
    return Plan(seq_len, max_pieces, rows, starts, lengths)
