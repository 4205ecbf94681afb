"""What the examples share: a tiny model, documents, and the loss and gradients that one process
finds for them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Of transformers' trainers: one step on the CPU, and nothing is written.
ARGUMENTS = {
    "max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    "bf16": False,
}  # fmt: skip
VOCABULARY = 64
LENGTHS = (37, 5, 90, 1, 60)


def model(attention: str) -> LlamaForCausalLM:
    """With the same random weights, whatever its attention."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, use_cache=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def packed(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of one sequence, as collators without padding make it: a document's first token has
    no label.
    """
    tokens = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "labels": tokens.where(positions > 0, -100),
    }


class Proof:
    """Loss and gradients of the first optimizer step, of any trainer."""

    loss: float
    grads: dict[str, torch.Tensor]

    def check(self, name: str, batch: dict[str, torch.Tensor]) -> None:
        """Raises AssertionError unless they are those of one process with transformers' own
        attention.
        """
        reference = model("eager")
        loss = reference(**batch).loss
        loss.backward()
        self.compare(
            name,
            float(loss),
            {key: parameter.grad for key, parameter in reference.named_parameters()},
        )

    def compare(self, name: str, loss: float, grads: dict[str, torch.Tensor]) -> None:
        """Raises AssertionError unless loss and gradients are these."""
        largest = max(float(grad.abs().max()) for grad in grads.values())
        errors = [float((self.grads[key] - grad).abs().max()) for key, grad in grads.items()]
        error = max(abs(self.loss - loss) / loss, max(errors) / largest)
        assert error < 1e-6, (
            f"{name}: loss {self.loss} against {loss}, gradients off by {max(errors) / largest:.1e}"
        )
        if distributed.get_rank() == 0:
            print(
                f"{name}: loss {self.loss:.6f}, largest error of loss and gradients {error:.0e} of one process",
                flush=True,
            )


@contextmanager
def recorded(trained: torch.nn.Module) -> Iterator[Proof]:
    """Records the gradients of the first step of an optimizer."""
    proof = Proof()
    proof.grads = {}

    def record(*_: Any) -> None:
        if not proof.grads:
            proof.grads = {
                name: parameter.grad.clone() for name, parameter in trained.named_parameters()
            }

    handle = register_optimizer_step_post_hook(record)
    yield proof
    handle.remove()


def mean_over_ranks(x: torch.Tensor) -> float:
    x = x.detach().clone()
    distributed.all_reduce(x)
    return float(x) / distributed.get_world_size()
