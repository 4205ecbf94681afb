"""The door to communication: what every rank gets, and that what is handed in stays as it is."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from parallelisms import collectives
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

RANKS = 3


def held(rank: int, *shape: int) -> Tensor:
    """Numbers that tell a rank and a place, not laid out in their order."""
    return (100.0 * rank + torch.arange(float(torch.Size(shape).numel())).view(shape)).mT.contiguous().mT


def everything(dtype: torch.dtype) -> dict[str, Any]:
    """By name, what a rank got for `held(rank, ...)`."""
    rank = distributed.get_rank()
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    some, parts = held(rank, 2, 5).to(dtype), held(rank, RANKS, 2, 5).to(dtype)
    before = some.clone(), parts.clone()
    # Two on their way at once, as in a backward pass.
    first, second = collectives.ring_shift(some, group), collectives.ring_shift(-some, group)
    found: dict[str, Any] = {
        "rotate": (first.wait(), second.wait()),
        "rotate_all_to_all": collectives.ring_shift_all_to_all(some, group).wait(),
        "gather": collectives.all_gather_async(some, group).wait(),
        "reduce_scatter": collectives.reduce_scatter(parts, group),
        "exchange": collectives.all_to_all_async(parts, group).wait(),
        "gather_over": collectives.all_gather_object({"rank": rank}, group),
    }
    assert torch.equal(some, before[0])
    assert torch.equal(parts, before[1])
    for x in (*found["rotate"], *(x for x in found.values() if isinstance(x, Tensor))):
        assert x.is_contiguous()
        assert x.dtype == dtype
    largest = torch.tensor([float(rank), -float(rank)], dtype=dtype)
    summed = torch.tensor([1.0, float(rank)], dtype=dtype)
    assert collectives.all_reduce_max(group, largest) is largest
    assert collectives.all_reduce(group, summed) is summed
    found |= {"largest_over": largest, "sum_over": summed}
    found["max_over"] = collectives.max_over_ranks(group, [float(rank), -float(rank)])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_collective_does_what_its_name_says(dtype: torch.dtype) -> None:
    by_rank = run_ranks(everything, RANKS, dtype)
    some = torch.stack([held(rank, 2, 5) for rank in range(RANKS)]).to(dtype)
    parts = torch.stack([held(rank, RANKS, 2, 5) for rank in range(RANKS)]).to(dtype)
    for rank, found in enumerate(by_rank):
        before = (rank - 1) % RANKS
        assert torch.equal(found["rotate"][0], some[before])
        assert torch.equal(found["rotate"][1], -some[before])
        assert torch.equal(found["rotate_all_to_all"], some[before])
        assert torch.equal(found["gather"], some)
        near = 0 if dtype == torch.float64 else 2**-7
        torch.testing.assert_close(found["reduce_scatter"].double(), parts[:, rank].double().sum(0), rtol=near, atol=0)
        assert torch.equal(found["exchange"], parts[:, rank])
        assert found["gather_over"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["largest_over"].tolist() == [2.0, 0.0]
        assert found["sum_over"].tolist() == [3.0, 3.0]
        assert found["max_over"] == [2.0, 0.0]


def of_one_rank() -> list[str]:
    """What is said where a rank has no neighbour; and that gathering from one's own works."""
    group = init_device_mesh("cpu", (RANKS, 1)).get_group(1)
    x = torch.ones(4)
    said = []
    for rotate in (collectives.ring_shift, collectives.ring_shift_all_to_all):
        with pytest.raises(ValueError, match="neighbour") as raised:
            rotate(x, group)
        said.append(str(raised.value))
    assert torch.equal(collectives.all_gather_async(x, group).wait(), x[None])
    assert torch.equal(collectives.reduce_scatter(x[None], group), x)
    return said


def test_a_ring_of_one_rank_has_no_neighbour() -> None:
    for said in run_ranks(of_one_rank, RANKS):
        assert said == ["a ring of one rank has no neighbour to send to"] * 2


def by_name() -> tuple[list[list[int]], str]:
    """The ranks of the groups that names give, which must be the same objects; and what an unknown name says."""
    mesh = init_device_mesh("cpu", (1, RANKS))
    groups = [mesh.get_group(axis) for axis in (0, 1)]
    assert [collectives.resolve_process_group(group.group_name) for group in groups] == groups
    assert len({group.group_name for group in groups}) == 2
    with pytest.raises((LookupError, RuntimeError, ValueError)) as raised:
        collectives.resolve_process_group("nobody")
    return [distributed.get_process_group_ranks(group) for group in groups], str(raised.value)


def test_a_group_is_found_by_its_name() -> None:
    """Through a private function of torch: this says when it is no longer there."""
    for rank, (ranks, said) in enumerate(run_ranks(by_name, RANKS)):
        assert ranks == [[rank], [0, 1, 2]]
        assert re.search("nobody", said)


def renamed() -> list[str]:
    """Warnings of what was renamed between versions of torch."""
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collectives.all_gather_async(torch.ones(2), group).wait()
        collectives.reduce_scatter(torch.ones(RANKS, 2), group)
    return [str(warning.message) for warning in caught]


def test_no_collective_goes_by_a_name_that_torch_warns_of() -> None:
    assert run_ranks(renamed, RANKS) == [[]] * RANKS
