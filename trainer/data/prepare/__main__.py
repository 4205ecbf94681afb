"""`python -m trainer.data.prepare`: text to tokens before a run, a look at them, and a tokenizer of one's own.

Leaves with 0 if it is done, 2 if the command line or the configuration is wrong, 78 if the data cannot be used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config.job_config import COPY, CORPUS
from trainer.config.parse import load
from trainer.data import DataError, source_of, sources_of
from trainer.data.hf_datasets import HUB
from trainer.data.prepare import prepare
from trainer.data.source import Source
from trainer.data.token_dataset import Prepared, is_prepared
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, ConfigError, RankError

USAGE = """\
python -m trainer.data.prepare [--config NAME|PATH] [--section.key VALUE]... [--workers N]
                               [--corpus CORPUS] [--output FOLDER]
python -m trainer.data.prepare inspect FOLDER [--verify] [--samples N] [--config NAME|PATH] [--section.key VALUE]...
python -m trainer.data.prepare inspect [--verify] [--samples N] --config NAME|PATH [--section.key VALUE]...
python -m trainer.data.prepare train-tokenizer --vocab-size N --output FILE [--lines N]
                               [--config NAME|PATH] [--corpus CORPUS] [--section.key VALUE]...

Without a word in front: makes tokens of every corpus of a configuration, as the start of a run would; a run
then finds them. What an interrupted command finished, the next one does not do again.
inspect: counts, lengths of documents and some of their text. train-tokenizer: a sentencepiece BPE.

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
  --corpus CORPUS     this corpus, and none of the configuration's: python-stdlib, a file or folder of text, .jsonl
                      or .parquet (each may be .gz or .zst), or hf:NAME[,split=NAME][,config=NAME][,data_files=PATH]
  --workers N         processes; the result does not depend on them; default: 1
  --output PATH       the folder to make, for a run to name as its corpus; of several corpora, the folder that holds
                      one for each. Default: in data.cache_dir, where a run looks for it. train-tokenizer: the file
  --verify            read all tokens and compare them with their sums
  --samples N         documents to show; default: 3
  --vocab-size N      tokens, special ones included
  --lines N           lines to learn from, drawn from all of the text, always the same; default: 100000
  --help              this text

