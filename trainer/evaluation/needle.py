"""`python -m trainer.evaluation.needle`: whether a model finds a number that it has read far back (a passkey test).

    text ... "The secret number is 40718." ... text ... "The secret number is" 40718
             at a depth of the text                                           targets, fed as they are

Nothing is generated: the number's tokens are targets, and found if each is the most likely one where it stands. So a
cell of depth x length is one forward pass, on any mesh. After Mohtashami & Jaggi, 2023 (passkey) and Kamradt, 2023.

Shape suffixes: B rows, S tokens on this rank, T tokens of a row.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from parallelisms.collectives import all_reduce
from trainer.build import ParallelModel
from trainer.config import checks
from trainer.config.job_config import DEFAULT_SOURCE, Config
from trainer.data.packing import holdout_mask
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.shuffle import splitmix64
from trainer.data.source import corpus_spec
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.evaluation import report
from trainer.evaluation.validation import assign_sequences
from trainer.export.checkpoint_cli import (
    CheckpointArgs,
    ResolvedCheckpoint,
    load_parallel_model,
    parse_args,
    parse_int_list,
    resolve_for_evaluation,
    run_command,
)
from trainer.hardware.device import AsyncHostCopy

USAGE = """\
python -m trainer.evaluation.needle CHECKPOINT [--lengths 1024,4096] [--depths 5] [--trials 2]
                                    [--output FOLDER] [--section.key VALUE]... [--help]

Hides a five-digit number in the run's corpus and asks for it at the end, at several depths and lengths.

  CHECKPOINT        a run folder (its newest checkpoint), or one of its checkpoints/step-N
  --lengths N,...   tokens of a row; default: a quarter of training.seq_len, and that
  --depths N        places of the number, from the beginning to the end of the text; default: 5
  --trials N        numbers and texts for each place and length; default: 2
  --output FOLDER   for needle-step-N.json and .png; default: evaluation/ in the run folder
  --section.key     as for training; the mesh is what is given here, not what the run had

Leaves with 0, or 2 for wrong arguments, 78 for data or a checkpoint that cannot be used, 1 for the rest.
"""
OPTIONS = ("--lengths", "--depths", "--trials", "--output")
MARKER = "\nThe secret number is: "
DIGITS = 5


@dataclass(frozen=True)
class NeedleCell:
    """What all trials at a length and a depth gave."""

    length: int
    depth: float
    """Part of the text that stands before the number: 0 to 1."""
    found: float
    """Part of the trials in which every token of the number was the most likely one."""
    log_probability: float
    """Mean over the number's tokens, in nats; 0 is certainty."""


class NeedleDataset:
    """Rows of one length: `depths` places of the number, `trials` of each. See `RowSource`."""

    max_segments = 1
    num_padding_tokens = 0

    def __init__(
        self,
        sentences: PasskeySentences,
        prepared: TokenDataset,
        documents: list[int],
        *,
        length: int,
        depths: int,
        trials: int,
    ) -> None:
        self.num_sequences, self.pad_token_id, self.fingerprint = depths * trials, prepared.eos, prepared.fingerprint
        self.depths, self._sentences, self._length = depths, sentences, length
        self._prepared, self._documents = prepared, documents

    def depth(self, number: int) -> float:
        return (number % self.depths) / max(1, self.depths - 1)

    def segment_lengths(self, index: int) -> list[int]:
        del index
        return [self._length]

    def fill(self, index: int, segment: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        del segment
        sequence_T, num_targets = self.sequence(index)
        end = start + tokens.numel()
        tokens.copy_(sequence_T[start:end])
        labels_T = torch.full_like(sequence_T, IGNORE_INDEX)
        labels_T[-num_targets - 1 : -1] = sequence_T[-num_targets:]
        labels[: end - start] = labels_T[start:end]

    def sequence(self, number: int) -> tuple[Tensor, int]:
        """[T] int64, and how many of them, the last ones, are the hidden number's."""
        trial = number // self.depths
        marker, needle, number_tokens = self._sentences.passkey(trial)
        text = self._filler_text(self._length - len(needle) - len(marker) - len(number_tokens), trial)
        position = round(self.depth(number) * text.numel())
        parts = (text[:position], needle, text[position:], marker, number_tokens)
        return torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in parts]), len(number_tokens)

    def _filler_text(self, num_tokens: int, trial: int) -> Tensor:
        """So many tokens of documents that follow each other, from another one on in every trial."""
        document, chunks, remaining = splitmix64(trial) % len(self._documents), list[Tensor](), num_tokens
        while remaining:
            start, end = self._prepared.document_starts[
                self._documents[document] : self._documents[document] + 2
            ].tolist()
            chunks.append(self._prepared.read(start, min(end, start + remaining)))
            remaining -= chunks[-1].numel()
            document = (document + 1) % len(self._documents)
        return torch.cat(chunks)


