"""`python -m trainer.data.prepare`: text to tokens before a run, a look at them, and a tokenizer of one's own.

Leaves with 0 if it is done, 2 if the command line or the configuration is wrong, 78 if the data cannot be used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config.job_config import COPY_CORPUS, DEFAULT_SOURCE
from trainer.config.parse import load
from trainer.data import DataError
from trainer.data.hf_datasets import HUB_PREFIX
from trainer.data.prepare import prepare
from trainer.data.source import CorpusSpec, corpus_spec, corpus_specs
from trainer.data.token_dataset import TokenDataset, is_token_dataset
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_NO_RETRY, EXIT_SUCCESS, ConfigError, RankFailedError

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
OPTIONS_BY_COMMAND = {
    "prepare": ("--workers", "--corpus", "--output"),
    "inspect": ("--samples", "--verify"),
    "train-tokenizer": ("--vocab-size", "--lines", "--corpus", "--output"),
}
FLAGS = ("--verify",)


class PrepareArguments:
    """A command line taken apart. Raises ConfigError."""

    def __init__(self, argv: Sequence[str]) -> None:
        remaining = list(argv)
        self.command = remaining.pop(0) if remaining and remaining[0] in OPTIONS_BY_COMMAND else "prepare"
        self.folder = (
            Path(remaining.pop(0)) if self.command == "inspect" and remaining and remaining[0][0:2] != "--" else None
        )
        self.has_config = any(word.partition("=")[0] == "--config" for word in remaining)
        self._options: dict[str, str] = {}
        config_options: list[str] = []
        while remaining:
            option, equals, value = remaining.pop(0).partition("=")
            if option not in OPTIONS_BY_COMMAND[self.command]:
                config_options.append(option + equals + value)
            elif option in FLAGS:
                self._options[option] = "true"
            elif not equals and (not remaining or remaining[0].startswith("--")):
                raise ConfigError([f"command line: {option} needs a value"])
            else:
                self._options[option] = value if equals else remaining.pop(0)
        self.config = load(config_options)

    def string(self, option: str, default: str | None = None) -> str:
        """Raises ConfigError if it is not given and has no default."""
        value = self._options.get(option, default)
        if not value:
            raise ConfigError([f"command line: {self.command} needs {option}"])
        return value

    def positive_integer(self, option: str, default: int | None = None) -> int:
        value = self.string(option, None if default is None else str(default))
        if not (value.isdecimal() and int(value) > 0):
            raise ConfigError([f"command line: {option} {value} must be an integer, at least 1"])
        return int(value)

    def flag(self, option: str) -> bool:
        return option in self._options

    def path(self, option: str) -> Path | None:
        return Path(self.string(option)) if option in self._options else None

    def corpus_specs(self) -> dict[str, CorpusSpec]:
        """The corpora that are asked for, by name. Raises ConfigError."""
        data, corpus = self.config.data, self._options.get("--corpus")
        problems = self.config.tokenizer.problems() if self.command != "train-tokenizer" else []
        if corpus is None:
            problems += self.config.stage_problems()
            data_sections = [] if problems else [stage.config.data for stage in self.config.training_stages]
            section_problems = [
                problem for each in data_sections for problem in (*each.problems(), *each.path_problems())
            ]
            problems += dict.fromkeys(section_problems)
            if problems:
                raise ConfigError(problems)
            specs = {name: each for name, each in corpus_specs(self.config).items() if each.corpus != COPY_CORPUS}
            if not specs:
                problems.append(f'data.corpus = "{COPY_CORPUS}" is made up: there is nothing to prepare')
        else:
            specs = {Path(corpus).name: replace(corpus_spec(data, DEFAULT_SOURCE), corpus=corpus)}
            if not corpus.startswith(HUB_PREFIX) and corpus != "python-stdlib" and not Path(corpus).exists():
                problems.append(f"command line: --corpus {corpus} is not there")
        if problems:
            raise ConfigError(problems)
        return specs


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        sys.stdout.write(USAGE)
        return EXIT_SUCCESS
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments = PrepareArguments(argv)
        if arguments.command == "inspect":
            inspect(arguments)
        elif arguments.command == "train-tokenizer":
            train_tokenizer(arguments)
        else:
            prepare_corpora(arguments)
    except ConfigError as error:
        return print_errors(EXIT_BAD_CONFIG, *error.problems)
    except DataError as error:
        return print_errors(EXIT_NO_RETRY, str(error))
    except RankFailedError as error:
        return print_errors(error.status, str(error))
    except KeyboardInterrupt:
        return print_errors(EXIT_FAILURE, "interrupted; the same command goes on with what is not finished")
    return EXIT_SUCCESS


def prepare_corpora(arguments: PrepareArguments) -> None:
    specs, output = arguments.corpus_specs(), arguments.path("--output")
    workers = arguments.positive_integer("--workers", 1)
    folders = {name: output / name if output and len(specs) > 1 else output for name in specs}
    if nonempty := [folder for folder in folders.values() if folder and folder.exists() and any(folder.iterdir())]:
        raise ConfigError([f"command line: --output {folder} is not empty" for folder in nonempty])
    tokenizer = load_tokenizer(arguments.config.tokenizer.kind, arguments.config.tokenizer.path)
    for name, source in specs.items():
        prepared = prepare(source, tokenizer, workers=workers, folder=folders[name])
        sys.stdout.write(
            f"{prepared.folder}: {prepared.num_tokens:,} tokens, {prepared.num_documents:,} documents, "
            f"{prepared.meta.skipped:,} skipped; fingerprint {prepared.fingerprint}\n"
        )


def inspect(arguments: PrepareArguments) -> None:
    from trainer.data.prepare.report import render_report

    tokenizer = load_tokenizer(arguments.config.tokenizer.kind, arguments.config.tokenizer.path)
    samples, verify = arguments.positive_integer("--samples", 3), arguments.flag("--verify")
    if arguments.folder is not None:
        if not is_token_dataset(arguments.folder):
            raise ConfigError([f"command line: {arguments.folder} is not a folder that was prepared"])
        sys.stdout.write(render_report(TokenDataset(arguments.folder), tokenizer, samples=samples, verify=verify))
        return
    if not arguments.has_config:
        raise ConfigError(["command line: inspect needs a folder or --config"])
    for source in arguments.corpus_specs().values():
        sys.stdout.write(render_report(prepare(source, tokenizer), tokenizer, samples=samples, verify=verify))


def train_tokenizer(arguments: PrepareArguments) -> None:
    from trainer.data.prepare import train_tokenizer as training

    size, path = arguments.positive_integer("--vocab-size"), Path(arguments.string("--output"))
    lines = arguments.positive_integer("--lines", training.DEFAULT_LINES)
    if path.exists():
        raise ConfigError([f"command line: --output {path} is there already"])
    model = training.train_sentencepiece(list(arguments.corpus_specs().values()), vocab_size=size, lines=lines)
    training.write_model(model, path)
    tokenizer = load_tokenizer("sentencepiece", path)
    sys.stdout.write(
        f"{path}: {tokenizer.vocab_size:,} tokens; fingerprint {tokenizer.fingerprint}\n"
        f"--tokenizer.kind sentencepiece --tokenizer.path {path}\n"
    )


def print_errors(status: int, *problems: str) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
