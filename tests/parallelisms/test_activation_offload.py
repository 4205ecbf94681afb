"""Activation offload: host buffers, budgets and prefetching."""

from __future__ import annotations

import random
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.dry_run import dry_run
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint, activation_offload
from parallelisms.activation_checkpoint import BlockActivations, RecomputeConfig
from parallelisms.activation_offload import (
    HostActivationPool,
    OffloadStreams,
    SavedTensor,
    allocated_size,
    buffer_sizes,
)
from parallelisms.block_recompute import Tiling
from tests.models.small_models import SMALL, gradients, packed, small_model
from tests.parallelisms.test_activation_checkpoint import (
    BATCH,
    BATCHES,
    DEEP,
    Calls,
    assert_same_bits,
    model_with,
)
from tests.trace.small_steps import configured
from trainer.step.build import residual_bytes

TOKENS = BATCH.tokens.numel()
INPUT = allocated_size(TOKENS * SMALL.dim * 8)
WIDTH = SMALL.head_dim
HEADS = SMALL.num_heads


def output(groups: int = 1) -> int:
    """Host bytes of the attention output of one block of `SMALL`."""
    heads = HEADS // groups
    return groups * (
        allocated_size(TOKENS * heads * WIDTH * 8) + allocated_size(TOKENS * heads * 8)
    )


def model_with_host_pool(
    *,
    policy: activation_checkpoint.RecomputePolicy = "keep_attention",
    attention: bool = True,
    budget: int | None = None,
    **options: Any,
) -> tuple[Transformer, HostActivationPool]:
    every = options.get("blocks_per_checkpoint", 1)
    host = HostActivationPool(max_inputs=-(-SMALL.num_layers // every), budget=budget)
    return model_with(RecomputeConfig(policy, host, attention, **options)), host


# ---- host buffers


def test_buffer_sizes_are_powers_of_two_and_waste_at_most_a_sixteenth() -> None:
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


def test_buffers_are_few() -> None:
    assert buffer_sizes(1 << 20) == [1 << 20]
    assert buffer_sizes((1 << 20) - 1) == [1 << 20]
    assert buffer_sizes(96) == [64, 32]
    assert buffer_sizes(97) == [64, 32, 1]
    assert buffer_sizes(127 << 20) == [128 << 20]


# ---- memory that is reserved


def test_inputs_take_memory_that_a_thread_has_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, bool]] = []
    devices: list[torch.device] = []

    def host_buffer(size: int, *, pinned: bool) -> Tensor:
        made.append((threading.current_thread().name, size, pinned))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(activation_offload, "_host_buffer", host_buffer)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    inputs = [torch.full((96,), float(number)) for number in range(3)]
    sizes = buffer_sizes(inputs[0].nbytes)
    assert len(sizes) == 2
    host = HostActivationPool(max_inputs=3, budget=2 * sum(sizes))
    host.reserve_inputs(inputs[0].nbytes, torch.device("cuda", 1))
    saved = [host.save_input(x) for x in inputs]
    assert devices == [torch.device("cuda", 1)]
    assert made == [("pinned memory_0", size, True) for size in 2 * sizes], "the budget has two"
    assert host.reserved_bytes == 2 * sum(sizes)
    assert [each.pop()[0].item() for each in saved] == [0, 1, 2]
    host.save_input(inputs[2]).pop()
    SavedTensor(torch.ones(2), host, "attention")
    assert len(made) == 5, "buffers are used again, and attention's are made when it needs them"


