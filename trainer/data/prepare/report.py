"""A readable report of a prepared corpus: counts, document lengths, samples."""

from __future__ import annotations

import hashlib

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trainer.data.packing import PackingPlan
from trainer.data.packing_stats import packing_facts
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.metrics.loggers import format_tokens

LENGTH_BINS = (0, *(1 << power for power in (8, 10, 12, 14, 16, 18, 20)))
SAMPLE_TOKENS = 64
VERIFIED_TOKENS = 1 << 23
"""Tokens of a corpus at a URL that are read at once."""


def render_report(
    dataset: TokenDataset, tokenizer: Tokenizer, *, samples: int, verify: bool, plan: PackingPlan
) -> str:
    """The report as text. `plan` packs these documents.

    Raises DataError if a checksum does not match.
    """
    if verify:
        verify_checksums(dataset)
    meta = dataset.meta
    facts = Table(show_header=False, title=Text(str(dataset.folder)), title_justify="left")
    counts = {"tokens": meta.tokens, "documents": meta.documents, "longest": meta.longest}
    counts |= {
        "shards": len(meta.shards),
        "files": meta.files,
        "skipped": meta.skipped,
        "vocabulary": meta.vocab_size,
    }
    for name, count in counts.items():
        facts.add_row(name, f"{count:,}")
    facts.add_row("tokenizer", meta.tokenizer)
    facts.add_row("fingerprint", dataset.fingerprint)
    if verify:
        facts.add_row("checksums", "match")
    samples_table: Table | Text = Text(
        f"No samples: [tokenizer] is {tokenizer.fingerprint}, a different one."
    )
    if meta.tokenizer == tokenizer.fingerprint:
        samples_table = sample_table(dataset, tokenizer, samples)
    packed = Table(show_header=False, title="packed", title_justify="left")
    for name, fact in packing_facts(plan).items():
        packed.add_row(name, fact)
    rendered = Console().render(
        Group(facts, histogram(dataset.document_lengths), packed, samples_table)
    )
    return "".join(segment.text for segment in rendered)


def sample_table(dataset: TokenDataset, tokenizer: Tokenizer, samples: int) -> Table:
    table = Table("document", "tokens", "first tokens")
    numbers = {dataset.num_documents * sample // samples for sample in range(samples)}
    for number in sorted(numbers):
        start, stop = dataset.document_starts[number : number + 2].tolist()
        text = tokenizer.decode(dataset.read(start, min(stop, start + SAMPLE_TOKENS)).tolist())
        table.add_row(
            f"{number:,}",
            f"{stop - start:,}",
            Text(repr(text)[1:-1]),
        )
    return table


def histogram(lengths: torch.Tensor) -> Table:
    """Documents and tokens by document length, and the share of tokens in documents at least that
    long.
    """
    table = Table(
        "document length", "documents", "tokens", "share of tokens", "share at least as long"
    )
    total = int(lengths.sum())
    for lower, upper in zip(LENGTH_BINS, (*LENGTH_BINS[1:], None), strict=True):
        longer = lengths[lengths >= lower]
        in_bin = longer[longer < (upper or torch.inf)]
        name = (
            f"{format_tokens(lower)} to {format_tokens(upper)}"
            if upper
            else f"at least {format_tokens(lower)}"
        )
        shares = (f"{100 * int(group.sum()) / total:.1f} %" for group in (in_bin, longer))
        table.add_row(name, f"{in_bin.numel():,}", f"{int(in_bin.sum()):,}", *shares)
    return table


def verify_checksums(dataset: TokenDataset) -> None:
    """Raises DataError for the first shard whose tokens changed after they were written."""
    if dataset.is_remote:
        # Every block is compared with its hash; the cache is filled on the way.
        for start in range(0, dataset.num_tokens, VERIFIED_TOKENS):
            dataset.read(start, min(start + VERIFIED_TOKENS, dataset.num_tokens))
        return
    for shard in dataset.meta.shards:
        path = dataset.folder / f"{shard.name}.bin"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.bin_sha256:
                raise DataError(
                    f"{path} is damaged: checksum mismatch; delete {dataset.folder} to prepare it again"
                )
