"""Collectives: the result on every rank, and unchanged inputs."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from parallelisms.mesh import collectives, host_staging, values
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

RANKS = 3


def rank_values(rank: int, *shape: int) -> Tensor:
    """A non-contiguous tensor whose values encode rank and position."""
    return (
        (100.0 * rank + torch.arange(float(torch.Size(shape).numel())).view(shape))
        .mT.contiguous()
        .mT
    )


def run_all(dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """Results of every collective by name, for inputs from `rank_values`."""
    rank = distributed.get_rank()
    group = distributed.new_group(backend=backend)
    x = rank_values(rank, 2, 5).to(dtype)
    parts = rank_values(rank, RANKS, 2, 5).to(dtype)
    before = x.clone(), parts.clone()
    # Two in flight at once, as in a backward.
    first = collectives.ring_shift(x, group)
    second = collectives.ring_shift(-x, group)
    found: dict[str, Any] = {
        "ring_shift": (first.wait(), second.wait()),
        "ring_shift_all_to_all": collectives.ring_shift_all_to_all(x, group).wait(),
        "all_gather": collectives.all_gather_async(x, group).wait(),
        "reduce_scatter": collectives.reduce_scatter_async(parts, group).wait(),
        "all_to_all": collectives.all_to_all_async(parts, group).wait(),
        "all_gather_values": collectives.all_gather_values({"rank": rank}, group),
    }
    assert torch.equal(x, before[0])
    assert torch.equal(parts, before[1])
    for x in (*found["ring_shift"], *(x for x in found.values() if isinstance(x, Tensor))):
        assert x.is_contiguous()
        assert x.dtype == dtype
    largest = torch.tensor([float(rank), -float(rank)], dtype=dtype)
    summed = torch.tensor([1.0, float(rank)], dtype=dtype)
    assert collectives.all_reduce_max(group, largest) is largest
    assert collectives.all_reduce(group, summed) is summed
    found |= {"all_reduce_max": largest, "all_reduce": summed}
    found["max_over_ranks"] = collectives.max_over_ranks(group, [float(rank), -float(rank)])
    return found


@pytest.mark.parametrize("backend", ["gloo", host_staging.BACKEND])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_collective_returns_its_definition(dtype: torch.dtype, backend: str) -> None:
    by_rank = run_ranks(run_all, RANKS, dtype, backend)
    x = torch.stack([rank_values(rank, 2, 5) for rank in range(RANKS)]).to(dtype)
    parts = torch.stack([rank_values(rank, RANKS, 2, 5) for rank in range(RANKS)]).to(dtype)
    for rank, found in enumerate(by_rank):
        before = (rank - 1) % RANKS
        assert torch.equal(found["ring_shift"][0], x[before])
        assert torch.equal(found["ring_shift"][1], -x[before])
        assert torch.equal(found["ring_shift_all_to_all"], x[before])
        assert torch.equal(found["all_gather"], x)
        near = 0 if dtype == torch.float64 else 2**-7
        torch.testing.assert_close(
            found["reduce_scatter"].double(), parts[:, rank].double().sum(0), rtol=near, atol=0
        )
        assert torch.equal(found["all_to_all"], parts[:, rank])
        assert found["all_gather_values"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["all_reduce_max"].tolist() == [2.0, 0.0]
        assert found["all_reduce"].tolist() == [3.0, 3.0]
        assert found["max_over_ranks"] == [2.0, 0.0]


def staged_in_flight() -> tuple[list[float], list[list[float]]]:
    """The result of an all-gather before it is waited for, and after, of a tensor that changes
    once it is on its way.
    """
    group = distributed.new_group(backend=host_staging.BACKEND)
    x = torch.full((2,), float(group.rank()))
    in_flight = collectives.all_gather_async(x, group)
    before = in_flight.result.fill_(-1.0).flatten().tolist()
    x.fill_(-2.0)
    distributed.barrier(group)
    return before, in_flight.wait().tolist()


def test_tensors_leave_for_the_host_at_the_call_and_come_back_at_the_wait() -> None:
    for before, after in run_ranks(staged_in_flight, RANKS):
        assert before == [-1.0] * (2 * RANKS)
        assert after == [[float(rank)] * 2 for rank in range(RANKS)]


def single_rank_errors() -> list[str]:
    """Errors of ring shifts on one rank; all-gather and reduce-scatter work."""
    group = init_device_mesh("cpu", (RANKS, 1)).get_group(1)
    x = torch.ones(4)
    errors = []
    for rotate in (collectives.ring_shift, collectives.ring_shift_all_to_all):
        with pytest.raises(ValueError, match="at least 2 ranks") as raised:
            rotate(x, group)
        errors.append(str(raised.value))
    assert torch.equal(collectives.all_gather_async(x, group).wait(), x[None])
    assert torch.equal(collectives.reduce_scatter_async(x[None], group).wait(), x)
    return errors


def test_ring_shift_needs_two_ranks() -> None:
    for errors in run_ranks(single_rank_errors, RANKS):
        assert errors == ["a ring shift needs at least 2 ranks"] * 2


def resolve_by_name() -> tuple[list[list[int]], str]:
    """The ranks of the groups resolved by name, and the error for an unknown name."""
    mesh = init_device_mesh("cpu", (1, RANKS))
    groups = [mesh.get_group(axis) for axis in (0, 1)]
    assert [collectives.resolve_process_group(group.group_name) for group in groups] == groups
    assert len({group.group_name for group in groups}) == 2
    with pytest.raises((LookupError, RuntimeError, ValueError)) as raised:
        collectives.resolve_process_group("nobody")
    return [distributed.get_process_group_ranks(group) for group in groups], str(raised.value)


def test_process_groups_are_resolved_by_name() -> None:
    """With a private function of torch: fails when it is gone."""
    for rank, (ranks, errors) in enumerate(run_ranks(resolve_by_name, RANKS)):
        assert ranks == [[rank], [0, 1, 2]]
        assert re.search("nobody", errors)


def deprecation_warnings() -> list[str]:
    """Deprecation warnings of collectives that torch deprecation_warnings."""
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collectives.all_gather_async(torch.ones(2), group).wait()
        collectives.reduce_scatter_async(torch.ones(RANKS, 2), group).wait()
    return [str(warning.message) for warning in caught]


def test_no_collective_uses_a_deprecated_name() -> None:
    assert run_ranks(deprecation_warnings, RANKS) == [[]] * RANKS


# ---- values

VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**70),
    -0.0,
    1e-310,
    float("inf"),
    float("-inf"),
    "",
    "\udc80 \n \0 é 中",
    [],
    {},
    {"a": [1, {"b": [None, 2.5]}], "": "x" * 3_000_000},
]


def exchange_values() -> list[tuple[list[str], list[str]]]:
    """Each rank sends other values; what all get, and what rank 0 gets, as text, which tells -0.0
    from 0.
    """
    rank = distributed.get_rank()
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    found = []
    for number in range(len(VALUES)):
        value = VALUES[(number + rank) % len(VALUES)]
        found.append(
            (
                [*map(repr, collectives.all_gather_values(value))],
                [*map(repr, collectives.gather_values(value, group))],
            )
        )
    return found


def test_values_of_every_kind_and_length_arrive_unchanged() -> None:
    expected = [
        [repr(VALUES[(number + rank) % len(VALUES)]) for rank in range(RANKS)]
        for number in range(len(VALUES))
    ]
    for rank, found in enumerate(run_ranks(exchange_values, RANKS)):
        assert [everywhere for everywhere, _ in found] == expected
        assert [gathered for _, gathered in found] == (
            expected if rank == 0 else [[]] * len(VALUES)
        )


def values_of_groups() -> tuple[list[str], list[str], bool]:
    """Of groups of one rank and of two, and that a value that is not a number arrives."""
    rank = distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    alone = init_device_mesh("cpu", (4, 1)).get_group(1)
    (nan,) = collectives.all_gather_values(float("nan"), alone)
    sent = collectives.all_gather_values([float("nan")])[1][0]
    pair = collectives.all_gather_values(f"rank {rank}", mesh.get_group("outer"))
    return pair, collectives.all_gather_values(f"rank {rank}", alone), nan != nan and sent != sent


def test_a_group_exchanges_values_of_its_own_ranks() -> None:
    for rank, (pair, alone, is_nan) in enumerate(run_ranks(values_of_groups, 4)):
        assert pair == [f"rank {rank % 2}", f"rank {rank % 2 + 2}"]
        assert alone == [f"rank {rank}"]
        assert is_nan


def scatter_from_rank_zero() -> list[float]:
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    parts = [torch.full((2,), float(rank)) for rank in range(RANKS)]
    return collectives.scatter(
        torch.empty(2), parts if group.rank() == 0 else None, group
    ).tolist()


def test_scatter_gives_every_rank_its_part() -> None:
    assert run_ranks(scatter_from_rank_zero, RANKS) == [[float(rank)] * 2 for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), r"\(1, 2\) is a tuple"),
        ([{"a": {1, 2}}], r"\{1, 2\} is a set"),
        (Path("x"), "is a PosixPath"),
        ({1: "a"}, "the key 1 is a int"),
        ([torch.float32], "torch.float32 is a dtype"),
        (b"abc", "is a bytes"),
    ],
)
def test_a_value_that_json_has_no_word_for_is_an_error_of_its_sender(
    value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        values.encode(value)


class Hostile:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Announced(bytes):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return 1 << 40


def receive_from_a_stranger(content: bytes) -> str:
    """What this rank says when rank 1 sends `content` for a value."""

    def send(value: object) -> bytes:
        del value
        return Announced() if content == b"announced" else content

    if distributed.get_rank() == 1:
        collectives.encode = send  # type: ignore[attr-defined]
    try:
        return str(collectives.all_gather_values("honest"))
    except values.ValueExchangeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a pickle", "what rank 1 sent is not JSON"),
        (b"\xff\xfe", "what rank 1 sent is not JSON"),
        (b'{"a": 1', "what rank 1 sent is not JSON"),
        (b"[" * 100_000, "what rank 1 sent is not JSON"),
        (b"1" * 5_000, "what rank 1 sent is not JSON"),
        (b"", "rank 1 sends a value of 0 bytes; allowed are 1 to 67,108,864"),
        (
            b"announced",
            "rank 1 sends a value of 1,099,511,627,776 bytes; allowed are 1 to 67,108,864",
        ),
    ],
    ids=["pickle", "no text", "cut", "nested", "number", "empty", "announced"],
)
def test_what_a_stranger_sends_is_refused_and_never_run(
    tmp_path: Path, content: bytes, message: str
) -> None:
    if content == b"a pickle":
        content = pickle.dumps(Hostile(tmp_path / "run"))
    for said in run_ranks(receive_from_a_stranger, 2, content):
        assert message in said
    assert not (tmp_path / "run").exists()


def send_more_than_all_may() -> str:
    collectives.MAX_VALUES_BYTES = 1000
    with pytest.raises(values.ValueExchangeError) as raised:
        collectives.all_gather_values("x" * 598 * distributed.get_rank())
    return str(raised.value)


def test_the_values_of_all_ranks_are_bounded_together() -> None:
    allowed = "allowed are 1,000 for all of them"
    assert (
        run_ranks(send_more_than_all_may, 2)
        == [f"2 ranks send values of up to 600 bytes; {allowed}"] * 2
    )
