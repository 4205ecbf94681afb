"""`longhaul prepare`: tokenize corpora before a run, inspect the result."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.commands import print_lines, run_command
from trainer.config import checks
from trainer.config.data import (
    COPY_CORPUS,
    DEFAULT_SOURCE,
    HF_PREFIX,
    PACKING_VERSION,
    STDLIB_CORPUS,
)
from trainer.config.parse import load
from trainer.config.sections import is_remote
from trainer.config.source import CorpusSpec, corpus_spec, corpus_specs
from trainer.config.training_stages import Recipe
from trainer.data.corpus_files import corpus_problems
from trainer.data.own_files import is_token_dataset
from trainer.data.prepare import describe_prepared, prepare
from trainer.data.prepare_arguments import build_parser
from trainer.data.remote_corpus import upload_corpus
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import open_tokenizer
from trainer.errors import ConfigError, CorpusRefusedError
from trainer.metrics.loggers import log_plainly
from trainer.storage.object_store import RemoteFolder, reporting


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def selected_specs(config: Recipe, corpus: str | None = None) -> dict[str, CorpusSpec]:
    """The corpora to read, by name: `corpus`, or those of the configuration.

    Raises ConfigError with all problems of them and of the tokenizer.
    """
    problems = [*checks.tokenizer_problems(config.tokenizer)]
    specs = dict[str, CorpusSpec]()
    if corpus is not None:
        if not corpus or not (
            corpus.startswith(HF_PREFIX)
            or corpus == STDLIB_CORPUS
            or is_remote(corpus)
            or Path(corpus).exists()
        ):
            problems.append(f"command line: --corpus {corpus or chr(34) * 2} does not exist")
        specs = {
            Path(corpus).name: replace(corpus_spec(config.data, DEFAULT_SOURCE), corpus=corpus)
        }
    elif not (problems := problems + checks.stage_problems(config)):
        for data in (stage.config.data for stage in config.training_stages):
            problems += [*checks.data_section_problems(data), *checks.path_problems(data)]
        specs = (
            {}
            if problems
            else {
                key: each
                for key, each in corpus_specs(config).items()
                if each.corpus != COPY_CORPUS
            }
        )
        if not problems and not specs:
            problems = [f'data.corpus = "{COPY_CORPUS}" is synthetic: there is nothing to prepare']
    if problems := problems or [
        problem for spec in specs.values() for problem in corpus_problems(spec)
    ]:
        raise ConfigError([*dict.fromkeys(problems)])
    return specs


@contextmanager
def refusing() -> Iterator[None]:
    """Turns the refusal of a corpus into a wrong argument."""
    try:
        yield
    except CorpusRefusedError as error:
        raise ConfigError(error.problems) from None


def prepare_corpora(arguments: Namespace, overrides: Sequence[str]) -> None:
    log_plainly()
    config = load(overrides)
    output = arguments.output
    specs = selected_specs(config, arguments.corpus)
    if isinstance(output, str):
        prepare_at_url(config, specs, output, workers=arguments.workers)
        return
    folders = {name: output / name if output and len(specs) > 1 else output for name in specs}
    if nonempty := [
        folder
        for folder in folders.values()
        if folder and folder.exists() and any(folder.iterdir())
    ]:
        raise ConfigError([f"command line: --output {folder} is not empty" for folder in nonempty])
    tokenizer = open_tokenizer(config.tokenizer)
    for name, spec in specs.items():
        with refusing():
            dataset = prepare(spec, tokenizer, workers=arguments.workers, folder=folders[name])
        sys.stdout.write(f"{describe_prepared(dataset)}\n")


def prepare_at_url(
    config: Recipe, specs: Mapping[str, CorpusSpec], url: str, *, workers: int
) -> None:
    """Prepares corpora in their `cache_dir` and uploads them."""
    key = "command line: --output"
    # Before the work: credentials and the bucket may be wrong.
    with reporting(key, url):
        RemoteFolder(url).require_conditional_writes()
    tokenizer = open_tokenizer(config.tokenizer)
    for name, spec in specs.items():
        with refusing():
            dataset = prepare(spec, tokenizer, workers=workers)
        place = f"{url}/{name}" if len(specs) > 1 else url
        upload_corpus(dataset, place, key=key)
        print_lines(describe_prepared(dataset), f"{place}: uploaded, a corpus of any run")


def inspect(arguments: Namespace, overrides: Sequence[str]) -> None:
    from trainer.data.packing import pack_documents
    from trainer.data.prepare.report import render_report

    log_plainly()
    config = load(overrides)
    folder = arguments.folder
    if folder is None and arguments.config is None:
        raise ConfigError(["command line: inspect needs a folder or --config"])
    is_url = isinstance(folder, str)
    if folder is not None and not is_url and not is_token_dataset(folder):
        raise ConfigError([f"command line: {folder} is not a prepared folder"])
    specs = {} if folder and not is_url else selected_specs(config, folder)
    tokenizer = open_tokenizer(config.tokenizer)
    with refusing():
        datasets = (
            [TokenDataset(folder)]
            if folder and not is_url
            else [prepare(spec, tokenizer) for spec in specs.values()]
        )
    for dataset in datasets:
        plan = pack_documents(
            dataset.document_lengths,
            seq_len=config.training.seq_len,
            packing=config.data.packing,
            version=config.data.packing_version or PACKING_VERSION,
            seed=config.training.seed,
        )
        options = {"samples": arguments.samples, "verify": arguments.verify, "plan": plan}
        sys.stdout.write(render_report(dataset, tokenizer, **options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