class PasskeySentences:
    """The sentences, as tokens. Each part is encoded alone, so that the number has the same ones at both places."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marker = self._encode(MARKER)
        self._end = self._encode(".\n")

    def passkey(self, trial: int) -> tuple[list[int], list[int], list[int]]:
        """(the question, the sentence that is hidden, the number)"""
        number = self._encode(str(random.Random(trial).randint(10 ** (DIGITS - 1), 10**DIGITS - 1)))
        return self._marker, [*self._marker, *number, *self._end], number

    def max_overhead(self, trials: int) -> int:
        """Tokens that are no text, in the trial that has most."""
        return max(sum(map(len, self.passkey(trial))) for trial in range(trials))

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]


def build_datasets(config: Config, lengths: Sequence[int], *, depths: int, trials: int) -> list[NeedleDataset]:
    """Of the run's corpus, of what it holds out if it does. Raises `ConfigError` or `DataError`."""
    if config.is_synthetic:
        raise ConfigError([f'data.corpus = "{config.data.corpus}" has no text to hide a number in; give --data.corpus'])
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    checks.require_vocab_size(config, tokenizer.vocab_size)
    sentences = PasskeySentences(tokenizer)
    if too_short := [length for length in lengths if length <= sentences.max_overhead(trials)]:
        raise ConfigError(
            [
                f"--lengths {too_short[0]} leaves no text beside the {sentences.max_overhead(trials)} tokens of the marker"
            ]
        )
    source_names = [item.source for item in config.data.effective_mix]
    prepared = prepare(
        corpus_spec(config.data, DEFAULT_SOURCE if DEFAULT_SOURCE in source_names else source_names[0]), tokenizer
    )
    documents = [*range(prepared.num_documents)]
    if config.data.holdout:
        is_held_out = holdout_mask(prepared.num_documents, config.data.holdout)
        documents = [number for number in documents if is_held_out[number]]
    return [
        NeedleDataset(sentences, prepared, documents, length=length, depths=depths, trials=trials) for length in lengths
    ]


def evaluate_length(dataset: NeedleDataset, parallel_model: ParallelModel, *, length: int) -> list[NeedleCell]:
    """The cells of a length, by depth. Collective."""
    sequences = BlendedDataset([dataset], seq_len=length)
    sums = torch.zeros(dataset.num_sequences, 3, dtype=torch.float64, device=parallel_model.device)
    batch_numbers: list[int] = []

    def batches() -> Iterator[Batch]:
        for numbers in assign_sequences(dataset.num_sequences, parallel_model, batch_size=1):
            batch_numbers[:] = [dataset.num_sequences - 1 if number is None else number for number in numbers]
            yield sequences.read(numbers, parallel_model.sequence_shard)

    def record(losses_BS: Tensor, hits_BS: Tensor, batch: Batch) -> None:
        targets_BS = batch.labels != IGNORE_INDEX  # None in a row of padding, whose number is anybody's.
        counts = torch.stack([x_BS.double().sum(-1) for x_BS in (losses_BS, hits_BS, targets_BS)], dim=-1)
        sums.index_add_(0, torch.tensor(batch_numbers, device=parallel_model.device), counts)

    parallel_model.evaluate(batches(), record)
    totals = AsyncHostCopy(all_reduce(parallel_model.mesh.loss_group, sums).flatten()).read()
    cells = []
    for depth_index in range(dataset.depths):
        trials = [
            totals[3 * number : 3 * number + 3] for number in range(depth_index, dataset.num_sequences, dataset.depths)
        ]
        loss, _, targets = map(sum, zip(*trials, strict=True))
        found = sum(hits == count for _, hits, count in trials) / len(trials)
        cells.append(NeedleCell(length, dataset.depth(depth_index), found, -loss / targets))
    return cells


def run(argv: Sequence[str]) -> None:
    args = parse_args(argv, OPTIONS)
    resolved = resolve_for_evaluation(args)
    seq_len = resolved.config.training.seq_len
    lengths = sorted(set(parse_int_list(args, "--lengths", (seq_len // 4, seq_len), minimum=2)))
    (depths,), (trials,) = (
        parse_int_option(args, option, default) for option, default in (("--depths", 5), ("--trials", 2))
    )
    datasets = build_datasets(resolved.config, lengths, depths=depths, trials=trials)
    with load_parallel_model(resolved) as (parallel_model, world):
        cells = [
            cell
            for source, each in zip(datasets, lengths, strict=True)
            for cell in evaluate_length(source, parallel_model, length=each)
        ]
        if world.rank == 0:
            write_results(resolved, cells, args.options.get("--output"))


def parse_int_option(args: CheckpointArgs, option: str, default: int) -> list[int]:
    values = parse_int_list(args, option, (default,), minimum=1)
    if len(values) > 1:
        raise ConfigError([f"command line: {option} {args.options[option]} must be one integer"])
    return values


def write_results(resolved: ResolvedCheckpoint, cells: Sequence[NeedleCell], output: str | None) -> None:
    """The table, the JSON file, the picture and TensorBoard's. Raises `DataError` where nothing can be written."""
    folder = Path(output) if output else resolved.run_dir.path / "evaluation"
    tensorboard_dir = folder / "tensorboard" if output else resolved.run_dir.tensorboard_dir / "evaluation"
    name = f"needle-step-{resolved.step}"
    content = {"checkpoint": str(resolved.checkpoint), "step": resolved.step, "cells": [asdict(cell) for cell in cells]}
    grid = report.ScoreGrid(
        title=f"number found, {resolved.checkpoint}",
        columns=[f"{length:,}" for length in dict.fromkeys(cell.length for cell in cells)],
        rows=[f"{depth:.0%}" for depth in dict.fromkeys(cell.depth for cell in cells)],
        values={(f"{cell.depth:.0%}", f"{cell.length:,}"): (cell.found, cell.log_probability) for cell in cells},
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        picture = report.draw_grid(grid, folder / f"{name}.png")
        report.write_tensorboard(grid, "needle", tensorboard_dir, step=resolved.step, image=picture)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    report.print_grid(grid)
    sys.stdout.write(f"{folder / name}.json\n")


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], USAGE, run))
