"""Attention of a video diffusion transformer in fp16, without a causal mask: heads inside a node,
keys between nodes.

torchrun --nproc-per-node 4 diffusion_attention.py
"""

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longhaul_attention import ContextParallel

BATCH = 2
HEADS = 24
WIDTH = 64
VIDEO = 4 * 64
TEXT = 32


def block(video, text):
    """Attention of all patches to each other, then to a text of another length."""
    out = F.scaled_dot_product_attention(video, video, video)
    return F.scaled_dot_product_attention(out, text, text)


def results(video, text, weights):
    """Output and gradients."""
    given = [x.detach().requires_grad_() for x in (video, text)]
    out = block(*given)
    return [x.detach() for x in (out, *torch.autograd.grad((out * weights).sum(), given))]


def largest_error(found, exact):
    return max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, exact, strict=True)
    )


def main() -> None:
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    # Without packed documents, KV go around a ring.
    cp = ContextParallel(mesh, method="hybrid", packs_documents=False)
    torch.manual_seed(0)  # The same tensors on all ranks.
    full = [torch.randn(BATCH, HEADS, tokens, WIDTH).half() for tokens in (VIDEO, TEXT, VIDEO)]

    shards = [cp.shard(x, dim=2) for x in full]
    with cp.sdpa():
        found = [cp.gather(x, dim=2) for x in results(*shards)]

    exact = results(*(x.double() for x in full))
    error, of_one_process = (largest_error(each, exact) for each in (found, results(*full)))
    assert error < 2 * of_one_process, (error, of_one_process)
    if distributed.get_rank() == 0:
        proof = f"largest error of output and gradients {error:.1e} in fp16, and {of_one_process:.1e} of one process"
        print(f"diffusion attention: {proof}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
