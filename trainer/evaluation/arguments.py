"""The arguments of commands on a checkpoint. Imports no torch, which the commands need."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from trainer.command_table import typed
from trainer.commands import (
    CHECKPOINT_HELP,
    CommandParser,
    checkpoint_path,
    count,
    integer,
    later,
    number,
)
from trainer.metrics import loggers

NEEDLE = """\
Hides a five-digit number in text from the run's corpus and asks for it at the end, at several depths and lengths."""
PERPLEXITY = """\
Prints loss, perplexity, accuracy and bits per byte of the run's validation sets, by position and by context."""
GENERATE = """\
Continues a text with a trained model, on one GPU or on the CPU."""
MESH = "The mesh is not taken from the run: set --parallelism.* for the processes that you start."
SAMPLING = (
    ("--tokens", "N", count, 200, "maximum number of new tokens"),
    ("--temperature", "T", number(), 0.8, "0 takes the likeliest token"),
    ("--top-k", "K", integer(minimum=1), 50, "sample from the K likeliest tokens"),
    ("--seed", "N", integer(minimum=0), 0, "sample n uses seed N + n - 1"),
    ("--samples", "N", integer(minimum=1), 1, "number of texts"),
)


def checkpoint_parser(
    command: str, description: str, *, run: str, overrides: str
) -> CommandParser:
    """The parser of a command whose first argument is a checkpoint.

    `overrides` says which keys are worth overriding.
    """
    on_ranks = later(run)

    def log_and_run(options: Namespace, arguments: list[str]) -> int | None:
        loggers.configure_logging(started_rank())
        return on_ranks(options, arguments)

    overrides = f"--section.key VALUE overrides the run's config.toml. {overrides}"
    parser = CommandParser(
        typed(command), description, run=log_and_run, overrides=overrides, rank=started_rank
    )
    help_text = f"{CHECKPOINT_HELP}; of a run folder, the newest checkpoint"
    parser.add_argument("checkpoint", type=checkpoint_path, metavar="CHECKPOINT", help=help_text)
    return parser


def started_rank() -> int:
    """The rank as which torchrun or srun started this process."""
    from trainer.step.process_group import rank_from_environment  # Imports torch.

    return rank_from_environment()[0]


def needle_parser() -> CommandParser:
    parser = checkpoint_parser(
        "evaluate needle", NEEDLE, run="trainer.evaluation.needle:run", overrides=MESH
    )
    add = parser.add_argument
    positive = integer(minimum=1)
    lengths_help = "tokens per sequence (default: training.seq_len / 4 and training.seq_len)"
    add("--lengths", metavar="N,...", type=sequence_lengths, help=lengths_help)
    add(
        "--depths",
        metavar="N",
        type=positive,
        default=5,
        help="number of evenly spaced depths (default: 5)",
    )
    add(
        "--trials",
        metavar="N",
        type=positive,
        default=2,
        help="numbers and texts per cell (default: 2)",
    )
    output_help = "for needle-step-N.json (default: evaluation/ in the run folder)"
    add("--output", metavar="FOLDER", type=Path, help=output_help)
    return parser


def sequence_lengths(text: str) -> list[int]:
    """Ascending sequence lengths from text such as `1024,4096`: an argparse type."""
    try:
        return sorted({count(part.strip(), minimum=2) for part in text.split(",")})
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{text} must be integers, at least 2, such as 1024,4096 or 32K,1M"
        ) from None


def perplexity_parser() -> CommandParser:
    run = "trainer.evaluation.perplexity:run"
    parser = checkpoint_parser("evaluate perplexity", PERPLEXITY, run=run, overrides=MESH)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def generate_parser() -> CommandParser:
    keys = "Relevant keys: [model], [tokenizer], training.dtype and training.attention."
    parser = checkpoint_parser("generate", GENERATE, run="trainer.generate:run", overrides=keys)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="start of the text (default: the start of a document)"
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="UTF-8 file with the start of the text"
    )
    for option, metavar, kind, default, meaning in SAMPLING:
        text = f"{meaning} (default: %(default)s)"
        parser.add_argument(option, metavar=metavar, type=kind, default=default, help=text)
    return parser
