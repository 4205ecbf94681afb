"""What blocks keep in host memory: so much of it, in pieces, back in time, and never more than is allowed."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import BlockActivations, RecomputeConfig
from parallelisms.activation_offload import HostActivationPool, SavedTensor, allocated_size, buffer_sizes
from parallelisms.block_recompute import Tiling
from tests.models.small_models import SMALL, gradients, packed, small_model
from tests.parallelisms.test_activation_checkpoint import BATCH, BATCHES, DEEP, Calls, assert_same_bits, kept_by

TOKENS = BATCH.tokens.numel()
INPUT = allocated_size(TOKENS * SMALL.dim * 8)
WIDTH, HEADS = SMALL.head_dim, SMALL.num_heads


def output(groups: int = 1) -> int:
    """Host memory of what attention gives in a block of `SMALL`."""
    heads = HEADS // groups
    return groups * (allocated_size(TOKENS * heads * WIDTH * 8) + allocated_size(TOKENS * heads * 8))


def hosted(
    *,
    policy: activation_checkpoint.RecomputePolicy = "keep_attention",
    attention: bool = True,
    budget: int | None = None,
    **options: Any,
) -> tuple[Transformer, HostActivationPool]:
    every = options.get("every", 1)
    host = HostActivationPool(max_inputs=-(-SMALL.num_layers // every), budget=budget)
    return kept_by(RecomputeConfig(policy, host, attention, **options)), host


# ---- pieces


def test_pieces_are_powers_of_two_and_cost_a_sixteenth_at_most() -> None:
    rng = random.Random(0)
    some = [rng.randrange(1, 1 << rng.randrange(1, 40)) for _ in range(5000)]
    for size in (*range(1, 5000), *some):
        found = buffer_sizes(size)
        assert all(piece & (piece - 1) == 0 for piece in found)
        assert found == sorted(found, reverse=True)
        assert size <= sum(found) <= size + size / 16
        assert len(found) <= 5
        assert allocated_size(size) == sum(found)
    assert buffer_sizes(0) == []


def test_pieces_are_as_few_as_that_allows() -> None:
    assert buffer_sizes(1 << 20) == [1 << 20]
    assert buffer_sizes((1 << 20) - 1) == [1 << 20]
    assert buffer_sizes(96) == [64, 32]
    assert buffer_sizes(97) == [64, 32, 1]
    assert buffer_sizes(127 << 20) == [128 << 20]


# ---- one tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 4, 6), (1, 97, 1)])
def test_a_tensor_comes_back_as_it_was(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = HostActivationPool(max_inputs=1)
    # Also one that is not laid out in its order.
    for x in (torch.randn(*shape).to(dtype), torch.randn(*reversed(shape)).to(dtype).movedim(0, -1)):
        before = x.clone()
        kept = SavedTensor(x, memory, "attention")
        assert memory.used_bytes == {"attention": allocated_size(x.nbytes)}
        x.zero_()
        for _ in range(2):
            assert torch.equal(kept.read(), before), "reading does not take"
        assert memory.used_bytes["attention"] == allocated_size(x.nbytes)
        kept.prefetch()
        found = kept.pop()
        assert torch.equal(found, before)
        assert (found.dtype, found.shape) == (before.dtype, before.shape)
        assert memory.used_bytes.total() == 0
        with pytest.raises(RuntimeError, match="has been taken already"):
            kept.pop()


def test_without_memory_a_tensor_stays_where_it_is_until_it_is_taken() -> None:
    x = torch.ones(3)
    kept, alive = SavedTensor(x), weakref.ref(x)
    kept.prefetch()
    assert kept.read() is x
    assert kept.pop() is x
    del x
    assert alive() is None
    with pytest.raises(RuntimeError, match="has been taken already"):
        kept.read()


def test_what_is_on_the_host_is_not_held_here_until_it_is_asked_for() -> None:
    memory = HostActivationPool(max_inputs=1)
    kept = SavedTensor(torch.ones(3), memory)
    assert kept._device_tensor is None
    kept.prefetch()
    first = kept._device_tensor
    kept.prefetch()
    assert kept._device_tensor is first, "it starts once"
    kept.read()
    assert kept._device_tensor is None, "nor after it was read"


# ---- budgets


@pytest.mark.parametrize(
    ("attention", "every", "groups", "budget", "held"),
    [
        (False, 1, 1, None, (2 * INPUT, 0)),
        (False, 2, 1, None, (INPUT, 0)),
        (False, 1, 1, 2 * INPUT, (2 * INPUT, 0)),
        (False, 1, 1, 2 * INPUT - 1, (INPUT, 0)),
        (False, 1, 1, INPUT - 1, (0, 0)),
        (False, 1, 1, 0, (0, 0)),
        (True, 1, 1, None, (2 * INPUT, 2 * output())),
        (True, 2, 2, None, (INPUT, 2 * output(2))),
        (True, 1, 1, 2 * INPUT + 2 * output(), (2 * INPUT, 2 * output())),
        (True, 1, 1, 2 * INPUT + 2 * output() - 1, (2 * INPUT, output())),
        (True, 1, 1, 2 * INPUT + output(), (2 * INPUT, output())),
        (True, 1, 1, 2 * INPUT + output() - 1, (2 * INPUT, 0)),
        (True, 2, 1, INPUT + output(), (INPUT, output())),
        (True, 2, 2, INPUT + output(2), (INPUT, output(2))),
        (True, 1, 2, 2 * INPUT + output(2) - 1, (2 * INPUT, 0)),
        (True, 1, 1, INPUT + output(), (2 * INPUT, 0)),
    ],
)
def test_the_host_holds_inputs_first_and_then_what_attention_gave(
    *,
    attention: bool,
    every: int,
    groups: int,
    budget: int | None,
    held: tuple[int, int],
) -> None:
    model, host = hosted(attention=attention, budget=budget, every=every, pieces=Tiling(groups))
    losses = model(BATCH)
    assert (host.used_bytes["inputs"], host.used_bytes["attention"]) == held
    losses.sum().backward()
    assert host.used_bytes.total() == 0


@pytest.mark.parametrize(
    ("policy", "attention", "budget", "runs"),
    [
        ("full", False, None, 4),
        ("keep_attention", False, 0, 2),
        ("keep_attention", True, None, 2),
        ("keep_attention", True, 0, 4),
        ("keep_attention", True, 2 * INPUT + output() - 1, 4),
        ("keep_attention", True, 2 * INPUT + output(), 3),
        ("keep_attention", True, 2 * INPUT + 2 * output(), 2),
    ],
)
def test_attention_runs_again_only_where_it_found_no_room(
    *,
    policy: activation_checkpoint.RecomputePolicy,
    attention: bool,
    budget: int | None,
    runs: int,
) -> None:
    model, _ = hosted(policy=policy, attention=attention, budget=budget)
    with Calls() as calls:
        model(BATCH).sum().backward()
    assert (calls.forward, calls.backward) == (runs, SMALL.num_layers)


def test_room_is_counted_in_pieces() -> None:
    """127 bytes take 128, and 31 take 32."""
    outputs, x = [torch.empty(127, dtype=torch.uint8)], torch.empty(31, dtype=torch.uint8)
    for budget, has_room in ((2 * 128 + 3 * 32, True), (2 * 128 + 3 * 32 - 1, False)):
        assert HostActivationPool(max_inputs=3, budget=budget).has_room(outputs, head_groups=2, x=x) == has_room
    assert HostActivationPool(max_inputs=1, budget=32).save_input(x)._device_tensor is None
    assert HostActivationPool(max_inputs=1, budget=31).save_input(x)._device_tensor is x


class Watched(HostActivationPool):
    """Remembers the most bytes that were held at a time."""

    most = 0

    def copy_out(self, x: Tensor, kind: Any) -> list[Tensor]:
        found = super().offload(x, kind)
        self.most = max(self.most, self.used_bytes.total())
        return found


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_budget_is_ever_exceeded_and_none_changes_a_bit(every: int, groups: int) -> None:
    """With three batches between their passes, as in a pipeline."""
    rng, cut = random.Random(0), Tiling(groups)
    losses, expected = gradients(kept_by(RecomputeConfig("full", tiling=cut), DEEP), BATCH)
    inputs = 3 * -(-DEEP.num_layers // every)
    everything = Watched(max_inputs=inputs)
    all_at_once(kept_by(RecomputeConfig("keep_attention", everything, True, every, cut), DEEP))  # noqa: FBT003
    used = set()
    for budget in (0, everything.most, *(rng.randrange(everything.most) for _ in range(12))):
        host = Watched(max_inputs=inputs, budget=budget)
        model = kept_by(RecomputeConfig("keep_attention", host, True, every, cut), DEEP)  # noqa: FBT003
        all_at_once(model)
        used.add(host.most)
        assert host.most <= budget
        assert host.used_bytes.total() == 0
        found_losses, found = gradients(model, BATCH)
        assert torch.equal(found_losses, losses)
        assert_same_bits(found, expected)
    assert everything.most in used
    assert len(used) > 5


def all_at_once(model: Transformer) -> None:
    for losses in [model(batch) for batch in BATCHES]:
        losses.sum().backward()


def test_memory_of_the_host_is_got_once_and_used_again() -> None:
    model, host = hosted(budget=2 * INPUT + output(2))
    most = 0
    for _ in range(3):
        losses = model(BATCH)
        most = max(most, host.used_bytes.total())
        losses.sum().backward()
    assert host.reserved_bytes == most > 0


# ---- the way back


def began(
    every: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, config: ModelConfig = DEEP, **options: Any
) -> list[str]:
    """What happens when: a block's feed-forward (-) and attention go back, and what begins its way; batches by letter."""
    told: list[str] = []
    names: dict[int, str] = {}
    start, first, back, leave = (
        SavedTensor.prefetch,
        BlockActivations.feed_forward_backward,
        BlockActivations.attention_backward,
        BlockActivations.attention_forward,
    )

    def named(this: BlockActivations, x_BSE: Tensor) -> Tensor:
        number = next(passes)
        name = f"{'abc'[number // layers]}{number % layers}"
        names[id(this)] = name
        alive.append(this)
        found = leave(this, x_BSE)
        for kept, kind in (
            (this._saved_input, "x"),
            *((kept, "o") for group in this._saved_attention for kept in group[:1]),
        ):
            if kept is not None:
                names[id(kept)] = name + kind
                alive.append(kept)
        return found

    def starts(this: SavedTensor) -> None:
        if this._device_tensor is None and id(this) in names:
            told.append(names[id(this)])
        start(this)

    def begins(this: BlockActivations, grad_BSE: Tensor) -> Any:
        told.append(f"{names[id(this)]}-")
        return first(this, grad_BSE)

    def goes(this: BlockActivations, *given: Any, **options: Any) -> Any:
        told.append(names[id(this)])
        return back(this, *given, **options)

    alive: list[Any] = []
    passes = count()
    layers = config.num_layers
    for name, function in (
        ("attention_forward", named),
        ("feed_forward_backward", begins),
        ("attention_backward", goes),
    ):
        monkeypatch.setattr(BlockActivations, name, function)
    monkeypatch.setattr(SavedTensor, "prefetch", starts)
    host = HostActivationPool(max_inputs=9)
    model = kept_by(RecomputeConfig("keep_attention", host, True, every, **options), config)  # noqa: FBT003
    losses = [model(batch) for batch in BATCHES[: len(order)]]
    for index in order:
        losses[index].sum().backward()
    assert host.used_bytes.total() == 0
    return told


