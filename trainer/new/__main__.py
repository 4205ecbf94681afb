"""`longhaul new NAME`: a configuration, the plan that explains it and a SLURM script, from a model,
a length, devices and a corpus. Trains nothing. Imports no torch but for traces and a model's
tokenizer.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.command_table import typed
from trainer.commands import (
    CommandParser,
    count,
    format_table,
    overrides_help,
    print_lines,
    run_command,
)
from trainer.config.parse import CONFIG_DIR, load
from trainer.config.sections import MAX_SEQ_LEN
from trainer.errors import EXIT_SUCCESS, ConfigError
from trainer.plan.document import format_gib
from trainer.plan.plan import TrainingPlan
from trainer.plan.tracing import tracing_processes

DESCRIPTION = """\
Writes NAME.toml, the configuration of a new run on the fastest layout that the planner finds, and NAME.md, which
says why. On a cluster (--partition, --account or any --slurm.key) NAME.sh too, the batch script. On a terminal it
asks for what is missing. Exits with 3 if the run fits no layout."""
MAX_LENGTH_HELP = "tokens of a sequence; 1M is 1,048,576"


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    from trainer.new.model_source import MODEL_HELP, TOKENIZER_HELP

    parser = CommandParser(typed("new"), DESCRIPTION, run=run, overrides=overrides_help())
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the run and of its files, in this folder")
    add("--model", metavar="MODEL", help=MODEL_HELP)
    add("--tokenizer", metavar="PATH", help=f"{TOKENIZER_HELP}; default: the model's own")
    length = partial(count, minimum=2, maximum=MAX_SEQ_LEN)
    add("--seq-len", dest="training.seq_len", type=length, metavar="T", help=MAX_LENGTH_HELP)
    devices_help = "as for longhaul plan; default: the GPU of this machine"
    add("--device", dest="plan.device", metavar="NAME|PATH", help=devices_help)
    add("--gpus", type=count, metavar="N", help="number of devices")
    add("--nodes", type=count, metavar="N", help="number of whole nodes, instead of --gpus")
    add("--corpus", dest="data.corpus", metavar="CORPUS", help="as data.corpus")
    for key in ("partition", "account", "time"):
        add(f"--{key}", dest=f"slurm.{key}", metavar="VALUE", help=f"as slurm.{key}")
    add("--text-only", action="store_true", help="as for longhaul hf import")
    add("--ignore-key", action="append", default=[], metavar="NAME", help="as --text-only")
    add("--force", action="store_true", help="replace files that exist")
    return parser


def run(options: Namespace, overrides: list[str]) -> int:
    from trainer.new.compose import RunChoices, given_values
    from trainer.new.layout import script
    from trainer.new.page import render_page
    from trainer.plan.report import search_report, search_suggestions

    files = {suffix: Path(f"{options.name}.{suffix}") for suffix in ("toml", "md", "sh")}
    given = given_values(options.name, overrides)
    require_new_files(options.name, files.values(), force=options.force)
    new = RunChoices(options, given, os.environ, is_terminal=is_terminal()).new_run()
    with tracing_processes() as trace:
        result = new.fastest_layouts(overrides, trace)
        suggestions = search_suggestions(result, trace)
    best = result.best[0]
    files["toml"].write_text(new.toml(best.config, best.step_seconds))
    # From the file, as a run will read it.
    config = load(["--config", f"{files['toml']}"])
    title = f"{config.job.name} on {new.world_size:,} x {new.device.name}"
    words = [*options.words, *new.answers]
    report = search_report(result, title, new.device, notes=[f"command: {typed('new', *words)}"])
    report = replace(report, suggestions=suggestions)
    commands = [*new.next_commands(config, files["toml"])]
    page = render_page(
        config, report, model=new.source.description, remarks=new.remarks, commands=commands
    )
    files["md"].write_text(page)
    if new.is_cluster:
        files["sh"].write_text(script(files["toml"]))
    else:
        del files["sh"]
    print_lines(
        f"{report.title}: {report.verdict}",
        *format_table(*report.facts, ("device memory", describe_memory(best))),
        *new.remarks,
        f"wrote {', '.join(map(str, files.values()))}",
        "next:",
        *format_table(*((f"  {command}", f"# {meaning}") for command, meaning in commands)),
    )
    return EXIT_SUCCESS


def is_terminal() -> bool:
    """Whether somebody can be asked: on standard error, so that the output can be piped."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def describe_memory(plan: TrainingPlan) -> str:
    """The peak of the fullest device, and what is usable."""
    needed = format_gib(plan.peak_memory.device_bytes)
    return f"{needed} of {format_gib(plan.usable_device_memory)} usable GiB"


def require_new_files(name: str, files: Iterable[Path], *, force: bool) -> None:
    """Raises `ConfigError` if a file of the run exists, or if a shipped one would hide it."""
    if (CONFIG_DIR / f"{name}.toml").exists():
        raise ConfigError(
            [f'NAME "{name}" is that of a shipped configuration, which --config {name} means']
        )
    if existing := [path for path in files if path.exists() and not force]:
        raise ConfigError([f"{path} exists already; --force replaces it" for path in existing])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
