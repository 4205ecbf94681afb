"""Trains a custom model with hybrid context parallelism on four ranks: Ulysses over two, ring over
two.

    torchrun --nproc-per-node 4 -m examples.unified_attention [--ulysses 1|2|4] [--compile]

Only the attention call comes from Longhaul. Documents are packed and masked, and the losses equal
those of one rank on every mesh.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from models import attention_op
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.context_plan import ContextPlan

TOKENS = 1024
WIDTH = 64
HEADS = 8
BOUNDARIES = torch.tensor([[0, 100, 101, 700, TOKENS]], dtype=torch.int32)  # Any document lengths.


class Model(nn.Module):
    """Embedding, one attention layer, output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        self.attention = lambda q, k, v, boundaries: attention_op.attention(q, k, v, boundaries)[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        logits: Tensor = self.head(x + self.attention(q, k, v, BOUNDARIES).flatten(-2))
        return logits


def train(model: nn.Module, tokens: Tensor, labels: Tensor, *, ranks: int) -> list[float]:
    """The global losses of ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            / TOKENS
        )
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:
            for x in (total, *(parameter.grad for parameter in model.parameters())):
                distributed.all_reduce(x)
        optimizer.step()
        losses.append(float(total))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ulysses", type=int, choices=[1, 2, 4], default=2, help="Ulysses degree")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // arguments.ulysses, arguments.ulysses))
    plan = ContextPlan(
        cp=ranks,
        method="hybrid",
        cp_ulysses=arguments.ulysses,
        outer_method="ring",
        heads=HEADS,
        kv_heads=HEADS,
    )
    cp = ContextParallel(mesh, plan)

    torch.manual_seed(0)  # The same on all ranks.
    sequence = torch.randint(256, (1, TOKENS + 1))
    # Labels are shifted before sharding.
    tokens = sequence[:, :-1]
    labels = sequence[:, 1:]
    torch.manual_seed(1)
    reference = train(Model(), tokens, labels, ranks=1)

    torch.manual_seed(1)
    model = Model()
    model.attention = cp
    if arguments.compile:
        model.compile(fullgraph=True)
    losses = train(model, cp.shard(tokens, BOUNDARIES), cp.shard(labels, BOUNDARIES), ranks=ranks)

    torch.testing.assert_close(losses, reference, rtol=1e-5, atol=0)
    if distributed.get_rank() == 0:
        print(f"{cp.plan.summary()}{', compiled' if arguments.compile else ''}")
        print(
            f"losses on {ranks} ranks {losses[0]:.5f} ... {losses[-1]:.5f}, on 1 rank {reference[0]:.5f} ... "
            f"{reference[-1]:.5f}"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