def test_a_block_s_tensors_come_back_while_the_one_behind_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = began(1, (0,), monkeypatch)
    assert found == ["a2-", "a2x", "a2o", "a2", "a1x", "a1o", "a1-", "a1", "a0x", "a0o", "a0-", "a0"]


def test_where_an_input_is_made_again_that_of_the_block_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three blocks, the first and the third keep theirs; a0o is read once to make a1's input, and taken later."""
    found = began(2, (0,), monkeypatch)
    assert found == ["a2-", "a2x", "a2o", "a2", "a0x", "a1o", "a1-", "a0o", "a1", "a0o", "a0-", "a0"]
    found = began(3, (0,), monkeypatch, replace(DEEP, num_layers=4))
    assert found[:7] == ["a3-", "a3x", "a3o", "a3", "a0x", "a2o", "a2-"], "also from two blocks before"


def test_groups_wait_for_their_turn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = began(1, (0,), monkeypatch, pieces=Tiling(2))
    behind = ["a1x", "a1-", "a1o", "a1o", "a1", "a0x", "a0-", "a0o", "a0o", "a0"]
    assert found == ["a2-", "a2x", "a2o", "a2o", "a2", *behind]


def test_the_batch_that_went_last_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = began(1, (1, 0), monkeypatch)
    assert [name for name in found if len(name) == 2] == ["b2", "b1", "b0", "a2", "a1", "a0"]
    assert found[found.index("b0") + 1 :][:3] == ["a2-", "a2x", "a2o"], "nothing of another batch before its turn"


def test_no_batch_comes_back_while_the_one_before_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline, where batches go back in the order in which they came."""
    found = began(1, (0, 1, 2), monkeypatch)
    of_one = ["2-", "2x", "2o", "2", "1x", "1o", "1-", "1", "0x", "0o", "0-", "0"]
    assert found == [f"{batch}{what}" for batch in "abc" for what in of_one]


def test_gradients_are_the_same_with_little_of_it_and_tiles() -> None:
    """As a run has it where the host is small: half of the blocks find room for what attention gave."""
    batch = packed([24], [20, 4], seed=3)
    expected = gradients(small_model(), batch)[1]
    model, _ = hosted(budget=INPUT + output(2), every=2, pieces=Tiling(2, 2000))
    for name, grad in gradients(model, batch)[1].items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)
