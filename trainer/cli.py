"""`longhaul COMMAND ...`: one command line over the modules that `./run_train.sh` and `python -m trainer.X` run."""

from __future__ import annotations

import runpy
import sys

from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS

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


def main() -> None:
    """Runs the module of a command as `python -m` does, so that both are the same code."""
    for length in (2, 1):
        command = " ".join(sys.argv[1 : 1 + length])
        if command in COMMANDS:
            sys.argv = [f"longhaul {command}", *sys.argv[1 + length :]]
            runpy.run_module(COMMANDS[command][0], run_name="__main__", alter_sys=False)
            return
    usage = "usage: longhaul COMMAND [option]... [--section.key VALUE]...\n\n"
    lines = "".join(f"  {command:<20}  {text}\n" for command, (_, text) in COMMANDS.items())
    is_help = sys.argv[1:2] in (["-h"], ["--help"])
    unknown = "" if is_help else f"error: unknown command {' '.join(sys.argv[1:2]) or '(none)'}\n"
    (sys.stdout if is_help else sys.stderr).write(f"{unknown}{usage}{lines}\nlonghaul COMMAND --help: its options\n")
    sys.exit(EXIT_SUCCESS if is_help else EXIT_BAD_CONFIG)


if __name__ == "__main__":
    main()
