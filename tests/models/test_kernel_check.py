"""The start-up check of attention kernels: right ones pass, and every way to be wrong is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from models import attention_op, kernel_check, kernel_reference, kernels
from models.kernel_check import SHORT_LENGTHS, Heads, verify_kernel, verify_wide
from models.kernel_choice import planned_length
from models.kernel_reference import Results, Sample
from models.score_blocks import ScoreBlock, ScoreBlocks, VarlenBatch
from models.score_pairs import Scores
from trainer.config.parse import load
from trainer.errors import RankFailedError
from trainer.hardware import device as hardware

CPU = torch.device("cpu")
FEW_HEADS = Heads(4, 2, 16)
SHORT = SHORT_LENGTHS
NOT_CAUSAL = False
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
FORWARD, BACKWARD = kernels.DENSE_KERNELS["cpu"]


def verify(kernel: str = "auto", *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    verify_kernel(kernel, CPU, dtype, heads=FEW_HEADS, **{"lengths": SHORT} | options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_cpu_kernels_pass(kernel: str, dtype: torch.dtype) -> None:
    verify(kernel, dtype=dtype, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(2, 2, 128), Heads(2, 1, 256)])
def test_cpu_kernels_pass_at_all_lengths(heads: Heads) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        verify_kernel("auto", CPU, dtype, heads=heads)


# ---- wrong kernels


def in_base_2(*inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = FORWARD(*inputs)
    return out, lse / torch.log(torch.tensor(2.0))


def shifted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """The causal mask lets every query see one key too many."""
    if not causal or k.shape[2] < 2:
        return FORWARD(q, k, v, causal)
    out, lse = FORWARD(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], causal)
    first, first_lse = FORWARD(q[:, :, :1], k[:, :, :2], v[:, :, :2], NOT_CAUSAL)
    return torch.cat((first, out), 2), torch.cat((first_lse, lse), 2)


def other_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Query heads take KV heads in turn, not in groups."""
    order = torch.arange(q.shape[1]) % k.shape[1]
    return FORWARD(q, k[:, order], v[:, order], causal)


