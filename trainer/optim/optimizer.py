"""AdamW over sharded parameters: groups, clipping over the whole mesh, and updates that skip themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw

from models.view import unchanged
from parallelisms.collectives import copies, local
from trainer.config.job_config import OptimizerSection
from trainer.config.sections import PIECE


class Optimizer:
    """AdamW whose state exists from the start, under the parameters' names, so that it can be saved and loaded.

    `parts` are the parts of the model on this rank, whose names differ; `total` is the sum of a number of every rank.
    Both moments are kept in the type `moments`, or else in that of the parameters. What belongs to one of `units`,
    inner ones after outer ones, is updated only before that next runs, or by `finish`, and old until then: so the host
    updates a unit that it holds while the device runs the one before.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: OptimizerSection,
        *,
        moments: torch.dtype | None = None,
        units: Sequence[nn.Module] = (),
        total: Callable[[Tensor], Tensor] = unchanged,
    ) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self._total, self._is_narrow = total, moments == torch.bfloat16
        owner = {parameter: unit for unit in units for parameter in unit.parameters()}
        shares: defaultdict[nn.Module | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.named.values():
            shares[owner.get(parameter)].append(parameter)
        self._steppers = {unit: _stepper(parameters, config, moments) for unit, parameters in shares.items()}
        self._due: dict[nn.Module | None, Tensor] = {}
        """The norm that gradients are clipped by, for whom it is still to be done."""
        for unit in units:
            unit.register_forward_pre_hook(torch.compiler.disable(self._update), prepend=True)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a name that does not depend on the mesh, up to date."""
        self.finish()
        states = {parameter: state for stepper in self._steppers.values() for parameter, state in stepper.state.items()}
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.named.items()
            for key, tensor in states[parameter].items()
        }

    def step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips, updates and drops the gradients.

        Returns the gradient norm before clipping, over the whole mesh, and whether it was finite, as scalars on the
        device. With a norm that is not finite nothing changes, on any rank, and the host does not have to look:
        the fused kernel reads the flag that gradient scalers use.
        """
        self.finish()
        norm = self._norm()
        finite = norm.isfinite()
        for stepper in self._steppers.values():
            stepper.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            for group in stepper.param_groups:
                group["lr"] = lr
        self._due = dict.fromkeys(self._steppers, norm)
        self._update(None)
        return norm, finite

    def finish(self) -> None:
        """Updates what still waits."""
        for unit in [*self._due]:
            self._update(unit)

    def _update(self, unit: nn.Module | None, *_: Any) -> None:
        if (norm := self._due.pop(unit, None)) is None:
            return
        stepper = self._steppers[unit]
        parameters = [parameter for group in stepper.param_groups for parameter in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        if self._is_narrow:
            _step_by_pieces(stepper)
        else:
            stepper.step()
        stepper.zero_grad()

    def _norm(self) -> Tensor:
        """The norm of all gradients of the whole mesh, float64; what several ranks hold alike counts once."""
        alike: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter in self.named.values():
            if parameter.grad is not None:
                alike[copies(parameter.grad)].append(local(parameter.grad))
        squares = [nn.utils.get_total_norm(held).double().square() / count for count, held in alike.items()]
        return self._total(torch.stack(squares).sum()).sqrt()


def _stepper(parameters: list[nn.Parameter], config: OptimizerSection, moments: torch.dtype | None) -> AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    stepper = AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        stepper.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=moments),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=moments),
        }
    return stepper


def _step_by_pieces(stepper: Any) -> None:
    """The stepper's step, by its kernel, on moments that are float32 for the piece at work, and then rounded."""
    for group in stepper.param_groups:
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        options |= {"beta1": beta1, "beta2": beta2, "found_inf": stepper.found_inf}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, gradient = stepper.state[parameter], local(parameter.grad).reshape(-1)
            step, before = state["step"], state["step"].clone()
            kept = (local(x).view(-1).split(PIECE) for x in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))
            for part, weight, *moments in zip(gradient.split(PIECE), *kept, strict=True):
                first, second = ([moment.float()] for moment in moments)
                adamw([weight], [part], first, second, [], [step.copy_(before)], **options)
                for moment, wide in zip(moments, (first, second), strict=True):
                    moment.copy_(wide.pop())
