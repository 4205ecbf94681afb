"""Kernels of attention with their log-sum-exp: the only file that knows devices, types and what torch ships for them.

Work is given as rectangles: each says which queries attend to which keys, all of them or, where both are as many, the
causal half. The queries of one call's rectangles are disjoint, so every part that comes back is final for its keys.

Shape suffixes: X query tokens and Y key tokens (the rows of a batch laid end to end), P tokens of a part, N query
heads, K key/value heads (N is a multiple of K), H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

KERNELS = ("auto", "flash", "cudnn", "efficient", "plain")
At = slice | Tensor
"""Which tokens: a range, or int64 indices without repetition."""

# Above this many rectangles on CUDA, one call with lengths is better than a call for each.
FEW = 8
# The first cuDNN whose attention takes any length.
CUDNN_ANY_LENGTH = 91501


class Rectangle(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int


Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Grads = tuple[Tensor, Tensor, Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Grads]


def attend(
    q_XNH: Tensor,
    k_YKH: Tensor,
    v_YKH: Tensor,
    rectangles: Sequence[Rectangle],
    *,
    causal: bool,
    kernel: str = "auto",
) -> Iterator[tuple[At, Tensor, Tensor]]:
    """Scaled dot-product attention, scale H ** -0.5, rectangle by rectangle or several at once.

    Yields (queries, output [P, N, H], log-sum-exp [N, P]: float64 for float64, else float32). Raises ValueError for
    an empty rectangle, and for a causal one that is no square.
    """
    _check(rectangles, causal=causal)
    name = choose(q_XNH, len(rectangles), kernel)
    if name == "flash":
        for batch in _batches(tuple(rectangles), q_XNH.device):
            q, k, v = q_XNH[batch.queries], k_YKH[batch.keys], v_YKH[batch.keys]
            yield batch.queries, *_flash_forward(q, k, v, batch, causal)
        return
    forward, _ = DENSE[name]
    for q0, q1, k0, k1 in rectangles:
        q, k, v = (x[None].transpose(1, 2) for x in (q_XNH[q0:q1], k_YKH[k0:k1], v_YKH[k0:k1]))
        out, lse = forward(q, k, v, causal)
        yield slice(q0, q1), out[0].transpose(0, 1), lse[0]


def attend_backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_YKH: Tensor,
    v_YKH: Tensor,
    out_XNH: Tensor,
    lse_NX: Tensor,
    rectangles: Sequence[Rectangle],
    *,
    causal: bool,
    kernel: str = "auto",
) -> Iterator[tuple[At, At, Tensor, Tensor, Tensor]]:
    """Yields (queries, keys, and the gradients that their attention adds to those queries, keys and values).

    `out_XNH` and `lse_NX` are of *all* the keys that each query attends to, here or elsewhere: with them the gradient
    of any part of the keys is exact by itself (FlashAttention, Dao et al., 2022, appendix B).
    """
    _check(rectangles, causal=causal)
    name = choose(q_XNH, len(rectangles), kernel)
    if name == "flash":
        for batch in _batches(tuple(rectangles), q_XNH.device):
            grad, q, out = (x[batch.queries] for x in (grad_XNH, q_XNH, out_XNH))
            k, v = (x[batch.keys] for x in (k_YKH, v_YKH))
            grads = _flash_backward(grad, q, k, v, out, lse_NX[:, batch.queries], batch, causal)
            yield batch.queries, batch.keys, *grads
        return
    _, backward = DENSE[name]
    for q0, q1, k0, k1 in rectangles:
        parts = (grad_XNH[q0:q1], q_XNH[q0:q1], k_YKH[k0:k1], v_YKH[k0:k1], out_XNH[q0:q1])
        grad, q, k, v, out = (x[None].transpose(1, 2) for x in parts)
        dq, dk, dv = (x[0].transpose(0, 1) for x in backward(grad, q, k, v, out, lse_NX[None, :, q0:q1], causal))
        yield slice(q0, q1), slice(k0, k1), dq, dk, dv


def choose(q_XNH: Tensor, rectangles: int, kernel: str = "auto") -> str:
    """The kernel for this many rectangles of such queries: "cpu" there, else what was asked for, or suits them."""
    if kernel not in KERNELS:
        raise ValueError(f'attention kernel "{kernel}" is unknown; there are {", ".join(KERNELS)}')
    if q_XNH.device.type == "cpu":
        return "plain" if kernel == "plain" else "cpu"
    if kernel != "auto":
        return kernel
    if q_XNH.dtype in (torch.bfloat16, torch.float16):
        return "cudnn" if rectangles <= FEW and _cudnn_is_better(q_XNH.device) else "flash"
    return "efficient" if q_XNH.dtype == torch.float32 else "plain"


@lru_cache(maxsize=8)
def _cudnn_is_better(device: torch.device) -> bool:
    # On Hopper and later, cuDNN's kernel is half again as fast as the FlashAttention 2 that torch ships.
    if torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and (
        (torch.backends.cudnn.version() or 0) >= CUDNN_ANY_LENGTH
    )


def described(kernel: str, device: torch.device, dtype: torch.dtype) -> str:
    """What `attend` does on this device, in words."""
    few, many = (choose(torch.empty(0, dtype=dtype, device=device), count, kernel) for count in (1, FEW + 1))
    return few if few == many else f"{few} for up to {FEW} documents or pieces at once, {many} for more"


def check(kernel: str, device: torch.device, dtype: torch.dtype, *, width: int) -> None:
    """Raises ValueError unless small attentions, forward and backward, are those of matrix products in float64.

    Kernels of one name differ between devices and versions in ways that no error tells; this does. Takes milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((192, 4, width), (192, 4, width), (192, 2, width), (192, 2, width))
    grad, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    few = [(0, 65, 0, 65), (65, 192, 65, 192)]
    many = [(at, at + 16, at, at + 16) for at in range(0, 192, 16)]
    oblong = [(0, 192, 0, 100)]
    for name, causal, ranges in (("few", True, few), ("many", True, many), ("oblong", False, oblong)):
        rectangles = [Rectangle(*range_) for range_ in ranges]
        found = _all_parts(grad, q, k, v, rectangles, causal, kernel)
        double = (grad.double(), q.double(), k.double(), v.double())
        exact = _all_parts(*double, rectangles, causal, "plain")
        for part, ours, right in zip(("output", "log-sum-exp", "dq", "dk", "dv"), found, exact, strict=True):
            error = float((ours.double() - right).abs().max() / right.abs().max())
            if not error < 16 * torch.finfo(dtype).eps:
                raise ValueError(f'kernel "{kernel}" errs by {error:.1e} in the {part} of {name} rectangles')


