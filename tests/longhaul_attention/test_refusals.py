"""What cannot be exact is refused in words, on all ranks, before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, evaluation, register_transformers
from longhaul_attention.huggingface import causal_mask
from tests.longhaul_attention.test_transformers_models import batch, model
from tests.models.hf_models import SIZES
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks


def message_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - its words are what is tested
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def tiny(kind: str = "Llama", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{kind}Config")(**SIZES | options)
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="longhaul"
        )


def with_attention(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    return model


def flat_mesh() -> Any:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


# ---- models


def messages_of_models() -> dict[str, str]:
    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ulysses")
    shard = cp.shard_batch(batch(packed=True))
    static = tiny()
    cache = transformers.StaticCache(config=static.config, max_cache_len=64)
    attending_both_ways = tiny()
    for layer in attending_both_ways.model.layers:
        layer.self_attn.is_causal = False
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    without_documents = {key: value for key, value in shard.items() if key != "documents"}
    unshifted = {key: value for key, value in shard.items() if key != "shift_labels"}
    return {
        "dropout": message_of(tiny(attention_dropout=0.1).train(), **shard),
        "residual dropout": message_of(tiny("Phi", hidden_size=32, resid_pdrop=0.1).train(), **shard),
        "ALiBi": message_of(tiny("Bloom", n_head=4, alibi=True), **shard),
        "chunks": message_of(tiny("Llama4Text", attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=8), **shard),
        "linear layers": message_of(tiny("Qwen3Next", layer_types=["linear_attention", "full_attention"]), **shard),
        "balance loss": message_of(tiny("Mixtral", output_router_logits=True), **shard),
        "mask of the user": message_of(tiny(), **shard | {"attention_mask": torch.zeros(2, 1, 23, 23)}),
        "mask that hides tokens": message_of(tiny(), **shard | {"attention_mask": torch.tensor([[1] * 20 + [0] * 3] * 2)}),
        "attention forgotten": message_of(with_attention(tiny(), "sdpa"), **shard),
        "eager attention": message_of(with_attention(tiny(), "eager"), **shard),
        "no attention": message_of(tiny("Mamba", state_size=4, expand=1), **shard),
        "positions of RoBERTa": message_of(
            tiny("Roberta", is_decoder=True, max_position_embeddings=64), **cp.shard_batch({"input_ids": shard["input_ids"]})
        ),
        "Llama 4's temperature": message_of(
            tiny("Llama4Text", attention_chunk_size=None, num_local_experts=2, no_rope_layers=[1, 0]), **shard
        ),
        "layers that are dropped": message_of(
            tiny("OPT", ffn_dim=20, word_embed_proj_dim=24, dropout=0.0, layerdrop=0.1, pad_token_id=0).train(), **shard
        ),
        "static cache": message_of(static, **shard | {"past_key_values": cache, "use_cache": True}),
        "both ways": message_of(attending_both_ways, **shard),
        "dynamic rope": message_of(tiny(max_position_embeddings=16, rope_scaling=rope), **cp.shard_batch(batch(packed=False))),
        "longrope": message_of(model("Phi3", "longhaul"), **cp.shard_batch({"input_ids": torch.ones(1, 6).long()})),
        "documents lost": message_of(tiny(), **without_documents),
        "unknown input of attention": message_of(tiny(), **shard, score_bias=torch.ones(1)),
        "labels that the model would shift": message_of(tiny(), **unshifted),
    }  # fmt: skip


REFUSED_MODELS = {
    "dropout": "attention dropout 0.1: ranks would drop other pairs than one process",
    "residual dropout": "resid_pdrop = 0.1: ranks would drop other values than one process",
    "ALiBi": "ALiBi adds a bias to scores",
    "chunks": "layer_types chunked_attention need the tokens of other ranks",
    "linear layers": "layer_types linear_attention need the tokens of other ranks",
    "balance loss": "output_router_logits = True adds a balance loss, which is not a mean over tokens",
    "mask of the user": "the mask (Tensor) was not made by transformers' mask interface; its pairs are not known",
    "mask that hides tokens": "attention_mask hides tokens: shard_batch makes documents of it; prompts to generate must be equally long",
    "attention forgotten": "RuntimeError",
    "eager attention": "RuntimeError",
    "no attention": "RuntimeError",
    "positions of RoBERTa": "roberta counts positions from another number than 0: give position_ids",
    "Llama 4's temperature": "attn_temperature_tuning counts the tokens of a rank",
    "layers that are dropped": "layerdrop = 0.1: ranks would drop other values than one process",
    "static cache": "64 keys for 23 queries: a KV cache of transformers holds no shards",
    "both ways": "attention without a causal mask",
    "dynamic rope": "rope_type dynamic takes its frequencies from the last position of a rank, beyond 16 positions",
    "longrope": "which may be 3 of 6; all must be on one side of 4",
    "documents lost": "no documents reached attention: give the model what shard_batch returns, whole",
    "unknown input of attention": "attention is given score_bias, which it does not know",
    # torch's words: transformers shifts 24 labels for 23 logits of each sequence.
    "labels that the model would shift": "Expected input batch_size (46) to match target batch_size (48)",
}


def test_models_that_cannot_be_exact_are_refused() -> None:
    for found in run_ranks(messages_of_models, 2, timeout=120):
        assert found.keys() == REFUSED_MODELS.keys()
        # transformers 4, whose Bloom takes no `documents`.
        if "Got unexpected arguments" in found["ALiBi"]:
            found["ALiBi"] = REFUSED_MODELS["ALiBi"]
        assert {
            case: told for case, told in found.items() if REFUSED_MODELS[case] not in told
        } == {}


def test_masks_are_taken_apart_and_unknown_parts_refused() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    causal = masks.causal_mask_function
    window = masks.sliding_window_causal_mask_function(7)
    packed = masks.packed_sequence_mask_function(torch.zeros(1, 4))
    assert causal_mask(mask_function=causal).window is None
    assert causal_mask(mask_function=masks.and_masks(window, packed)).window == 7

    def prefix(*_: Any) -> bool:
        return True

    for function, name in (
        (masks.or_masks(causal, prefix), "or_masks"),
        (masks.and_masks(causal, prefix), "test_masks_are_taken_apart_and_unknown_parts_refused"),
        (masks.chunked_overlay(4, torch.zeros(1)), "chunked_overlay"),
        (prefix, "test_masks_are_taken_apart_and_unknown_parts_refused"),
    ):
        assert f"mask function {name} is unknown" in message_of(
            causal_mask, mask_function=function
        )


# ---- batches


def messages_of_batches() -> dict[str, str]:
    cp = ContextParallel(flat_mesh(), method="ring")
    given = batch(packed=True)
    tokens = given["input_ids"]
    positions = given["position_ids"]
    mask = torch.ones_like(tokens)
    holes = mask.clone()
    holes[0, 3:5] = holes[1, 40:] = 0

    def told(**changes: Any) -> str:
        return message_of(cp.shard_batch, given | changes)

    return {
        "no tokens": message_of(cp.shard_batch, {}),
        "nothing": message_of(cp.shard_batch, {"input_ids": tokens[:, :0]}),
        "one sequence without a batch": message_of(cp.shard_batch, {"input_ids": tokens[0]}),
        "labels of another length": told(labels=tokens[:, 1:]),
        "labels that are shifted": told(labels=tokens.roll(-1, 1)),
        "shift_labels that are not": told(labels=None, shift_labels=tokens),
        "both labels": told(shift_labels=tokens),
        "a mask with holes": message_of(cp.shard_batch, {"input_ids": tokens, "attention_mask": holes}),
        "labels of padding": message_of(
            cp.shard_batch, {"input_ids": tokens, "labels": tokens, "attention_mask": (torch.arange(45) > 4).expand(2, -1)}
        ),
        "a mask and documents": told(attention_mask=mask),
        "a mask of pairs": told(attention_mask=torch.ones(2, 1, 45, 45)),
        "positions in three dimensions": told(position_ids=positions.expand(3, 2, 45)),
        "something that is no token": told(pixel_values=torch.ones(3, 4)),
        "other documents": told(cu_seq_lens_q=torch.tensor([0, 45, 90])),
        "boundaries that descend": message_of(cp.shard_batch, given, torch.tensor([0, 30, 20, 45])),
        "boundaries of another length": message_of(cp.shard_batch, given, torch.tensor([0, 30, 44])),
    }  # fmt: skip


REFUSED_BATCHES = {
    "no tokens": "a batch needs input_ids [batch, tokens]",
    "nothing": "input_ids [2, 0] hold no tokens",
    "one sequence without a batch": "a batch needs input_ids [batch, tokens], not [45]",
    "labels of another length": "labels [2, 44] must have the shape of input_ids [2, 45]",
    "labels that are shifted": "labels are shifted already, and would be shifted again: give them as shift_labels",
    "shift_labels that are not": "shift_labels are input_ids, not shifted: give them as labels",
    "both labels": "labels and shift_labels are both given",
    "a mask with holes": "attention_mask hides tokens between others; it may hide padding at the ends only",
    "labels of padding": "tokens that attention_mask hides have labels to predict",
    "a mask and documents": "attention_mask is given and position_ids restart: transformers takes such a sequence for one document",
    "a mask of pairs": "attention_mask must hide padding, [2, 45], and not have shape (2, 1, 45, 45)",
    "positions in three dimensions": "position_ids must be [2, 45], not [3, 2, 45]",
    "something that is no token": "pixel_values has shape [3, 4]; a batch holds tensors [2, 45, ...]",
    "other documents": "cu_seq_lens_q = [0, 45, 90] are not the documents of position_ids",
    "boundaries that descend": "boundaries [0, 30, 20, 45] must ascend from 0 to the sequence length 45",
    "boundaries of another length": "boundaries [0, 30, 44] must ascend from 0 to the sequence length 45",
}


def test_batches_that_are_not_understood_are_refused() -> None:
    for found in run_ranks(messages_of_batches, 2):
        assert found.keys() == REFUSED_BATCHES.keys()
        assert {
            case: told for case, told in found.items() if REFUSED_BATCHES[case] not in told
        } == {}


# ---- ranks


def messages_of_ranks() -> dict[str, str]:
    rank = distributed.get_rank()
    mesh = flat_mesh()
    cp = ContextParallel(mesh, method="ring")
    other = batch(packed=True)
    if rank:
        other["input_ids"] = other["input_ids"].flip(0)
    q = torch.ones(1, 4, 4, 8)
    k = torch.ones(1, 4, 2, 8)
    whole = torch.tensor([[0, 8]], dtype=torch.int32)

    def compare() -> None:
        cp.attention(q, k, k, cp.shard_batch(other)["documents"])

    lost = ContextParallel(mesh, method="ring").shard_batch(other)["documents"]
    register_transformers()
    blank = tiny()
    torch.nn.init.zeros_(blank.lm_head.weight)
    return {
        "other sequences": message_of(compare),
        "no heads to choose by": message_of(ContextParallel, mesh),
        "another method": message_of(ContextParallel, mesh, method=("ring", "ulysses")[rank]),
        "an unknown method": message_of(ContextParallel, mesh, method="striped"),
        "heads that Ulysses cannot split": message_of(ContextParallel(mesh, method="ulysses").attention, q[:, :, :3], k[:, :, :1], k[:, :, :1], whole),
        "a window of flash": message_of(cp.attention, q, k, k, whole, window=(3, 0)),
        "a sink of each key head": message_of(cp.attention, q, k, k, whole, sink=torch.ones(2)),
        "no documents": message_of(cp.attention, q, k, k, None),
        "heads before tokens": message_of(cp.attention, *(x.transpose(1, 2)[:, :2] for x in (q, k, k)), whole),
        "a process group": message_of(ContextParallel, distributed.group.WORLD, method="ring"),
        "one dimension for two": message_of(ContextParallel, mesh, method="hybrid"),
        "a window of nothing": message_of(cp.attention, q, k, k, whole, window=0),
        "a cap of nothing": message_of(cp.attention, q, k, k, whole, softcap=0.0),
        "a model whose logits are zero": message_of(evaluation.check, blank, cp),
        "a ContextParallel that is gone": message_of(tiny(), **cp.shard_batch(batch(packed=True)) | {"documents": lost}),
    }  # fmt: skip


REFUSED_RANKS = {
    "other sequences": "the ranks of a context-parallel group must be given the same batch; those of ranks [1] differ",
    "no heads to choose by": 'method "auto" chooses by the heads of a rank: give heads and kv_heads, or a method',
    "another method": "context-parallel ranks have different plans: method is ring on rank 0 and ulysses on rank 1",
    "an unknown method": 'cp_method = "striped" must be one of auto, allgather, ring, alltoall, ulysses, hybrid',
    "heads that Ulysses cannot split": "splits heads over 2 ranks, which must divide the 3 query heads of a rank",
    "a window of nothing": "sliding window 0 must be a number of keys, at least 1",
    "a window of flash": "sliding window (3, 0) must be a number of keys",
    "a sink of each key head": "a sink is a logit per query head, [4], not [2]",
    "no documents": "attention needs documents or boundaries, not None; those of one document are [[0, tokens]]",
    "heads before tokens": "boundaries end at 8, and 2 ranks have 2 tokens each: queries are [batch, tokens, heads, width]",
    "a process group": "mesh must be a DeviceMesh, such as init_device_mesh makes, not ProcessGroup",
    "one dimension for two": 'method "hybrid" needs a mesh of two dimensions, ring and Ulysses, not 1',
    "a cap of nothing": "soft cap 0.0 must be above 0",
    "a model whose logits are zero": "LlamaForCausalLM gives logits of 0.0 only: they say nothing about its layers",
    "a ContextParallel that is gone": "the ContextParallel that sharded this batch does not exist any more",
}


def test_ranks_that_disagree_are_refused() -> None:
    for found in run_ranks(messages_of_ranks, 2):
        assert found.keys() == REFUSED_RANKS.keys()
        assert {
            case: told for case, told in found.items() if REFUSED_RANKS[case] not in told
        } == {}
