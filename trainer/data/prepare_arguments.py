"""The arguments of `longhaul prepare`. Imports no torch, which the preparation needs."""

from __future__ import annotations

from trainer.command_table import typed
from trainer.commands import (
    CommandParser,
    folder_or_url,
    integer,
    later,
    overrides_help,
    text_or_url,
)
from trainer.config.data import HF_PREFIX, STDLIB_CORPUS

DESCRIPTION = """\
Tokenize every corpus of a configuration, as the launch of a run does; the run then reuses the result.
An interrupted command resumes where it stopped."""
INSPECT = "show counts, document lengths and samples of a prepared FOLDER, or of the corpora of a configuration"
CORPUS_HELP = f"""\
instead of the corpora of the configuration: {STDLIB_CORPUS}, a file or folder of text, lines of JSON or .parquet
(each may be .gz or .zst), or {HF_PREFIX}NAME[,split=NAME][,config=NAME][,data_files=PATH]"""
OUTPUT_HELP = """\
the folder to create, which a run can name as its corpus; for several corpora, the folder to hold one folder each.
Default: in data.cache_dir, where a run looks for it. A URL as s3://BUCKET/PREFIX: what data.cache_dir then has is uploaded"""


def build_parser() -> CommandParser:
    run = later("trainer.data.prepare.__main__:prepare_corpora")
    parser = CommandParser(typed("prepare"), DESCRIPTION, run=run, overrides=overrides_help())
    parser.add_config()
    positive = integer(minimum=1)
    add = parser.add_argument
    add("--corpus", type=text_or_url, help=CORPUS_HELP)
    workers_help = "processes, which do not change the result; default: 1"
    add("--workers", metavar="N", type=positive, default=1, help=workers_help)
    add("--output", metavar="FOLDER|URL", type=folder_or_url, help=OUTPUT_HELP)
    run = later("trainer.data.prepare.__main__:inspect")
    inspecting = parser.add_command("inspect", INSPECT, run=run, overrides=overrides_help())
    inspecting.add_config()
    add = inspecting.add_argument
    folder_help = "a prepared corpus, or its URL"
    add("folder", nargs="?", metavar="FOLDER", type=folder_or_url, help=folder_help)
    add("--verify", action="store_true", help="read all tokens and compare their checksums")
    add("--samples", metavar="N", type=positive, default=3, help="default: 3")
    return parser
