"""Unchanged models of transformers: their losses, logits and every gradient equal those of one
process, by every method.

Compared with transformers' own attention, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.models.hf_models import MADE, made, made_by_transformers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks

# Beside the families that Longhaul imports: values narrower than keys, and norms and windows of
# another kind.
OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "kv_lora_rank": 6,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "Cohere2": {"sliding_window": 7, "num_hidden_layers": 5},
    "Glm4": {"head_dim": 8, "partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "Starcoder2": {"sliding_window": 7},
}
CHANGES = {"Phi3": {"original_max_position_embeddings": 4}}
"""Each rank has a position that calls for longrope's factors of long sequences."""
# Divisible by nothing that a layout needs.
LENGTH = 45
DOCUMENTS = [17, 1, 20, 7]
METHODS = ("allgather", "ring", "alltoall", "ulysses", "hybrid")


def model(name: str, implementation: str) -> Any:
    built = (
        made_by_transformers(name, torch.float32, std=0.2, **OTHERS[name])
        if name in OTHERS
        else made(name, **CHANGES.get(name, {}))
    )
    built.set_attn_implementation(implementation)
    if hasattr(built, "set_experts_implementation") and built._can_set_experts_implementation():
        built.set_experts_implementation("eager")  # Grouped products have no float64.
    return built.double()


def batch(*, packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    # Ranks have different numbers of targets.
    labels[0, 20:30] = -100
    found = {"input_ids": tokens, "labels": labels}
    if packed:
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
        found["position_ids"] = torch.stack((positions, positions.roll(8)))  # Not all start at 0.
    return found


def with_masks(inputs: dict[str, Tensor], window: int) -> dict[str, Any]:
    """For gpt-oss, whose documents transformers 5.24 ignores: its masks are made without
    positions.
    """
    positions = inputs["position_ids"]
    documents = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    tokens = torch.arange(LENGTH)
    distance = tokens[:, None] - tokens
    full = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
    masks = {"full_attention": full, "sliding_attention": full & (distance < window)}
    hidden = {
        kind: torch.where(mask, 0.0, -torch.inf)[:, None].double() for kind, mask in masks.items()
    }
    return inputs | {"attention_mask": hidden}


def run(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, logits and gradients."""
    output = model(**inputs | {"use_cache": False})
    model.zero_grad()
    output.loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in model.parameters()]
    return output.loss.detach(), output.logits.detach(), grads


def contexts(methods: tuple[str, ...]) -> Iterator[tuple[str, ContextParallel]]:
    ranks = distributed.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (ranks // 2, 2))
    for method in methods:
        yield method, ContextParallel(grid if method == "hybrid" else flat, method=method)


def errors(name: str, methods: tuple[str, ...]) -> dict[str, float]:
    """Of loss, logits and gradients over their largest, by method and kind of batch."""
    register_transformers()
    found = {}
    made_contexts = [*contexts(methods)]
    with float64_throughout():
        eager = model(name, "eager")
        sharded = model(name, "longhaul")
        for packed in (False, True):
            inputs = batch(packed=packed)
            masked = with_masks(inputs, 7) if packed and name == "GptOss" else inputs
            loss, logits, grads = run(eager, masked)
            scale = max(grad.abs().max() for grad in grads)
            for method, cp in made_contexts:
                shard = cp.shard_batch(inputs)
                our_loss, our_logits, our_grads = run(sharded, shard)
                for x in (our_loss, *our_grads):
                    distributed.all_reduce(x)
                    x /= cp.plan.cp
                gathered = cp.gather(our_logits, shard["documents"])
                found[f"{method}, {'packed' if packed else 'one document'}"] = max(
                    abs(our_loss - loss).item(),
                    ((gathered - logits).abs().max() / logits.abs().max()).item(),
                    *(
                        ((a - b).abs().max() / scale).item()
                        for a, b in zip(our_grads, grads, strict=True)
                    ),
                )
    return found


ALWAYS = ("Gemma2", "GptOss")
"""Windows, caps, sinks and experts."""
CASES = [
    pytest.param(name, ranks, marks=[] if ranks == 4 and name in ALWAYS else pytest.mark.slow)
    for name in [*MADE, *OTHERS]
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_losses_logits_and_every_gradient_equal_one_process(name: str, ranks: int) -> None:
    for found in run_ranks(errors, ranks, name, METHODS, timeout=200):
        assert len(found) == 2 * len(METHODS)
        assert {case: error for case, error in found.items() if not error < 1e-11} == {}
