"""Batches as collators make them: every token, label and position reaches one rank, and padding
changes nothing.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from longhaul_attention import ContextParallel, register_transformers
from longhaul_attention.batch import find_boundaries
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.longhaul_attention.test_refusals import flat_mesh
from tests.longhaul_attention.test_transformers_models import METHODS, contexts, model, run
from tests.models.dense_attention import dense, inputs
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
T = 45
Run = tuple[Tensor, Tensor, list[Tensor]]


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in (17, 1, 20, 7)])


def gathered() -> list[str]:
    """What comes back from the ranks in another way than it was given, for every method."""
    generator = torch.Generator().manual_seed(distributed.get_world_size())
    full: dict[str, Any] = {
        "input_ids": torch.randint(1000, (2, T), generator=generator),
        "position_ids": torch.stack((packed_positions(), packed_positions().roll(8))),
        "loss_weights": torch.rand(2, T, generator=generator),
        "embeddings": torch.rand(2, T, 3, generator=generator),
        "use_cache": False,
    }
    full["labels"] = full["input_ids"].where(torch.rand(2, T, generator=generator) > 0.2, -100)
    wrong = []
    for method, cp in contexts(METHODS):
        shard = cp.shard_batch(full)
        back = {
            key: cp.gather(value, shard["documents"])
            for key, value in shard.items()
            if isinstance(value, Tensor)
            and value.ndim > 1
            and key not in ("labels", "attention_mask")
        }
        expected = {
            key: full[key] for key in ("input_ids", "position_ids", "loss_weights", "embeddings")
        }
        expected["shift_labels"] = torch.cat(
            (full["labels"][:, 1:], torch.full((2, 1), -100)), dim=1
        )
        wrong += [
            f"{method}: {key}"
            for key in expected
            if key not in back or not torch.equal(back[key], expected[key])
        ]
        wrong += [f"{method}: more {key}" for key in back.keys() - expected.keys()]
        count = (expected["shift_labels"] != -100).sum() / distributed.get_world_size()
        if shard["num_items_in_batch"] != count or shard["use_cache"] is not False:
            wrong.append(f"{method}: {shard['num_items_in_batch']} instead of {count}")
        # In front one more: a loss that shifts labels itself has other lengths, and counting them
        # in either way is right.
        if (
            not torch.equal(shard["labels"][:, 1:], shard["shift_labels"])
            or (shard["labels"][:, 0] != -100).any()
        ):
            wrong.append(f"{method}: labels")
        mask = shard["attention_mask"]
        if (
            mask.shape[1] != shard["input_ids"].shape[1] + 1
            or mask[:, 0].any()
            or not mask[:, 1:].all()
        ):
            wrong.append(f"{method}: mask")
        if (
            cp.shard_batch(full | {"num_items_in_batch": 12})["num_items_in_batch"]
            != 12 / distributed.get_world_size()
        ):
            wrong.append(f"{method}: a given count")
    return wrong


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_token_label_and_position_reaches_one_rank(ranks: int) -> None:
    assert run_ranks(gathered, ranks) == [[]] * ranks


def test_targets_are_counted_whatever_the_default_type() -> None:
    """bfloat16 counts to 256, and float16 to 65,504."""
    cp = ContextParallel(None, method="ring")
    labels = torch.zeros(1, 65_537, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            count = cp.shard_batch({"input_ids": labels, "shift_labels": labels})[
                "num_items_in_batch"
            ]
        finally:
            torch.set_default_dtype(torch.float32)
        assert (count.dtype, count.item()) == (torch.float64, 65_537)


def padded_errors() -> dict[str, float]:
    """Of loss and gradients, for padding at either end, hidden by a mask, and for documents that
    are given.
    """
    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ring")
    tokens = torch.randint(40, (2, T), generator=torch.Generator().manual_seed(1))
    found = {}
    with float64_throughout():
        eager = model("Llama", "eager")
        sharded = model("Llama", "longhaul")
        for name, hidden in {
            "left": [slice(0, 6), slice(0, 1)],
            "right": [slice(40, T), slice(20, T)],
        }.items():
            mask = torch.ones_like(tokens)
            for row, part in zip(mask, hidden, strict=True):
                row[part] = 0
            predicted = mask.bool() & mask.roll(1, 1).bool()  # Not the first token after padding.
            given = {
                "input_ids": tokens,
                "attention_mask": mask,
                "labels": tokens.where(predicted, -100),
            }
            found[name] = error(run(eager, given), run(sharded, cp.shard_batch(given)), cp)
        lengths = torch.tensor([0, 9, 10, 33, T])
        positions = torch.cat([torch.arange(length) for length in lengths.diff().tolist()]).expand(
            2, -1
        )
        labels = {"input_ids": tokens, "labels": tokens}
        expected = run(eager, labels | {"position_ids": positions})
        found["given"] = error(expected, run(sharded, cp.shard_batch(labels, lengths)), cp)
    return found


def error(expected: Run, found: Run, cp: ContextParallel) -> float:
    loss = found[0]
    grads = found[2]
    for x in (loss, *grads):
        distributed.all_reduce(x)
        x /= cp.plan.cp
    pairs = zip((loss, *grads), (expected[0], *expected[2]), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_padding_and_given_documents_change_nothing() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(padded_errors, 2):
        assert found.keys() == {"left", "right", "given"}
        assert max(found.values()) < 1e-11, found


def attention_errors(method: str) -> float:
    """Of `attention`, for heads, windows, sinks and caps that differ from layer to layer."""
    ((_, cp),) = contexts((method,))
    boundaries = torch.tensor([[0, 5, 6, 40, 48], [0, 17, 48, 48, 48]], dtype=torch.int32)
    worst = 0.0
    cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((4, 4), {}), ((8, 2), {"window": 9}), ((4, 1), {"softcap": 1.5}), ((8, 2), {"window": 3}), ((8, 2), {}),
    ]  # fmt: skip
    for heads, scores in cases:
        q, k, v = inputs(boundaries, heads)[:3]
        sink = torch.linspace(-1, 1, heads[0], dtype=torch.float64) if "window" in scores else None
        expected = dense(q, k, v, boundaries, sink, **scores)[0]
        shards = [cp.shard(x.detach(), boundaries) for x in (q, k, v)]
        ours = cp.attention(shards[0], shards[1], shards[2], boundaries, sink=sink, **scores)
        found = cp.gather(ours, boundaries)
        worst = max(worst, (found - expected).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(each, marks=[] if each in ("ring", "hybrid") else pytest.mark.slow)
        for each in METHODS
    ],
)
def test_attention_takes_any_heads_windows_sinks_and_caps(method: str) -> None:
    assert max(run_ranks(attention_errors, 4, method)) < 1e-12


def test_documents_are_those_that_transformers_finds() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 9, 10, 11, 12, 13], [5, 6, 7, 8, 0, 0, 1, 2]])
    found = find_boundaries({"input_ids": tokens, "position_ids": positions}, None)
    assert found.tolist() == [[0, 3, 8, 8], [0, 4, 5, 8]]
    assert find_boundaries(
        {"input_ids": tokens, "position_ids": positions[:1, :1] + torch.arange(8)}, None
    ).tolist() == ([[0, 8]] * 2)
    lengths = torch.tensor([0, 3, 8, 12, 13, 16])
    assert find_boundaries(
        {"input_ids": tokens, "position_ids": positions, "cu_seq_lens_q": lengths}, None
    ).tolist() == (found.tolist())


def test_documents_may_be_lists_and_differ_between_sequences() -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    assert find_boundaries(batch, [0, 3, 8]).tolist() == [[0, 3, 8]] * 2
    assert find_boundaries(batch, [[0, 3, 5, 8], [0, 8]]).tolist() == [[0, 3, 5, 8], [0, 8, 8, 8]]
    assert find_boundaries(batch, torch.tensor([[0, 3, 8], [0, 8, 8]])).tolist() == [
        [0, 3, 8],
        [0, 8, 8],
    ]


def test_without_a_mesh_it_is_plain_attention() -> None:
    boundaries = torch.tensor([[0, 5, 6, 40, 48], [0, 17, 48, 48, 48]], dtype=torch.int32)
    q, k, v = inputs(boundaries, (4, 2))[:3]
    cp = ContextParallel(None, method="ring")
    shard = cp.shard_batch({"input_ids": torch.arange(96).view(2, 48)}, boundaries)
    assert torch.equal(
        cp.gather(shard["input_ids"], shard["documents"]), torch.arange(96).view(2, 48)
    )
    expected = dense(q, k, v, boundaries, window=9)[0]
    torch.testing.assert_close(
        cp.attention(q, k, v, shard["documents"], window=9), expected, rtol=1e-12, atol=1e-12
    )


def sharded_elsewhere() -> bool:
    """Whether a data loader's worker that does not share this process's memory shards a batch as
    this rank does.
    """
    cp = ContextParallel(flat_mesh(), method="ring")
    batch = {
        "input_ids": torch.arange(90).view(2, 45),
        "position_ids": packed_positions().expand(2, -1),
    }
    here, there = (each.shard_batch(batch) for each in (cp, pickle.loads(pickle.dumps(cp))))
    tokens = cp.gather(there["input_ids"], pickle.loads(pickle.dumps(there["documents"])))
    return torch.equal(here["input_ids"], there["input_ids"]) and torch.equal(
        tokens, batch["input_ids"]
    )


def test_workers_of_a_data_loader_shard_batches() -> None:
    assert run_ranks(sharded_elsewhere, 2) == [True, True]
