"""Attention inside documents, compared with a dense masked softmax: values and all gradients.

Shape suffixes: B batch, S tokens, N query heads, K KV heads, H head dim, D document boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from models import attention_op, kernels
from tests.models.dense_attention import Inputs, dense, inputs, run
from tests.models.small_models import starts

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]
LAYOUTS = {
    "one document": starts([23], [23]),
    "one document, padded": starts([23], [23], width=5),
    "packed odd lengths": starts([7, 3, 13], [7, 3, 13]),
    "documents of one token": starts([1, 1, 20, 1], [1, 5, 1, 16]),
    "only documents of one token": starts([1] * 23, [1] * 23),
    "rows with different documents": starts([23], [4, 19], [22, 1], width=7),
}


def three(tensors: Iterable[Tensor]) -> Inputs:
    q, k, v = tensors
    return q, k, v


def rms_error(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_gradients_and_lse_equal_dense_masked_softmax(
    layout: str, heads: tuple[int, int]
) -> None:
    boundaries_BD = LAYOUTS[layout]
    given = inputs(boundaries_BD, heads)
    for found, expected in zip(
        run(attention_op.attention, given, boundaries_BD),
        run(dense, given, boundaries_BD),
        strict=True,
    ):
        assert found.shape == expected.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_may_have_any_strides(layout: str) -> None:
    boundaries_BD = LAYOUTS[layout]
    q, k, v = inputs(boundaries_BD)
    turned = three(
        [
            q,
            *(
                x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                for x in (k, v)
            ),
        ]
    )
    for found, expected in zip(
        run(attention_op.attention, turned, boundaries_BD),
        run(dense, (q, k, v), boundaries_BD),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_padded_boundaries_change_no_bit() -> None:
    bare = starts([7, 3, 13], [23])
    padded = starts([7, 3, 13], [23], width=9)
    given = inputs(bare)
    for found, expected in zip(
        run(attention_op.attention, given, padded),
        run(attention_op.attention, given, bare),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_repeated_boundary_in_the_middle_is_no_document() -> None:
    once = starts([7, 16])
    twice = torch.tensor([[0, 0, 7, 7, 7, 23]], dtype=torch.int32)
    given = inputs(once)
    for found, expected in zip(
        run(attention_op.attention, given, twice),
        run(attention_op.attention, given, once),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_no_value_or_gradient_crosses_a_document_boundary() -> None:
    boundaries_BD = starts([7, 3, 13])
    q, k, v = inputs(boundaries_BD)
    out = attention_op.attention(q, k, v, boundaries_BD)[0]
    for grad in torch.autograd.grad(out[:, 7:10].sum(), (q, k, v)):
        assert grad[:, :7].count_nonzero() == grad[:, 10:].count_nonzero() == 0
    with torch.no_grad():
        poisoned = three(x.clone() for x in (q, k, v))
        for x in poisoned:
            x[:, :7] = torch.nan
        again = attention_op.attention(*poisoned, boundaries_BD)[0]
    assert torch.equal(again[:, 7:], out[:, 7:])


def test_no_gradient_flows_from_later_tokens() -> None:
    boundaries_BD = starts([23])
    q, k, v = inputs(boundaries_BD)
    out = attention_op.attention(q, k, v, boundaries_BD)[0]
    dk, dv = torch.autograd.grad(out[:, :9].sum(), (k, v))
    assert dk[:, 9:].count_nonzero() == dv[:, 9:].count_nonzero() == 0
    assert dv[:, 8].count_nonzero() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["one document", "packed odd lengths"])
def test_outputs_and_gradients_keep_their_dtype_and_lse_is_at_least_float32(
    layout: str, dtype: torch.dtype
) -> None:
    out, *grads, lse = run(
        attention_op.attention, inputs(LAYOUTS[layout], dtype=dtype), LAYOUTS[layout]
    )
    assert {x.dtype for x in (out, *grads)} == {dtype}
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    "layout", ["one document", "packed odd lengths", "rows with different documents"]
)
def test_float32_error_is_rounding_only(layout: str) -> None:
    boundaries_BD = LAYOUTS[layout]
    exact = run(dense, inputs(boundaries_BD), boundaries_BD)
    for found, expected in zip(
        run(attention_op.attention, inputs(boundaries_BD, dtype=torch.float32), boundaries_BD),
        exact,
        strict=True,
    ):
        assert rms_error(found, expected) < 1e-6


@pytest.mark.parametrize("lengths", [[256], [101, 3, 152], [1] * 16 + [240]])
def test_bfloat16_error_is_at_most_twice_that_of_one_torch_call(lengths: list[int]) -> None:
    boundaries_BD = starts(lengths)
    half = inputs(boundaries_BD, dtype=torch.bfloat16, head_dim=32)
    exact = run(dense, three(x.detach().double().requires_grad_() for x in half), boundaries_BD)

    def one_call(q: Tensor, k: Tensor, v: Tensor, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(q.shape[1])
        document_S = (tokens[:, None] >= boundaries_BD[0]).sum(-1)
        mask = (document_S[:, None] == document_S[None, :]) & (tokens[:, None] >= tokens[None, :])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2), torch.zeros(())

    ours, torchs = (
        run(function, half, boundaries_BD)[:4] for function in (attention_op.attention, one_call)
    )
    for found, plain, expected in zip(ours, torchs, exact, strict=False):
        assert rms_error(found, expected) <= 2 * rms_error(plain, expected)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([[0, 22]], "boundaries [0, 22] must ascend from 0 to the sequence length 23"),
        ([[0, 24]], "boundaries [0, 24] must ascend from 0 to the sequence length 23"),
        ([[1, 23]], "boundaries [1, 23] must ascend from 0 to the sequence length 23"),
        ([[0, 9, 5, 23]], "boundaries [0, 9, 5, 23] must ascend from 0 to the sequence length 23"),
        ([[0, 23, 0]], "boundaries [0, 23, 0] must ascend from 0 to the sequence length 23"),
    ],
)
def test_boundaries_that_do_not_cover_the_sequence_raise(
    boundaries: list[list[int]], message: str
) -> None:
    given = inputs(starts([23]))
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_op.attention(*given, torch.tensor(boundaries, dtype=torch.int32))


def test_boundaries_of_every_sequence_are_checked() -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("boundaries [0, 9, 22] must ascend from 0 to the sequence length 23"),
    ):
        attention_op.attention(
            *inputs(starts([23], [23])), torch.tensor([[0, 9, 23], [0, 9, 22]], dtype=torch.int32)
        )


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (torch.tensor([[0, 23]]), "boundaries must be int32 on the CPU, not torch.int64 on cpu"),
        (
            torch.empty(1, 2, dtype=torch.int32, device="meta"),
            "boundaries must be int32 on the CPU, not torch.int32 on meta",
        ),
    ],
)
def test_boundaries_of_wrong_dtype_or_device_raise(boundaries: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_op.document_blocks(boundaries, 1, 23)


@pytest.mark.parametrize(
    "layout", ["one document", "rows with different documents", "without a causal mask"]
)
def test_both_operators_pass_opcheck(layout: str) -> None:
    boundaries_BD = LAYOUTS.get(layout, starts([9, 14], [23, 0]))
    given = inputs(boundaries_BD)
    if layout == "without a causal mask":
        boundaries_BD = torch.stack((boundaries_BD, boundaries_BD))
    out, lse = (x.detach() for x in attention_op.attention(*given, boundaries_BD))
    detached = [x.detach() for x in given]
    found = torch.library.opcheck(
        attention_op.attention, (*given, boundaries_BD, None, None, None, "auto")
    )
    assert {*found.values()} == {"SUCCESS"}
    found = torch.library.opcheck(
        attention_op.attention_backward,
        (torch.ones_like(out), [*detached, out, lse], boundaries_BD, None, None, None, "auto"),
    )
    assert {*found.values()} == {"SUCCESS"}


def test_five_document_layouts_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_op.attention, backend=counter, fullgraph=True)
    layouts = [
        starts(lengths, width=8)
        for lengths in ([23], [7, 16], [1] * 5 + [18], [20, 2, 1], [11, 1, 11])
    ]
    for boundaries_BD in layouts:
        given = inputs(boundaries_BD)
        for found, expected in zip(
            run(compiled, given, boundaries_BD), run(dense, given, boundaries_BD), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("heads", HEADS)
def test_plain_kernel_is_exact(heads: tuple[int, int]) -> None:
    for boundaries_BD in (starts([23], [23]), starts([7, 1, 15], [23], width=4)):
        given = inputs(boundaries_BD, heads)
        found = run(partial(attention_op.attention, kernel_name="plain"), given, boundaries_BD)
        for ours, expected in zip(found, run(dense, given, boundaries_BD), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


SCORES: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window 4, soft cap": {"window": 4, "softcap": 1.5},
    "window 22": {"window": 22},
    "window 23": {"window": 23},
    "soft cap": {"softcap": 1.5},
}


@pytest.mark.parametrize(("has_sink", "kernel"), [(True, "auto"), (False, "plain")])
@pytest.mark.parametrize("scores", SCORES)
def test_windows_sinks_and_soft_caps_equal_dense_masked_softmax(
    scores: str, kernel: str, *, has_sink: bool
) -> None:
    for boundaries_BD in [*LAYOUTS.values(), starts([2, 3, 4, 5, 1, 8], [4, 4, 15], width=8)]:
        for heads in ((4, 2), (4, 4), (4, 1)):
            sinks = [
                torch.linspace(-1, 2, heads[0], dtype=torch.float64, requires_grad=True)
            ] * has_sink
            given = [*inputs(boundaries_BD, heads), *sinks]
            options = SCORES[scores]
            found = run(
                partial(attention_op.attention, kernel_name=kernel, **options),
                given,
                boundaries_BD,
            )
            expected = run(partial(dense, **options), given, boundaries_BD)
            for ours, right in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


def test_a_large_sink_takes_all_attention_without_overflow() -> None:
    boundaries_BD = starts([23])
    sink_N = torch.tensor([-1e4, 0.0, 60.0, 1e4], dtype=torch.float64, requires_grad=True)
    given = [*inputs(boundaries_BD), sink_N]
    found = run(attention_op.attention, given, boundaries_BD)
    expected = run(dense, given, boundaries_BD)
    assert all(x.isfinite().all() for x in found)
    assert (found[0][:, :, 3] == 0).all()
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_lse_is_not_differentiable() -> None:
    boundaries_BD = starts([23])
    out, lse = attention_op.attention(*inputs(boundaries_BD), boundaries_BD)
    assert out.requires_grad
    assert not lse.requires_grad


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("lengths", [[256], [101, 3, 152], [1] * 16 + [240]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_flash_error_is_at_most_twice_that_of_the_cpu_kernel(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int]
) -> None:
    boundaries_BD = starts(lengths, lengths[::-1], width=20)
    host = inputs(boundaries_BD, heads, dtype, head_dim=64)
    device = three(x.detach().cuda().requires_grad_() for x in host)
    assert "flash" in kernels.select_kernel(device[0][0])
    exact = run(dense, three(x.detach().double().requires_grad_() for x in host), boundaries_BD)
    for found, plain, expected in zip(
        run(attention_op.attention, device, boundaries_BD),
        run(attention_op.attention, host, boundaries_BD),
        exact,
        strict=True,
    ):
        assert found.is_contiguous()
        assert rms_error(found.cpu(), expected) <= 2 * rms_error(plain, expected) + 1e-6


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_on_cuda_equals_dense_softmax(layout: str) -> None:
    boundaries_BD = LAYOUTS[layout]
    host = inputs(boundaries_BD)
    device = three(x.detach().cuda().requires_grad_() for x in host)
    for found, expected in zip(
        run(attention_op.attention, device, boundaries_BD),
        run(dense, host, boundaries_BD),
        strict=True,
    ):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
@needs_cuda
def test_boundaries_on_cuda_raise() -> None:
    with pytest.raises(
        ValueError, match=r"boundaries must be int32 on the CPU, not torch\.int32 on cuda:0"
    ):
        attention_op.document_blocks(starts([23]).cuda(), 1, 23)
