"""AdamW over sharded parameters: groups, clipping over the whole mesh, and updates that skip themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallelisms.collectives import whole
from trainer.config import OptimizerSection


class Optimizer:
    """AdamW whose state exists from the start, under the parameters' names, so that it can be saved and loaded."""

    def __init__(self, model: nn.Module, config: OptimizerSection) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.named = dict(model.named_parameters())
        matrices = [parameter for parameter in self.named.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.named.values() if parameter.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for parameter in self.named.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a name that does not depend on the mesh."""
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.named.items()
            for key, tensor in self.adamw.state[parameter].items()
        }

    def step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips, updates and drops the gradients.

        Returns the gradient norm before clipping, over the whole mesh, and whether it was finite, as scalars on the
        device. With a norm that is not finite nothing changes, on any rank, and the host does not have to look:
        the fused kernel reads the flag that gradient scalers use.
        """
        gradients = [parameter.grad for parameter in self.named.values() if parameter.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients))
        finite = norm.isfinite()
        nn.utils.clip_grads_with_norm_(self.named.values(), self.max_grad_norm, norm)
        self.adamw.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        return norm, finite
