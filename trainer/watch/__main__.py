"""`longhaul watch RUN`: a page that follows a run, on this machine or in a file. Imports no
torch.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from trainer.command_table import typed
from trainer.commands import (
    CommandParser,
    integer,
    local_path,
    print_lines,
    run_command,
    writable_file,
)
from trainer.errors import ConfigError
from trainer.plan.html import template
from trainer.runs import is_run
from trainer.watch.page import RunView
from trainer.watch.server import PageServer

DESCRIPTION = """\
A page that follows a run, or shows one that has ended: state, losses, step time and memory beside their prediction,
throughput, balance, events, checkpoints and lineage. It is served on this machine only; the run needs no other process
and is only read."""
REFRESH_SECONDS = 5
MAX_TABLE_ROWS = 12
PLOT_SIZE = (420, 190)
"""Width and height of a chart, small enough that its letters can be read on a phone."""


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("watch"), DESCRIPTION, run=watch)
    add = parser.add_argument
    add("run_folder", type=local_path, metavar="RUN", help="run folder, such as outputs/debug")
    add(
        "--port",
        type=integer(minimum=0),
        default=0,
        metavar="N",
        help="port on 127.0.0.1; default: a free one",
    )
    add("--once", type=writable_file, metavar="FILE.html", help="write the page and exit")
    return parser


def watch(options: Namespace, overrides: list[str]) -> None:
    """Serves the page until it is interrupted, or writes it once."""
    del overrides
    folder = options.run_folder
    if not is_run(folder):
        reason = "has no config.toml and no checkpoints" if folder.is_dir() else "is not a folder"
        raise ConfigError([f"{folder} {reason}: it is not the folder of a run"])
    view = RunView(folder)
    if options.once is not None:
        options.once.write_text(render(view), encoding="utf-8")
        print_lines(f"wrote {options.once}")
        return
    server = PageServer(lambda nonce: render(view, nonce=nonce), options.port)
    print_lines(f"{folder}: {server.url} (Ctrl-C ends this page, not the run)")
    with suppress(KeyboardInterrupt):
        server.serve()


def render(view: RunView, *, nonce: str = "") -> str:
    """The page as HTML. With a `nonce` it has a script that refreshes it."""
    return template("watch.html.j2").render(
        page=view.page(),
        nonce=nonce,
        refresh_seconds=REFRESH_SECONDS,
        max_rows=MAX_TABLE_ROWS,
        plot_size=PLOT_SIZE,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
