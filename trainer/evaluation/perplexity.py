"""`python -m trainer.evaluation.perplexity`: loss, perplexity and bits per byte of a checkpoint, by position and context.

On the run's validation sets; of a run without any, on the corpus of `[data]`, packed as for training and at the ends of
its long documents.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.batch import IGNORE
from trainer.config.job_config import Config
from trainer.config.validation import ValidationSection, ValidationSetSection
from trainer.data import DataError, held_out_of, load_tokenizer
from trainer.data.holdout import HeldOut
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.evaluation import report
from trainer.evaluation.validation import Result, see
from trainer.export.checkpoint_cli import command, find_to_judge, opened, take
from trainer.metrics.loggers import or_dash

log = logging.getLogger(__name__)

USAGE = """\
python -m trainer.evaluation.perplexity CHECKPOINT [--json FILE] [--section.key VALUE]... [--help]

Loss, perplexity, accuracy and bits per byte of the run's validation sets, by position and by context.

  CHECKPOINT      a run folder (its newest checkpoint), or one of its checkpoints/step-N
  --json FILE     where the numbers are written, too
  --section.key   as for training, for example --data.corpus PATH; the mesh is what is given here

Leaves with 0, or 2 for wrong arguments, 78 for data or a checkpoint that cannot be used, 1 for the rest.
"""


def sets_of(config: Config, whole: Config) -> list[HeldOut]:
    """The run's sets, or two of its corpus. Raises `ConfigError` or `DataError`."""
    if whole.validation.sets:
        return held_out_of(whole)
    if config.is_made_up:
        raise ConfigError([f'data.corpus = "{config.data.corpus}" has no text to judge by; give --data.corpus'])
    length, source = config.training.seq_len, config.data.drawn[0].source
    context = [length >> power for power in (4, 3, 2, 1, 0) if length >> power > 1]
    found = []
    for name, lengths in ("packed", (length,)), ("context", tuple(context)):
        section = ValidationSection(sets={name: ValidationSetSection(source=source, seq_len=lengths)})
        try:
            found += held_out_of(whole.model_copy(update={"validation": section}))
        except DataError as error:
            if name == "packed":
                raise
            log.warning("no curve of context: %s", error)
    return found


def num_bytes(held: HeldOut, tokenizer: Tokenizer) -> int:
    """Bytes of the text that a set's targets stand for; a character that a row's end cuts counts by what is there."""
    rows, total = held.rows[-1], 0
    special = {tokenizer.bos, tokenizer.eos, *tokenizer.specials.values()}
    for number in range(held.num_rows):
        batch = rows.read([number])
        for document in batch.documents[0].unique():
            labels = batch.labels[0][(batch.documents[0] == document) & (batch.labels[0] != IGNORE)]
            total += len(tokenizer.decode([token for token in map(int, labels) if token not in special]).encode())
    return total


def described(result: Result, size: int) -> dict[str, Any]:
    """A set's numbers as validation writes them, with perplexity and bits per byte."""
    seen = result.longest
    event = {key: value for key, value in result.event(None).items() if key != "regression"}
    bits = seen.loss * seen.targets / math.log(2) / size if size else None
    return event | {"perplexity": math.exp(min(seen.loss, 700)), "bytes": size, "bits_per_byte": bits}


def tell(checkpoint: Path, each: Sequence[Mapping[str, Any]]) -> None:
    keys = ("loss", "perplexity", "bits_per_byte", "accuracy", "gain")
    rows = [[one["set"], f"{one['targets']:,}", *(or_dash(one[key], ".4f") for key in keys)] for one in each]
    report.table(str(checkpoint), ["set", "targets", *(key.replace("_", " ") for key in keys)], rows)
    for title, key in ("loss by position", "by_position"), ("loss by length of context", "by_context"):
        for one in each:
            curve = {name: loss for name, loss in (one[key] or {}).items() if loss is not None}
            if curve:
                report.table(f"{title}: {one['set']}", [*curve], [[f"{loss:.4f}" for loss in curve.values()]])


def run(words: Sequence[str]) -> None:
    asked = take(words, ("--json",))
    found = find_to_judge(asked)
    config = found.config
    sets = sets_of(config, found.whole)
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    most = config.training.micro_batch_size * config.training.seq_len
    with opened(found) as (placed, world):
        results = [Result(each.name, found.step, see(each, placed, most=most)) for each in sets]
        if world.rank != 0:
            return
        told = [described(result, num_bytes(held, tokenizer)) for result, held in zip(results, sets, strict=True)]
        tell(found.checkpoint, told)
        if path := asked.options.get("--json"):
            content = {"checkpoint": str(found.checkpoint), "step": found.step, "sets": told}
            try:
                Path(path).write_text(json.dumps(content, indent=1) + "\n")
            except OSError as error:
                raise DataError(f"--json {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], USAGE, run))
