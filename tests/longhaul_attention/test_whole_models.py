"""What a parallelized model refuses by name, and the start-up check of its kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longhaul_attention import (
    ContextParallel,
    gathers_logits,
    kernel_start,
    parallelize,
    register_transformers,
)
from models import kernel_check, kernels
from models.kernel_choice import CUDNN_AND_FLASH
from models.score_pairs import Scores

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(3, 15).view(2, 6)


def tiny(attention: str, **options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, attn_implementation=attention, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def cp() -> ContextParallel:
    return ContextParallel(None, method="ring")


@pytest.fixture
def model(cp: ContextParallel) -> Any:
    return parallelize(tiny(register_transformers()), cp)


def sharded(cp: ContextParallel) -> dict[str, Any]:
    return cp.shard_batch({"input_ids": TOKENS})


GIVEN: dict[str, tuple[Callable[[ContextParallel], dict[str, Any]], str]] = {
    "embeddings": (
        lambda _: {"inputs_embeds": torch.ones(2, 6, 16)},
        "inputs_embeds: tokens are sharded: give input_ids",
    ),
    "a few logits": (
        lambda _: {"input_ids": TOKENS, "logits_to_keep": 1},
        "logits_to_keep: a rank keeps the logits of its own",
    ),
    "scores": (
        lambda _: {"input_ids": TOKENS, "output_attentions": True},
        "output_attentions: no rank has the scores of all",
    ),
    "routers": (
        lambda _: {"input_ids": TOKENS, "output_router_logits": True},
        "output_router_logits: a balance loss is not a mean over tokens (TRL: router_aux_loss_coef=0.0)",
    ),
    "a cache": (
        lambda _: {"input_ids": TOKENS, "use_cache": True},
        "use_cache: a KV cache of transformers holds no shards",
    ),
    "a tuple": (
        lambda _: {"input_ids": TOKENS, "return_dict": False},
        "return_dict = False: outputs are gathered by their names",
    ),
    "shards": (sharded, "the batch is sharded already: a parallelized model takes whole batches"),
    "numbers of samples": (
        lambda _: {"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 2, 2, 3, 3]] * 2)},
        "attention_mask has values up to 3: it says which tokens are padding, with 0 and 1; give documents as position_ids",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_inputs_that_no_rank_could_share_are_refused(
    name: str, model: Any, cp: ContextParallel
) -> None:
    given, message = GIVEN[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**given(cp))


def test_dropout_of_any_layer_is_refused_in_training_and_not_in_evaluation(model: Any) -> None:
    model.model.layers[0].mlp.adapter = nn.Dropout(0.1)
    model.eval()
    assert model(input_ids=TOKENS).logits.shape == (2, 6, 32)
    model.train()
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.adapter drops 10% \(and 0 more layers\)"
    ):
        model(input_ids=TOKENS)


def test_other_attention_and_other_modules_are_refused(cp: ContextParallel) -> None:
    with pytest.raises(
        ValueError, match='has attention "eager": load it with attn_implementation="longhaul"'
    ):
        parallelize(tiny("eager"), cp)
    with pytest.raises(ValueError, match="Linear holds no model of transformers"):
        parallelize(nn.Linear(2, 2), cp)


def test_logits_are_gathered_where_they_are_asked_for(model: Any) -> None:
    assert model(input_ids=TOKENS, labels=TOKENS).logits is None
    with gathers_logits(model):
        assert model(input_ids=TOKENS, labels=TOKENS).logits.shape == (2, 6, 32)
    assert model(input_ids=TOKENS, labels=TOKENS).logits is None


def attend(cp: ContextParallel, heads: int, window: int | None = None) -> Tensor:
    q = torch.ones(1, 4, heads, 8)
    return cp.attention(
        q, q[:, :, :2], q[:, :, :2], torch.tensor([[0, 4]], dtype=torch.int32), window=window
    )


def test_a_kernel_is_checked_once_for_each_layout_of_heads(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel_start, "is_checked", lambda _: True)
    monkeypatch.setattr(kernel_start, "_verified", set())
    monkeypatch.setattr(
        kernel_check, "verify_kernel", lambda *_, heads, windows: seen.append((heads, windows))
    )
    for heads, window in ((4, None), (4, None), (2, None), (4, 3), (4, 3)):
        attend(cp, heads, window)
    assert seen == [((4, 2, 8), ()), ((2, 2, 8), ()), ((4, 2, 8), (3,))]


def test_a_wrong_kernel_is_refused_before_it_is_used(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*_: Any, **__: Any) -> None:
        raise ValueError("dq is off by 0.3")

    monkeypatch.setattr(kernel_start, "is_checked", lambda _: True)
    monkeypatch.setattr(kernel_start, "_verified", set())
    monkeypatch.setattr(kernel_check, "verify_kernel", verify)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r'kernel "cpu" is wrong on cpu: dq is off by 0\.3; kernel="plain" takes matrix',
        ):
            attend(cp, 4)


def test_auto_leaves_out_a_wrong_kernel_and_takes_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device of the newest generations: cuDNN is wrong, and FlashAttention right."""

    def verify(name: str, *_: Any, windows: tuple[int, ...], **__: Any) -> None:
        seen.append((name, windows))
        if name == CUDNN_AND_FLASH:
            raise ValueError("dq is off by 0.3")

    seen = list[tuple[str, tuple[int, ...]]]()
    queries = torch.empty(1, 4, 4, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(kernel_start, "is_checked", lambda _: True)
    monkeypatch.setattr(kernel_start, "_verified", set())
    monkeypatch.setattr(kernels, "left_out", set())
    monkeypatch.setattr(kernels, "device_generation", lambda _: "hopper")
    monkeypatch.setattr(kernel_check, "verify_kernel", verify)
    kernels._auto_choices.cache_clear()
    with pytest.warns(
        UserWarning, match=r"attention kernel cudnn\+flash is left out on meta: dq is off by 0\.3"
    ):
        kernel_start.verify_once("auto", queries, 2, ulysses=1, scores=Scores(window=3))
    assert seen == [(CUDNN_AND_FLASH, (3,)), ("flash", (3,))]
    kernel_start.verify_once("auto", queries, 2, ulysses=1, scores=Scores(window=3))
    assert len(seen) == 2
    assert kernels.select_kernel(queries, "auto") == "flash"
    kernels._auto_choices.cache_clear()


def test_a_right_kernel_passes_the_check_on_this_device(
    cp: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_start, "is_checked", lambda _: True)
    monkeypatch.setattr(kernel_start, "_verified", set())
    monkeypatch.setattr(
        kernel_check, "verify_kernel", partial(kernel_check.verify_kernel, lengths=(2, 3, 65))
    )
    assert attend(cp, 4).shape == (1, 4, 4, 8)
