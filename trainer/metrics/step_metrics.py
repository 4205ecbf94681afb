"""What an update measures: one vector on the device, summed over ranks at once and read by the host at once.

Shape suffixes: B rows, S tokens on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from parallelisms.collectives import largest_over, sum_over
from parallelisms.mesh import Mesh

Vector = TypeVar("Vector", Tensor, list[float])

# Losses are also reported by position in the document: below 256, below 1K, ..., and the rest.
POSITIONS = tuple(4**power for power in range(4, 11))


@dataclass(frozen=True)
class Slots:
    """Which number of the vector is which."""

    shards: int
    """Ranks that share a row's tokens."""
    sources: int = 1

    @property
    def widths(self) -> dict[str, int]:
        """Every name, and how many numbers it has, in their order."""
        buckets = len(POSITIONS) + 1
        sums = {
            "loss": 1,
            "targets": 1,
            "tokens": 1,
            "pairs": 1,
            "attended": 1,
            "loss_by_position": buckets,
            "targets_by_position": buckets,
            "loss_by_shard": self.shards,
            "targets_by_shard": self.shards,
            "loss_by_source": self.sources,
            "targets_by_source": self.sources,
            "tokens_by_source": self.sources,
        }
        # Of the whole mesh: zero until the sums are there.
        return sums | {"attention_imbalance": 1, "grad_norm": 1, "finite": 1, "tokens_seen": 1}

    def parts(self, vector: Vector) -> dict[str, Vector]:
        """The vector by name; parts of a tensor are views, through which it is written."""
        ends = accumulate(self.widths.values())
        return {name: vector[end - width : end] for (name, width), end in zip(self.widths.items(), ends, strict=True)}


class Tally:
    """Fills the vector of an update, from this rank's place in the mesh. Nothing here waits for the device.

    Of a pipeline's stages the last one adds, since it has the losses.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *, sources: int = 1) -> None:
        self.slots = Slots(mesh.degrees["cp"], sources)
        self._mesh = mesh
        self._empty = torch.zeros(sum(self.slots.widths.values()), dtype=torch.float64, device=device)
        self._edges = torch.tensor(POSITIONS, device=device)

    def begin(self) -> Tensor:
        """The vector of an update that has no batches yet: float64."""
        return self._empty.clone()

    def add(self, vector: Tensor, losses_BS: Tensor, batch: Batch) -> None:
        """Adds this rank's part of a batch to the sums over the global batch."""
        parts, shard = self.slots.parts(vector), self._mesh.place["cp"]
        losses = losses_BS.double().flatten()
        is_target = (batch.labels != IGNORE).flatten().double()
        bucket = torch.bucketize(batch.positions.flatten(), self._edges, right=True)
        for name, values in (("loss", losses), ("targets", is_target)):
            total = values.sum()
            parts[name] += total
            parts[f"{name}_by_shard"][shard] += total
            by_position = parts[f"{name}_by_position"]
            by_position += torch.zeros_like(by_position).index_add_(0, bucket, values)
            for row, (source, _) in zip(values.view_as(losses_BS), batch.sources, strict=False):
                parts[f"{name}_by_source"][source] += row.sum()
        parts["attended"] += batch.attended
        if shard == 0:  # These are of whole rows, which the ranks that share them count once.
            parts["tokens"] += batch.num_tokens
            parts["pairs"] += batch.num_pairs
            for source, tokens in batch.sources:
                parts["tokens_by_source"][source] += tokens

    def sum_over_ranks(self, vector: Tensor) -> dict[str, Tensor]:
        """Makes the sums those of the global batch, on every rank, and returns the vector by name."""
        parts, group = self.slots.parts(vector), self._mesh.numbers
        busiest = largest_over(group, parts["attended"].clone())
        sum_over(group, vector)
        parts["attention_imbalance"].copy_(busiest * self._mesh.tokens.size() / parts["attended"])
        return parts


def means(totals: list[float], counts: list[float]) -> list[float | None]:
    """One by one; None where nothing was counted."""
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]


def finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not finite is null."""
    return value if value is not None and math.isfinite(value) else None


def position_names() -> list[str]:
    """`0-256`, `256-1K`, ..., `1M-`."""
    names = ["0", *(_short(edge) for edge in POSITIONS), ""]
    return [f"{low}-{high}" for low, high in pairwise(names)]


def _short(number: int) -> str:
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)