def _all_parts(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rectangles: list[Rectangle], causal: bool, kernel: str
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of rectangles that cover all queries."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=widest(q.dtype))
    for at, *parts in attend(q, k, v, rectangles, causal=causal, kernel=kernel):
        out[at], lse[:, at] = parts
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for at, keys, *grads in attend_backward(grad, q, k, v, out, lse, rectangles, causal=causal, kernel=kernel):
        dq[at], dk[keys], dv[keys] = grads
    return out, lse, dq, dk, dv


def widest(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts of this type are summed, and that of every log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(rectangles: Sequence[Rectangle], *, causal: bool) -> None:
    # A length of zero ends the process inside the CPU kernel; kernels differ on where an oblong's diagonal lies.
    for rectangle in rectangles:
        q0, q1, k0, k1 = rectangle
        if q1 <= q0 or k1 <= k0:
            raise ValueError(f"{rectangle} is empty: attention needs at least one query and one key")
        if causal and q1 - q0 != k1 - k0:
            raise ValueError(f"{rectangle} cannot be causal: it has as many queries as keys only if it is a square")


# ---- CPU flash: any strides, grouped heads and float64 natively.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


# ---- CUDA flash (FlashAttention 2, or 3 and 4 where activated): several rectangles in one call.


class _Batch(NamedTuple):
    """Rectangles with disjoint keys, as one call takes them."""

    queries: At
    keys: At
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


@lru_cache(maxsize=128)
def _batches(rectangles: tuple[Rectangle, ...], device: torch.device) -> tuple[_Batch, ...]:
    rounds: list[list[Rectangle]] = []
    for rectangle in rectangles:
        fitting = next((batch for batch in rounds if batch[-1].k1 <= rectangle.k0), None)
        if fitting is None:
            rounds.append([rectangle])
        else:
            fitting.append(rectangle)
    return tuple(_as_batch(batch, device) for batch in rounds)


def _as_batch(rectangles: list[Rectangle], device: torch.device) -> _Batch:
    queries = [(q0, q1) for q0, q1, _, _ in rectangles]
    keys = [(k0, k1) for _, _, k0, k1 in rectangles]
    (queries_at, query_starts, longest_query), (keys_at, key_starts, longest_key) = (
        (_at(ranges, device), _starts(ranges, device), max(end - start for start, end in ranges))
        for ranges in (queries, keys)
    )
    return _Batch(queries_at, keys_at, query_starts, key_starts, longest_query, longest_key)


def _at(ranges: list[tuple[int, int]], device: torch.device) -> At:
    if all(end == start for (_, end), (start, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return _to_device(torch.cat([torch.arange(start, end) for start, end in ranges]), device)


def _starts(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    lengths = torch.tensor([0] + [end - start for start, end in ranges], dtype=torch.int32)
    return _to_device(lengths.cumsum(0, dtype=torch.int32), device)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if torch.cuda.is_available() else x.to(device)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, batch: _Batch, causal: bool) -> tuple[Tensor, Tensor]:
    lengths = batch[2:]
    without_mask = (False,)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, *without_mask)
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: _Batch,
    causal: bool,
) -> Grads:
    dense = [x.contiguous() for x in (grad, q, k, v, out, lse)]
    no_dropout_state = (torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    dq, dk, dv = aten._flash_attention_backward(*dense, *batch[2:], 0.0, causal, *no_dropout_state)
    return dq, dk, dv


# ---- CUDA cuDNN, half precision: a call for each rectangle.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    with_lse = True
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, with_lse, 0.0, causal)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    saved = (out.contiguous(), lse.contiguous()[..., None])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, *saved, nothing, nothing, None, *lengths, 0.0, causal
    )
    return dq, dk, dv


# ---- CUDA memory-efficient: the one for single precision. It takes no grouped heads.


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    with_lse = True
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, keys, values, None, with_lse, 0.0, causal)
    # It comes padded to a multiple of 32 queries, and is wanted so again.
    return out, lse[..., : q.shape[2]]


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = (x.repeat_interleave(groups[1], dim=1) for x in (k, v))
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    nothing = torch.empty((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, keys, values, None, out, padded, nothing, nothing, 0.0, wanted, causal
    )
    return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


# ---- Anywhere, and for double precision on CUDA: matrix products, the reference of the others.


def _plain_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores: Tensor = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-2, -1) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, causal)
    out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out, scores.logsumexp(-1).to(widest(q.dtype))


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    # By hand: the body of an operator runs below autograd.
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    weights = (_plain_scores(q, k, causal) - lse.unsqueeze(-1)).exp().to(q.dtype)
    k_all, v_all = (x.repeat_interleave(groups[1], dim=1) for x in (k, v))
    grad_weights = grad @ v_all.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * q.shape[-1] ** -0.5
    dk = (grad_scores.transpose(-2, -1) @ q).unflatten(1, groups).sum(2)
    dv = (weights.transpose(-2, -1) @ grad).unflatten(1, groups).sum(2)
    return grad_scores @ k_all, dk, dv


DENSE: dict[str, tuple[Forward, Backward]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (_efficient_forward, _efficient_backward),
    "plain": (_plain_forward, _plain_backward),
}
