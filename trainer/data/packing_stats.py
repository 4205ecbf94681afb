"""Statistics of the documents and segments in packed sequences."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.data.packing import PackingPlan


def between_sequences(plan: PackingPlan) -> float:
    """The share of the variance of the logarithm of segment lengths that lies between sequences,
    from 0 to 1.

    0: every sequence is a fair sample of the corpus; 1: every sequence holds segments of one
    length.
    """
    # Logarithms, because lengths differ by orders of magnitude.
    logs = plan.lengths.double().log()
    deviations = logs - logs.mean()
    total = deviations.square().sum()
    if not total:
        return 0.0
    # Analysis of variance: a group of n values whose deviations sum to s adds n (s / n)^2 = s^2 /
    # n to the sum of squares between groups.
    counts = plan.sequence_offsets.diff()
    sequence_of = torch.repeat_interleave(counts)
    sums = torch.zeros(plan.num_sequences, dtype=torch.float64).index_add_(
        0, sequence_of, deviations
    )
    return float((sums.square() / counts).sum() / total)


def packing_facts(plan: PackingPlan) -> Mapping[str, str]:
    """Facts of a plan for a report, by name."""
    segments = plan.sequence_offsets.diff()
    return {
        "sequences": f"{plan.num_sequences:,} of {plan.seq_len:,} tokens",
        "padding": f"{plan.num_padding_tokens / (plan.num_sequences * plan.seq_len):.2%}",
        "segments": f"median {int(segments.median()):,}, at most {plan.max_segments:,} a sequence",
        "length variance": f"{between_sequences(plan):.0%} between sequences",
        "dp imbalance": ", ".join(
            f"{expected_imbalance(plan, dp):.2f} over {dp} ranks" for dp in (8, 64)
        ),
    }


def sequence_pairs(plan: PackingPlan) -> Tensor:
    """[sequences] float64: (query, key) pairs of each sequence, its padding included, without
    windows.
    """

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(plan.num_sequences, dtype=torch.float64).index_add_(
            0, sequence_of, values
        )

    sequence_of = torch.repeat_interleave(plan.sequence_offsets.diff())
    lengths = plan.lengths.double()
    padding = plan.seq_len - summed(lengths)
    return summed(lengths * (lengths + 1) / 2) + padding * (padding + 1) / 2


def expected_imbalance(plan: PackingPlan, dp_size: int) -> float:
    """(query, key) pairs of the busiest rank over the mean, expected if each takes one sequence of
    a shuffled corpus.
    """
    pairs = sequence_pairs(plan).sort().values
    # The largest of dp_size independent quantiles lies below x with probability x^dp_size, so each
    # sorted sequence is the busiest with the difference of two such powers.
    ranks = torch.linspace(0, 1, len(pairs) + 1, dtype=torch.float64).pow(dp_size)
    return float((pairs * ranks.diff()).sum() / pairs.mean())
