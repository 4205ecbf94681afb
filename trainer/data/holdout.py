"""The rows that a run is judged by: always the same, and never those that it learns from.

A set of one length is packed as [data] says, whatever the stage is. One of several has the same targets at each of them, with more before:

    a row of the longest length    a b c d e f g h i j k l        tail 2
    fed at length 8                        e f g h i j k l        targets l and what follows
    fed at length 4                                i j k l        the same
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from models.batch import IGNORE
from trainer.config.validation import ValidationSetSection
from trainer.data.errors import DataError
from trainer.data.packed_dataset import Packed
from trainer.data.packing import Choice, Packing, Plan, saved_plan
from trainer.data.sequences import Rows
from trainer.data.token_dataset import Prepared

ORDER = 0  # the seed: not the run's, so that runs can be compared


@dataclass(frozen=True)
class HeldOut:
    """A set: its rows at each of its lengths, ascending, of which so many are read."""

    name: str
    rows: tuple[Rows, ...]
    num_rows: int

    @property
    def fingerprint(self) -> str:
        return next(iter(self.rows[0].fingerprints.values()))


class Ends(Packed):
    """The last tokens of every row of a plan of full rows, of which those of the tail are targets."""

    def __init__(self, prepared: Prepared, plan: Plan, *, length: int, tail: int) -> None:
        starts, lengths = plan.starts + plan.seq_len - length, plan.lengths - plan.seq_len + length
        super().__init__(prepared, Plan(length, 1, plan.rows, starts, lengths), seed=ORDER)
        self._context = length - tail

    def fill(self, number: int, piece: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        super().fill(number, piece, start, tokens, labels)
        labels[: max(0, self._context - start)] = IGNORE


def held_out(
    name: str,
    section: ValidationSetSection,
    prepared: Prepared,
    *,
    packing: Packing,
    mask: Literal["document", "none"],
    part: float | None,
) -> HeldOut:
    """The rows of a set, of this part of the documents; None: of all. Raises DataError if there are none."""
    *_, longest = section.seq_len
    several = len(section.seq_len) > 1
    choice = Choice(only=part, at_least=longest if several else None)
    try:
        plan = saved_plan(prepared, seq_len=longest, packing="single" if several else packing, choice=choice)
    except DataError as error:
        raise DataError(f"validation.sets.{name}: {error}") from error
    ends: list[Packed] = []
    if several:
        full = plan.lengths == longest
        starts, lengths = plan.starts[full], plan.lengths[full]
        plan = Plan(longest, 1, lengths.new_tensor(range(lengths.numel() + 1)), starts, lengths)
        ends += [Ends(prepared, plan, length=length, tail=section.targets) for length in section.seq_len]
    each = ends if several else [Packed(prepared, plan, seed=ORDER)]
    rows = tuple(
        Rows([source], seq_len=length, mask=mask, names=[section.source])
        for source, length in zip(each, section.seq_len, strict=True)
    )
    return HeldOut(name, rows, min(section.rows, plan.num_rows))
