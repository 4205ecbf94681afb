"""`[validation]`: what a run is judged by while it trains, on rows that stay the same. Nothing here imports torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, Field

from trainer.config.data import COPY_CORPUS, DEFAULT_SOURCE, DataSection
from trainer.config.sections import MAX_SEQ_LEN, PositiveInt, Section

DEFAULT_TAIL_TOKENS = 2048  # tokens


def as_tuple(value: object) -> object:
    return (value,) if isinstance(value, int | str) else tuple(value) if isinstance(value, list) else value


class ValidationSetSection(Section):
    """A set of rows by a name of its own."""

    source: str = DEFAULT_SOURCE
    """A name of [data.sources], or `corpus`: that of [data] itself. Of one that training draws from, only what `data.holdout` leaves out."""
    seq_len: Annotated[
        tuple[Annotated[int, Field(ge=2, le=MAX_SEQ_LEN)], ...], BeforeValidator(as_tuple), Field(min_length=1)
    ]
    """Tokens in a row. Of several, ascending: the same targets, at the end of rows, with so much context."""
    rows: PositiveInt = 32
    """Rows of it, or all where there are fewer."""
    tail: PositiveInt | None = None
    """Several lengths: tokens at the end of a row that are targets. Left out: 2048, or the shortest length."""

    @property
    def target_tokens(self) -> int:
        """The tail, also where it is left out."""
        return self.tail or min(DEFAULT_TAIL_TOKENS, self.seq_len[0])

    def problems(self, source_names: list[str]) -> list[str]:
        """What is wrong with it, where sources have these names."""
        problems = []
        if self.source not in source_names:
            problems.append(f'source = "{self.source}" is not one of {", ".join(source_names)}')
        if any(shorter >= longer for shorter, longer in pairwise(self.seq_len)):
            problems.append(f"seq_len = {[*self.seq_len]} must ascend")
        if self.tail is not None and len(self.seq_len) == 1:
            problems.append(f"tail = {self.tail} has no use with one length")
        elif self.tail is not None and self.tail > min(self.seq_len):
            problems.append(f"tail = {self.tail} must be at most {min(self.seq_len)}, the shortest of seq_len")
        return problems


class ValidationSection(Section):
    interval: PositiveInt = 500
    """Updates between validations; the first is before the first update, and there is one after each stage's last."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], ValidationSetSection] = Field({})
    """What is validated on, by name."""

    @property
    def sources(self) -> set[str]:
        """Names of the sources that sets are from."""
        return {each.source for each in self.sets.values()}

    def problems(self, data: DataSection) -> list[str]:
        source_names = [DEFAULT_SOURCE, *data.sources]
        problems_by_set = {name: each.problems(source_names) for name, each in self.sets.items()}
        for name, each in self.sets.items():
            if each.source == DEFAULT_SOURCE and data.corpus == COPY_CORPUS:
                problems_by_set[name].append(
                    f'source = "{DEFAULT_SOURCE}" is "{COPY_CORPUS}", which shows no row twice'
                )
        return [
            f"validation.sets.{name}: {problem}" for name, problems in problems_by_set.items() for problem in problems
        ]
