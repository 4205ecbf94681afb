"""`longhaul evaluate perplexity`: loss, perplexity and bits per byte of a checkpoint.

Evaluates the run's validation sets. A run without any gets two sets from the corpus of `[data]`:
sequences packed as for training, and the ends of long documents with growing context.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.batch import IGNORE_INDEX
from trainer.commands import format_table, print_lines, run_command
from trainer.config.data import ValidationSection, ValidationSetSection
from trainer.config.job_config import Config
from trainer.data.datasets import build_validation_sets
from trainer.data.holdout import ValidationSet
from trainer.data.prepare import prepare_datasets
from trainer.data.tokenizer import Tokenizer, open_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.evaluation.arguments import perplexity_parser
from trainer.evaluation.load_checkpoint import (
    load_parallel_model,
    resolve_for_evaluation,
)
from trainer.metrics.loggers import format_or_dash
from trainer.run.validation import ValidationResult, evaluate_set

log = logging.getLogger(__name__)


def evaluation_sets(config: Config, run_config: Config) -> list[ValidationSet]:
    """The run's validation sets, or two sets from its corpus.

    Raises `ConfigError` or `DataError`.
    """
    if run_config.validation.sets:
        return build_validation_sets(run_config, prepare_datasets(run_config))
    if config.data.is_synthetic:
        raise ConfigError(
            [f'data.corpus = "{config.data.corpus}" has no text to evaluate; set --data.corpus']
        )
    length = config.training.seq_len
    source = config.data.effective_mix[0].source
    context = [length >> power for power in (4, 3, 2, 1, 0) if length >> power > 1]
    sets = []
    for name, lengths in ("packed", (length,)), ("context", tuple(context)):
        section = ValidationSection(
            sets={name: ValidationSetSection(source=source, seq_len=lengths)}
        )
        try:
            validating = run_config.model_copy(update={"validation": section})
            sets += build_validation_sets(validating, prepare_datasets(validating))
        except DataError as error:
            if name == "packed":
                raise
            log.warning("no loss by context: %s", error)
    return sets


def count_target_bytes(dataset: ValidationSet, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of a set's targets, without special tokens."""
    sequences = dataset.datasets[-1]
    total = 0
    special = {tokenizer.bos, tokenizer.eos, *tokenizer.special_tokens.values()}
    for number in range(dataset.num_sequences):
        batch = sequences.read([number])
        # Decoded by document: a character may take several tokens, but never of two documents.
        for document in batch.document_ids[0].unique():
            labels = batch.labels[0][
                (batch.document_ids[0] == document) & (batch.labels[0] != IGNORE_INDEX)
            ]
            total += len(
                tokenizer.decode(
                    [token for token in map(int, labels) if token not in special]
                ).encode()
            )
    return total


def summarize(result: ValidationResult, num_bytes: int) -> dict[str, Any]:
    """The validation event of a set, with perplexity and bits per byte."""
    longest = result.longest_context
    event = {key: value for key, value in result.event(None).items() if key != "regression"}
    # Nats per target times targets are the nats of the text; ln 2 nats are a bit.
    bits_per_byte = longest.loss * longest.targets / math.log(2) / num_bytes if num_bytes else None
    return event | {
        # exp of more than 709 overflows float64.
        "perplexity": math.exp(min(longest.loss, 700)),
        "bytes": num_bytes,
        "bits_per_byte": bits_per_byte,
    }


def print_results(checkpoint: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    keys = ("loss", "perplexity", "bits_per_byte", "accuracy", "gain")
    rows = [
        [
            summary["set"],
            f"{summary['targets']:,}",
            *(format_or_dash(summary[key], ".4f") for key in keys),
        ]
        for summary in summaries
    ]
    header = ["set", "targets", *(key.replace("_", " ") for key in keys)]
    print_lines(str(checkpoint), *format_table(header, *rows))
    for title, key in (
        ("loss by position", "by_position"),
        ("loss by context length", "by_context"),
    ):
        for summary in summaries:
            curve = {name: loss for name, loss in (summary[key] or {}).items() if loss is not None}
            if curve:
                print_lines("", f"{title}: {summary['set']}")
                print_lines(*format_table([*curve], [f"{loss:.4f}" for loss in curve.values()]))


def run(options: Namespace, overrides: Sequence[str]) -> None:
    resolved = resolve_for_evaluation(options.checkpoint, overrides)
    config = resolved.config
    sets = evaluation_sets(config, resolved.run_config)
    tokenizer = open_tokenizer(config.tokenizer)
    tokens_per_batch = config.training.micro_batch_size * config.training.seq_len
    with load_parallel_model(resolved) as (parallel_model, world):
        results = [
            evaluate_set(each, parallel_model, step=resolved.step, max_tokens=tokens_per_batch)
            for each in sets
        ]
        if world.rank != 0:
            return
        summaries = [
            summarize(result, count_target_bytes(validation_set, tokenizer))
            for result, validation_set in zip(results, sets, strict=True)
        ]
        print_results(resolved.checkpoint, summaries)
        if options.json is not None:
            content = {
                "checkpoint": str(resolved.checkpoint),
                "step": resolved.step,
                "sets": summaries,
            }
            try:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
            except OSError as error:
                raise DataError(
                    f"--json {options.json} cannot be written: {error.strerror}"
                ) from error


def main(argv: Sequence[str]) -> int:
    return run_command(argv, perplexity_parser())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
