"""A model of one's own, trained on sequences that four processes share: two exchange heads, two rotate keys and values.

    torchrun --nproc-per-node 4 -m examples.unified_attention [--ulysses 1|2|4] [--compile]

Only the attention call of the model is ours. Documents are packed, so that the mask matters, and the loss equals that
of one process, whatever the mesh.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from models import attention_op
from parallelisms.context.context_parallel import ContextParallel

TOKENS, WIDTH, HEADS = 1024, 64, 8
BOUNDARIES = torch.tensor([[0, 100, 101, 700, TOKENS]], dtype=torch.int32)  # Documents may have any length.


class Model(nn.Module):
    """One layer that mixes tokens, between an embedding and a head."""

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
    """The losses of ten steps, over all ranks' tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, choices=[1, 2, 4], default=2, help="ranks that exchange heads")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()

    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // given.ulysses, given.ulysses))
    cp = ContextParallel(mesh, outer_method="ring", heads=HEADS, kv_heads=HEADS)

    torch.manual_seed(0)  # The same on all ranks.
    row = torch.randint(256, (1, TOKENS + 1))
    tokens, labels = row[:, :-1], row[:, 1:]  # Labels are shifted before anything is cut.
    torch.manual_seed(1)
    alone = train(Model(), tokens, labels, ranks=1)

    torch.manual_seed(1)
    model = Model()
    model.attention = cp
    if given.compile:
        model.compile(fullgraph=True)
    shared = train(model, cp.shard(tokens, BOUNDARIES), cp.shard(labels, BOUNDARIES), ranks=ranks)

    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=0)
    if distributed.get_rank() == 0:
        print(f"{cp.plan.summary()}{', compiled' if given.compile else ''}")
        print(
            f"losses of {ranks} processes {shared[0]:.5f} ... {shared[-1]:.5f}, of one {alone[0]:.5f} ... {alone[-1]:.5f}"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
