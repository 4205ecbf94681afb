"""How costs grow: with the length of sequences, ranks, documents in a sequence, and documents in a
corpus.

    python -m benchmarks.growth            prints the tables of docs/benchmarks.md
    python -m benchmarks.growth --write    writes them
    python -m benchmarks.growth --toy      at small sizes

Least of several rounds of CPU time, of one thread; nothing else should run. Context parallelism is
counted without sending: what the busiest rank plans and reads.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.balance import log_normal
from benchmarks.pages import replace_block
from models import kernels
from models.batch import IGNORE_INDEX, Batch
from models.config import ModelConfig
from models.score_pairs import Scores
from models.transformer import Transformer
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.mesh.context_plan import ShardLayout
from trainer.data.packing import pack_documents

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
CPU = torch.device("cpu")


def least_seconds(job: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        job()
        seconds.append(time.process_time() - began)
    return min(seconds)


# ---- the length of a sequence


def sequence_table(lengths: list[int], rounds: int) -> Iterator[str]:
    yield "| tokens of a sequence | us per token | GFLOP/s | us per token, 64 documents | GFLOP/s |\n|---|---|---|---|---|"
    config = ModelConfig(
        dim=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        ffn_dim=384,
        vocab_size=512,
    )
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for length in lengths:
        cells = [f"{length:,}"]
        for documents in (1, 64):
            batch = one_sequence(length, documents, config.vocab_size)
            seconds = least_seconds(lambda batch=batch: model(batch).sum().backward(), rounds)  # type: ignore[misc]
            flops = config.flops(tokens=length, pairs=batch.num_pairs)
            cells += [f"{seconds / length * 1e6:.1f}", f"{flops / seconds / 1e9:.1f}"]
        yield f"| {' | '.join(cells)} |"


def one_sequence(length: int, documents: int, vocab_size: int) -> Batch:
    tokens = torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    size = length // documents
    return Batch(
        tokens=tokens,
        labels=tokens.roll(-1).masked_fill(torch.arange(length) == length - 1, IGNORE_INDEX),
        positions=torch.arange(length)[None] % size,
        document_ids=torch.arange(length)[None] // size,
        boundaries=torch.arange(0, length + 1, size, dtype=torch.int32)[None],
        num_tokens=length,
        num_pairs=documents * size * (size + 1) / 2,
        num_computed_pairs=documents * size * (size + 1) / 2,
    )


# ---- ranks, and documents in a sequence


METHODS: tuple[tuple[ShardLayout, str], ...] = (
    ("headtail", "ring"),
    ("balanced", "allgather"),
    ("doc_headtail", "ring"),
    ("headtail", "halo"),
)
"""Layouts, and how a rank gets keys; a halo for a window of 4096."""


def plan(
    boundaries_1D: torch.Tensor, layout: ShardLayout, method: str, ranks: int
) -> RankAttentionPlan:
    """What a rank computes on the host for the varlen calls of a sequence."""
    scores = Scores(window=4096 if method == "halo" else None)
    found = RankAttentionPlan(BatchLayout(layout, ranks, boundaries_1D), ranks // 2, scores=scores)
    blocks = [found.local_blocks]
    if method == "ring":
        blocks += found.ring_step_blocks
    elif method == "allgather":
        found.remote_kv_index(CPU)
        blocks.append(found.remote_blocks)
    else:
        found.halo_index(CPU)
        blocks.append(found.halo_blocks)
    for each in blocks:
        kernels.prepare(each, "flash")
    return found


def drawn_boundaries(tokens: int, documents: int) -> torch.Tensor:
    starts = random.Random(0).sample(range(1, tokens), documents - 1)
    return torch.tensor([[0, *sorted(starts), tokens]], dtype=torch.int32)


def plan_table(cases: list[tuple[int, int, int]], rounds: int) -> Iterator[str]:
    """(tokens, documents, ranks)."""
    names = [f"{layout}, {method}" for layout, method in METHODS]
    yield f"| tokens | documents | cp | one rank, ms | {' | '.join(f'{name}, ms' for name in names)} |"
    yield "|" + "---|" * (4 + len(names))
    for tokens, documents, ranks in cases:
        boundaries_1D = drawn_boundaries(tokens, documents)
        alone = least_seconds(lambda b=boundaries_1D: plan(b, "contiguous", "ring", 1), rounds)  # type: ignore[misc]
        cells = [f"{1000 * alone:.1f}"]
        for layout, method in METHODS:
            seconds = least_seconds(
                lambda b=boundaries_1D, k=layout, m=method, r=ranks: plan(b, k, m, r),  # type: ignore[misc]
                rounds,
            )
            cells.append(f"{1000 * seconds:.1f}")
        yield f"| {tokens:,} | {documents:,} | {ranks} | {' | '.join(cells)} |"


# ---- documents in a corpus


def corpus_table(counts: list[int], rounds: int) -> Iterator[str]:
    yield "| documents | tokens | packing, s | us per document |\n|---|---|---|---|"
    for count in counts:
        lengths = log_normal(count, 735, 1.6)
        pack = partial(pack_documents, lengths, seq_len=1 << 17, packing="best_fit")
        seconds = least_seconds(pack, rounds)
        yield f"| {count:,} | {int(lengths.sum()):,} | {seconds:.2f} | {seconds / count * 1e6:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    thousand = 1 << 10
    lengths = [1 << power for power in range(10, 17)]
    rounds = 3
    cases = [(128 * thousand, 100, ranks) for ranks in (1, 2, 4, 8)]
    cases += [(128 * thousand, documents, 8) for documents in (1, 10, 1000, 10_000)] + [
        (1 << 20, 100_000, 8)
    ]
    counts = [10_000, 100_000, 1_000_000]
    if options.toy:
        lengths = [256, 512]
        cases = [(512, 4, 2)]
        counts = [100]
        rounds = 1
    tables = (
        ("growth of sequences", sequence_table(lengths, rounds)),
        ("growth of documents", plan_table(cases, rounds)),
        ("growth of corpora", corpus_table(counts, rounds)),
    )
    for name, lines in tables:
        table = [*lines]
        sys.stdout.write("\n".join((f"{name}:", *table, "")) + "\n")
        if options.write:
            PAGE.write_text(replace_block(PAGE.read_text(), name, table))


if __name__ == "__main__":
    main()
