"""Metrics of a step in one device vector: one all-reduce, one copy to the host.

Shape suffixes: B sequences, S tokens on this rank.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar
from zlib import crc32

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from parallelisms.mesh.collectives import all_reduce, all_reduce_max
from parallelisms.mesh.mesh import Mesh
from trainer.metrics.loggers import format_tokens

Vector = TypeVar("Vector", Tensor, list[float])

# Upper bounds of the buckets for loss by position in the document; the last bucket is unbounded.
POSITION_EDGES = tuple(4**power for power in range(4, 11))


@dataclass(frozen=True)
class MetricLayout:
    """Names and offsets of the vector's entries."""

    num_shards: int
    """Number of context-parallel ranks."""
    num_sources: int = 1
    router_sums: int = 0
    """Number of summed statistics of all routers."""

    @property
    def widths(self) -> dict[str, int]:
        """Number of entries by name, in order."""
        by_position = dict.fromkeys(
            ("loss_by_position", "targets_by_position"), len(POSITION_EDGES) + 1
        )
        by_shard = dict.fromkeys(
            ("loss_by_shard", "targets_by_shard", "documents_by_shard"), self.num_shards
        )
        by_source = dict.fromkeys(
            ("loss_by_source", "targets_by_source", "tokens_by_source"), self.num_sources
        )
        summed = dict.fromkeys(("loss", "targets", "tokens", "pairs", "attended"), 1)
        # Set after the all-reduce; zero before.
        set_later = dict.fromkeys(("attention_imbalance", "grad_norm", "finite", "tokens_seen"), 1)
        return (
            summed | by_position | by_shard | by_source | {"routers": self.router_sums} | set_later
        )

    def split(self, vector: Vector) -> dict[str, Vector]:
        """Slices of the vector by name; views if it is a tensor."""
        widths = self.widths
        ends = accumulate(widths.values())
        return {
            name: vector[end - width : end]
            for (name, width), end in zip(widths.items(), ends, strict=True)
        }


class MetricAccumulator:
    """Accumulates the metric vector of a step without synchronizing with the device.

    In a pipeline, only the last stage adds, because it has the losses.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, *, num_sources: int = 1, router_sums: int = 0
    ) -> None:
        self.layout = MetricLayout(mesh.degrees["cp"], num_sources, router_sums)
        self._mesh = mesh
        # float64 counts exactly to 2^53; float32 would stop at 16.7 million tokens of a global
        # batch.
        self._zeros = torch.zeros(
            sum(self.layout.widths.values()), dtype=torch.float64, device=device
        )
        self._position_edges = torch.tensor(POSITION_EDGES, device=device)

    def new_vector(self, micro_batches: Sequence[Batch] = ()) -> Tensor:
        """A float64 vector of zeros, except for the checksum of the documents in this rank's
        micro-batches.

        All cp ranks must read the same ones: each computes the attention of its part from them.
        """
        vector = self._zeros.clone()
        checksum = 0
        for batch in micro_batches:
            checksum = crc32(array("i", batch.boundaries.flatten().tolist()), checksum)
        # Each cp rank fills its own entry, so that sums over dp ranks are equal if all cp ranks
        # read the same. float64 holds 32 bits exactly. `[...] = checksum` would wait for the
        # device.
        self.layout.split(vector)["documents_by_shard"][self._mesh.coordinate["cp"]].fill_(
            checksum
        )
        return vector

    def add(self, vector: Tensor, losses_BS: Tensor, batch: Batch) -> None:
        """Adds the sums of this rank's part of a batch.

        `losses_BS` is 0 where there is no target.
        """
        views = self.layout.split(vector)
        cp_rank = self._mesh.coordinate["cp"]
        losses = losses_BS.double().flatten()
        is_target = (batch.labels != IGNORE_INDEX).flatten().double()
        bucket = torch.bucketize(batch.positions.flatten(), self._position_edges, right=True)
        for name, values in (("loss", losses), ("targets", is_target)):
            total = values.sum()
            views[name] += total
            views[f"{name}_by_shard"][cp_rank] += total
            position_sums = views[f"{name}_by_position"]
            position_sums += torch.zeros_like(position_sums).index_add_(0, bucket, values)
            for sequence, (source, _) in zip(
                values.view_as(losses_BS), batch.sequence_sources, strict=False
            ):
                views[f"{name}_by_source"][source] += sequence.sum()
        views["attended"] += batch.num_computed_pairs
        # Counts of full sequences, which all cp ranks know.
        if cp_rank == 0:
            views["tokens"] += batch.num_tokens
            views["pairs"] += batch.num_pairs
            for source, tokens in batch.sequence_sources:
                views["tokens_by_source"][source] += tokens

    def all_reduce(self, vector: Tensor) -> dict[str, Tensor]:
        """Reduces the vector over the global batch in place, on every rank; returns it by name.

        Collective.
        """
        views = self.layout.split(vector)
        group = self._mesh.metrics_group
        # Before the sum replaces the counts of this rank. Imbalance is the maximum over the mean.
        max_attended = all_reduce_max(group, views["attended"].clone())
        all_reduce(group, vector)
        views["attention_imbalance"].copy_(
            max_attended * self._mesh.dp_cp_group.size() / views["attended"]
        )
        return views


def safe_divide(totals: list[float], counts: list[float]) -> list[float | None]:
    """Totals over counts, elementwise; None where the count is 0."""
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]


def finite_or_none(value: float | None) -> float | None:
    """The value; None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def position_bucket_names() -> list[str]:
    """`0-256`, `256-1K`, ..., `1M-`."""
    edges = ["0", *(format_tokens(edge) for edge in POSITION_EDGES), ""]
    return [f"{low}-{high}" for low, high in pairwise(edges)]
