"""`python -m trainer.data.prepare`: tokenize corpora before a run, inspect the result, train a tokenizer."""

from __future__ import annotations

import logging
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from trainer.config import checks
from trainer.config.data import COPY_CORPUS, DEFAULT_SOURCE, HF_PREFIX, STDLIB_CORPUS
from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.data.prepare import prepare
from trainer.data.source import CorpusSpec, corpus_spec, corpus_specs
from trainer.data.token_dataset import TokenDataset, is_token_dataset
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import (
    EXIT_BAD_CONFIG,
    EXIT_FAILURE,
    EXIT_NO_RETRY,
    EXIT_SUCCESS,
    ConfigError,
    DataError,
    RankFailedError,
)

DESCRIPTIONS = {
    "prepare": """\
Tokenize every corpus of a configuration, as the launch of a run does; the run then reuses the result.
An interrupted command resumes where it stopped.

Other commands, each with its own --help:
  inspect [FOLDER]  show counts, document lengths and samples of a prepared corpus
  train-tokenizer   train a sentencepiece BPE on a sample of the corpora""",
    "inspect": """\
Show counts, document lengths and samples of a prepared folder, or of the corpora of a configuration.""",
    "train-tokenizer": """\
Train a sentencepiece BPE on a sample of the corpora. The same text gives the same model.""",
}
EPILOG = """\
--section.key VALUE sets any key of the configuration; ./run_train.sh --help lists them.
Exit codes: 0 success, 2 bad configuration or arguments, 78 unusable data, 1 a worker was killed.
"""


