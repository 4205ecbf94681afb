"""AdamW over sharded parameters: groups, clipping over the whole mesh, and updates that skip themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from models.view import unchanged
from parallelisms.collectives import copies, local
from trainer.config import OptimizerSection
from trainer.sections import PIECE


class Optimizer:
    """AdamW whose state exists from the start, under the parameters' names, so that it can be saved and loaded.

    `parts` are the parts of the model on this rank, whose names differ; `total` is the sum of a number of every rank.
    Both moments are kept in type `moments`, by default that of the parameters; they are float32 while they change.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: OptimizerSection,
        *,
        moments: torch.dtype | None = None,
        total: Callable[[Tensor], Tensor] = unchanged,
    ) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self._total = total
        self._by_pieces = moments == torch.bfloat16
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
                "exp_avg": torch.zeros_like(parameter, dtype=moments),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=moments),
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
        found_inf = (~finite).to(torch.float32)
        self.adamw.found_inf = found_inf  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = lr
            if self._by_pieces:
                _step_by_pieces(group, self.adamw.state, found_inf)
        if not self._by_pieces:
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


def _step_by_pieces(group: dict[str, Any], states: dict[Tensor, Any], found_inf: Tensor) -> None:
    """The step of torch's AdamW, by its kernel, on moments that are float32 for the piece at work, and then rounded."""
    options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    beta1, beta2 = group["betas"]
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state, gradient = states[parameter], local(parameter.grad).reshape(-1)
        step, before = state["step"], state["step"].clone()
        kept = (local(x).view(-1).split(PIECE) for x in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))
        for part, weight, *moments in zip(gradient.split(PIECE), *kept, strict=True):
            first, second = ([moment.float()] for moment in moments)
            adamw(
                [weight], [part], first, second, [], [step.copy_(before)],
                fused=True, found_inf=found_inf, beta1=beta1, beta2=beta2, **options,
            )  # fmt: skip
            for moment, wide in zip(moments, (first, second), strict=True):
                moment.copy_(wide.pop())
