"""What a preparation holds, for people: counts, lengths, samples."""

from __future__ import annotations

import hashlib

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trainer.data.errors import DataError
from trainer.data.token_dataset import Prepared
from trainer.data.tokenizer import Tokenizer

K = 1 << 10
LENGTHS = (0, 256, K, 4 * K, 16 * K, 64 * K, 256 * K, K * K)
SHOWN = 64  # tokens of a sample


def report(prepared: Prepared, tokenizer: Tokenizer, *, samples: int, verify: bool) -> str:
    """Raises DataError if it is damaged."""
    if verify:
        check(prepared)
    meta = prepared.meta
    facts = Table(show_header=False, title=Text(str(prepared.folder)), title_justify="left")
    counts = {"tokens": meta.tokens, "documents": meta.documents, "longest": meta.longest}
    counts |= {"shards": len(meta.shards), "files": meta.files, "skipped": meta.skipped, "vocabulary": meta.vocab_size}
    for name, count in counts.items():
        facts.add_row(name, f"{count:,}")
    facts.add_row("tokenizer", meta.tokenizer)
    facts.add_row("fingerprint", prepared.fingerprint)
    if verify:
        facts.add_row("sums", "right")
    shown: Table | Text = Text(f"No samples: [tokenizer] is {tokenizer.fingerprint}, another one.")
    if meta.tokenizer == tokenizer.fingerprint:
        shown = beginnings(prepared, tokenizer, samples)
    rendered = Console().render(Group(facts, histogram(prepared.lengths), shown))
    return "".join(segment.text for segment in rendered)


def beginnings(prepared: Prepared, tokenizer: Tokenizer, samples: int) -> Table:
    table = Table("document", "tokens", "how it begins")
    for number in sorted({prepared.num_documents * sample // samples for sample in range(samples)}):
        start, stop = prepared.starts[number : number + 2].tolist()
        text = tokenizer.decode(prepared.read(start, min(stop, start + SHOWN)).tolist())
        table.add_row(f"{number:,}", f"{stop - start:,}", Text(repr(text)[1:-1]))
    return table


def histogram(lengths: torch.Tensor) -> Table:
    """Of documents by their length in tokens, and what share of all tokens is in documents at least that long."""
    table = Table("tokens of a document", "documents", "tokens", "share of tokens", "at least that long")
    total = int(lengths.sum())
    for least, below in zip(LENGTHS, (*LENGTHS[1:], None), strict=True):
        longer = lengths >= least
        here = lengths[longer if below is None else longer & (lengths < below)]
        name = f"{short(least)} to {short(below)}" if below else f"at least {short(least)}"
        share, above = 100 * int(here.sum()) / total, 100 * int(lengths[longer].sum()) / total
        table.add_row(name, f"{here.numel():,}", f"{int(here.sum()):,}", f"{share:.1f} %", f"{above:.1f} %")
    return table


def short(length: int) -> str:
    return f"{length // (K * K)}M" if length >= K * K else f"{length // K}K" if length >= K else str(length)


def check(prepared: Prepared) -> None:
    """Raises DataError naming the first shard whose tokens are not those that were written."""
    for shard in prepared.meta.shards:
        path = prepared.folder / f"{shard.name}.bin"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.bin_sha256:
                raise DataError(f"{path} is damaged: its sum is another; delete {prepared.folder} to prepare it again")
