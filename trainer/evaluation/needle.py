"""`longhaul evaluate needle`: whether a model retrieves a number from its context (passkey
retrieval).

    text ... "The secret number is: 40718." ... text ... "The secret number is: " 40718
             at some depth of the text                                            targets, teacher-forced

Nothing is generated: a number is found if each of its tokens is the likeliest at its position. So
a cell of depth x length is one forward pass, on any mesh. After Mohtashami & Jaggi, 2023 (passkey)
and Kamradt, 2023.

Shape suffixes: B sequences, S tokens on this rank, T tokens of a sequence.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from models.ranges import concatenated_ranges
from parallelisms.mesh.collectives import all_reduce
from trainer.commands import format_table, print_lines, run_command
from trainer.config import checks
from trainer.config.data import DEFAULT_SOURCE
from trainer.config.job_config import Config
from trainer.config.source import corpus_spec
from trainer.data.packing import holdout_mask
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.shuffle import splitmix64
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import Tokenizer, open_tokenizer
from trainer.data.vocabulary import text_vocab_size
from trainer.errors import ConfigError, DataError
from trainer.evaluation.arguments import needle_parser
from trainer.evaluation.load_checkpoint import (
    ResolvedCheckpoint,
    load_parallel_model,
    resolve_for_evaluation,
)
from trainer.hardware.device import AsyncHostCopy
from trainer.metrics.trackers import EVALUATION
from trainer.run.validation import assign_sequences
from trainer.step.build import ParallelModel

MARKER = "\nThe secret number is: "
DIGITS = 5


@dataclass(frozen=True)
class NeedleCell:
    """Result of all trials at one length and depth."""

    length: int
    depth: float
    """Fraction of the text before the number, 0 to 1."""
    found: float
    """Fraction of the trials in which every token of the number is the likeliest."""
    log_probability: float
    """Mean over the number's tokens, in nats."""


