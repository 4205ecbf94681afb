"""The commands of `longhaul`, and what a reader of a message types to run one.

Imports nothing of ours by itself.
"""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command of `longhaul`."""

    module: str
    """The module that `python -m` runs in a checkout."""
    parser: str
    """Module and function that declare its options. They import no torch."""
    summary: str


COMMANDS = {
    "new": Command(
        "trainer.new",
        "trainer.new.__main__:build_parser",
        "configuration, SLURM script and plan of a new run, from a model, a length and devices",
    ),
    "train": Command(
        "trainer.launch",
        "trainer.launch.launcher:build_parser",
        "train a run, or with --check or --plan only look at it (./run_train.sh)",
    ),
    "plan": Command(
        "trainer.plan",
        "trainer.plan.__main__:build_parser",
        "memory, step time and bottlenecks on devices that need not be here; search, calibrate",
    ),
    "prepare": Command(
        "trainer.data.prepare",
        "trainer.data.prepare_arguments:build_parser",
        "tokenize corpora before a run, inspect the result",
    ),
    "hf": Command(
        "trainer.hf",
        "trainer.hf:build_parser",
        "import a Hugging Face model, or export a checkpoint as one",
    ),
    "checkpoint": Command(
        "trainer.checkpoint",
        "trainer.checkpoint.__main__:build_parser",
        "list, verify, prune or export checkpoints",
    ),
    "branch": Command(
        "trainer.branch",
        "trainer.branch:build_parser",
        "make a run that starts from a checkpoint of another one",
    ),
    "runs": Command(
        "trainer.runs",
        "trainer.runs:build_parser",
        "list runs as a tree: steps, state and the checkpoint that each branched from",
    ),
    "watch": Command(
        "trainer.watch",
        "trainer.watch.__main__:build_parser",
        "a page that follows a run: losses, speed, memory, events; on this machine or in a file",
    ),
    "evaluate needle": Command(
        "trainer.evaluation.needle",
        "trainer.evaluation.arguments:needle_parser",
        "passkey retrieval by depth and length",
    ),
    "evaluate perplexity": Command(
        "trainer.evaluation.perplexity",
        "trainer.evaluation.arguments:perplexity_parser",
        "loss, perplexity and bits per byte by position",
    ),
    "generate": Command(
        "trainer.generate",
        "trainer.evaluation.arguments:generate_parser",
        "sample text from a checkpoint",
    ),
    "selfcheck": Command(
        "trainer.selfcheck",
        "trainer.selfcheck.__main__:build_parser",
        "compare a run's mesh with one process, reduced, in float64 on this CPU",
    ),
    "preflight": Command(
        "trainer.preflight",
        "trainer.preflight:build_parser",
        "check this node before a run trains on it",
    ),
    "slurm": Command(
        "trainer.slurm",
        "trainer.slurm.__main__:build_parser",
        "render, submit, watch or cancel a run as a SLURM job",
    ),
}


def resolve(reference: str) -> Any:
    """The object that a reference such as `package.module:name` names; imports the module."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def typed(command: str, *words: object) -> str:
    """The command line of a command of `COMMANDS` and further words, as a reader can type it.

    A process that was started as `longhaul` has it on the path, and so has what runs from an
    installed package, such as a rank. In a checkout that is not installed there are only the
    modules.
    """
    is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    if sys.argv[0].startswith("longhaul ") or not is_checkout:
        program = f"longhaul {command}"
    elif command == "train":
        program = "./run_train.sh"
    else:
        program = f"python -m {COMMANDS[command].module}"
    return " ".join([program, *(shlex.quote(str(word)) for word in words)])
