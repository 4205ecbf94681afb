"""Data: text to tokens once, tokens to sequences, sequences to micro-batches; each a pure function of the one before."""

from trainer.data.errors import DataError

__all__ = ["DataError"]