LAYOUTS = {
    "": 1,
    "parallelism.cp=2 training.seq_len=1021": 2,
    "parallelism.tp=2": 2,
    "parallelism.tp=2 parallelism.sequence_parallel=false": 2,
    "parallelism.cp=2 parallelism.tp=2 training.seq_len=1001": 4,
    "training.micro_batch_size=2 training.global_batch_size=4 training.dtype=bfloat16": 1,
    "parallelism.pp=2 model.num_layers=4 training.global_batch_size=4": 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_an_input_is_known_before_the_first_step(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(f"memory.recompute=full memory.offload=inputs {layout}")
    seen = set[int]()

    def save_input(_: HostActivationPool, x: Tensor) -> SavedTensor:
        seen.add(x.nbytes)
        return SavedTensor(x)

    monkeypatch.setattr(HostActivationPool, "save_input", save_input)
    dry_run(config, LAYOUTS[layout])
    assert seen == {residual_bytes(config)}


# ---- one tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 4, 6), (1, 97, 1)])
def test_offloaded_tensor_is_restored_bitwise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = HostActivationPool(max_inputs=1)
    # Contiguous, and not contiguous.
    for x in (
        torch.randn(*shape).to(dtype),
        torch.randn(*reversed(shape)).to(dtype).movedim(0, -1),
    ):
        before = x.clone()
        kept = SavedTensor(x, memory, "attention")
        assert memory.used_bytes == {"attention": allocated_size(x.nbytes)}
        x.zero_()
        for _ in range(2):
            assert torch.equal(kept.read(), before), "read does not release"
        assert memory.used_bytes["attention"] == allocated_size(x.nbytes)
        kept.prefetch()
        found = kept.pop()
        assert torch.equal(found, before)
        assert (found.dtype, found.shape) == (before.dtype, before.shape)
        assert memory.used_bytes.total() == 0
        with pytest.raises(RuntimeError, match="already used by a backward pass"):
            kept.pop()


def test_saved_tensor_without_pool_stays_on_the_device_until_pop() -> None:
    x = torch.ones(3)
    kept = SavedTensor(x)
    alive = weakref.ref(x)
    kept.prefetch()
    assert kept.read() is x
    assert kept.pop() is x
    del x
    assert alive() is None
    with pytest.raises(RuntimeError, match="already used by a backward pass"):
        kept.read()


def test_offloaded_tensor_is_on_the_device_only_between_prefetch_and_read() -> None:
    memory = HostActivationPool(max_inputs=1)
    kept = SavedTensor(torch.ones(3), memory)
    assert kept._device_tensor is None
    kept.prefetch()
    first = kept._device_tensor
    kept.prefetch()
    assert kept._device_tensor is first, "prefetch record_prefetch once"
    kept.read()
    assert kept._device_tensor is None, "read drops the device tensor"


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
def test_budget_serves_inputs_first_and_then_attention_outputs(
    *,
    attention: bool,
    every: int,
    groups: int,
    budget: int | None,
    held: tuple[int, int],
) -> None:
    model, host = model_with_host_pool(
        attention=attention, budget=budget, blocks_per_checkpoint=every, tiling=Tiling(groups)
    )
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
def test_attention_is_recomputed_only_beyond_the_budget(
    *,
    policy: activation_checkpoint.RecomputePolicy,
    attention: bool,
    budget: int | None,
    runs: int,
) -> None:
    model, _ = model_with_host_pool(policy=policy, attention=attention, budget=budget)
    with Calls() as calls:
        model(BATCH).sum().backward()
    assert (calls.forward, calls.backward) == (runs, SMALL.num_layers)


def test_headroom_counts_whole_buffers() -> None:
    """127 bytes take a buffer of 128, and 31 one of 32."""
    outputs = [torch.empty(127, dtype=torch.uint8)]
    x = torch.empty(31, dtype=torch.uint8)
    for budget, has_room in ((2 * 128 + 3 * 32, True), (2 * 128 + 3 * 32 - 1, False)):
        assert (
            HostActivationPool(max_inputs=3, budget=budget).has_headroom(
                outputs, head_groups=2, x=x
            )
            == has_room
        )
    assert HostActivationPool(max_inputs=1, budget=32).save_input(x)._device_tensor is None
    assert HostActivationPool(max_inputs=1, budget=31).save_input(x)._device_tensor is x


class PeakRecordingPool(HostActivationPool):
    """Records the peak of the used bytes."""

    peak = 0

    def offload(self, x: Tensor, kind: Any) -> list[Tensor]:
        found = super().offload(x, kind)
        self.peak = max(self.peak, self.used_bytes.total())
        return found


@pytest.mark.parametrize(
    ("groups", "every"),
    [
        (1, 1),
        (2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 2), (2, 1), (4, 1), (4, 2)]
        ),
    ],
)
def test_any_budget_is_respected_and_results_are_bitwise_equal(every: int, groups: int) -> None:
    """With three batches in flight, as in a pipeline."""
    rng = random.Random(0)
    cut = Tiling(groups)
    losses, expected = gradients(model_with(RecomputeConfig("full", tiling=cut), DEEP), BATCH)
    inputs = 3 * -(-DEEP.num_layers // every)
    everything = PeakRecordingPool(max_inputs=inputs)
    run_batches_in_flight(
        model_with(RecomputeConfig("keep_attention", everything, True, every, cut), DEEP)  # noqa: FBT003
    )
    used = set()
    for budget in (0, everything.peak, *(rng.randrange(everything.peak) for _ in range(12))):
        host = PeakRecordingPool(max_inputs=inputs, budget=budget)
        model = model_with(RecomputeConfig("keep_attention", host, True, every, cut), DEEP)  # noqa: FBT003
        run_batches_in_flight(model)
        used.add(host.peak)
        assert host.peak <= budget
        assert host.used_bytes.total() == 0
        found_losses, found = gradients(model, BATCH)
        assert torch.equal(found_losses, losses)
        assert_same_bits(found, expected)
    assert everything.peak in used
    assert len(used) > 5


def run_batches_in_flight(model: Transformer) -> None:
    for losses in [model(batch) for batch in BATCHES]:
        losses.sum().backward()


def test_host_buffers_are_reused() -> None:
    model, host = model_with_host_pool(budget=2 * INPUT + output(2))
    peak = 0
    for _ in range(3):
        losses = model(BATCH)
        peak = max(peak, host.used_bytes.total())
        losses.sum().backward()
    assert host.reserved_bytes == peak > 0


# ---- prefetching


def backward_events(
    every: int,
    order: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    config: ModelConfig = DEEP,
    **options: Any,
) -> list[str]:
    """The order of backward events: a batch letter and block index, with "-" for the feed-forward
    half, nothing for the attention half, "x" or "o" for the prefetch of the input or the attention
    output.
    """
    events: list[str] = []
    names: dict[int, str] = {}
    start = SavedTensor.prefetch
    first = BlockActivations.feed_forward_backward
    back = BlockActivations.attention_backward
    leave = BlockActivations.attention_forward

    def name_tensors(this: BlockActivations, x_BSE: Tensor) -> Tensor:
        number = next(forward_count)
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

    def record_prefetch(this: SavedTensor) -> None:
        if this._device_tensor is None and id(this) in names:
            events.append(names[id(this)])
        start(this)

    def record_feed_forward(this: BlockActivations, grad_BSE: Tensor) -> Any:
        events.append(f"{names[id(this)]}-")
        return first(this, grad_BSE)

    def record_attention(this: BlockActivations, *given: Any, **options: Any) -> Any:
        events.append(names[id(this)])
        return back(this, *given, **options)

    alive: list[Any] = []
    forward_count = count()
    layers = config.num_layers
    for name, function in (
        ("attention_forward", name_tensors),
        ("feed_forward_backward", record_feed_forward),
        ("attention_backward", record_attention),
    ):
        monkeypatch.setattr(BlockActivations, name, function)
    monkeypatch.setattr(SavedTensor, "prefetch", record_prefetch)
    host = HostActivationPool(max_inputs=9)
    model = model_with(RecomputeConfig("keep_attention", host, True, every, **options), config)  # noqa: FBT003
    losses = [model(batch) for batch in BATCHES[: len(order)]]
    for index in order:
        losses[index].sum().backward()
    assert host.used_bytes.total() == 0
    return events


def test_activations_are_prefetched_during_the_backward_of_the_next_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = backward_events(1, (0,), monkeypatch)
    assert found == [
        "a2-",
        "a2x",
        "a2o",
        "a2",
        "a1x",
        "a1o",
        "a1-",
        "a1",
        "a0x",
        "a0o",
        "a0-",
        "a0",
    ]


def test_prefetch_of_a_recomputed_input_fetches_the_saved_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks 0 and 2 of three save their input; a0o is read to recompute the input of block 1, and
    released later.
    """
    found = backward_events(2, (0,), monkeypatch)
    assert found == [
        "a2-",
        "a2x",
        "a2o",
        "a2",
        "a0x",
        "a1o",
        "a1-",
        "a0o",
        "a1",
        "a0o",
        "a0-",
        "a0",
    ]
    found = backward_events(3, (0,), monkeypatch, replace(DEEP, num_layers=4))
    assert found[:7] == ["a3-", "a3x", "a3o", "a3", "a0x", "a2o", "a2-"], (
        "also from two blocks before"
    )


def test_attention_outputs_of_head_groups_are_not_prefetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = backward_events(1, (0,), monkeypatch, tiling=Tiling(2))
    behind = ["a1x", "a1-", "a1o", "a1o", "a1", "a0x", "a0-", "a0o", "a0o", "a0"]
    assert found == ["a2-", "a2x", "a2o", "a2o", "a2", *behind]


def test_reverse_order_of_batches_prefetches_within_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = backward_events(1, (1, 0), monkeypatch)
    assert [name for name in found if len(name) == 2] == ["b2", "b1", "b0", "a2", "a1", "a0"]
    assert found[found.index("b0") + 1 :][:3] == ["a2-", "a2x", "a2o"], (
        "no prefetch of another batch before its turn"
    )


def test_prefetch_never_crosses_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline, which runs backward in the order of the batches."""
    found = backward_events(1, (0, 1, 2), monkeypatch)
    of_one = ["2-", "2x", "2o", "2", "1x", "1o", "1-", "1", "0x", "0o", "0-", "0"]
    assert found == [f"{batch}{what}" for batch in "abc" for what in of_one]


def test_gradients_are_equal_with_a_small_budget_and_tiles() -> None:
    """With host memory for the attention output of half the blocks."""
    batch = packed([24], [20, 4], seed=3)
    expected = gradients(small_model(), batch)[1]
    model, _ = model_with_host_pool(
        budget=INPUT + output(2), blocks_per_checkpoint=2, tiling=Tiling(2, 2000)
    )
    for name, grad in gradients(model, batch)[1].items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


# ---- streams


class NoStream:
    """In the place of a CUDA stream, which only orders work on the device."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self) -> NoStream:
        return self


def test_a_tensor_lives_until_its_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy stream may still write to memory that nobody reads: a saved tensor dropped after
    `prefetch`.
    """
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    streams = OffloadStreams(torch.device("cpu"))
    for copy in (streams.reload, streams.offload):
        target = torch.empty(4)
        alive = weakref.ref(target)
        copy([(target, torch.ones(4))])
        del target
        assert alive() is not None
        streams.wait()
        assert alive() is None
