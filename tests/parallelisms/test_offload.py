"""What blocks keep in host memory changes where it lies, and not one bit of what is computed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.transformer import Transformer
from parallelisms import offload, recompute
from parallelisms.offload import HostMemory
from tests.models.small import SMALL, TIED, gradients, packed, small_model
from tests.parallelisms.test_recompute import Calls

BATCH = packed([9, 1, 14], [24])
TOKENS = BATCH.tokens.numel()
INPUT = TOKENS * SMALL.dim * 8
OUTPUT = TOKENS * SMALL.num_heads * (SMALL.head_dim + 1) * 8
KINDS = [("inputs", False), ("inputs", True), ("inputs_and_attention", True)]


def offloaded(
    what: offload.What, *, keep_attention: bool = True, budget: int | None = None, **options: Any
) -> tuple[Transformer, HostMemory]:
    model = small_model(**options)
    host = HostMemory(inputs=SMALL.num_layers, budget=budget)
    offload.apply(model, host=host, what=what, keep_attention=keep_attention)
    return model, host


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(("what", "keep_attention"), KINDS)
def test_it_gives_the_same_bits(what: offload.What, keep_attention: bool, config: Any, dtype: torch.dtype) -> None:  # noqa: FBT001
    losses, expected = gradients(small_model(config, dtype=dtype), BATCH)
    model, _ = offloaded(what, keep_attention=keep_attention, config=config, dtype=dtype)
    for _ in range(2):
        found_losses, found = gradients(model, BATCH)
        assert torch.equal(found_losses, losses)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("what", "keep_attention"), KINDS)
def test_tiles_give_the_same_bits_and_are_computed_again_once(what: offload.What, keep_attention: bool) -> None:  # noqa: FBT001
    model, (hosted, host) = small_model(), offloaded(what, keep_attention=keep_attention)
    for each in (model, hosted):
        recompute.apply_tiles(each, mib=0)
    losses, expected = gradients(model, BATCH)
    with Calls() as calls:
        found_losses, found = gradients(hosted, BATCH)
    assert torch.equal(found_losses, losses)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (calls.tiled, calls.tiled_backward, host.held) == (SMALL.num_layers, SMALL.num_layers, 0)


@pytest.mark.parametrize(
    ("what", "keep_attention", "budget", "runs"),
    [
        ("inputs", False, None, 2 * SMALL.num_layers),
        ("inputs", True, None, SMALL.num_layers),
        ("inputs_and_attention", True, None, SMALL.num_layers),
        ("inputs_and_attention", True, 0, 2 * SMALL.num_layers),
        ("inputs_and_attention", True, 2 * INPUT + OUTPUT - 1, 2 * SMALL.num_layers),
        ("inputs_and_attention", True, 2 * INPUT + OUTPUT, 2 * SMALL.num_layers - 1),
        ("inputs_and_attention", True, 2 * INPUT + 2 * OUTPUT, SMALL.num_layers),
    ],
)
def test_attention_that_is_kept_runs_once(
    what: offload.What,
    keep_attention: bool,  # noqa: FBT001
    budget: int | None,
    runs: int,
) -> None:
    model, _ = offloaded(what, keep_attention=keep_attention, budget=budget)
    losses, expected = gradients(small_model(), BATCH)
    with Calls() as calls:
        found_losses, found = gradients(model, BATCH)
    assert (calls.forward, calls.backward) == (runs, SMALL.num_layers)
    assert torch.equal(found_losses, losses)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("what", "budget", "held"),
    [
        ("inputs", None, 2 * INPUT),
        ("inputs", 2 * INPUT - 1, INPUT),
        ("inputs", 0, 0),
        ("inputs_and_attention", None, 2 * INPUT + 2 * OUTPUT),
        ("inputs_and_attention", 2 * INPUT + OUTPUT, 2 * INPUT + OUTPUT),
        ("inputs_and_attention", 2 * INPUT, 2 * INPUT),
    ],
)
def test_the_host_holds_what_its_budget_allows_until_the_backward_pass(
    what: offload.What, budget: int | None, held: int
) -> None:
    model, host = offloaded(what, budget=budget)
    losses = model(BATCH)
    assert host.held == held
    losses.sum().backward()
    assert host.held == 0


class Outputs(TorchDispatchMode):
    """What attention gave, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        outputs = function(*arguments, **(options or {}))
        if function is torch.ops.longhaul.attention.default:
            self.seen += map(weakref.ref, outputs)
        return outputs


@pytest.mark.parametrize(("what", "kept"), [("inputs", 2 * SMALL.num_layers), ("inputs_and_attention", 0)])
def test_nothing_of_a_block_stays_on_the_device(what: offload.What, kept: int) -> None:
    model, _ = offloaded(what)
    inputs: list[weakref.ref[Tensor]] = []
    for block in model.layers():
        block.register_forward_pre_hook(lambda _, arguments: inputs.append(weakref.ref(arguments[0])))
    with Outputs() as outputs:
        losses = model(BATCH)
    assert len(inputs) == SMALL.num_layers
    assert [x for x in inputs if x() is not None] == []
    assert sum(x() is not None for x in outputs.seen) == kept
    losses.sum().backward()


def test_several_batches_may_be_between_their_passes() -> None:
    """As in a pipeline, and in any order."""
    model, host = offloaded("inputs_and_attention")
    other = packed([24], [20, 4], seed=3)
    expected: dict[str, Any] = {}
    for batch in (BATCH, other):
        plain = small_model()
        plain(batch).sum().backward()
        for name, parameter in plain.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad
    losses = [model(batch) for batch in (BATCH, other)]
    for loss in losses:
        loss.sum().backward()
    assert host.held == 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


def test_without_gradients_nothing_is_kept() -> None:
    model, host = offloaded("inputs_and_attention")
    with torch.no_grad():
        assert torch.equal(model(BATCH), small_model()(BATCH))
    assert host.held == 0


def test_what_was_kept_can_be_taken_once() -> None:
    model, _ = offloaded("inputs")
    losses = model(BATCH)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        losses.sum().backward()
