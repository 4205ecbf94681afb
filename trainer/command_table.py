"""The commands of `longhaul`, and what a reader of a message types to run one. Imports nothing of ours."""

from __future__ import annotations

import shlex
import sys

COMMANDS = {
    "train": ("trainer.launch", "train a run, or with --check or --plan only look at it (./run_train.sh)"),
    "plan": ("trainer.plan", "memory, step time and bottlenecks on devices that need not be here; search, calibrate"),
    "prepare": ("trainer.data.prepare", "tokenize corpora before a run, inspect the result"),
    "hf": ("trainer.hf", "import a Hugging Face model, or export a checkpoint as one"),
    "checkpoint": ("trainer.checkpoint", "list, verify, prune or export checkpoints"),
    "evaluate needle": ("trainer.evaluation.needle", "passkey retrieval by depth and length"),
    "evaluate perplexity": ("trainer.evaluation.perplexity", "loss, perplexity and bits per byte by position"),
    "generate": ("trainer.generate", "sample text from a checkpoint"),
    "selfcheck": ("trainer.selfcheck", "compare a run's mesh with one process, reduced, in float64 on this CPU"),
    "slurm": ("trainer.slurm", "render, submit, watch or cancel a run as a SLURM job"),
}
"""Module and one line of help of each command."""


def typed(command: str, *words: object) -> str:
    """What to type for a command of `COMMANDS` and further words, in the way in which this process was started.

    A reader who typed `longhaul` has it on the path. In a checkout that is not installed there are only the modules.
    """
    if sys.argv[0].startswith("longhaul "):
        program = f"longhaul {command}"
    elif command == "train":
        program = "./run_train.sh"
    else:
        program = f"python -m {COMMANDS[command][0]}"
    return " ".join([program, *(shlex.quote(str(word)) for word in words)])
