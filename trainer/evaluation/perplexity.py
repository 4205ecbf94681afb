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

from models.batch import IGNORE_INDEX
from trainer.config.job_config import Config
from trainer.config.validation import ValidationSection, ValidationSetSection
from trainer.data.datasets import build_validation_sets
from trainer.data.holdout import ValidationSet
from trainer.data.prepare import prepare_datasets
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.evaluation import report
from trainer.evaluation.validation import ValidationResult, evaluate_set
from trainer.export.checkpoint_cli import load_parallel_model, parse_args, resolve_for_evaluation, run_command
from trainer.metrics.loggers import format_or_dash

log = logging.getLogger(__name__)

USAGE = """\
python -m trainer.evaluation.perplexity CHECKPOINT [--json FILE] [--section.key VALUE]... [--help]

Loss, perplexity, accuracy and bits per byte of the run's validation sets, by position and by context.

  CHECKPOINT      a run folder (its newest checkpoint), or one of its checkpoints/step-N
  --json FILE     where the numbers are written, too
  --section.key   as for training, for example --data.corpus PATH; the mesh is what is given here

Leaves with 0, or 2 for wrong arguments, 78 for data or a checkpoint that cannot be used, 1 for the rest.
"""


def evaluation_sets(config: Config, run_config: Config) -> list[ValidationSet]:
    """The run's sets, or two of its corpus. Raises `ConfigError` or `DataError`."""
    if run_config.validation.sets:
        return build_validation_sets(run_config, prepare_datasets(run_config))
    if config.is_synthetic:
        raise ConfigError([f'data.corpus = "{config.data.corpus}" has no text to judge by; give --data.corpus'])
    length, source = config.training.seq_len, config.data.effective_mix[0].source
    context = [length >> power for power in (4, 3, 2, 1, 0) if length >> power > 1]
    sets = []
    for name, lengths in ("packed", (length,)), ("context", tuple(context)):
        section = ValidationSection(sets={name: ValidationSetSection(source=source, seq_len=lengths)})
        try:
            validating = run_config.model_copy(update={"validation": section})
            sets += build_validation_sets(validating, prepare_datasets(validating))
        except DataError as error:
            if name == "packed":
                raise
            log.warning("no curve of context: %s", error)
    return sets


def count_target_bytes(dataset: ValidationSet, tokenizer: Tokenizer) -> int:
    """Bytes of the text that a set's targets stand for; a character that a row's end cuts counts by what is there."""
    sequences, total = dataset.datasets[-1], 0
    special = {tokenizer.bos, tokenizer.eos, *tokenizer.special_tokens.values()}
    for number in range(dataset.num_sequences):
        batch = sequences.read([number])
        for document in batch.document_ids[0].unique():
            labels = batch.labels[0][(batch.document_ids[0] == document) & (batch.labels[0] != IGNORE_INDEX)]
            total += len(tokenizer.decode([token for token in map(int, labels) if token not in special]).encode())
    return total


def summarize(result: ValidationResult, num_bytes: int) -> dict[str, Any]:
    """A set's numbers as validation writes them, with perplexity and bits per byte."""
    longest = result.longest_context
    event = {key: value for key, value in result.event(None).items() if key != "regression"}
    bits_per_byte = longest.loss * longest.targets / math.log(2) / num_bytes if num_bytes else None
    return event | {"perplexity": math.exp(min(longest.loss, 700)), "bytes": num_bytes, "bits_per_byte": bits_per_byte}


def print_results(checkpoint: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    keys = ("loss", "perplexity", "bits_per_byte", "accuracy", "gain")
    rows = [
        [summary["set"], f"{summary['targets']:,}", *(format_or_dash(summary[key], ".4f") for key in keys)]
        for summary in summaries
    ]
    report.print_table(str(checkpoint), ["set", "targets", *(key.replace("_", " ") for key in keys)], rows)
    for title, key in ("loss by position", "by_position"), ("loss by length of context", "by_context"):
        for one in summaries:
            curve = {name: loss for name, loss in (one[key] or {}).items() if loss is not None}
            if curve:
                report.print_table(f"{title}: {one['set']}", [*curve], [[f"{loss:.4f}" for loss in curve.values()]])


def run(argv: Sequence[str]) -> None:
    args = parse_args(argv, ("--json",))
    resolved = resolve_for_evaluation(args)
    config = resolved.config
    sets = evaluation_sets(config, resolved.run_config)
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    tokens_per_batch = config.training.micro_batch_size * config.training.seq_len
    with load_parallel_model(resolved) as (parallel_model, world):
        results = [
            ValidationResult(each.name, resolved.step, evaluate_set(each, parallel_model, max_tokens=tokens_per_batch))
            for each in sets
        ]
        if world.rank != 0:
            return
        summaries = [
            summarize(result, count_target_bytes(held, tokenizer)) for result, held in zip(results, sets, strict=True)
        ]
        print_results(resolved.checkpoint, summaries)
        if path := args.options.get("--json"):
            content = {"checkpoint": str(resolved.checkpoint), "step": resolved.step, "sets": summaries}
            try:
                Path(path).write_text(json.dumps(content, indent=1) + "\n")
            except OSError as error:
                raise DataError(f"--json {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], USAGE, run))
