"""`torch.nn.functional.scaled_dot_product_attention` over sequences that are sharded over ranks,
in unchanged code.

Shape suffixes: B sequences, S query tokens and U key tokens of this rank, N query heads, K KV
heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallelisms.context.context_parallel import one_document


class ScaledDotProductAttention(TorchFunctionMode):
    """The context of `ContextParallel.sdpa`: calls of the function of this name are calls of
    `attention`, over `ranks`.
    """

    def __init__(self, attention: Callable[..., Tensor], ranks: int) -> None:
        super().__init__()
        self._attention = attention
        self._ranks = ranks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        # A mode does not see what such a function calls.
        if func is F.multi_head_attention_forward:
            raise ValueError(
                "nn.MultiheadAttention would attend to the tokens of this rank: call scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        problems = []
        if attn_mask is not None:
            problems.append(
                "attn_mask: which pairs it allows is not known; is_causal is, and the documents of cp.attention"
            )
        if dropout_p > 0:
            problems.append(
                f"dropout_p = {dropout_p}: ranks would drop other pairs than one process"
            )
        problems += _shape_problems(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)
        if _is_in_autograd_function():
            problems.append(
                "a re-entrant checkpoint would call it again outside of cp.sdpa(): checkpoint with use_reentrant=False and "
                "context_fn=lambda: (cp.sdpa(), cp.sdpa())"
            )
        if problems:
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            problems.append(f"query, key and value are {shapes}")
            raise ValueError(
                f"scaled_dot_product_attention over {self._ranks} ranks: {'; '.join(problems)}"
            )
        # Kernels scale by width ** -0.5.
        factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        query = query if isclose(factor, 1, rel_tol=1e-12) else query * factor
        q_BSNH, k_BUKH, v_BUKH = (x.transpose(1, 2) for x in (query, key, value))
        documents = one_document(len(query), query.shape[2] * self._ranks) if is_causal else None
        return self._attention(q_BSNH, k_BUKH, v_BUKH, documents, causal=is_causal).transpose(1, 2)


def _shape_problems(
    q_BNSH: Tensor, k_BKUH: Tensor, v_BKUH: Tensor, *, is_causal: bool, enable_gqa: bool
) -> list[str]:
    if not q_BNSH.ndim == k_BKUH.ndim == v_BKUH.ndim == 4:
        return ["query, key and value must be [batch, heads, tokens of a rank, width]"]
    problems = []
    if k_BKUH.shape != v_BKUH.shape:
        problems.append("key and value must have the same shape")
    if is_causal and q_BNSH.shape[2] != k_BKUH.shape[2]:
        problems.append("is_causal = True needs as many keys as queries")
    if not enable_gqa and q_BNSH.shape[1] != k_BKUH.shape[1]:
        problems.append("enable_gqa = False needs as many key heads as query heads")
    return problems


def _is_in_autograd_function() -> bool:
    """Whether the `forward(ctx, ...)` of an `autograd.Function` runs: its backward calls what it
    likes, without a mode.
    """
    # Inside of `forward(ctx, ...)` gradients are off; a compiler has no frames to look at.
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    codes = (frame.f_code for frame, _ in walk_stack(None))
    return any(code.co_name == "forward" and code.co_varnames[:1] == ("ctx",) for code in codes)
