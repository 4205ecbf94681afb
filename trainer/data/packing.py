"""Packs documents into sequences of seq_len tokens.

Documents are cut into segments of at most seq_len tokens; no token is dropped. A sequence holds
one or more segments:

    best_fit   a full segment is a sequence; remainders are packed by best fit (`trainer/data/best_fit.py`)
    concat     the token stream is cut every seq_len tokens; only the last sequence has padding
    single     every segment is a sequence
"""

from __future__ import annotations

import hashlib
import logging
import shlex
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from models.batch import IGNORE_INDEX
from models.ranges import concatenated_ranges
from trainer.config.data import PACKING_VERSION
from trainer.data.best_fit import best_fit_decreasing, mixed_best_fit
from trainer.data.shuffle import shuffled_index, splitmix64s
from trainer.data.token_dataset import TokenDataset
from trainer.errors import DataError, ResumeError
from trainer.storage.artifact import (
    HEADER_BYTES,
    Artifact,
    DamageError,
    open_regular,
    sealed_header,
    unseal_header,
)
from trainer.storage.durable_io import write_atomic

log = logging.getLogger(__name__)

Packing = Literal["best_fit", "concat", "single"]
OLDER_MAGIC = (0x4C48504C414E0002).to_bytes(8, "little")  # "LHPLAN", version 2


@dataclass(frozen=True, kw_only=True)
class DocumentFilter:
    """Selects documents by length in tokens, max_length excluded, and by holdout."""

    min_length: int | None = None
    max_length: int | None = None
    max_len: int | None = None
    """Documents are cut into segments of at most this length, which do not attend to each
    other.
    """
    exclude_holdout: float | None = None
    """Drop this fraction of the documents, the holdout."""
    only_holdout: float | None = None
    """Keep only this fraction of the documents, the holdout."""

    def __str__(self) -> str:
        # Part of the file names of stored plans, which must not change.
        stored = zip(
            ("at_least", "below", "max_len", "without", "only"), vars(self).values(), strict=True
        )
        return "".join(f"-{key}-{value}" for key, value in stored if value is not None)


NO_FILTER = DocumentFilter()


