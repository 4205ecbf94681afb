"""Start-up check of an attention kernel against matrix products in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from models import attention_op
from models.kernels import ScoreBlocks, accumulate_grads, attend_blocks_backward

# Blocks of length 1, several rectangular blocks in one call, and keys that several blocks share.
CHECK_CASES = {
    "causal blocks": ScoreBlocks([(0, 65, 0, 65), (65, 66, 65, 66), (66, 192, 66, 192)], causal=True),
    "one rectangular block": ScoreBlocks([(0, 192, 0, 100)], causal=False),
    "rectangular blocks": ScoreBlocks(
        [(0, 50, 0, 20), (50, 51, 0, 70), (51, 100, 70, 71), (100, 192, 80, 192)], causal=False
    ),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


def verify_kernel(kernel: str, device: torch.device, dtype: torch.dtype, *, width: int) -> None:
    """Raises ValueError unless the kernel's forward and backward pass agree with the reference for head dim `width`.

    Kernels of one name differ between devices and versions without raising an error. Takes milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((192, 4, width), (192, 4, width), (192, 2, width), (192, 2, width))
    grad, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    # Also very negative scores, whose exponentials underflow.
    for score_range, (query, key) in {"": (q, k), " with very negative scores": (5 * q.abs(), -5 * k.abs())}.items():
        for name, blocks in CHECK_CASES.items():
            actual = _forward_backward(grad, query, key, v, blocks, kernel)
            expected = _forward_backward(grad.double(), query.double(), key.double(), v.double(), blocks, "plain")
            for output_name, actual_tensor, expected_tensor in zip(
                ("output", "log-sum-exp", "dq", "dk", "dv"), actual, expected, strict=True
            ):
                error = float((actual_tensor.double() - expected_tensor).abs().max() / expected_tensor.abs().max())
                if not error < TOLERANCES[dtype]:
                    raise ValueError(
                        f'attention kernel "{kernel}": relative error {error:.1e} in the {output_name} of {name}'
                        f"{score_range}, above {TOLERANCES[dtype]:g}"
                    )


def _forward_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: ScoreBlocks, kernel: str
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp, dq, dk and dv of blocks that cover all queries."""
    out, lse = attention_op.forward(q, k, v, blocks, kernel=kernel)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    accumulate_grads((dq, dk, dv), attend_blocks_backward(grad, q, k, v, out, lse, blocks, kernel=kernel))
    return out, lse, dq, dk, dv
