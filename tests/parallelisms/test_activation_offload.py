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
from parallelisms.activation_checkpoint import Pass, Recompute
from parallelisms.activation_offload import HostMemory, Kept, pieces, rounded
from parallelisms.block_recompute import Pieces
from tests.models.small_models import SMALL, gradients, packed, small_model
from tests.parallelisms.test_activation_checkpoint import BATCH, BATCHES, DEEP, Calls, assert_same_bits, kept_by

TOKENS = BATCH.tokens.numel()
INPUT = rounded(TOKENS * SMALL.dim * 8)
WIDTH, HEADS = SMALL.head_dim, SMALL.num_heads


def output(groups: int = 1) -> int:
    """Host memory of what attention gives in a block of `SMALL`."""
    heads = HEADS // groups
    return groups * (rounded(TOKENS * heads * WIDTH * 8) + rounded(TOKENS * heads * 8))


def hosted(
    *,
    policy: activation_checkpoint.Policy = "keep_attention",
    attention: bool = True,
    budget: int | None = None,
    **options: Any,
) -> tuple[Transformer, HostMemory]:
    every = options.get("every", 1)
    host = HostMemory(inputs=-(-SMALL.num_layers // every), budget=budget)
    return kept_by(Recompute(policy, host, attention, **options)), host


# ---- pieces


def test_pieces_are_powers_of_two_and_cost_a_sixteenth_at_most() -> None:
    rng = random.Random(0)
    some = [rng.randrange(1, 1 << rng.randrange(1, 40)) for _ in range(5000)]
    for size in (*range(1, 5000), *some):
        found = pieces(size)
        assert all(piece & (piece - 1) == 0 for piece in found)
        assert found == sorted(found, reverse=True)
        assert size <= sum(found) <= size + size / 16
        assert len(found) <= 5
        assert rounded(size) == sum(found)
    assert pieces(0) == []


def test_pieces_are_as_few_as_that_allows() -> None:
    assert pieces(1 << 20) == [1 << 20]
    assert pieces((1 << 20) - 1) == [1 << 20]
    assert pieces(96) == [64, 32]
    assert pieces(97) == [64, 32, 1]
    assert pieces(127 << 20) == [128 << 20]


# ---- one tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 4, 6), (1, 97, 1)])
def test_a_tensor_comes_back_as_it_was(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = HostMemory(inputs=1)
    # Also one that is not laid out in its order.
    for x in (torch.randn(*shape).to(dtype), torch.randn(*reversed(shape)).to(dtype).movedim(0, -1)):
        before = x.clone()
        kept = Kept(x, memory, "attention")
        assert memory.held == {"attention": rounded(x.nbytes)}
        x.zero_()
        for _ in range(2):
            assert torch.equal(kept.read(), before), "reading does not take"
        assert memory.held["attention"] == rounded(x.nbytes)
        kept.start()
        found = kept.take()
        assert torch.equal(found, before)
        assert (found.dtype, found.shape) == (before.dtype, before.shape)
        assert memory.held.total() == 0
        with pytest.raises(RuntimeError, match="has been taken already"):
            kept.take()


def test_without_memory_a_tensor_stays_where_it_is_until_it_is_taken() -> None:
    x = torch.ones(3)
    kept, alive = Kept(x), weakref.ref(x)
    kept.start()
    assert kept.read() is x
    assert kept.take() is x
    del x
    assert alive() is None
    with pytest.raises(RuntimeError, match="has been taken already"):
        kept.read()


def test_what_is_on_the_host_is_not_held_here_until_it_is_asked_for() -> None:
    memory = HostMemory(inputs=1)
    kept = Kept(torch.ones(3), memory)
    assert kept._here is None
    kept.start()
    first = kept._here
    kept.start()
    assert kept._here is first, "it starts once"
    kept.read()
    assert kept._here is None, "nor after it was read"


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
    model, host = hosted(attention=attention, budget=budget, every=every, pieces=Pieces(groups))
    losses = model(BATCH)
    assert (host.held["inputs"], host.held["attention"]) == held
    losses.sum().backward()
    assert host.held.total() == 0


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
    policy: activation_checkpoint.Policy,
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
        assert HostMemory(inputs=3, budget=budget).has_room(outputs, times=2, x=x) == has_room
    assert HostMemory(inputs=1, budget=32).keep_input(x)._here is None
    assert HostMemory(inputs=1, budget=31).keep_input(x)._here is x


class Watched(HostMemory):
    """Remembers the most bytes that were held at a time."""

    most = 0

    def copy_out(self, x: Tensor, kind: Any) -> list[Tensor]:
        found = super().copy_out(x, kind)
        self.most = max(self.most, self.held.total())
        return found


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_budget_is_ever_exceeded_and_none_changes_a_bit(every: int, groups: int) -> None:
    """With three batches between their passes, as in a pipeline."""
    rng, cut = random.Random(0), Pieces(groups)
    losses, expected = gradients(kept_by(Recompute("full", pieces=cut), DEEP), BATCH)
    inputs = 3 * -(-DEEP.num_layers // every)
    everything = Watched(inputs=inputs)
    all_at_once(kept_by(Recompute("keep_attention", everything, True, every, cut), DEEP))  # noqa: FBT003
    used = set()
    for budget in (0, everything.most, *(rng.randrange(everything.most) for _ in range(12))):
        host = Watched(inputs=inputs, budget=budget)
        model = kept_by(Recompute("keep_attention", host, True, every, cut), DEEP)  # noqa: FBT003
        all_at_once(model)
        used.add(host.most)
        assert host.most <= budget
        assert host.held.total() == 0
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
        most = max(most, host.held.total())
        losses.sum().backward()
    assert host.reserved == most > 0


# ---- the way back


def began(
    every: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, config: ModelConfig = DEEP, **options: Any
) -> list[str]:
    """What happens when: a block's feed-forward (-) and attention go back, and what begins its way; batches by letter."""
    told: list[str] = []
    names: dict[int, str] = {}
    start, first, back, leave = Kept.start, Pass.feed_backward, Pass.attend_backward, Pass.attend

    def named(this: Pass, x_BSE: Tensor) -> Tensor:
        number = next(passes)
        name = f"{'abc'[number // layers]}{number % layers}"
        names[id(this)] = name
        alive.append(this)
        found = leave(this, x_BSE)
        for kept, kind in ((this._input, "x"), *((kept, "o") for group in this._attended for kept in group[:1])):
            if kept is not None:
                names[id(kept)] = name + kind
                alive.append(kept)
        return found

    def starts(this: Kept) -> None:
        if this._here is None and id(this) in names:
            told.append(names[id(this)])
        start(this)

    def begins(this: Pass, grad_BSE: Tensor) -> Any:
        told.append(f"{names[id(this)]}-")
        return first(this, grad_BSE)

    def goes(this: Pass, *given: Any, **options: Any) -> Any:
        told.append(names[id(this)])
        return back(this, *given, **options)

    alive: list[Any] = []
    passes = count()
    layers = config.num_layers
    for name, function in (("attend", named), ("feed_backward", begins), ("attend_backward", goes)):
        monkeypatch.setattr(Pass, name, function)
    monkeypatch.setattr(Kept, "start", starts)
    host = HostMemory(inputs=9)
    model = kept_by(Recompute("keep_attention", host, True, every, **options), config)  # noqa: FBT003
    losses = [model(batch) for batch in BATCHES[: len(order)]]
    for index in order:
        losses[index].sum().backward()
    assert host.held.total() == 0
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
    found = began(1, (0,), monkeypatch, pieces=Pieces(2))
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
    model, _ = hosted(budget=INPUT + output(2), every=2, pieces=Pieces(2, 2000))
    for name, grad in gradients(model, batch)[1].items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)
