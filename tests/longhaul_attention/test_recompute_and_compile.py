"""Gradient checkpointing of transformers, and torch.compile, on sharded batches."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from longhaul_attention import ContextParallel, register_transformers
from tests.longhaul_attention.test_refusals import flat_mesh
from tests.longhaul_attention.test_transformers_models import batch, model
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks


def gradients(trained: Any, shard: dict[str, Any], forward: Any = None) -> list[Tensor]:
    loss = (trained if forward is None else forward)(**shard).loss
    trained.zero_grad()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in trained.parameters())]


def checkpointed(name: str, method: str) -> float:
    """The largest difference from a run without checkpoints, with and without re-entry."""
    # transformers 5 has another name for checkpoints.
    warnings.simplefilter("ignore")
    register_transformers()
    cp = ContextParallel(flat_mesh(), method=method)
    trained = model(name, "longhaul").train()
    shard = cp.shard_batch(batch(packed=True))
    expected = gradients(trained, shard)
    found = []
    for reentrant in (False, True):
        trained.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            trained.enable_input_require_grads()
        found.append(gradients(trained, shard))
    return max(
        (a - b).abs().max().item() for one in found for a, b in zip(one, expected, strict=True)
    )


@pytest.mark.parametrize("method", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_checkpoints_change_no_gradient(method: str) -> None:
    assert max(run_ranks(checkpointed, 2, "GptOss", method)) < 1e-12


def compiled(name: str, method: str) -> tuple[float, int]:
    """The largest difference from a run that is not compiled, and the graphs that other documents
    need.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    warnings.simplefilter("ignore")
    register_transformers()
    cp = ContextParallel(flat_mesh(), method=method)
    trained = model(name, "longhaul").float()
    counter = CompileCounterWithBackend("inductor")
    forward = torch.compile(trained, backend=counter)
    graphs = list[int]()
    errors = list[float]()
    for shift in (0, 3, 6):
        given = batch(packed=True)
        given["position_ids"] = given["position_ids"].roll(shift, 1)
        expected, found = (
            gradients(trained, cp.shard_batch(given), each) for each in (None, forward)
        )
        largest = max(grad.abs().max() for grad in expected)
        errors += [
            ((a - b).abs().max() / largest).item() for a, b in zip(found, expected, strict=True)
        ]
        graphs.append(counter.frame_count)
    return max(errors), graphs[-1] - graphs[0]


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_compiled_models_find_the_same_gradients_for_any_documents(method: str) -> None:
    for error, further_graphs in run_ranks(
        compiled, 2, "Qwen3 windows", method, timeout=400, fresh=True
    ):
        assert error < 1e-5
        assert further_graphs == 0


def compiled_in_checkpoints() -> float:
    """The largest difference of gradients of two compiled layers, each in a checkpoint."""
    from torch.utils.checkpoint import checkpoint

    cp = ContextParallel(flat_mesh(), method="ring")
    boundaries = torch.tensor([[0, 5, 6, 40, 48]], dtype=torch.int32)
    torch.manual_seed(distributed.get_rank())
    q = torch.randn(1, 24, 4, 8, requires_grad=True)
    k = torch.randn(1, 24, 2, 8, requires_grad=True)

    def layers(window: int) -> Tensor:
        out = q
        for _ in range(2):
            out = checkpoint(
                cp.attention, out, k, k, boundaries, window=window, use_reentrant=False
            )
        return out.square().sum()

    found = torch.autograd.grad(
        torch.compile(layers, backend="aot_eager", fullgraph=True)(9), (q, k)
    )
    expected = torch.autograd.grad(layers(9), (q, k))
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_checkpoints_of_a_compiled_model_change_no_gradient() -> None:
    assert max(run_ranks(compiled_in_checkpoints, 2, timeout=120)) < 1e-5
