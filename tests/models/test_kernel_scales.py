"""The start-up check where terms cancel: a reference of zero lets right kernels pass, and wrong
ones are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models import attention_op, kernel_check, kernels
from models.kernel_check import (
    SHORT_LENGTHS,
    TOLERANCES,
    Heads,
    check_cases,
    compare,
    random_sample,
    verify_kernel,
)
from models.kernel_reference import (
    OUTPUTS,
    Reference,
    Results,
    Sample,
    last_query_on_host,
    reference,
)
from models.score_blocks import ScoreBlocks
from tests.models.test_kernel_check import segments
from trainer.config.parse import load
from trainer.hardware import device as hardware

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
LENGTHS = (2, 66)
BLOCKS = check_cases(LENGTHS, windows=(1,))
WINDOW = "a window of 1"
ALL = slice(None)


class Case(NamedTuple):
    blocks: str
    zero: str
    """The input that is zero, if one is."""
    vanishing: dict[str, slice | list[int]]
    """Rows by output."""


CASES = {
    "every query sees one key": Case(WINDOW, "", {"dq": ALL, "dk": ALL}),
    "every query sees one key, which is zero": Case(
        WINDOW, "k", {"log-sum-exp": ALL, "dq": ALL, "dk": ALL}
    ),
    "queries are zero": Case(WINDOW, "q", {"log-sum-exp": ALL, "dk": ALL}),
    "values are zero": Case("causal blocks", "v", {"output": ALL, "dq": ALL, "dk": ALL}),
    "no gradient arrives": Case("rectangular blocks", "grad", {"dq": ALL, "dk": ALL, "dv": ALL}),
    "some queries see one key": Case(
        "single queries and keys", "", {"dq": slice(1, None), "dk": [70]}
    ),
    "some documents have one token": Case(
        "causal blocks and single tokens", "", {"dq": [0, 65, 66, 192], "dk": [65, 192]}
    ),
}
VANISHING = [(case, output) for case, (_, _, outputs) in CASES.items() for output in outputs]


def rows_of(output: str, x: Tensor) -> Tensor:
    return x.T if output == "log-sum-exp" else x


def reference_of(case: Case, dtype: torch.dtype) -> Reference:
    """With zeros, where float64 may leave rounding errors."""
    blocks = BLOCKS[case.blocks]
    sample = random_sample(blocks, HEADS, CPU, dtype)
    if case.zero:
        getattr(sample, case.zero).zero_()
    found = reference(sample, blocks)
    for output, exact in zip(OUTPUTS, found.exact, strict=True):
        if output in case.vanishing:
            vanishing = rows_of(output, exact)[case.vanishing[output]]
            assert vanishing.abs().max() < 1e-12
            rows_of(output, exact)[case.vanishing[output]] = 0
    return found


def rounded(expected: Reference, dtype: torch.dtype, *, noise: float = 0.0) -> Results:
    """What a right kernel gives; the noise is in roundings of a number's terms."""
    draws = torch.Generator().manual_seed(0)
    out, lse, dq, dk, dv = (
        exact
        + noise
        * torch.finfo(dtype).eps
        * size
        * torch.empty_like(size).uniform_(-1, 1, generator=draws)
        for exact, size in zip(*expected, strict=True)
    )
    return out.to(dtype), lse, dq.to(dtype), dk.to(dtype), dv.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_a_right_kernel_passes_where_the_reference_is_zero(name: str, dtype: torch.dtype) -> None:
    expected = reference_of(CASES[name], dtype)
    for noise in (0.0, 1.0):
        found = compare("x", rounded(expected, dtype, noise=noise), expected, TOLERANCES[dtype])
        assert all(error < TOLERANCES[dtype] for error in found.values())


def last_row(found: Tensor, terms: Tensor) -> None:
    """Its terms do not cancel; without terms, it holds something."""
    found[-1] += torch.where(terms[-1] > 0, terms[-1], 1e-3).to(found.dtype)


def stale_tile(found: Tensor, terms: Tensor) -> None:
    """What memory held."""
    del terms
    found[-64:] = torch.randn(found[-64:].shape, generator=torch.Generator().manual_seed(1)).to(
        found.dtype
    )


def uncancelled(found: Tensor, terms: Tensor) -> None:
    """A gradient from which the softmax subtracts nothing, or a log-sum-exp of two keys."""
    found += torch.where(terms > 0, terms, 0.05).to(found.dtype)


