"""`[validation]`: what a run is judged by while it trains, on rows that stay the same. Nothing here imports torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, Field

from trainer.config.data import COPY, CORPUS, DataSection
from trainer.config.sections import LONGEST_ROW, Count, Section

LONGEST_TAIL = 2048  # tokens


def as_list(value: object) -> object:
    return (value,) if isinstance(value, int | str) else tuple(value) if isinstance(value, list) else value


class ValidationSetSection(Section):
    """A set of rows by a name of its own."""

    source: str = CORPUS
    """A name of [data.sources], or `corpus`: that of [data] itself. Of one that training draws from, only what `data.holdout` leaves out."""
    seq_len: Annotated[
        tuple[Annotated[int, Field(ge=2, le=LONGEST_ROW)], ...], BeforeValidator(as_list), Field(min_length=1)
    ]
    """Tokens in a row. Of several, ascending: the same targets, at the end of rows, with so much context."""
    rows: Count = 32
    """Rows of it, or all where there are fewer."""
    tail: Count | None = None
    """Several lengths: tokens at the end of a row that are targets. Left out: 2048, or the shortest length."""

    @property
    def targets(self) -> int:
        """The tail, also where it is left out."""
        return self.tail or min(LONGEST_TAIL, self.seq_len[0])

    def problems(self, known: list[str]) -> list[str]:
        """What is wrong with it, where sources have these names."""
        found = []
        if self.source not in known:
            found.append(f'source = "{self.source}" is not one of {", ".join(known)}')
        if any(shorter >= longer for shorter, longer in pairwise(self.seq_len)):
            found.append(f"seq_len = {[*self.seq_len]} must ascend")
        if self.tail is not None and len(self.seq_len) == 1:
            found.append(f"tail = {self.tail} has no use with one length")
        elif self.tail is not None and self.tail > min(self.seq_len):
            found.append(f"tail = {self.tail} must be at most {min(self.seq_len)}, the shortest of seq_len")
        return found


class ValidationSection(Section):
    interval: Count = 500
    """Updates between validations; the first is before the first update, and there is one after each stage's last."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], ValidationSetSection] = Field({})
    """What is validated on, by name."""

    @property
    def sources(self) -> set[str]:
        """Names of the sources that sets are from."""
        return {each.source for each in self.sets.values()}

    def problems(self, data: DataSection) -> list[str]:
        known = [CORPUS, *data.sources]
        found = {name: each.problems(known) for name, each in self.sets.items()}
        for name, each in self.sets.items():
            if each.source == CORPUS and data.corpus == COPY:
                found[name].append(f'source = "{CORPUS}" is "{COPY}", which shows no row twice')
        return [f"validation.sets.{name}: {problem}" for name, problems in found.items() for problem in problems]
