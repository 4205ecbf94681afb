"""Context-parallel attention over four ranks, compared with full attention on one rank, forward
and backward.

    torchrun --nproc-per-node 4 -m examples.context_parallel [--rotation ring|alltoall|allgather] [--compile]

The same task as PyTorch's context-parallel tutorial, but without patching the attention function:
shard the sequence, call attention on the shards, gather the result.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.context_plan import ContextPlan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rotation", choices=["ring", "alltoall", "allgather"], default="ring")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(0)  # The same on all ranks.
    q, k, v = (torch.randn(2, 4096, heads, 64, requires_grad=True) for heads in (8, 4, 4))

    cp = ContextParallel(
        mesh, ContextPlan(cp=mesh.size(), method=arguments.rotation, heads=8, kv_heads=4)
    )
    attention = torch.compile(cp, fullgraph=True) if arguments.compile else cp
    # [2, 4096 / ranks, heads, 64]: differentiable, like any indexing
    shards = [cp.shard(x) for x in (q, k, v)]
    out = attention(*shards)
    grads = torch.autograd.grad(out.square().sum(), shards)

    full = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    expected = torch.autograd.grad(full.square().sum(), (q, k, v))
    gathered = [cp.gather(x) for x in (out, *grads)]
    for name, actual, reference in zip(
        ["out", "dq", "dk", "dv"], gathered, (full.transpose(1, 2), *expected), strict=True
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)
        if mesh.get_local_rank() == 0:
            print(
                f"{name:>4}: max abs difference {(actual - reference).abs().max():.1e} of {reference.abs().max():.1f}"
            )
    if mesh.get_local_rank() == 0:
        print(f"{cp.plan.summary()}{', compiled' if arguments.compile else ''}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