class PasskeySentences:
    """Tokenized sentences.

    Each part is encoded separately, so that the number has the same tokens in both places.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marker, self._end = self._encode(MARKER), self._encode(".\n")

    def passkey(self, trial: int) -> tuple[list[int], list[int], list[int]]:
        """Tokens of (the question, the hidden sentence, the number)."""
        number = self._encode(
            str(random.Random(trial).randint(10 ** (DIGITS - 1), 10**DIGITS - 1))
        )
        return self._marker, [*self._marker, *number, *self._end], number

    def max_overhead(self, trials: int) -> int:
        """Largest number of tokens besides the filler text, over all trials."""
        return max(sum(map(len, self.passkey(trial))) for trial in range(trials))

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]


@dataclass(frozen=True)
class FillerText:
    """The text that hides numbers: these documents of a corpus."""

    prepared: TokenDataset
    documents: Sequence[int]

    def read(self, num_tokens: int, trial: int) -> Tensor:
        """Tokens of consecutive documents, from a start document that depends on the trial."""
        number = splitmix64(trial)
        chunks = list[Tensor]()
        remaining = num_tokens
        while remaining:
            document = self.documents[number % len(self.documents)]
            start, end = self.prepared.document_starts[document : document + 2].tolist()
            chunks.append(self.prepared.read(start, min(end, start + remaining)))
            remaining -= chunks[-1].numel()
            number += 1
        return torch.cat(chunks)


class NeedleDataset:
    """Sequences of one length with a hidden number: `trials` sequences at each of `depths`
    depths.
    """

    max_segments = 1
    num_padding_tokens = 0

    def __init__(
        self,
        text: FillerText,
        sentences: PasskeySentences,
        *,
        length: int,
        depths: int,
        trials: int,
    ) -> None:
        self.num_sequences = depths * trials
        self.pad_token_id = text.prepared.eos
        self.fingerprint = text.prepared.fingerprint
        self.plan_fingerprint = ""
        self.seed = 0
        self.length = length
        self.depths = depths
        self._text = text
        self._sentences = sentences

    def depth(self, number: int) -> float:
        return (number % self.depths) / max(1, self.depths - 1)

    def segment_lengths(self, index: int) -> Tensor:
        del index
        return torch.tensor([self.length])

    def read(self, index: int, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        sequence_T, num_targets = self.sequence(index)
        labels_T = torch.full_like(sequence_T, IGNORE_INDEX)
        # The label of a place is the next token, so the number is predicted from the end of the
        # marker on.
        labels_T[-num_targets - 1 : -1] = sequence_T[-num_targets:]
        places = concatenated_ranges(starts, lengths)
        return sequence_T[places], labels_T[places]

    def sequence(self, number: int) -> tuple[Tensor, int]:
        """(int64 [T], number of tokens at its end that are the hidden number)."""
        trial = number // self.depths
        marker, needle, number_tokens = self._sentences.passkey(trial)
        text = self._text.read(self.length - len(needle) - len(marker) - len(number_tokens), trial)
        position = round(self.depth(number) * text.numel())
        parts = (text[:position], needle, text[position:], marker, number_tokens)
        return torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in parts]), len(
            number_tokens
        )


def build_datasets(
    config: Config, lengths: Sequence[int], *, depths: int, trials: int
) -> list[NeedleDataset]:
    """One dataset per length, from the run's held-out documents if it has any.

    Raises `ConfigError` or `DataError`.
    """
    if config.data.is_synthetic:
        raise ConfigError(
            [
                f'data.corpus = "{config.data.corpus}" has no text to hide a number in; set --data.corpus'
            ]
        )
    tokenizer = open_tokenizer(config.tokenizer)
    checks.require_vocab_size(config, text_vocab_size(tokenizer, config.data.separators))
    sentences = PasskeySentences(tokenizer)
    overhead = sentences.max_overhead(trials)
    if too_short := [length for length in lengths if length <= overhead]:
        raise ConfigError(
            [f"--lengths {too_short[0]} must exceed the {overhead} tokens of question and number"]
        )
    source_names = [item.source for item in config.data.effective_mix]
    source = DEFAULT_SOURCE if DEFAULT_SOURCE in source_names else source_names[0]
    prepared = prepare(corpus_spec(config.data, source), tokenizer)
    documents: Sequence[int] = range(prepared.num_documents)
    if config.data.holdout:
        documents = [
            *compress(documents, holdout_mask(prepared.num_documents, config.data.holdout))
        ]
    text = FillerText(prepared, documents)
    return [
        NeedleDataset(text, sentences, length=length, depths=depths, trials=trials)
        for length in lengths
    ]


def evaluate_length(dataset: NeedleDataset, parallel_model: ParallelModel) -> list[NeedleCell]:
    """The cells of one length, by depth. Collective."""
    sequences = BlendedDataset([dataset], seq_len=dataset.length)
    sums = torch.zeros(dataset.num_sequences, 3, dtype=torch.float64, device=parallel_model.device)
    batch_numbers: list[int] = []

    def batches() -> Iterator[Batch]:
        for numbers in assign_sequences(dataset.num_sequences, parallel_model, batch_size=1):
            # `record` reads them for the batch that was yielded last: batches are run one by one.
            batch_numbers[:] = [
                dataset.num_sequences - 1 if number is None else number for number in numbers
            ]
            yield sequences.read(numbers, parallel_model.sequence_shard)

    def record(losses_BS: Tensor, hits_BS: Tensor, batch: Batch) -> None:
        # A padding sequence has no targets and adds zeros to any index.
        targets_BS = batch.labels != IGNORE_INDEX
        counts = torch.stack(
            [x_BS.double().sum(-1) for x_BS in (losses_BS, hits_BS, targets_BS)], dim=-1
        )
        sums.index_add_(0, torch.tensor(batch_numbers, device=parallel_model.device), counts)

    parallel_model.evaluate(batches(), record)
    totals = AsyncHostCopy(all_reduce(parallel_model.mesh.metrics_group, sums).flatten()).read()
    cells = []
    for index in range(dataset.depths):
        trials = [
            totals[3 * number : 3 * number + 3]
            for number in range(index, dataset.num_sequences, dataset.depths)
        ]
        loss, _, targets = map(sum, zip(*trials, strict=True))
        found = fmean(hits == count for _, hits, count in trials)
        cells.append(NeedleCell(dataset.length, dataset.depth(index), found, -loss / targets))
    return cells


def run(options: Namespace, overrides: Sequence[str]) -> None:
    resolved = resolve_for_evaluation(options.checkpoint, overrides)
    seq_len = resolved.config.training.seq_len
    lengths = options.lengths or sorted({seq_len // 4, seq_len})
    datasets = build_datasets(
        resolved.config, lengths, depths=options.depths, trials=options.trials
    )
    with load_parallel_model(resolved) as (parallel_model, world):
        cells = [cell for dataset in datasets for cell in evaluate_length(dataset, parallel_model)]
        if world.rank == 0:
            write_results(resolved, cells, options.output)


def write_results(
    resolved: ResolvedCheckpoint, cells: Sequence[NeedleCell], output: Path | None
) -> None:
    """Prints a table and writes JSON and TensorBoard files.

    Raises `DataError` if one cannot be written.
    """
    folder = output or resolved.run_dir.path / "evaluation"
    tensorboard_dir = (
        folder / "tensorboard" if output else resolved.run_dir.tensorboard_dir / EVALUATION
    )
    file = folder / f"needle-step-{resolved.step}.json"
    content = {
        "checkpoint": str(resolved.checkpoint),
        "step": resolved.step,
        "cells": [asdict(cell) for cell in cells],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")
        write_tensorboard(cells, tensorboard_dir, resolved.step)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    by_depth = groupby(sorted(cells, key=lambda cell: cell.depth), key=lambda cell: cell.depth)
    rows = [
        [f"{depth:.0%}", *(f"{cell.found:.0%} ({cell.log_probability:.2f})" for cell in row)]
        for depth, row in by_depth
    ]
    header = ["depth", *(f"{length:,}" for length in dict.fromkeys(cell.length for cell in cells))]
    print_lines(f"number found, {resolved.checkpoint}: trials found (mean log-probability)")
    print_lines(*format_table(header, *rows), str(file))


def write_tensorboard(cells: Sequence[NeedleCell], folder: Path, step: int) -> None:
    """Writes the means of each length over depths."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))
    for length, group in groupby(cells, key=lambda cell: cell.length):
        column = [*group]
        writer.add_scalar(f"needle/{length}", fmean(cell.found for cell in column), step)
        writer.add_scalar(
            f"needle_log_probability/{length}",
            fmean(cell.log_probability for cell in column),
            step,
        )
    writer.close()


def main(argv: Sequence[str]) -> int:
    return run_command(argv, needle_parser())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
