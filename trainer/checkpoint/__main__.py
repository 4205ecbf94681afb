"""`longhaul checkpoint list | verify | prune | export`: manage the checkpoints of a run.

Exits with 78 if there is no checkpoint or one is damaged. Only `list` imports no torch.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.initial_weights import find_checkpoint, is_hugging_face
from trainer.checkpoint.listing import find_file_damage, listed_checkpoints, select_checkpoints
from trainer.command_table import typed
from trainer.commands import (
    CHECKPOINT_HELP,
    CommandParser,
    Run,
    checkpoint_or_url,
    checkpoint_path,
    folder_or_url,
    integer,
    print_lines,
    print_table,
    run_command,
)
from trainer.config.parse import load
from trainer.errors import EXIT_NO_RETRY, EXIT_SUCCESS, ConfigError, ResumeError
from trainer.metrics.loggers import log_plainly
from trainer.storage import manifest
from trainer.storage.artifact import DamageError
from trainer.storage.durable_io import format_bytes
from trainer.storage.remote_models import local_output, upload_checkpoint
from trainer.storage.retention import (
    checkpoints_to_delete,
    delete_checkpoint,
    valid_checkpoints,
)
from trainer.storage.run_dir import RunDir

DESCRIPTION = "Manages the checkpoints of a run. DIR is a run folder or one of its checkpoints."
SUMMARIES = {
    "list": "step, time, size, ranks and manifest status of every checkpoint",
    "verify": "hash every file of the newest checkpoint, or of --all; exit 78 if one is damaged",
    "prune": "delete all but the newest N checkpoints. Kept as well: checkpoints with a file `pinned` in their folder, "
    "the initial weights of the run, and the newest checkpoint whose hashes match",
    "export": "write the weights alone, as a checkpoint for checkpoint.initial_load_path of another run",
}


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("checkpoint"), DESCRIPTION)
    runs: dict[str, Run] = {
        "list": list_checkpoints,
        "verify": _logging_progress(verify),
        "prune": _logging_progress(prune),
        "export": _logging_progress(export),
    }
    commands = {
        name: parser.add_command(name, SUMMARIES[name], run=run) for name, run in runs.items()
    }
    for name, command in commands.items():
        add = command.add_argument
        if name in ("list", "verify"):
            where = f"{CHECKPOINT_HELP}, or the URL of copies"
            add("folder", type=checkpoint_or_url, metavar="DIR", help=where)
        else:
            add("folder", type=checkpoint_path, metavar="DIR", help=CHECKPOINT_HELP)
    commands["verify"].add_argument(
        "--all", action="store_true", help="verify every checkpoint, not only the newest"
    )
    add = commands["prune"].add_argument
    add(
        "--keep",
        type=integer(minimum=1),
        required=True,
        metavar="N",
        help="number of newest checkpoints to keep",
    )
    add("--dry-run", action="store_true", help="only print what would be deleted")
    commands["export"].add_argument(
        "output",
        type=folder_or_url,
        metavar="OUTPUT",
        help="folder to create, or URL as s3://BUCKET/PREFIX",
    )
    return parser


def _logging_progress(run: Run) -> Run:
    """Lets a command log how far it is: it may read terabytes."""

    def log_and_run(options: Namespace, overrides: list[str]) -> int | None:
        log_plainly()
        return run(options, overrides)

    return log_and_run


def list_checkpoints(args: Namespace, _: Sequence[str]) -> None:
    rows = list[Sequence[str]]()
    with listed_checkpoints(args.folder) as listing:
        for each in listing.checkpoints:
            try:
                found = each.read_manifest()
                facts = (found.saved, format_bytes(found.bytes), f"{found.world_size}", "intact")
            except DamageError as error:
                facts = ("-", "-", "-", f"damaged: {error}")
            rows.append((f"{each.step}", *facts, "pinned" if each.is_pinned else ""))
    print_table(("step", "saved", "size", "ranks", "", ""), *rows)
    print_lines(*listing.set_aside)


def verify(args: Namespace, _: Sequence[str]) -> int:
    damaged = 0
    with listed_checkpoints(args.folder) as listing:
        newest_first = listing.checkpoints[::-1]
        for each in newest_first if args.all else newest_first[:1]:
            problems = each.find_damage()
            damaged += bool(problems)
            print_lines(f"{each.place}: {'; '.join(problems) or 'intact'}")
    return EXIT_NO_RETRY if damaged else EXIT_SUCCESS


def prune(args: Namespace, _: Sequence[str]) -> None:
    run_dir = RunDir(args.folder)
    # A damaged checkpoint must not count as one of the newest N.
    committed = valid_checkpoints(select_checkpoints(args.folder))
    if not run_dir.checkpoints_dir.is_dir():
        raise ConfigError(
            [f"command line: {args.folder} is a checkpoint; prune needs a run folder"]
        )
    # Manifests alone do not show a flipped bit. Deleting older checkpoints needs one whose hashes
    # match.
    newest_verified = next(
        (checkpoint for _, checkpoint in reversed(committed) if not find_file_damage(checkpoint)),
        None,
    )
    if newest_verified is None:
        raise ResumeError(
            f"no checkpoint in {run_dir.checkpoints_dir} is intact; nothing was deleted"
        )
    to_delete = checkpoints_to_delete(
        committed, keep=args.keep, protected=[newest_verified, *initial_checkpoints(run_dir)]
    )
    for folder in to_delete:
        if not args.dry_run:
            delete_checkpoint(folder)
        print_lines(f"{folder} {'would be' if args.dry_run else 'was'} deleted")
    print_lines(
        f"{len(committed) - len(to_delete)} checkpoints {'would remain' if args.dry_run else 'remain'}"
    )


def export(args: Namespace, _: Sequence[str]) -> None:
    from trainer.checkpoint.export_weights import export_weights

    checkpoint = find_checkpoint(args.folder)
    with local_output(args.output, upload_checkpoint, key="command line: OUTPUT") as output:
        if output.exists():
            raise ConfigError([f"{output} exists already"])
        # The copy gets new hashes, which would make damage look intact.
        manifest.read_verified(checkpoint)
        num_bytes = export_weights(checkpoint, output)
    print_lines(f"{args.output}: weights of {checkpoint}, {format_bytes(num_bytes)}")


def initial_checkpoints(run_dir: RunDir) -> list[Path]:
    """The checkpoint that the run loaded its initial weights from, if any."""
    with suppress(ConfigError):
        initial = load(
            ["--config", str(run_dir.config_path.resolve())], imports_extensions=False
        ).checkpoint.initial_load_path
        if initial is not None and not is_hugging_face(initial):
            return [Path(initial).expanduser()]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
