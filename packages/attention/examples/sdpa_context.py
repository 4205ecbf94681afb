"""Code that calls scaled_dot_product_attention, unchanged: each rank has a quarter of every
sequence.

torchrun --nproc-per-node 4 sdpa_context.py
"""

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longhaul_attention import ContextParallel


def layer(q, k, v):
    """Knows nothing of ranks."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    cp = ContextParallel(init_device_mesh("cpu", (ranks,)), method="ring")
    torch.manual_seed(0)  # The same tensors on all ranks.
    qkv = [torch.randn(8, 8, 64, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    shards = [cp.shard(x.detach(), dim=2).requires_grad_() for x in qkv]
    with cp.sdpa():
        loss = layer(*shards).square().mean()
    # The mean over the ranks is the loss of all tokens.
    grads = torch.autograd.grad(loss / ranks, shards)

    expected_loss = layer(*qkv).square().mean()
    expected = torch.autograd.grad(expected_loss, qkv)
    distributed.all_reduce(mean := loss.detach() / ranks)
    errors = [abs(mean - expected_loss) / expected_loss]
    for grad, right in zip(grads, expected, strict=True):
        errors.append((cp.gather(grad, dim=2) - right).abs().max() / right.abs().max())
    error = float(max(errors))
    assert error < 1e-12, error
    if distributed.get_rank() == 0:
        print(
            f"sdpa context: largest error of loss and gradients {error:.0e} of one process",
            flush=True,
        )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
