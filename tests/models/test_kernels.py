"""Attention kernels on every device, compared with an explicit masked softmax."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from models import attention_op, kernels
from models.dtypes import accumulation_dtype
from models.score_blocks import CAUSAL, Mask, ScoreBlock, ScoreBlocks, block_rows, rows_before
from models.score_pairs import Scores
from tests.models.dense_attention import dense, inputs, run
from tests.models.small_models import starts
from tests.models.test_kernel_check import varlen_backward, varlen_forward

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]
BLOCKS = [ScoreBlock(0, 5, 0, 3), ScoreBlock(5, 9, 0, 7), ScoreBlock(12, 20, 9, 10)]
CAUSAL_BLOCKS = [ScoreBlock(0, 7, 0, 7), ScoreBlock(7, 8, 7, 8), ScoreBlock(8, 20, 8, 20)]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(
    heads: tuple[int, int], dtype: torch.dtype = torch.float64, device: str = "cpu", width: int = 8
) -> tuple[Tensor, ...]:
    """A gradient of the output, queries, keys and values of 20 tokens."""
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (20, heads[0], width),
        (20, heads[0], width),
        (20, heads[1], width),
        (20, heads[1], width),
    )
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    )


def reference(
    given: tuple[Tensor, ...], rectangles: list[ScoreBlock], *, causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Reference: output (zero without keys), log-sum-exp (-inf without keys) and gradients over
    all blocks.
    """
    grad, *qkv = (x.detach().double().cpu() for x in given)
    q, k, v = (x.requires_grad_() for x in qkv)
    allowed = torch.zeros(20, 20, dtype=torch.bool)
    for q0, q1, k0, k1, _ in rectangles:
        allowed[q0:q1, k0:k1] = torch.ones(q1 - q0, k1 - k0).tril() if causal else True
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    out = torch.einsum("nqk,knh->qnh", scores.softmax(-1).nan_to_num(), values)
    return out.detach(), scores.logsumexp(-1).detach(), torch.autograd.grad(out, (q, k, v), grad)


def computed(
    given: tuple[Tensor, ...], rectangles: list[ScoreBlock], *, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    grad, q, k, v = given
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], 20), -torch.inf, dtype=accumulation_dtype(q.dtype))
    for at, part, part_lse in kernels.attend_blocks(
        q, k, v, ScoreBlocks(rectangles, causal=causal), kernel=kernel
    ):
        out[at] = part
        lse[:, at] = part_lse
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    for at, keys, *parts in kernels.attend_blocks_backward(
        grad, q, k, v, out, lse, ScoreBlocks(rectangles, causal=causal), kernel=kernel
    ):
        for whole, where, part in zip(grads, (at, keys, keys), parts, strict=True):
            whole[where] += part
    return out, lse, grads


