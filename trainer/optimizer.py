"""AdamW over sharded parameters: groups, clipping over the whole mesh, and updates that skip themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.view import unchanged
from parallelisms.collectives import copies, local
from trainer.config import OptimizerSection


class Optimizer:
    """AdamW whose state exists from the start, under the parameters' names, so that it can be saved and loaded.

    `parts` are the parts of the model on this rank, whose names differ; `total` is the sum of a number of every rank.
    """

    def __init__(
        self, parts: Sequence[nn.Module], config: OptimizerSection, *, total: Callable[[Tensor], Tensor] = unchanged
    ) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self._total = total
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
        norm = self._norm()
        finite = norm.isfinite()
        nn.utils.clip_grads_with_norm_(self.named.values(), self.max_grad_norm, norm)
        self.adamw.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        return norm, finite

    def _norm(self) -> Tensor:
        """The norm of all gradients of the whole mesh, float64; what several ranks hold alike counts once."""
        alike: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter in self.named.values():
            if parameter.grad is not None:
                alike[copies(parameter.grad)].append(local(parameter.grad))
        squares = [nn.utils.get_total_norm(held).double().square() / count for count, held in alike.items()]
        return self._total(torch.stack(squares).sum()).sqrt()
