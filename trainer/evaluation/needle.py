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

from models.batch import IGNORE, Batch
from parallelisms.collectives import sum_over
from trainer.build import Placed
from trainer.config.job_config import CORPUS, Config
from trainer.data import DataError, load_tokenizer, source_of
from trainer.data.packing import held_out
from trainer.data.prepare import prepare
from trainer.data.sequences import Rows
from trainer.data.shuffle import mix
from trainer.data.token_dataset import Prepared
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.evaluation import report
from trainer.evaluation.validation import shared_out
from trainer.export.checkpoint_cli import Asked, Found, command, find_to_judge, integers, opened, take
from trainer.hardware.device import Numbers

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
class Cell:
    """What all trials at a length and a depth gave."""

    length: int
    depth: float
    """Part of the text that stands before the number: 0 to 1."""
    found: float
    """Part of the trials in which every token of the number was the most likely one."""
    log_probability: float
    """Mean over the number's tokens, in nats; 0 is certainty."""


class Haystacks:
    """Rows of one length: `depths` places of the number, `trials` of each. See `RowSource`."""

    max_pieces = 1
    num_padding = 0

    def __init__(
        self, words: Words, prepared: Prepared, documents: list[int], *, length: int, depths: int, trials: int
    ) -> None:
        self.num_rows, self.padding, self.fingerprint = depths * trials, prepared.eos, prepared.fingerprint
        self.depths, self._words, self._length = depths, words, length
        self._prepared, self._documents = prepared, documents

    def depth(self, number: int) -> float:
        return (number % self.depths) / max(1, self.depths - 1)

    def pieces(self, number: int) -> list[int]:
        del number
        return [self._length]

    def fill(self, number: int, piece: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        del piece
        row_T, targets = self.row(number)
        end = start + tokens.numel()
        tokens.copy_(row_T[start:end])
        labels_T = torch.full_like(row_T, IGNORE)
        labels_T[-targets - 1 : -1] = row_T[-targets:]
        labels[: end - start] = labels_T[start:end]

    def row(self, number: int) -> tuple[Tensor, int]:
        """[T] int64, and how many of them, the last ones, are the hidden number's."""
        trial = number // self.depths
        marker, needle, number_tokens = self._words.hidden(trial)
        text = self._text(self._length - len(needle) - len(marker) - len(number_tokens), trial)
        at = round(self.depth(number) * text.numel())
        parts = (text[:at], needle, text[at:], marker, number_tokens)
        return torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in parts]), len(number_tokens)

    def _text(self, tokens: int, trial: int) -> Tensor:
        """So many tokens of documents that follow each other, from another one on in every trial."""
        at, found, missing = mix(trial) % len(self._documents), list[Tensor](), tokens
        while missing:
            first, last = self._prepared.starts[self._documents[at] : self._documents[at] + 2].tolist()
            found.append(self._prepared.read(first, min(last, first + missing)))
            missing -= found[-1].numel()
            at = (at + 1) % len(self._documents)
        return torch.cat(found)


class Words:
    """The sentences, as tokens. Each part is encoded alone, so that the number has the same ones at both places."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marker = self._encode(MARKER)
        self._end = self._encode(".\n")

    def hidden(self, trial: int) -> tuple[list[int], list[int], list[int]]:
        """(the question, the sentence that is hidden, the number)"""
        number = self._encode(str(random.Random(trial).randint(10 ** (DIGITS - 1), 10**DIGITS - 1)))
        return self._marker, [*self._marker, *number, *self._end], number

    def longest(self, trials: int) -> int:
        """Tokens that are no text, in the trial that has most."""
        return max(sum(map(len, self.hidden(trial))) for trial in range(trials))

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]


def haystacks(config: Config, lengths: Sequence[int], *, depths: int, trials: int) -> list[Haystacks]:
    """Of the run's corpus, of what it holds out if it does. Raises `ConfigError` or `DataError`."""
    if config.is_made_up:
        raise ConfigError([f'data.corpus = "{config.data.corpus}" has no text to hide a number in; give --data.corpus'])
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocabulary(tokenizer.vocab_size)
    words = Words(tokenizer)
    if short := [length for length in lengths if length <= words.longest(trials)]:
        raise ConfigError(
            [f"--lengths {short[0]} leaves no text beside the {words.longest(trials)} tokens of the marker"]
        )
    names = [item.source for item in config.data.drawn]
    prepared = prepare(source_of(config.data, CORPUS if CORPUS in names else names[0]), tokenizer)
    documents = [*range(prepared.num_documents)]
    if config.data.holdout:
        held = held_out(prepared.num_documents, config.data.holdout)
        documents = [number for number in documents if held[number]]
    return [Haystacks(words, prepared, documents, length=each, depths=depths, trials=trials) for each in lengths]


