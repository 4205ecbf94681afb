"""Data: text to tokens once, tokens to rows, rows to micro-batches, each a pure function of what comes before."""

from __future__ import annotations

from trainer.config import COPY, Config, DataSection
from trainer.data.copy import CopyRows
from trainer.data.errors import DataError
from trainer.data.packing import saved_plan
from trainer.data.prepare import prepare
from trainer.data.rows import Rows
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["DataError", "open_rows", "rows_of", "sources_of"]


def rows_of(config: Config) -> Rows | CopyRows:
    """The rows of a run; text is tokenized first. Call it before any process group exists.

    Raises DataError, and ConfigError if the model has no row for a token of the tokenizer's.
    """
    data, training = config.data, config.training
    if data.corpus == COPY:
        return CopyRows(
            vocab_size=config.model.build().vocab_size,
            period=data.copy_period or training.seq_len // 2,
            seq_len=training.seq_len,
            num_rows=training.steps * training.global_batch_size,
            seed=training.seed,
        )
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocabulary(tokenizer.vocab_size)
    return open_rows(data, tokenizer, seq_len=training.seq_len, seed=training.seed)


def open_rows(data: DataSection, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> Rows:
    """The rows of `[data]`, prepared if they are not yet. Call it before any process group exists. Raises DataError."""
    prepared = prepare(_source(data), tokenizer)
    plan = saved_plan(prepared, seq_len=seq_len, packing=data.packing)
    return Rows(prepared, plan, mask=data.mask, seed=seed)


def sources_of(config: Config) -> dict[str, Source]:
    """Every corpus of a run, by its name."""
    return {"corpus": _source(config.data)}


def _source(data: DataSection) -> Source:
    return Source(
        corpus=data.corpus,
        documents=data.documents,
        max_document=data.max_document,
        bad_files=data.bad_files,
        cache_dir=data.cache_dir,
    )