@dataclass(frozen=True)
class PackingPlan:
    """Sequence n holds segments sequence_offsets[n] to sequence_offsets[n + 1], in stream
    order.
    """

    seq_len: int
    max_segments: int
    """Largest number of segments in a sequence."""
    sequence_offsets: Tensor
    """[sequences + 1] int64: first segment of each sequence, then the number of segments."""
    starts: Tensor
    """[segments] int64: offset in the token stream."""
    lengths: Tensor
    """[segments] int64: from 1 to seq_len."""
    fingerprint: str = ""
    """sha256 of the three tensors; empty for a plan that `load_or_build_plan` did not return."""

    def broken_rule(self, stream_tokens: int) -> str:
        """The rule that a stored plan for a stream of `stream_tokens` breaks; empty if it keeps
        all.
        """
        segments_per_sequence = self.sequence_offsets.diff()
        num_segments = self.starts.numel()
        ends = int(self.sequence_offsets[0]), int(self.sequence_offsets[-1])
        if ends != (0, num_segments) or bool((segments_per_sequence < 1).any()):
            return f"its offsets do not ascend from 0 to its {num_segments} segments"
        if (most := int(segments_per_sequence.max())) != self.max_segments:
            return f"its longest sequence has {most} segments, its header says {self.max_segments}"
        is_lawful = (self.starts >= 0) & (self.lengths >= 1) & (self.lengths <= self.seq_len)
        # Not written as starts + lengths, which may overflow for numbers of a damaged file.
        if not bool((is_lawful & (self.starts <= stream_tokens - self.lengths)).all()):
            return f"a segment is not within the {stream_tokens} tokens of the corpus, or longer than a sequence"
        filled = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])[
            self.sequence_offsets
        ].diff()
        if (longest := int(filled.max())) > self.seq_len:
            return f"a sequence has {longest} tokens, its header says {self.seq_len}"
        return ""

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
    lengths: Tensor,
    *,
    seq_len: int,
    packing: Packing,
    version: int = PACKING_VERSION,
    seed: int = 0,
    document_filter: DocumentFilter = NO_FILTER,
) -> PackingPlan:
    """A pure function of its arguments. lengths: [documents] int64, each at least 1.

    `seed` is that of best_fit's shuffle. Raises DataError if the filter leaves no document.
    """
    starts = lengths.cumsum(0) - lengths
    selected = (lengths >= (document_filter.min_length or 0)) & (
        lengths < (document_filter.max_length or torch.inf)
    )
    if holdout := document_filter.exclude_holdout or document_filter.only_holdout:
        is_held_out = holdout_mask(lengths.numel(), holdout)
        selected &= is_held_out if document_filter.only_holdout else ~is_held_out
    if not bool(selected.any()):
        conditions = ", ".join(
            f"{key} = {value}" for key, value in vars(document_filter).items() if value is not None
        )
        raise DataError(
            f"no document with {conditions}: the longest of {lengths.numel()} has {int(lengths.max())} tokens"
        )
    starts = starts[selected]
    lengths = lengths[selected]
    if packing != "concat" or document_filter.max_len is not None:
        starts, lengths = chunk_documents(
            starts, lengths, min(document_filter.max_len or seq_len, seq_len)
        )
    if packing == "concat":
        # The stream is cut where a document or a sequence begins, so that each part lies in one
        # document and one sequence. `right=True`: a cut at the end of a document belongs to the
        # next one.
        ends = lengths.cumsum(0)  # in the stream of selected documents
        cut_points = torch.unique(
            torch.cat([ends - lengths, torch.arange(0, int(ends[-1]), seq_len)])
        )
        document = torch.searchsorted(ends, cut_points, right=True)
        starts = starts[document] + cut_points - (ends - lengths)[document]
        return group_by_sequence(
            cut_points // seq_len, starts, torch.diff(cut_points, append=ends[-1:]), seq_len
        )
    sequence_of = torch.arange(lengths.numel())
    if packing == "best_fit":
        # Full segments are sequences by themselves, so only the rest is packed.
        full = lengths == seq_len
        num_full = int(full.sum())
        sequence_of[full] = torch.arange(num_full)
        rest = lengths[~full]
        if version == 1 or not rest.numel():
            sequence_of[~full] = best_fit_decreasing(rest, seq_len) + num_full
        else:
            sequence_of[~full] = mixed_best_fit(rest, seq_len, seed=seed) + num_full
    return group_by_sequence(sequence_of, starts, lengths, seq_len)


def holdout_mask(num_documents: int, fraction: float) -> Tensor:
    """[documents] bool. A hash of the document's number decides, so packing and seq_len do not
    matter.

    Raises DataError if it holds out no document or every document.
    """
    # `splitmix64s` gives signed numbers. Flipping the sign bit of both sides makes the comparison
    # one of unsigned hashes with fraction * 2^64.
    lowest = -(1 << 63)
    is_held_out = (splitmix64s(torch.arange(num_documents)) ^ lowest) < ceil(
        fraction * 2.0**64
    ) + lowest
    if bool(is_held_out.any()) and not bool(is_held_out.all()):
        return is_held_out
    which = "all" if bool(is_held_out.any()) else "none"
    raise DataError(
        f"data.holdout = {fraction} holds out {which} of the {num_documents} documents; change it"
    )


def chunk_documents(
    starts: Tensor, lengths: Tensor, max_segment_length: int
) -> tuple[Tensor, Tensor]:
    """(starts, lengths) of the segments: those of a document are full, except the last."""
    counts = (lengths + max_segment_length - 1) // max_segment_length
    # The exclusive cumsum of counts is each document's first segment; subtracting it numbers the
    # segments within a document.
    document = torch.repeat_interleave(counts)
    offset = (
        torch.arange(document.numel()) - (counts.cumsum(0) - counts)[document]
    ) * max_segment_length
    return starts[document] + offset, (lengths[document] - offset).clamp(max=max_segment_length)


def group_by_sequence(
    sequence_of: Tensor, starts: Tensor, lengths: Tensor, seq_len: int
) -> PackingPlan:
    """Sorts segments, given in stream order, by sequence."""
    # Stable: the segments of a sequence stay in stream order.
    order = sequence_of.argsort(stable=True)
    segments_per_sequence = sequence_of.bincount()
    sequence_offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), segments_per_sequence.cumsum(0)]
    )
    return PackingPlan(
        seq_len, int(segments_per_sequence.max()), sequence_offsets, starts[order], lengths[order]
    )


