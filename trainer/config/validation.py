"""`[validation]`: fixed validation sets, evaluated during training. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from trainer.config.data import DEFAULT_SOURCE
from trainer.config.sections import MAX_SEQ_LEN, PositiveInt, Section

DEFAULT_TAIL_TOKENS = 2048


def as_tuple(value: object) -> object:
    return (value,) if isinstance(value, int | str) else tuple(value) if isinstance(value, list) else value


class ValidationSetSection(Section):
    """A named validation set."""

    source: str = DEFAULT_SOURCE
    """A name in [data.sources], or `corpus` for the corpus of [data]. Of a training source, only the documents that `data.holdout` leaves out."""
    seq_len: Annotated[
        tuple[Annotated[int, Field(ge=2, le=MAX_SEQ_LEN)], ...], BeforeValidator(as_tuple), Field(min_length=1)
    ]
    """Tokens per sequence. Several lengths must ascend; all score the same targets at the end of a sequence, with more context each."""
    rows: PositiveInt = 32
    """Number of sequences, or all if there are fewer."""
    tail: PositiveInt | None = None
    """With several lengths: number of target tokens at the end of a sequence. Left out: 2048, or the shortest length."""

    @property
    def target_tokens(self) -> int:
        """The tail, or its default."""
        return self.tail or min(DEFAULT_TAIL_TOKENS, self.seq_len[0])


class ValidationSection(Section):
    interval: PositiveInt = 500
    """Steps between validations; the first precedes the first step, and one follows the last step of each stage."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], ValidationSetSection] = Field({})
    """Validation sets by name."""

    @property
    def sources(self) -> set[str]:
        return {each.source for each in self.sets.values()}
