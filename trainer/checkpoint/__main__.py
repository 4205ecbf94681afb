"""`python -m trainer.checkpoint list | verify | prune | export`: what checkpoints there are, and whether they are whole.

Leaves with 0, with 78 where one is damaged, with 2 for wrong arguments, with 1 for the rest. Only `export` imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.initial_weights import checkpoint_of, is_hugging_face, require_hashes
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.retention import delete, good, is_pinned, put_aside, superfluous
from trainer.checkpoint.run_dir import RunFolder
from trainer.config.parse import load
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, ConfigError, ResumeError, RunError

ABOUT = """\
list    step, time, size and ranks of every checkpoint, and whether its manifest and state are as they were written
verify  reads the newest checkpoint, or --all, and compares every file with its hash; leaves with 78 if one differs
prune   deletes checkpoints beyond the newest N. A file `pinned` in a checkpoint's folder keeps it, and so does being
        what the run began with, or the newest whose hashes are right
export  writes the weights alone, as a checkpoint that checkpoint.initial of another run takes

DIR is a run folder, or one checkpoint of it.
"""


def main(words: Sequence[str]) -> int:
    asked = parser().parse_args(words)
    try:
        status: int = asked.run(asked)
    except ResumeError as error:
        return refuse(str(error), status=NO_RETRY)
    except RunError as error:
        return refuse(str(error), status=FAILED)
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}", status=FAILED)
    return status


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m trainer.checkpoint",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = found.add_subparsers(dest="command", required=True)

    def command(name: str, run: object, about: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        made.add_argument("folder", type=Path, metavar="DIR", help="a run folder, or a checkpoint")
        made.set_defaults(run=run)
        return made

    command("list", show, "what checkpoints there are")
    verify_ = command("verify", verify, "whether files are as they were written")
    verify_.add_argument("--all", action="store_true", help="every checkpoint of the run, not only the newest")
    prune_ = command("prune", prune, "deletes old checkpoints")
    prune_.add_argument("--keep", type=count, required=True, metavar="N", help="how many of the newest stay")
    prune_.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    export_ = command("export", export, "the weights alone, as a checkpoint")
    export_.add_argument("output", type=Path, metavar="OUTPUT", help="a folder that is not there yet")
    return found


def count(text: str) -> int:
    """At least 1; argparse says what is not."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


# ---- commands


def show(asked: argparse.Namespace) -> int:
    rows = [("step", "saved", "size", "ranks", "", "")]
    for step, folder in checkpoints_in(asked.folder):
        pinned = "pinned" if is_pinned(folder) else ""
        try:
            about = manifest.sound(folder)
            rows.append((f"{step}", about.saved, manifest.size(about.bytes), f"{about.world_size}", "good", pinned))
        except DamageError as error:
            rows.append((f"{step}", "-", "-", "-", f"damaged: {error}", pinned))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for line in put_aside(RunFolder(asked.folder).checkpoints):
        say(line)
    return DONE


def verify(asked: argparse.Namespace) -> int:
    chosen = checkpoints_in(asked.folder)
    damaged = 0
    for _, folder in reversed(chosen) if asked.all else chosen[-1:]:
        found = [*damage(folder)]
        damaged += bool(found)
        say(f"{folder}: {'; '.join(found) or 'good'}")
    return NO_RETRY if damaged else DONE


def prune(asked: argparse.Namespace) -> int:
    folder = RunFolder(asked.folder)
    committed = good(checkpoints_in(asked.folder))
    last = next((place for _, place in reversed(committed) if not [*damage(place)]), None)
    if last is None:
        raise ResumeError(f"no checkpoint in {folder.checkpoints} is good, and nothing was deleted")
    doomed = superfluous(committed, keep=asked.keep, kept=[last, *begun_with(folder)])
    for place in doomed:
        if not asked.dry_run:
            delete(place)
        say(f"{place} {'would be' if asked.dry_run else 'was'} deleted")
    say(f"{len(committed) - len(doomed)} checkpoints {'would stay' if asked.dry_run else 'are left'}")
    return DONE


def export(asked: argparse.Namespace) -> int:
    from trainer.export.export_weights import slim

    checkpoint = checkpoint_of(asked.folder)
    if asked.output.exists():
        return refuse(f"{asked.output} is there already", status=BAD_CONFIGURATION)
    require_hashes(checkpoint)
    written = slim(checkpoint, asked.output)
    say(f"{asked.output}: the weights of {checkpoint}, {manifest.size(written)}")
    return DONE


# ---- what they share


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Those of a run folder, oldest first, or the one that is named. Raises `ResumeError` if there is none."""
    run = RunFolder(folder.parents[1] if folder.parent.name == "checkpoints" else folder)
    found = [(step, place) for step, place in run.committed() if run.path == folder or place.name == folder.name]
    if not found and (folder / manifest.NAME).exists():
        found = [(0, folder)]  # Exported, or copied elsewhere.
    if not found:
        raise ResumeError(f"{folder} is neither a checkpoint nor a run folder with one")
    return found


def damage(folder: Path) -> Iterator[str]:
    """What is wrong with a checkpoint's files, telling how far it is."""
    try:
        about = manifest.sound(folder)
    except DamageError as error:
        yield str(error)
        return
    done = 0
    for name, (size, _) in sorted(about.files.items()):
        yield from manifest.damage(folder, about, [name])
        done += size
        tell(f"{folder.name}: {manifest.size(done)} of {manifest.size(about.bytes)}")


def begun_with(folder: RunFolder) -> list[Path]:
    with suppress(ConfigError):
        initial = load(["--config", str(folder.config.resolve())]).checkpoint.initial
        if initial is not None and not is_hugging_face(initial):
            return [Path(initial).expanduser()]
    return []


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def tell(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")


def refuse(problem: str, *, status: int) -> int:
    sys.stderr.write(f"error: {problem}\n")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(refuse("interrupted", status=FAILED))