def without_scale(found: Tensor, terms: Tensor) -> None:
    """And from which it subtracts nothing."""
    found += HEADS.dim**0.5 * torch.where(terms > 0, terms, 0.05).to(found.dtype)


def one_nan(found: Tensor, terms: Tensor) -> None:
    del terms
    found.view(-1)[-1] = torch.nan


def one_infinity(found: Tensor, terms: Tensor) -> None:
    del terms
    found.view(-1)[-1] = -torch.inf


MISTAKES = [last_row, stale_tile, uncancelled, without_scale, one_nan, one_infinity]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("name", "output"), VANISHING)
def test_a_wrong_kernel_is_found_where_the_reference_is_zero(
    name: str, output: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    expected = reference_of(case, dtype)
    place = OUTPUTS.index(output)
    rows = case.vanishing[output]
    for mistake in MISTAKES:
        actual: Any = tuple(x.clone() for x in rounded(expected, dtype))
        wrong = rows_of(output, actual[place])[rows].contiguous()
        mistake(wrong, rows_of(output, expected.terms[place])[rows])
        rows_of(output, actual[place])[rows] = wrong
        with pytest.raises(
            ValueError,
            match=rf"attention kernel x: relative error \S+ in the {output} of token \d+",
        ):
            compare("x", actual, expected, TOLERANCES[dtype])


def test_the_size_of_terms_is_that_of_their_sum_where_they_do_not_cancel() -> None:
    """A single pair of one number each: the output is v, dv the gradient; dq and dk are what the
    softmax subtracts.
    """
    blocks = ScoreBlocks([(0, 1, 0, 1)])
    grad, q, k, v = (torch.tensor([[[x]]], dtype=torch.float64) for x in (3.0, 0.5, -5.0, 7.0))
    exact, terms = reference(Sample(grad, q, k, v), blocks)
    assert [x.item() for x in exact] == [7, -2.5, 0, 0, 3]
    assert [x.item() for x in terms] == [7, 1, 3 * 7 * 5, 3 * 7 * 0.5, 3]


@pytest.mark.parametrize("name", [*BLOCKS, "a window of 65"])
def test_the_sizes_of_terms_see_the_pairs_of_the_blocks(name: str) -> None:
    """All weights are equal where keys are zero: with values and gradients of one sign nothing
    cancels but the subtraction.
    """
    blocks = check_cases(LENGTHS, windows=(1, 65))[name]
    drawn = random_sample(blocks, HEADS, CPU, torch.float64)
    sample = Sample(
        torch.ones_like(drawn.grad), drawn.q, torch.zeros_like(drawn.k), torch.ones_like(drawn.v)
    )
    (out, lse, _, _, dv), (out_terms, _, _, dk_terms, dv_terms) = reference(sample, blocks)
    keys = lse.exp().T[..., None].expand_as(out)
    torch.testing.assert_close(out_terms, out / keys.sqrt())
    assert (dv_terms <= dv + 1e-12).all()
    assert ((dv_terms > 0) == (dv > 0)).all(), "a key that no query sees has no terms"
    assert ((dk_terms > 0) == (dv > 0)).all()


# ---- the reference


@pytest.mark.parametrize("name", check_cases(SHORT_LENGTHS, windows=(64,)))
def test_the_host_computes_the_last_query_of_every_case(name: str) -> None:
    blocks = check_cases(SHORT_LENGTHS, windows=(64,))[name]
    sample = random_sample(blocks, HEADS, CPU, torch.float64)
    (out, lse, dq, _, _), _ = reference(sample, blocks)
    for ours, expected in zip(
        (out[-1], lse[:, -1], dq[-1]), last_query_on_host(sample, blocks), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


# ---- kernels whose vanishing gradients are exactly zero, as on CUDA

FORWARD, BACKWARD = kernels.DENSE_KERNELS["cpu"]
Backward = Callable[..., tuple[Tensor, ...]]


def exact_zeros(backward: Backward) -> Backward:
    """Of queries that see a single key: their output is its value."""

    def compute(*inputs: Any) -> tuple[Tensor, ...]:
        _, q, k, v, out, *_ = inputs
        dq, dk, dv = backward(*inputs)
        values = (
            v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).expand_as(out)
            if k.shape[2] == 1
            else None
        )
        if values is None or not torch.allclose(out, values):
            return dq, dk, dv
        return torch.zeros_like(dq), torch.zeros_like(dk), dv

    return compute


def uncancelled_single(*inputs: Any) -> tuple[Tensor, ...]:
    """Forgets what the softmax subtracts, where there is a single key."""
    grad, q, k, v, out, lse, causal = inputs
    return BACKWARD(grad, q, k, v, out * float(k.shape[2] > 1), lse, causal)


@pytest.fixture
def only_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "check_cases", lambda *_: {WINDOW: BLOCKS[WINDOW]})