@pytest.mark.parametrize("kernel", ["auto", "plain"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_blocks_are_computed_exactly(heads: tuple[int, int], kernel: str, *, causal: bool) -> None:
    rectangles = CAUSAL_BLOCKS if causal else BLOCKS
    given = draw(heads)
    ours = computed(given, rectangles, causal=causal, kernel=kernel)
    torch.testing.assert_close(
        ours, reference(given, rectangles, causal=causal), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_gradient_of_some_keys_is_exact_given_lse_of_all_keys(kernel: str) -> None:
    given = draw((4, 2))
    whole = [ScoreBlock(0, 20, 0, 20)]
    out, lse, expected = reference(given, whole, causal=False)
    grads = tuple(torch.zeros_like(x) for x in given[1:])
    for k0, k1 in pairwise([0, 1, 8, 20]):
        part = [ScoreBlock(0, 20, k0, k1)]
        grad_out, q, k, v = given
        found = kernels.attend_blocks_backward(
            grad_out, q, k, v, out, lse, ScoreBlocks(part, causal=False), kernel=kernel
        )
        for at, keys, *parts in found:
            for sums, where, grad in zip(grads, (at, keys, keys), parts, strict=True):
                sums[where] += grad
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-12)


def test_empty_block_raises_instead_of_crashing() -> None:
    for empty in (ScoreBlock(0, 0, 0, 3), ScoreBlock(0, 3, 4, 4)):
        with pytest.raises(
            ValueError, match=re.escape(f"{empty} is empty: attention needs at least one query")
        ):
            ScoreBlocks([ScoreBlock(0, 3, 0, 3), empty], causal=False)


def test_causal_block_must_be_square() -> None:
    with pytest.raises(
        ValueError,
        match=r"ScoreBlock\(q0=0, q1=5, k0=0, k1=3, mask='causal'\) is causal, and must have as many queries as keys",
    ):
        ScoreBlocks(BLOCKS, causal=True)


def test_unknown_kernel_is_named() -> None:
    _, q, k, v = draw((4, 2))
    with pytest.raises(
        ValueError, match='attention kernel "fast" is unknown; choose from auto, cpu, flash, cudnn'
    ):
        list(kernels.attend_blocks(q, k, v, ScoreBlocks(BLOCKS, causal=False), kernel="fast"))


# ---- varlen calls


def test_blocks_that_share_keys_go_into_separate_varlen_calls() -> None:
    one, two = ScoreBlocks(BLOCKS, causal=False).varlen_batches(torch.device("cpu"))
    assert one.cu_seqlens_q.tolist() == [0, 5, 13]
    assert one.cu_seqlens_k.tolist() == [0, 3, 4]
    assert isinstance(one.queries, Tensor)
    assert one.queries.tolist() == [*range(5), *range(12, 20)]
    assert isinstance(one.keys, Tensor)
    assert one.keys.tolist() == [0, 1, 2, 9]
    assert (one.max_seqlen_q, one.max_seqlen_k) == (8, 3)
    assert (two.queries, two.keys) == (slice(5, 9), slice(0, 7))
    assert two.cu_seqlens_q.dtype == torch.int32


def test_adjacent_causal_blocks_need_no_index() -> None:
    (batch,) = ScoreBlocks(CAUSAL_BLOCKS, causal=True).varlen_batches(torch.device("cpu"))
    assert (batch.queries, batch.keys) == (slice(0, 20), slice(0, 20))
    assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_k.tolist() == [0, 7, 8, 20]
    assert batch.max_seqlen_q == batch.max_seqlen_k == 12


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_calls_return_each_block_at_its_tokens(
    monkeypatch: pytest.MonkeyPatch, *, causal: bool
) -> None:
    """The code path of CUDA flash, with a fake kernel that runs segment by segment on the CPU."""
    choose = kernels.select_kernel
    monkeypatch.setattr(kernels, "_flash_forward", varlen_forward)
    monkeypatch.setattr(kernels, "_flash_backward", varlen_backward)
    monkeypatch.setattr(
        kernels,
        "select_kernel",
        lambda q, kernel, **_: "flash" if kernel == "flash" else choose(q, kernel),
    )
    rectangles = CAUSAL_BLOCKS if causal else BLOCKS
    given = draw((4, 2))
    ours = computed(given, rectangles, causal=causal, kernel="flash")
    torch.testing.assert_close(
        ours, reference(given, rectangles, causal=causal), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("window", [1, 2, 4, 11, 12, 20])
def test_windows_by_varlen_calls_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The code path of CUDA flash: causal calls with a window, and flipped ones of parts that
    other tokens precede.
    """
    choose = kernels.select_kernel
    monkeypatch.setattr(kernels, "_flash_forward", varlen_forward)
    monkeypatch.setattr(kernels, "_flash_backward", varlen_backward)
    monkeypatch.setattr(
        kernels,
        "select_kernel",
        lambda q, kernel, **_: "flash" if kernel != "plain" else choose(q),
    )
    boundaries_BD = starts([7, 1, 12], [20], width=4)
    *expected, lse_BNS = run(partial(dense, window=window), inputs(boundaries_BD), boundaries_BD)
    whole = attention_op.document_blocks(boundaries_BD, 2, 20, Scores(window))
    # As a rank gets them that holds the second half of a document after the first.
    halves_22 = torch.tensor([[0, 10], [10, 20]])
    before = rows_before(
        halves_22[1:], halves_22[:1], window, shift_P2=torch.zeros(1, 2, dtype=torch.int64)
    )
    parts = torch.cat((block_rows(halves_22, halves_22, CAUSAL), before))
    assert whole.window == (window if window < 20 else None)
    for blocks, rows in (
        (whole, slice(0, 2)),
        (ScoreBlocks(parts, scores=Scores(window)), slice(1, 2)),
    ):
        q, k, v = (x[rows].flatten(0, 1).detach() for x in inputs(boundaries_BD))
        out, lse = attention_op.forward(q, k, v, blocks)
        grad = torch.randn(
            2, 20, *q.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )[rows]
        grads = attention_op.backward(grad.flatten(0, 1), q, k, v, out, lse, blocks)
        for found, right in zip((out, *grads), expected, strict=True):
            torch.testing.assert_close(found, right[rows].flatten(0, 1), rtol=0, atol=1e-12)
        torch.testing.assert_close(
            lse, attention_op.flatten_lse(lse_BNS[rows]), rtol=0, atol=1e-12
        )


# ---- CUDA


@pytest.mark.parametrize("window", [None, 3])
def test_torch_accepts_the_arguments_of_windows(window: int | None) -> None:
    """On meta tensors; values need a CUDA device.

    The kernel counts the keys before a query's own.
    """
    with torch.device("meta"):
        shapes = ((20, 4, 64), (20, 4, 64), (20, 2, 64), (20, 2, 64))
        grad, q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    blocks = ScoreBlocks(
        [ScoreBlock(0, 20, 0, 20, "causal"), ScoreBlock(4, 9, 0, 5, "flipped")],
        scores=Scores(window),
    )
    calls = list[dict[str, Any]]()
    with CallOptions(calls):
        out = [*kernels.attend_blocks(q, k, v, blocks, kernel="flash")]
        grads = kernels.attend_blocks_backward(
            grad, q, k, v, q, torch.empty(4, 20, device="meta"), blocks, kernel="flash"
        )
        assert [dk.shape for *_, dk, _ in grads] == [(20, 2, 64), (5, 2, 64)]
    assert [len(part) for _, part, _ in out] == [20, 5]
    own = {} if window is None else {"window_size_left": 2}
    assert calls == [own, {}, own, {}]


class CallOptions(TorchDispatchMode):
    """The keyword arguments of each flash attention call."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if "_flash_attention" in function.name():
            self.calls.append(dict(options or {}))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient", "plain"])
def test_torch_accepts_the_arguments_of_every_cuda_kernel(kernel: str, *, causal: bool) -> None:
    """Checks shapes and dtypes on meta tensors; values need a CUDA device."""
    dtype = torch.float32 if kernel == "efficient" else torch.bfloat16
    rectangles = CAUSAL_BLOCKS if causal else BLOCKS
    with torch.device("meta"):
        shapes = ((20, 4, 64), (20, 4, 64), (20, 2, 64), (20, 2, 64))
        grad, q, k, v = (torch.empty(shape, dtype=dtype) for shape in shapes)
        out = torch.empty_like(q)
        lse = torch.empty(4, 20)
        for (_, part, part_lse), (q0, q1, *_) in zip(
            kernels.attend_blocks(q, k, v, ScoreBlocks(rectangles, causal=causal), kernel=kernel),
            rectangles,
            strict=False,
        ):
            assert part.shape[1:] == (4, 64)
            assert part_lse.shape == (4, part.shape[0])
            assert kernel in ("flash", "cudnn") or part.shape[0] == q1 - q0
        inputs = (grad, q, k, v, out, lse)
        for _, _, dq, dk, dv in kernels.attend_blocks_backward(
            *inputs, ScoreBlocks(rectangles, causal=causal), kernel=kernel
        ):
            assert dq.shape[1:] == (4, 64)
            assert dk.shape == dv.shape == (dk.shape[0], 2, 64)


def test_cudnn_gets_no_block_of_a_single_query_or_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kernels.DENSE_KERNELS, "cudnn")
    q = torch.empty(20, 2, 64, dtype=torch.bfloat16, device="meta")
    assert list(
        kernels.attend_blocks(q, q, q, ScoreBlocks([(0, 7, 0, 1)], causal=False), kernel="cudnn")
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("flash", torch.bfloat16),
        ("flash", torch.float16),
        ("cudnn", torch.bfloat16),
        ("cudnn", torch.float16),
        ("efficient", torch.float32),
        ("plain", torch.float64),
    ],
)
def test_cuda_kernel_error_is_within_the_tolerance_of_its_dtype(
    kernel: str, dtype: torch.dtype, heads: tuple[int, int], *, causal: bool
) -> None:
    rectangles = (
        CAUSAL_BLOCKS
        if causal
        else [ScoreBlock(0, 5, 0, 3), ScoreBlock(5, 9, 0, 7), ScoreBlock(12, 20, 9, 12)]
    )
    given = draw(heads, dtype, "cuda", width=64)
    ours = computed(given, rectangles, causal=causal, kernel=kernel)
    expected = reference(given, rectangles, causal=causal)
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[
        dtype
    ]
    for found, right in zip((*ours[:2], *ours[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(found.cpu().double(), right, rtol=near, atol=near)


@pytest.mark.parametrize("masks", [("full", "causal", "full"), ("flipped", "flipped", "causal")])
def test_nothing_of_a_block_lives_beside_the_next_one(
    masks: tuple[Mask, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long block's gradients are as large as its queries, keys and values."""
    before = list[StorageWeakRef]()

    def watched(kernel: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*args: Any) -> tuple[Tensor, ...]:
            assert all(storage.expired() for storage in before)
            found = kernel(*args)
            before.extend(StorageWeakRef(x.untyped_storage()) for x in found)
            return found

        return run

    dense = tuple(map(watched, kernels.DENSE_KERNELS["cpu"]))
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cpu", dense)
    grad, q, k, v = draw((4, 2))
    spans = ((0, 6), (6, 12), (12, 20))
    blocks = ScoreBlocks(
        [ScoreBlock(*span, *span, mask) for span, mask in zip(spans, masks, strict=True)]
    )
    out, lse = attention_op.forward(q, k, v, blocks)
    assert len(before) == 6
    attention_op.backward(grad, q, k, v, out, lse, blocks)
    assert len(before) == 15
    sharing = ScoreBlocks([ScoreBlock(0, 20, *span) for span in spans])
    out, lse = attention_op.forward(q, k, v, sharing)
    attention_op.backward(grad, q, k, v, out, lse, sharing)
    assert len(before) == 30