`--section.key VALUE` is any key of a configuration; ./run_train.sh --help lists them. Leaves with 0 if all is done,
2 if the command line or the configuration is wrong, 78 if data cannot be used, 1 if a worker was killed.
"""
TAKES = {
    "prepare": ("--workers", "--corpus", "--output"),
    "inspect": ("--samples", "--verify"),
    "train-tokenizer": ("--vocab-size", "--lines", "--corpus", "--output"),
}
FLAGS = ("--verify",)


class Arguments:
    """A command line taken apart. Raises ConfigError."""

    def __init__(self, words: Sequence[str]) -> None:
        given = list(words)
        self.command = given.pop(0) if given and given[0] in TAKES else "prepare"
        self.folder = Path(given.pop(0)) if self.command == "inspect" and given and given[0][0:2] != "--" else None
        self.named = any(word.partition("=")[0] == "--config" for word in given)
        self._own: dict[str, str] = {}
        rest: list[str] = []
        while given:
            option, equals, value = given.pop(0).partition("=")
            if option not in TAKES[self.command]:
                rest.append(option + equals + value)
            elif option in FLAGS:
                self._own[option] = "true"
            elif not equals and (not given or given[0].startswith("--")):
                raise ConfigError([f"command line: {option} needs a value"])
            else:
                self._own[option] = value if equals else given.pop(0)
        self.config = load(rest)

    def text(self, option: str, default: str | None = None) -> str:
        """Raises ConfigError if it is not given and has no default."""
        value = self._own.get(option, default)
        if not value:
            raise ConfigError([f"command line: {self.command} needs {option}"])
        return value

    def number(self, option: str, default: int | None = None) -> int:
        value = self.text(option, None if default is None else str(default))
        if not (value.isdecimal() and int(value) > 0):
            raise ConfigError([f"command line: {option} {value} must be an integer, at least 1"])
        return int(value)

    def flag(self, option: str) -> bool:
        return option in self._own

    def path(self, option: str) -> Path | None:
        return Path(self.text(option)) if option in self._own else None

    def sources(self) -> dict[str, Source]:
        """The corpora that are asked for, by name. Raises ConfigError."""
        data, corpus = self.config.data, self._own.get("--corpus")
        problems = self.config.tokenizer.problems() if self.command != "train-tokenizer" else []
        if corpus is None:
            problems += self.config.stage_problems()
            every = [] if problems else [stage.config.data for stage in self.config.stages]
            told = [problem for each in every for problem in (*each.problems(), *each.source_problems())]
            problems += dict.fromkeys(told)
            if problems:
                raise ConfigError(problems)
            found = {name: each for name, each in sources_of(self.config).items() if each.corpus != COPY}
            if not found:
                problems.append(f'data.corpus = "{COPY}" is made up: there is nothing to prepare')
        else:
            found = {Path(corpus).name: replace(source_of(data, CORPUS), corpus=corpus)}
            if not corpus.startswith(HUB) and corpus != "python-stdlib" and not Path(corpus).exists():
                problems.append(f"command line: --corpus {corpus} is not there")
        if problems:
            raise ConfigError(problems)
        return found


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        sys.stdout.write(USAGE)
        return DONE
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments = Arguments(words)
        if arguments.command == "inspect":
            inspect(arguments)
        elif arguments.command == "train-tokenizer":
            train_tokenizer(arguments)
        else:
            make(arguments)
    except ConfigError as error:
        return complain(BAD_CONFIGURATION, *error.problems)
    except DataError as error:
        return complain(NO_RETRY, str(error))
    except RankError as error:
        return complain(error.status, str(error))
    except KeyboardInterrupt:
        return complain(FAILED, "interrupted; the same command goes on with what is not finished")
    return DONE


def make(arguments: Arguments) -> None:
    sources, output = arguments.sources(), arguments.path("--output")
    workers = arguments.number("--workers", 1)
    folders = {name: output / name if output and len(sources) > 1 else output for name in sources}
    if full := [folder for folder in folders.values() if folder and folder.exists() and any(folder.iterdir())]:
        raise ConfigError([f"command line: --output {folder} is not empty" for folder in full])
    tokenizer = load_tokenizer(arguments.config.tokenizer.kind, arguments.config.tokenizer.path)
    for name, source in sources.items():
        prepared = prepare(source, tokenizer, workers=workers, folder=folders[name])
        sys.stdout.write(
            f"{prepared.folder}: {prepared.num_tokens:,} tokens, {prepared.num_documents:,} documents, "
            f"{prepared.meta.skipped:,} skipped; fingerprint {prepared.fingerprint}\n"
        )


def inspect(arguments: Arguments) -> None:
    from trainer.data.prepare.report import report

    tokenizer = load_tokenizer(arguments.config.tokenizer.kind, arguments.config.tokenizer.path)
    samples, verify = arguments.number("--samples", 3), arguments.flag("--verify")
    if arguments.folder is not None:
        if not is_prepared(arguments.folder):
            raise ConfigError([f"command line: {arguments.folder} is not a folder that was prepared"])
        sys.stdout.write(report(Prepared(arguments.folder), tokenizer, samples=samples, verify=verify))
        return
    if not arguments.named:
        raise ConfigError(["command line: inspect needs a folder or --config"])
    for source in arguments.sources().values():
        sys.stdout.write(report(prepare(source, tokenizer), tokenizer, samples=samples, verify=verify))


def train_tokenizer(arguments: Arguments) -> None:
    from trainer.data.prepare import train_tokenizer as training

    size, path = arguments.number("--vocab-size"), Path(arguments.text("--output"))
    lines = arguments.number("--lines", training.LINES)
    if path.exists():
        raise ConfigError([f"command line: --output {path} is there already"])
    made = training.train(list(arguments.sources().values()), vocab_size=size, lines=lines)
    training.write(made, path)
    tokenizer = load_tokenizer("sentencepiece", path)
    sys.stdout.write(
        f"{path}: {tokenizer.vocab_size:,} tokens; fingerprint {tokenizer.fingerprint}\n"
        f"--tokenizer.kind sentencepiece --tokenizer.path {path}\n"
    )


def complain(status: int, *problems: str) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