def without_last_row(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Of a tile that is not full."""
    out, lse = FORWARD(*inputs)
    out[:, :, out.shape[2] - out.shape[2] % 64 :] *= float(out.shape[2] < 64)
    return out, lse


def nan_at_the_end(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = BACKWARD(*inputs)
    dq[0, -1, -1, -1] = torch.nan
    return dq, dk, dv


def all_nan(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = BACKWARD(*inputs)
    return dq, dk, dv * torch.nan


def transposed(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = BACKWARD(*inputs)
    return dq, dk.flip(2), dv


def not_causal(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return BACKWARD(*inputs[:-1], NOT_CAUSAL)


def without_the_last_key(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a causal block, where random queries hardly attend to it."""
    dq, dk, dv = BACKWARD(*inputs)
    dv[:, :, -1] *= float(not inputs[-1])
    return dq, dk, dv


WRONG: dict[str, tuple[Forward, Backward, str]] = {
    "log-sum-exp in base 2": (in_base_2, BACKWARD, "log-sum-exp"),
    "causal off by one": (shifted, BACKWARD, "output"),
    "KV heads in another order": (other_heads, BACKWARD, "output"),
    "rows of the last tile": (without_last_row, BACKWARD, "output"),
    "one NaN": (FORWARD, nan_at_the_end, "dq"),
    "all NaN": (FORWARD, all_nan, "dv"),
    "dk transposed": (FORWARD, transposed, "dk"),
    "gradients without a mask": (FORWARD, not_causal, "dq"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named_with_its_wrong_output(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward, output = WRONG[name]
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (forward, backward))
    with pytest.raises(
        ValueError, match=rf'"auto" on \D+: relative error \S+ in the {output} of token \d+, above'
    ):
        verify()


def test_a_device_that_computes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the reference is as wrong as the kernel."""

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(_: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in inputs[:3])

    def nothing(sample: Sample, _: ScoreBlocks) -> Results:
        q, k, v = sample[1:]
        zeros = torch.zeros_like
        return zeros(q), q.new_zeros(q.shape[1::-1]), zeros(q), zeros(k), zeros(v)

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (forward, backward))
    monkeypatch.setattr(kernel_reference, "exact_results", nothing)
    with pytest.raises(
        ValueError,
        match=r"products in float64 on cpu: relative error \S+ in the output of the last query",
    ):
        verify()


def test_small_gradients_of_a_long_document_are_judged_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (FORWARD, without_the_last_key))
    with pytest.raises(ValueError, match="in the dv of token 999"):
        verify(lengths=(1000,))


def test_a_kernel_whose_gradients_vary_is_refused_by_a_deterministic_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = torch.Generator().manual_seed(0)

    def varying(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = BACKWARD(*inputs)
        return dq * (1 + 0.01 * torch.rand(dq.shape, generator=draws)), dk, dv

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (FORWARD, varying))
    verify()
    with pytest.raises(
        ValueError,
        match=r"gives another dq the second time on causal blocks; training.deterministic",
    ):
        verify(deterministic=True)


# ---- code paths of CUDA kernels, with CPU kernels in their places


def segments(batch: VarlenBatch, window: int | None) -> ScoreBlocks:
    """As the kernel sees them: flipped blocks are causal ones of reversed tokens."""
    queries, keys = (
        pairwise(starts.tolist()) for starts in (batch.cu_seqlens_q, batch.cu_seqlens_k)
    )
    blocks = [ScoreBlock(*q, *k) for q, k in zip(queries, keys, strict=True)]
    scores = Scores(window if batch.mask == "causal" else None)
    return ScoreBlocks(blocks, causal=batch.mask != "full", scores=scores)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    return attention_op.forward(q, k, v, segments(batch, window), kernel="plain")


def varlen_backward(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, batch, window = inputs
    dq, dk, dv = (torch.zeros_like(x) for x in tensors[1:4])
    arguments: Any = (*tensors, segments(batch, window))
    kernels.accumulate_grads(
        (dq, dk, dv), kernels.attend_blocks_backward(*arguments, kernel="plain")
    )
    return dq, dk, dv


@pytest.fixture
def cudnn_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, bool]]]:
    """(queries, keys, causal) of every forward call to cuDNN, while CPU kernels stand in for it
    and for flash.
    """
    calls: list[tuple[int, int, bool]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        calls.append((q.shape[2], k.shape[2], causal))
        return FORWARD(q, k, v, causal)

    choose = kernels.select_kernel
    monkeypatch.setattr(kernels, "_flash_forward", varlen_forward)
    monkeypatch.setattr(kernels, "_flash_backward", varlen_backward)
    monkeypatch.setattr(
        kernels, "select_kernel", lambda q, name, **_: name if name == "cudnn" else choose(q, name)
    )
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cudnn", (forward, BACKWARD))
    yield calls


def test_every_length_reaches_cudnns_causal_path(
    cudnn_lengths: list[tuple[int, int, bool]],
) -> None:
    verify("cudnn")
    causal = Counter(queries for queries, _, is_causal in cudnn_lengths if is_causal)
    assert causal.keys() == {planned_length(length) for length in (*SHORT, 65, 126)}
    assert causal[planned_length(65)] == 2 * causal[2], (
        "single tokens beside it do not take it to flash"
    )
    assert all(min(queries, keys) > 1 for queries, keys, _ in cudnn_lengths), (
        "flash takes single tokens"
    )
    assert any(queries != keys for queries, keys, _ in cudnn_lengths)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cudnn_is_found(
    name: str, cudnn_lengths: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward, output = WRONG[name]
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cudnn", (forward, backward))
    with pytest.raises(ValueError, match=f'"cudnn" on .*error .* in the {output} of token'):
        verify("cudnn")
    assert not cudnn_lengths


# ---- tensors with more elements than 32 bits count

MANY = 1 << 16


def test_large_tensors_are_checked_where_the_run_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        if q.dtype == torch.float32:
            seen.append((q.numel(), k.numel()))
        return FORWARD(q, k, v, causal)

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (forward, BACKWARD))
    for num_tokens, has_queries, has_keys in (
        (1024, False, False),
        (2048, True, False),
        (3072, True, True),
    ):
        seen.clear()
        verify_wide(
            "auto", CPU, torch.float32, heads=FEW_HEADS, num_tokens=num_tokens, max_elements=MANY
        )
        assert any(queries > MANY for queries, _ in seen) == has_queries
        assert any(keys > MANY for _, keys in seen) == has_keys


@pytest.mark.parametrize("broken", ["queries", "keys"])
def test_a_kernel_that_counts_in_too_few_bits_is_found(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapping(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        q = q.clone()
        k = k.clone()
        x = q if broken == "queries" else k
        x[:, :, MANY // (x.shape[1] * x.shape[3]) :] = 0
        return FORWARD(q, k, v, causal)

    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (wrapping, BACKWARD))
    with pytest.raises(
        ValueError, match=r'"auto" on few .* in tensors of 1?\d\d,\d{3} elements: relative error'
    ):
        verify_wide(
            "auto", CPU, torch.float32, heads=FEW_HEADS, num_tokens=4096, max_elements=MANY
        )


# ---- what a run checks


def checked(*options: str) -> tuple[Heads, Heads, int]:
    """Heads that are compared at every length, heads and tokens of the run's tensors."""
    config = load(["--data.corpus=copy", "--model.family=llama3", "--model.size=8b", *options])
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel_check, "verify_kernel", lambda *_, **given: found.append(given["heads"])
        )
        patch.setattr(
            kernel_check,
            "verify_wide",
            lambda *_, **given: found.extend((given["heads"], given["num_tokens"])),
        )
        hardware.verify_attention_kernel(config, "flash", CPU)
    few, heads, num_tokens = found
    return few, heads, num_tokens


def test_the_run_checks_its_own_heads_and_tokens() -> None:
    length = "--training.seq_len=131072"
    assert checked(length) == (Heads(8, 2, 128), Heads(32, 8, 128), 131_072)
    assert checked(length, "--memory.head_groups=4") == (
        Heads(8, 2, 128),
        Heads(8, 2, 128),
        131_072,
    )
    ring = ("--parallelism.cp=8", "--parallelism.cp_method=ring", "--parallelism.tp=8")
    assert checked(length, *ring) == (Heads(4, 1, 128), Heads(4, 1, 128), 16_384)
    ulysses = (
        "--parallelism.cp=16",
        "--parallelism.cp_method=ulysses",
        "--training.micro_batch_size=2",
    )
    assert checked(length, *ulysses) == (Heads(2, 1, 128), Heads(2, 1, 128), 262_144)


def test_an_assertion_of_a_kernel_ends_the_run_with_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("head dim 192 is not supported")

    monkeypatch.setattr(hardware, "verify_attention_kernel", refuse)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda _: None)
    config = load(["--data.corpus=copy", "--training.attention=fa4", "--training.dtype=bfloat16"])
    words = r'training\.attention = "fa4" does not work on cuda:0: head dim 192 is not'
    with FakeTensorMode(), pytest.raises(RankFailedError, match=words):
        hardware.choose_attention_kernel(config, torch.device("cuda", 0))