def load_or_build_plan(
    dataset: TokenDataset,
    *,
    seq_len: int,
    packing: Packing,
    version: int = PACKING_VERSION,
    seed: int = 0,
    document_filter: DocumentFilter = NO_FILTER,
) -> PackingPlan:
    """The plan stored with the shards, mapped into memory.

    Builds it if absent, and stores it if possible.
    """
    # Only this packing depends on the seed. Other plans keep the file names they always had.
    is_shuffled = packing == "best_fit" and version > 1
    shuffled = f"-version-{version}-seed-{seed}" if is_shuffled else ""
    path = dataset.folder / f"{packing}-{seq_len}{document_filter}{shuffled}.plan"
    max_document = dataset.meta.max_document
    if max_document is not None and (
        document_filter.exclude_holdout or document_filter.only_holdout
    ):
        raise DataError(
            f"{dataset.folder} was prepared with data.max_document = {max_document}: data.holdout could hold out one part "
            "of a document and train on another; set max_len in data.mix instead"
        )
    try:
        if path.exists() and not _is_older(path):
            return load_plan(
                path,
                seq_len=seq_len,
                made_from=dataset.fingerprint,
                stream_tokens=dataset.num_tokens,
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    options: dict[str, Any] = {
        "version": version,
        "seed": seed,
        "document_filter": document_filter,
    }
    plan = pack_documents(dataset.document_lengths, seq_len=seq_len, packing=packing, **options)
    return store_plan(plan, path, made_from=dataset.fingerprint)


class PlanHeader(Artifact):
    """The beginning of a stored plan. Its offsets, starts and lengths follow, as int64."""

    kind: ClassVar[str] = "packing plan"
    name: str
    """Name of the file, which states how the corpus was packed."""
    seq_len: int = Field(ge=1)
    max_segments: int = Field(ge=1)
    num_offsets: int = Field(ge=2)
    num_segments: int = Field(ge=1)
    sha256: str


def store_plan(plan: PackingPlan, path: Path, *, made_from: str) -> PackingPlan:
    """Stores a plan of the corpus with this fingerprint, if possible; returns it with its own.

    Ranks may store it at once.
    """
    content = bytearray((plan.sequence_offsets.numel() + 2 * plan.starts.numel()) * 8)
    numbers = torch.cat([plan.sequence_offsets, plan.starts, plan.lengths])
    torch.frombuffer(content, dtype=torch.int64).copy_(numbers)
    plan = replace(plan, fingerprint=hashlib.sha256(content).hexdigest())
    header = PlanHeader(
        name=path.name,
        seq_len=plan.seq_len,
        max_segments=plan.max_segments,
        num_offsets=plan.sequence_offsets.numel(),
        num_segments=plan.starts.numel(),
        sha256=plan.fingerprint,
    )
    try:
        # Renamed into place: a rank that stores at the same time writes the same bytes, and none
        # reads half a file.
        write_atomic(path, sealed_header(header, made_from=made_from) + content)
    except OSError as error:
        log.warning("%s cannot be written; every run will rebuild it: %s", path, error)
    return plan


def _is_older(path: Path) -> bool:
    """Whether a stored plan is of before files were sealed.

    It may be damaged, and packing gives it again.
    """
    try:
        with open_regular(path) as file:
            return file.read(8) == OLDER_MAGIC
    except DamageError:
        return False


def load_plan(path: Path, *, seq_len: int, made_from: str, stream_tokens: int) -> PackingPlan:
    """The plan stored at `path` for the corpus with fingerprint `made_from` and `stream_tokens`
    tokens.

    Raises DataError if the file is damaged, breaks a rule of plans, or belongs to another corpus
    or sequence length.
    """
    try:
        with open_regular(path) as file:
            header, sealed = unseal_header(file.read(HEADER_BYTES), PlanHeader)
            num_numbers = header.num_offsets + 2 * header.num_segments
            if path.stat().st_size != HEADER_BYTES + 8 * num_numbers:
                raise DamageError("it has another size than its header says")
            if hashlib.file_digest(file, "sha256").hexdigest() != header.sha256:
                raise DamageError("checksum mismatch")
    except (DamageError, ResumeError) as error:
        raise DataError(f"{path} is damaged: {error}; {remedy(path)}") from None
    if (sealed.made_from, header.name, header.seq_len) != (made_from, path.name, seq_len):
        raise DataError(
            f"{path} is the plan of another corpus or packing ({header.name}); {remedy(path)}"
        )
    # A private mapping of the whole file: the header takes a multiple of 8 bytes, so that int64
    # behind it is aligned, and ranks of a node share the pages.
    numbers = torch.from_file(
        str(path), shared=False, size=HEADER_BYTES // 8 + num_numbers, dtype=torch.int64
    )
    parts = [header.num_offsets, header.num_segments, header.num_segments]
    offsets, starts, lengths = torch.split(numbers[HEADER_BYTES // 8 :], parts)
    plan = PackingPlan(seq_len, header.max_segments, offsets, starts, lengths, header.sha256)
    if broken := plan.broken_rule(stream_tokens):
        raise DataError(f"{path} is damaged: {broken}; {remedy(path)}")
    return plan


def remedy(path: Path) -> str:
    return f"to make it again: rm {shlex.quote(str(path))}, then the same command"


class PackedDataset:
    """The sequences of a plan, reshuffled every epoch; a `SequenceSource`."""

    def __init__(self, token_dataset: TokenDataset, plan: PackingPlan, *, seed: int) -> None:
        self.token_dataset = token_dataset
        self.plan = plan
        self.num_sequences = plan.num_sequences
        self.max_segments = plan.max_segments
        self.num_padding_tokens = plan.num_padding_tokens
        # A coarse fraction keeps the integers of `WeightedRoundRobin` small, and with them its
        # period.
        self.fill_ratio = Fraction(
            max(1, round(100 * plan.num_tokens / (plan.num_sequences * plan.seq_len))), 100
        )
        """Fraction of tokens that are not padding, rounded to 0.01.

        Scales the weight of a source from tokens to sequences.
        """
        self.pad_token_id = token_dataset.eos
        self.fingerprint = token_dataset.fingerprint
        self.plan_fingerprint = plan.fingerprint
        self.seed = seed
        # Dealing, boundaries and reading each ask for the segments of a sequence.
        self._segments = lru_cache(maxsize=16)(self._load_segments)

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, sequence of the plan) of a sequence."""
        epoch, index_in_epoch = divmod(index, self.num_sequences)
        return epoch, shuffled_index(
            index_in_epoch, size=self.num_sequences, seed=self.seed, epoch=epoch
        )

    def segment_lengths(self, index: int) -> Tensor:
        return self._segments(index)[1]

    def read(self, index: int, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and labels of parts of a sequence.

        If the document continues after the segment, its next token is the last label.
        """
        segment_starts, segment_lengths, continued = self._segments(index)
        segment_ends = segment_lengths.cumsum(0)
        segment = torch.searchsorted(segment_ends, starts, right=True)
        in_stream = segment_starts[segment] + starts - (segment_ends - segment_lengths)[segment]
        # Labels are the tokens one further on, so one more token is read if the document has one.
        has_next_token = (starts + lengths < segment_ends[segment]) | continued[segment]
        num_read = lengths + has_next_token
        stream = self.token_dataset.read_ranges(in_stream, num_read)
        token_index = concatenated_ranges(num_read.cumsum(0) - num_read, lengths)
        # Where there is no next token, this takes some other one, which IGNORE_INDEX replaces. The
        # clamp keeps the last index within the stream.
        labels = stream[(token_index + 1).clamp(max=len(stream) - 1)]
        labels[lengths.cumsum(0)[~has_next_token] - 1] = IGNORE_INDEX
        return stream[token_index], labels

    def _load_segments(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(start in the token stream, length, whether the document continues after it) of each
        segment.
        """
        _, sequence = self.locate(index)
        first, last = self.plan.sequence_offsets[sequence : sequence + 2].tolist()
        starts = self.plan.starts[first:last]
        lengths = self.plan.lengths[first:last]
        document_starts = self.token_dataset.document_starts
        ends = starts + lengths
        # If a document ends with the segment, the next one, or the end of the stream, begins at
        # `ends`.
        continued = document_starts[torch.searchsorted(document_starts, ends)] != ends
        return starts, lengths, continued
