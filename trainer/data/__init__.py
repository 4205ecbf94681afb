"""Data: text to tokens once, tokens to rows, rows to micro-batches, each a pure function of what comes before."""

from __future__ import annotations

from trainer.config import DataSection
from trainer.data.errors import DataError
from trainer.data.packing import saved_plan
from trainer.data.prepare import prepare
from trainer.data.rows import Rows
from trainer.data.tokenizer import Tokenizer

__all__ = ["DataError", "open_rows"]


def open_rows(data: DataSection, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> Rows:
    """The rows of `[data]`, prepared if they are not yet. Call it before any process group exists. Raises DataError."""
    prepared = prepare(data, tokenizer)
    plan = saved_plan(prepared, seq_len=seq_len, packing=data.packing)
    return Rows(prepared, plan, mask=data.mask, seed=seed)
