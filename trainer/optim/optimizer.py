"""The optimizer over sharded parameters: gradient clipping over the whole mesh, and the skip of non-finite steps.

A new optimizer changes this file, and `OptimizerSection` for its keys: `_build_adamw` creates the torch optimizer, its
parameter groups and its state; `_clip_and_step` clips the gradients and runs it. Predicted memory and step time count
AdamW's two moments: `trainer/memory/estimator.py` and `trainer/plan/memory_traffic.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw

from models.linear import identity
from parallelisms.collectives import num_replicas, to_local
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS, OptimizerSection


class Optimizer:
    """AdamW whose state exists from construction, keyed by parameter name, so that checkpoints can load into it.

    `stage_modules` must have distinct parameter names. `moment_dtype` defaults to that of the parameters; `all_reduce`
    sums a scalar over all ranks. The update of a module in `deferred_modules` (outer before inner) is deferred until
    its next forward or `flush_deferred_updates`: the host updates offloaded weights while the device runs other modules.
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
            name: parameter for module in stage_modules for name, parameter in module.named_parameters()
        }
        self._all_reduce, self._has_bf16_moments = all_reduce, moment_dtype == torch.bfloat16
        deferred_module_of = {parameter: module for module in deferred_modules for parameter in module.parameters()}
        parameters_by_module: defaultdict[nn.Module | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters_by_name.values():
            parameters_by_module[deferred_module_of.get(parameter)].append(parameter)
        self._optimizers = {
            module: _build_adamw(members, config, moment_dtype) for module, members in parameters_by_module.items()
        }
        self._deferred_norms: dict[nn.Module | None, Tensor] = {}
        """The gradient norm by module whose update is pending."""
        for module in deferred_modules:
            module.register_forward_pre_hook(torch.compiler.disable(self._clip_and_step), prepend=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Every state tensor by a mesh-independent name, after pending updates."""
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
        """Clips the gradients, updates the weights and frees the gradients.

        Returns two device scalars: the gradient norm over the whole mesh before clipping, and whether it is finite. A
        non-finite norm leaves weights and state unchanged on every rank, without a host sync: the fused kernel reads
        `found_inf`, the flag of gradient scalers.
        """
        self.flush_deferred_updates()
        norm = self._grad_norm()
        finite = norm.isfinite()
        for optimizer in self._optimizers.values():
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = lr
        self._deferred_norms = dict.fromkeys(self._optimizers, norm)
        self._clip_and_step(None)
        return norm, finite

    def flush_deferred_updates(self) -> None:
        for module in [*self._deferred_norms]:
            self._clip_and_step(module)

    def _clip_and_step(self, module: nn.Module | None, *_: Any) -> None:
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
        """The float64 norm of all gradients of the mesh; replicas count once."""
        grads_by_replicas: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter in self.parameters_by_name.values():
            if parameter.grad is not None:
                grads_by_replicas[num_replicas(parameter.grad)].append(to_local(parameter.grad))
        squares = [
            nn.utils.get_total_norm(grads).double().square() / count for count, grads in grads_by_replicas.items()
        ]
        return self._all_reduce(torch.stack(squares).sum()).sqrt()


def _build_adamw(parameters: list[nn.Parameter], config: OptimizerSection, moment_dtype: torch.dtype | None) -> AdamW:
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=moment_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=moment_dtype),
        }
    return optimizer


def _step_in_chunks(optimizer: Any) -> None:
    """`optimizer.step()` for bfloat16 moments: runs the fused kernel on float32 copies, chunk by chunk, and rounds them."""
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