class PrepareParser(ArgumentParser):
    """Raises ConfigError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message).replace("expected one argument", "needs a value")
        message = message.replace("the following arguments are required:", f"{self.prog.split()[-1]} needs")
        raise ConfigError([f"command line: {message}"])


def build_parser(command: str) -> PrepareParser:
    parser = PrepareParser(
        prog=f"python -m trainer.data.prepare {command}".removesuffix(" prepare"),
        usage=f"%(prog)s{' [FOLDER]' if command == 'inspect' else ''} [options] [--section.key VALUE]...",
        description=DESCRIPTIONS[command],
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    config_help = "a TOML file, or the name of one in train_configs/; default: debug"
    parser.add_argument("--config", metavar="NAME|PATH", help=config_help)
    if command == "inspect":
        parser.add_argument("--verify", action="store_true", help="read all tokens and compare their checksums")
        parser.add_argument("--samples", metavar="N", type=positive_integer, default=3, help="default: 3")
        return parser
    corpus_help = (
        f"instead of the corpora of the configuration: {STDLIB_CORPUS}, a file or folder of text, .jsonl or .parquet "
        f"(each may be .gz or .zst), or {HF_PREFIX}NAME[,split=NAME][,config=NAME][,data_files=PATH]"
    )
    parser.add_argument("--corpus", help=corpus_help)
    if command == "prepare":
        workers_help = "processes, which do not change the result; default: 1"
        parser.add_argument("--workers", metavar="N", type=positive_integer, default=1, help=workers_help)
        output_help = (
            "the folder to create, which a run can name as its corpus; for several corpora, the folder to hold one "
            "folder each. Default: in data.cache_dir, where a run looks for it"
        )
        parser.add_argument("--output", metavar="FOLDER", type=Path, help=output_help)
        return parser
    size_help, lines_help = "tokens, special ones included", "lines to sample from all of the text; default: 100000"
    parser.add_argument("--vocab-size", metavar="N", type=positive_integer, required=True, help=size_help)
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="the model to create")
    parser.add_argument("--lines", metavar="N", type=positive_integer, default=100_000, help=lines_help)
    return parser


def positive_integer(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise ArgumentTypeError(f"{text} must be an integer, at least 1")
    return int(text)


def main(argv: Sequence[str]) -> int:
    remaining = [*argv]
    command = remaining.pop(0) if remaining and remaining[0] in DESCRIPTIONS else "prepare"
    if {"-h", "--help"}.intersection(remaining):
        sys.stdout.write(build_parser(command).format_help())
        return EXIT_SUCCESS
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # argparse would take the value of a configuration key for an optional positional argument.
    has_folder = command == "inspect" and remaining and not remaining[0].startswith("-")
    folder = Path(remaining.pop(0)) if has_folder else None
    try:
        arguments, overrides = build_parser(command).parse_known_args(remaining)
        config = load([*overrides, *(["--config", arguments.config] if arguments.config is not None else [])])
        if command == "inspect":
            inspect(config, arguments, folder)
        elif command == "train-tokenizer":
            train_tokenizer(config, arguments)
        else:
            prepare_corpora(config, arguments)
    except ConfigError as error:
        return print_errors(EXIT_BAD_CONFIG, *error.problems)
    except DataError as error:
        return print_errors(EXIT_NO_RETRY, str(error))
    except RankFailedError as error:
        return print_errors(error.status, str(error))
    except KeyboardInterrupt:
        return print_errors(EXIT_FAILURE, "interrupted; run the same command again to resume")
    return EXIT_SUCCESS


def selected_specs(config: Recipe, corpus: str | None, problems: Sequence[str] = ()) -> dict[str, CorpusSpec]:
    """The corpora to read, by name: `corpus`, or those of the configuration.

    Raises ConfigError with what is wrong with them and with the `problems` found before.
    """
    if corpus is not None:
        if not corpus.startswith(HF_PREFIX) and corpus != STDLIB_CORPUS and not Path(corpus).exists():
            problems = [*problems, f"command line: --corpus {corpus} does not exist"]
        specs = {Path(corpus).name: replace(corpus_spec(config.data, DEFAULT_SOURCE), corpus=corpus)}
    else:
        problems = [*problems, *checks.stage_problems(config)]
        sections = [] if problems else [stage.config.data for stage in config.training_stages]
        problems += dict.fromkeys(
            problem
            for each in sections
            for problem in (*checks.data_section_problems(each), *checks.path_problems(each))
        )
        all_specs = {} if problems else corpus_specs(config)
        specs = {name: each for name, each in all_specs.items() if each.corpus != COPY_CORPUS}
        if not problems and not specs:
            problems = [f'data.corpus = "{COPY_CORPUS}" is synthetic: there is nothing to prepare']
    if problems:
        raise ConfigError([*problems])
    return specs


def prepare_corpora(config: Recipe, arguments: Namespace) -> None:
    specs, output = (
        selected_specs(config, arguments.corpus, [*checks.tokenizer_problems(config.tokenizer)]),
        arguments.output,
    )
    folders = {name: output / name if output and len(specs) > 1 else output for name in specs}
    if nonempty := [folder for folder in folders.values() if folder and folder.exists() and any(folder.iterdir())]:
        raise ConfigError([f"command line: --output {folder} is not empty" for folder in nonempty])
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    for name, spec in specs.items():
        dataset = prepare(spec, tokenizer, workers=arguments.workers, folder=folders[name])
        sys.stdout.write(
            f"{dataset.folder}: {dataset.num_tokens:,} tokens, {dataset.num_documents:,} documents, "
            f"{dataset.meta.skipped:,} skipped; fingerprint {dataset.fingerprint}\n"
        )


def inspect(config: Recipe, arguments: Namespace, folder: Path | None) -> None:
    from trainer.data.prepare.report import render_report

    if folder is None and arguments.config is None:
        raise ConfigError(["command line: inspect needs a folder or --config"])
    if folder is not None and not is_token_dataset(folder):
        raise ConfigError([f"command line: {folder} is not a prepared folder"])
    specs = {} if folder else selected_specs(config, None, [*checks.tokenizer_problems(config.tokenizer)])
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    datasets = [TokenDataset(folder)] if folder else [prepare(spec, tokenizer) for spec in specs.values()]
    for dataset in datasets:
        sys.stdout.write(render_report(dataset, tokenizer, samples=arguments.samples, verify=arguments.verify))


def train_tokenizer(config: Recipe, arguments: Namespace) -> None:
    from trainer.data.prepare import train_tokenizer as training

    path = arguments.output
    if path.exists():
        raise ConfigError([f"command line: --output {path} exists"])
    specs = [*selected_specs(config, arguments.corpus).values()]
    model = training.train_sentencepiece(specs, vocab_size=arguments.vocab_size, lines=arguments.lines)
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