@pytest.mark.usefixtures("only_windows")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_window_of_one_passes_if_the_kernel_gives_exact_zeros(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (FORWARD, exact_zeros(BACKWARD)))
    errors = verify_kernel("auto", CPU, dtype, heads=HEADS)
    assert max(errors["dq"], errors["dk"]) < 1e-14
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", (FORWARD, uncancelled_single))
    with pytest.raises(
        ValueError,
        match=r'"auto" on a window of 1, random: relative error \S+ in the dq of token \d+',
    ):
        verify_kernel("auto", CPU, dtype, heads=HEADS)


@pytest.mark.usefixtures("only_windows")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_window_of_one_passes_on_the_cpu(dtype: torch.dtype) -> None:
    verify_kernel("auto", CPU, dtype, heads=HEADS, deterministic=True)


# ---- models with windows

WITH_WINDOWS = {
    "gemma3 1b": ("--model.family=gemma3", "--model.size=1b"),
    "gpt-oss 20b": ("--model.family=gpt_oss", "--model.size=20b"),
    "olmo3 7b": ("--model.family=olmo3", "--model.size=7b"),
    "mistral 7b-v0.1": ("--model.family=mistral", "--model.size=7b-v0.1"),
    "debug_window": ("--config=debug_window",),
}


def device_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Any, window: int | None
) -> tuple[Tensor, Tensor]:
    """A device's varlen kernel: products in float32, results in the dtype of the inputs."""
    out, lse = attention_op.forward(
        q.float(), k.float(), v.float(), segments(batch, window), kernel="plain"
    )
    return out.to(q.dtype), lse


def device_backward(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, batch, window = inputs
    dtype = tensors[0].dtype
    blocks = segments(batch, window)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in tensors[1:4]]
    given: Any = (*(x.float() for x in tensors), blocks)
    kernels.accumulate_grads(
        (grads[0], grads[1], grads[2]), kernels.attend_blocks_backward(*given, kernel="plain")
    )
    return tuple(x.to(dtype) for x in grads)


@pytest.fixture
def windows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Of every call of the device's kernel, while plain products give zeros where gradients
    vanish.
    """
    seen: list[int | None] = []

    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        seen.append(inputs[-1])
        return device_forward(*inputs)

    plain_forward, plain_backward = kernels.DENSE_KERNELS["plain"]
    choose = kernels.select_kernel
    monkeypatch.setattr(kernels, "_flash_forward", forward)
    monkeypatch.setattr(kernels, "_flash_backward", device_backward)
    monkeypatch.setattr(
        kernels, "select_kernel", lambda q, name, **_: name if name == "flash" else choose(q, name)
    )
    monkeypatch.setitem(
        kernels.DENSE_KERNELS, "plain", (plain_forward, exact_zeros(plain_backward))
    )
    verify = kernel_check.verify_kernel
    monkeypatch.setattr(
        kernel_check,
        "verify_kernel",
        lambda *args, **given: verify(*args, **given, lengths=LENGTHS),
    )
    return seen


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_a_model_with_windows_starts_on_a_device_whose_gradients_vanish_exactly(
    name: str, windows_seen: list[int | None]
) -> None:
    config = load([*WITH_WINDOWS[name], "--data.corpus=copy", "--training.dtype=bfloat16"])
    assert config.model.build().windows
    hardware.verify_attention_kernel(config, "flash", CPU)
    assert {1, 65} <= {*windows_seen}


def test_a_model_with_windows_is_refused_if_gradients_ignore_a_window_of_one(
    windows_seen: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_window(*inputs: Any) -> tuple[Tensor, ...]:
        *rest, window = inputs
        return device_backward(*rest, None if window == 1 else window)

    monkeypatch.setattr(kernels, "_flash_backward", without_window)
    config = load([*WITH_WINDOWS["debug_window"], "--training.dtype=bfloat16"])
    with pytest.raises(
        ValueError, match=r'"flash" on a window of 1, random: relative error \S+ in the dq'
    ):
        hardware.verify_attention_kernel(config, "flash", CPU)
    assert windows_seen[-1] == 1
