"""A parallelized model gives losses, outputs and gradients of one process for whatever is computed
from its outputs.

The grid is drawn: model x head x loss x rows x packing x precision x recomputation x method, on
two and three ranks. One process runs the same model with transformers' own attention; nothing of
ours is in it.
"""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallelisms.mesh.collectives import full_tensor
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.ranks import run_ranks

Case = dict[str, Any]
VOCABULARY = 64
WIDTH = 23
LEVELS: dict[str, tuple[Any, ...]] = {
    "model": ("Llama", "Mistral", "Qwen3", "Gemma3", "GptOss"),
    "loss": ("labels", "logits", "pairs", "smoothed", "classes", "token classes", "hidden states"),
    "rows": (2, 4),
    "packed": (False, True),
    "precision": ("float64", "bfloat16 autocast", "float16 autocast", "bfloat16"),
    "recomputed": ("no", "reentrant", "not reentrant"),
    "method": ("allgather", "ring", "alltoall"),
}
HEADS = {"classes": "ForSequenceClassification", "token classes": "ForTokenClassification"}
COUNT = 24
"""Of the default check, for each number of ranks."""


def drawn(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    cases = ({name: draw.choice(levels) for name, levels in LEVELS.items()} for _ in iter(int, 1))
    # transformers' gpt-oss takes packed documents for one, unless attention is flash.
    legal = (
        case
        for case in cases
        if not (case["loss"] in HEADS and case["model"] == "Gemma3")
        and not (case["packed"] and case["model"] == "GptOss")
    )
    return [next(legal) for _ in range(count)]


def build(case: Case, attention: str) -> Any:
    transformers = import_module("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "num_labels": 3,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "attn_implementation": attention,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "Mistral": {"sliding_window": 6},
        "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "GptOss": {
            "sliding_window": 6,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        },
    }
    name = case["model"]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, name + HEADS.get(case["loss"], "ForCausalLM"))(
        config(**sizes | more.get(name, {}))
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (
            0.3 if parameter.ndim > 1 else 1.0
        )
    if case["recomputed"] != "no":
        model.gradient_checkpointing_enable({"use_reentrant": case["recomputed"] == "reentrant"})
    model.train()
    return model.to(
        {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(
            case["precision"], torch.float32
        )
    )


def batch(case: Case) -> dict[str, Tensor]:
    """Padded on the right or, packed, with documents that start anew."""
    generator = torch.Generator().manual_seed(2)
    rows = case["rows"]
    tokens = torch.randint(3, VOCABULARY, (rows, WIDTH), generator=generator)
    lengths = torch.randint(4, WIDTH, (rows,), generator=generator)
    places = torch.arange(WIDTH).expand(rows, -1)
    if case["packed"]:
        return {
            "input_ids": tokens,
            "position_ids": places.where(places < lengths[:, None], places - lengths[:, None]),
        }
    mask = (places < lengths[:, None]).long()
    return {"input_ids": tokens.where(mask.bool(), 2), "attention_mask": mask}


def loss_of(model: Any, case: Case) -> Any:
    """As a trainer computes it from what a model returns."""
    inputs = batch(case)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    labels = inputs["input_ids"].where(mask, -100)
    if "position_ids" in inputs:
        labels = labels.where(inputs["position_ids"] > 0, -100)
    if case["loss"] == "labels":
        return model(**inputs, labels=labels).loss
    if case["loss"] == "classes":
        return model(**inputs, labels=torch.arange(len(labels)) % 3).loss
    if case["loss"] == "token classes":
        return model(**inputs, labels=(labels % 3).where(labels >= 0, -100)).loss
    if case["loss"] == "hidden states":
        states = model(**inputs, output_hidden_states=True).hidden_states
        return sum((state.double() * mask[..., None]).pow(2).mean() for state in states)
    log_probabilities = model(**inputs).logits[:, :-1].double().log_softmax(-1)
    is_target = labels[:, 1:] >= 0
    if case["loss"] == "smoothed":
        return -(log_probabilities.mean(-1) * is_target).sum() / is_target.sum()
    of_labels = log_probabilities.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    scores = (of_labels * is_target).sum(1)
    if case["loss"] == "logits":
        return -scores.sum() / is_target.sum()
    chosen, rejected = scores.chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def run(model: Any, case: Case) -> tuple[float, dict[str, Tensor]]:
    dtype = {"bfloat16 autocast": torch.bfloat16, "float16 autocast": torch.float16}.get(
        case["precision"]
    )
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = loss_of(model, case)
    loss.backward()
    return float(loss), {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }


def errors(
    found: tuple[float, dict[str, Tensor]], exact: tuple[float, dict[str, Tensor]]
) -> float:
    """The largest of the loss and of every gradient, each over its tensor's largest."""
    if found[1].keys() != exact[1].keys():
        return float("inf")
    largest = max(float(grad.abs().max()) for grad in exact[1].values())
    worst = abs(found[0] - exact[0]) / abs(exact[0])
    for name, grad in exact[1].items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        worst = max(worst, float((found[1][name] - grad).abs().max()) / scale)
    return worst


def is_wrong(case: Case, cp: Any) -> str:
    """In float64 no digit may differ; in 16 bits the error may be three times that of one
    process.
    """
    from longhaul_attention import parallelize, register_transformers

    is_exact = case["precision"] == "float64"
    with float64_throughout():
        exact = run(build(case, "eager").double(), case | {"precision": "float64"})
    with float64_throughout() if is_exact else nullcontext():
        loss, grads = run(parallelize(build(case, register_transformers()), cp), case)
        for grad in grads.values():
            distributed.all_reduce(grad)
            grad /= cp.plan.cp
    allowed = 1e-11 if is_exact else 3 * errors(run(build(case, "eager"), case), exact) + 1e-3
    error = errors((loss, grads), exact)
    return "" if error <= allowed else f"{error:.1e}, allowed {allowed:.1e}"


def differences(cases: list[Case]) -> list[tuple[Case, str]]:
    from longhaul_attention import ContextParallel

    warnings.simplefilter("ignore")  # Of transformers.
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    found = (
        (case, is_wrong(case, ContextParallel(mesh, method=case["method"]))) for case in cases
    )
    return [(case, wrong) for case, wrong in found if wrong]


def sharded_errors(method: str) -> dict[str, float]:
    """Of loss and gradients under FSDP2, in float64 and with weights that are cast to bfloat16."""
    from longhaul_attention import ContextParallel, parallelize, register_transformers

    warnings.simplefilter("ignore")
    cp = ContextParallel(init_device_mesh("cpu", (distributed.get_world_size(),)), method=method)
    found = {}
    for precision, policy in {
        "float64": MixedPrecisionPolicy(),
        "float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }.items():
        case: Case = {name: levels[0] for name, levels in LEVELS.items()} | {
            "precision": precision
        }
        with float64_throughout():
            exact = run(build(case, "eager").double(), case | {"precision": "float64"})
        with float64_throughout() if precision == "float64" else nullcontext():
            model: Any = parallelize(build(case, register_transformers()), cp)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            loss, grads = run(fully_shard(model, mp_policy=policy), case)
        found[precision] = errors(
            (loss, {name: full_tensor(grad) for name, grad in grads.items()}),
            exact,
        )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["allgather", pytest.param("ring", marks=pytest.mark.slow)])
def test_fsdp2_and_its_mixed_precision_equal_one_process(method: str) -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(sharded_errors, 2, method):
        assert found["float64"] < 1e-11
        assert found["float32"] < 0.25, "of rounding to bfloat16"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        (2, COUNT),
        (3, COUNT // 2),
        pytest.param(2, 200, marks=pytest.mark.slow),
        pytest.param(3, 100, marks=pytest.mark.slow),
        pytest.param(4, 100, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_of_every_kind_equal_one_process(ranks: int, count: int) -> None:
    pytest.importorskip("transformers")
    cases = drawn(count, seed=ranks)
    for found in run_ranks(differences, ranks, cases, timeout=900):
        assert found == []
