"""Replica check: weights and moments that several ranks hold as copies must be bitwise equal on
all of them.

HSDP copies every shard over dp_replicate; tensor parallelism copies norms and other whole weights
over tp. Copies start equal and get equal gradients, so a difference is silent data corruption or a
missing all-reduce.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from socket import gethostname
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from parallelisms.mesh.collectives import all_gather_values, num_replicas, to_local

T = TypeVar("T")

CHUNK_ELEMENTS = 1 << 20
"""Words hashed at once: two temporary tensors of 8 MiB."""
MULTIPLIER = 6364136223846793005
"""Base of the hash, from Knuth's MMIX generator: its powers modulo 2^64 are odd and do not
repeat.
"""
MAX_NAMED_TENSORS = 3
MAX_NAMED_RANKS = 8


@dataclass(frozen=True)
class DriftedRank:
    """A rank whose copies differ from the majority's; if no value has a majority, every rank that
    holds the tensor.
    """

    rank: int
    host: str
    num_tensors: int
    first_tensors: list[str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} in {self.num_tensors} of its tensors ({', '.join(self.first_tensors)})"


def find_drifted_ranks(state: Mapping[str, Tensor]) -> list[DriftedRank]:
    """Compares the copies of every tensor; the same result on all ranks.

    Collective. Waits for the device.
    """
    hashes = _hash_copies(state)
    # Copies usually agree, so ranks first exchange one digest for each set of ranks, and details
    # only if some differ.
    digests = {
        ranks: blake2b(repr(each).encode(), digest_size=16).hexdigest()
        for ranks, each in hashes.items()
    }
    gathered = _gather_by_ranks(digests)
    differing = {
        ranks
        for each in gathered
        for ranks, digest in each.items()
        # The first holder is the reference only for whether copies differ; the majority then says
        # which are wrong.
        if digest != gathered[ranks[0]][ranks]
    }
    if not differing:
        return []
    hosts = all_gather_values(gethostname())
    details = _gather_by_ranks(
        {ranks: each for ranks, each in hashes.items() if ranks in differing}
    )
    tensors_by_rank: defaultdict[int, list[str]] = defaultdict(list)
    for ranks in differing:
        for name in details[ranks[0]][ranks]:
            values = [details[rank][ranks][name] for rank in ranks]
            # Of two copies that differ neither has a majority, and both ranks are named.
            majority = next(
                (value for value, count in Counter(values).items() if 2 * count > len(ranks)), None
            )
            for rank, value in zip(ranks, values, strict=True):
                if value != majority:
                    tensors_by_rank[rank].append(name)
    found = sorted(tensors_by_rank.items())
    return [
        DriftedRank(rank, hosts[rank], len(names), sorted(names)[:MAX_NAMED_TENSORS])
        for rank, names in found
    ]


def _gather_by_ranks(values: Mapping[tuple[int, ...], T]) -> list[dict[tuple[int, ...], T]]:
    """Every rank's values by the ranks that hold the same copies. Collective."""
    rows: list[Any] = [[list(ranks), value] for ranks, value in values.items()]
    return [{tuple(ranks): value for ranks, value in each} for each in all_gather_values(rows)]


def _hash_copies(state: Mapping[str, Tensor]) -> dict[tuple[int, ...], dict[str, int]]:
    """Hashes of the local shards that other ranks hold too, by those ranks and name."""
    copies = {name: x for name, x in state.items() if num_replicas(x) > 1}
    device = next(iter(state.values())).device
    powers = hash_powers(device)
    # All hashes reach the host in one copy: one wait for the device instead of one for each
    # tensor. The empty slice stands in for no copies.
    values = torch.cat(
        [powers[:0], *(polynomial_hash(to_local(x), powers) for x in copies.values())]
    ).tolist()
    hashes: defaultdict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for (name, x), value in zip(copies.items(), values, strict=True):
        hashes[_ranks_of_copies(x)][name] = value
    return hashes


def hash_powers(device: torch.device) -> Tensor:
    """[CHUNK_ELEMENTS] int64: the powers of `MULTIPLIER` that `polynomial_hash` takes."""
    return torch.full((CHUNK_ELEMENTS,), MULTIPLIER, dtype=torch.int64, device=device).cumprod(0)


def polynomial_hash(x: Tensor, powers: Tensor) -> Tensor:
    """Hash of the bits of `x` modulo 2^64: [1], int64. Integer sums are exact in any order."""
    total = powers.new_zeros(1)
    # Words of bits, not values: a hash of values would not tell 0.0 from -0.0, or one NaN from
    # another.
    for words in (
        x.reshape(-1).view(torch.int16 if x.itemsize == 2 else torch.int32).split(CHUNK_ELEMENTS)
    ):
        # A polynomial in an odd base, which is invertible modulo 2^64: if one word changes, the
        # hash does. Wrap-around of int64 is the modulus.
        total = total * powers[-1] + (words * powers[: words.numel()]).sum()
    return total


def _ranks_of_copies(x: Tensor) -> tuple[int, ...]:
    """The ranks that hold the same shard of a DTensor as this rank."""
    mesh = cast(Any, x).device_mesh
    coordinates = zip(cast(Any, x).placements, mesh.get_coordinate(), strict=True)
    # Copies lie along the replicated mesh dimensions; along the sharded ones this rank's
    # coordinate is fixed.
    index = tuple(slice(None) if placement.is_replicate() else at for placement, at in coordinates)
    return tuple(mesh.mesh[index].flatten().tolist())