def search(source: Haystacks, placed: Placed, *, length: int) -> list[Cell]:
    """The cells of a length, by depth. Collective."""
    rows = Rows([source], seq_len=length)
    sums = torch.zeros(source.num_rows, 3, dtype=torch.float64, device=placed.device)
    at: list[int] = []

    def batches() -> Iterator[Batch]:
        for numbers in shared_out(source.num_rows, placed, size=1):
            at[:] = [source.num_rows - 1 if number is None else number for number in numbers]
            yield rows.read(numbers, placed.share)

    def record(losses_BS: Tensor, hits_BS: Tensor, batch: Batch) -> None:
        targets_BS = batch.labels != IGNORE  # None in a row of padding, whose number is anybody's.
        each = torch.stack([x_BS.double().sum(-1) for x_BS in (losses_BS, hits_BS, targets_BS)], dim=-1)
        sums.index_add_(0, torch.tensor(at, device=placed.device), each)

    placed.judge(batches(), record)
    flat = Numbers(sum_over(placed.mesh.numbers, sums).flatten()).read()
    cells = []
    for place in range(source.depths):
        trials = [flat[3 * number : 3 * number + 3] for number in range(place, source.num_rows, source.depths)]
        loss, _, targets = map(sum, zip(*trials, strict=True))
        found = sum(hits == count for _, hits, count in trials) / len(trials)
        cells.append(Cell(length, source.depth(place), found, -loss / targets))
    return cells


def run(words: Sequence[str]) -> None:
    asked = take(words, OPTIONS)
    found = find_to_judge(asked)
    whole = found.config.training.seq_len
    lengths = sorted(set(integers(asked, "--lengths", (whole // 4, whole), least=2)))
    (depths,), (trials,) = (one(asked, option, default) for option, default in (("--depths", 5), ("--trials", 2)))
    sources = haystacks(found.config, lengths, depths=depths, trials=trials)
    with opened(found) as (placed, world):
        cells = [
            cell for source, each in zip(sources, lengths, strict=True) for cell in search(source, placed, length=each)
        ]
        if world.rank == 0:
            write(found, cells, asked.options.get("--output"))


def one(asked: Asked, option: str, default: int) -> list[int]:
    values = integers(asked, option, (default,), least=1)
    if len(values) > 1:
        raise ConfigError([f"command line: {option} {asked.options[option]} must be one integer"])
    return values


def write(found: Found, cells: Sequence[Cell], output: str | None) -> None:
    """The table, the JSON file, the picture and TensorBoard's. Raises `DataError` where nothing can be written."""
    folder = Path(output) if output else found.folder.path / "evaluation"
    board = folder / "tensorboard" if output else found.folder.tensorboard / "evaluation"
    name = f"needle-step-{found.step}"
    content = {"checkpoint": str(found.checkpoint), "step": found.step, "cells": [asdict(cell) for cell in cells]}
    grid = report.Grid(
        title=f"number found, {found.checkpoint}",
        columns=[f"{length:,}" for length in dict.fromkeys(cell.length for cell in cells)],
        rows=[f"{depth:.0%}" for depth in dict.fromkeys(cell.depth for cell in cells)],
        values={(f"{cell.depth:.0%}", f"{cell.length:,}"): (cell.found, cell.log_probability) for cell in cells},
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        picture = report.picture(grid, folder / f"{name}.png")
        report.tensorboard(grid, "needle", board, step=found.step, picture=picture)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    report.show(grid)
    sys.stdout.write(f"{folder / name}.json\n")


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], USAGE, run))
