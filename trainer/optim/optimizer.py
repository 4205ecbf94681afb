"""AdamW over sharded parameters: groups, clipping over the whole mesh, and updates that skip themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw

from models.view import identity
from parallelisms.collectives import num_replicas, to_local
from trainer.config.job_config import OptimizerSection
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS


class Optimizer:
    """AdamW whose state exists from the start, under the parameters' names, so that it can be saved and loaded.

    `parts` are the parts of the model on this rank, whose names differ; `total` is the sum of a number of every rank.
    Both moments are kept in the type `moments`, or else in that of the parameters. What belongs to one of `units`,
    inner ones after outer ones, is updated only before that next runs, or by `finish`, and old until then: so the host
    updates a unit that it holds while the device runs the one before.
    """

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        config: OptimizerSection,
        *,
        moment_dtype: torch.dtype | None = None,
        deferred_modules: Sequence[nn.Module] = (),
        all_reduce: Callable[[Tensor], Tensor] = identity,
    ) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.parameters_by_name = {
            name: parameter for stage_module in stage_modules for name, parameter in stage_module.named_parameters()
        }
        self._all_reduce, self._has_bf16_moments = all_reduce, moment_dtype == torch.bfloat16
        deferred_module_of = {parameter: unit for unit in deferred_modules for parameter in unit.parameters()}
        parameters_by_module: defaultdict[nn.Module | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters_by_name.values():
            parameters_by_module[deferred_module_of.get(parameter)].append(parameter)
        self._optimizers = {
            unit: _build_adamw(parameters, config, moment_dtype) for unit, parameters in parameters_by_module.items()
        }
        self._deferred_norms: dict[nn.Module | None, Tensor] = {}
        """The norm that gradients are clipped by, for whom it is still to be done."""
        for unit in deferred_modules:
            unit.register_forward_pre_hook(torch.compiler.disable(self._step_module), prepend=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state by a name that does not depend on the mesh, up to date."""
        self.flush_deferred_updates()
        states = {
            parameter: state for optimizer in self._optimizers.values() for parameter, state in optimizer.state.items()
        }
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.parameters_by_name.items()
            for key, tensor in states[parameter].items()
        }

    def step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips, updates and drops the gradients.

        Returns the gradient norm before clipping, over the whole mesh, and whether it was finite, as scalars on the
        device. With a norm that is not finite nothing changes, on any rank, and the host does not have to look:
        the fused kernel reads the flag that gradient scalers use.
        """
        self.flush_deferred_updates()
        norm = self._grad_norm()
        finite = norm.isfinite()
        for optimizer in self._optimizers.values():
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = lr
        self._deferred_norms = dict.fromkeys(self._optimizers, norm)
        self._step_module(None)
        return norm, finite

    def flush_deferred_updates(self) -> None:
        """Updates what still waits."""
        for unit in [*self._deferred_norms]:
            self._step_module(unit)

    def _step_module(self, module: nn.Module | None, *_: Any) -> None:
        if (norm := self._deferred_norms.pop(module, None)) is None:
            return
        optimizer = self._optimizers[module]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        if self._has_bf16_moments:
            _step_in_chunks(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()

    def _grad_norm(self) -> Tensor:
        """The norm of all gradients of the whole mesh, float64; what several ranks hold alike counts once."""
        grads_by_replicas: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter in self.parameters_by_name.values():
            if parameter.grad is not None:
                grads_by_replicas[num_replicas(parameter.grad)].append(to_local(parameter.grad))
        squares = [
            nn.utils.get_total_norm(grads).double().square() / count for count, grads in grads_by_replicas.items()
        ]
        return self._all_reduce(torch.stack(squares).sum()).sqrt()


def _build_adamw(parameters: list[nn.Parameter], config: OptimizerSection, moment_dtype: torch.dtype | None) -> AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    optimizer = AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=moment_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=moment_dtype),
        }
    return optimizer


def _step_in_chunks(optimizer: Any) -> None:
    """The stepper's step, by its kernel, on moments that are float32 for the piece at work, and then rounded."""
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        options |= {"beta1": beta1, "beta2": beta2, "found_inf": optimizer.found_inf}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, grad = optimizer.state[parameter], to_local(parameter.grad).reshape(-1)
            step, step_before = state["step"], state["step"].clone()
            chunks = (
                to_local(x).view(-1).split(OPTIMIZER_CHUNK_ELEMENTS)
                for x in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
            )
            for grad_chunk, weight_chunk, *moments in zip(grad.split(OPTIMIZER_CHUNK_ELEMENTS), *chunks, strict=True):
                first, second = ([moment.float()] for moment in moments)
                adamw([weight_chunk], [grad_chunk], first, second, [], [step.copy_(step_before)], **options)
                for moment, fp32_moment in zip(moments, (first, second), strict=True):
                    moment.copy_(fp32_moment.pop())
