"""The optimizer over sharded parameters: gradient clipping over the whole mesh, and the skip of
non-finite steps.

`Optimizer` computes the norm and decides when each weight is updated; an `UpdateRule` has the
states and changes weights. `AdamW` is ours, extensions add others.

Clipping and the optimizer work on local shards. For lists of DTensors, torch would first work out
a sharding in Python for every operation, on the host, while the device waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.profiler import record_function

from models.device_paths import runs_as_on_gpu
from models.linear import identity
from parallelisms.mesh.collectives import num_replicas, to_local
from trainer.config import extension
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS, OptimizerSection
from trainer.errors import EXIT_NO_RETRY, RankFailedError

HOST_NORM_ELEMENTS = 1 << 16
"""A float32 norm on the host adds element after element: over 16M equal ones it is 0.7% off, in
such chunks 1e-5.
"""
CLIP_EPSILON = 1e-6
"""Added to the norm, as in `torch.nn.utils.clip_grads_with_norm_`."""
STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
MAX_NAMED_PARAMETERS = 8


class UpdateRule(Protocol):
    """State that an optimizer has for each parameter, and its update of the weights."""

    clips: bool
    """Whether it clips the gradients as it changes the weights; else they are clipped before."""

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Creates the state of a parameter, by the names that checkpoints use.

        Tensors of the parameter's shape are sharded like it.
        """

    def update(
        self,
        weights: list[Tensor],
        states: list[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        norm: Tensor,
    ) -> None:
        """Changes local shards, whose gradients are their `grad`, and their states in place.

        `norm` is that of all gradients of the mesh, on the device. If it is not finite, nothing
        may change, and the host must not wait to know.
        """


class Optimizer:
    """Its state exists from construction, keyed by parameter name, so that checkpoints can load
    into it.

    `stage_modules` must have distinct parameters, which the configuration of each declares.
    `moment_dtype` defaults to that of the parameters; `all_reduce` sums a scalar over all ranks.
    The update of a module in `deferred_modules` (outer before inner) is deferred until its next
    forward or `flush_deferred_updates`: the host updates offloaded weights while the device runs
    other modules.
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
        self._config = config
        self._all_reduce = all_reduce
        self._rule = update_rule(config, moment_dtype)
        self.parameters_by_name = {
            name: parameter
            for module in stage_modules
            for name, parameter in module.named_parameters()
        }
        self._decays = {
            parameter: cast(Any, module).config.declared(name).decays
            for module in stage_modules
            for name, parameter in module.named_parameters()
        }
        self._state = {
            parameter: self._rule.new_state(parameter)
            for parameter in self.parameters_by_name.values()
        }
        # Inner modules come later and override outer ones: a parameter belongs to the FSDP unit
        # that gathers it.
        deferred_module_of = {
            parameter: module for module in deferred_modules for parameter in module.parameters()
        }
        self._parameters_by_module: defaultdict[nn.Module | None, list[nn.Parameter]] = (
            defaultdict(list)
        )
        for parameter in self.parameters_by_name.values():
            self._parameters_by_module[deferred_module_of.get(parameter)].append(parameter)
        self._pending: dict[nn.Module | None, tuple[float, Tensor]] = {}
        """Learning rate and gradient norm by module whose update is pending."""
        for module in deferred_modules:
            # Before FSDP's own hook, which gathers the weights. Not compiled: the hook changes
            # weights and Python state.
            module.register_forward_pre_hook(
                torch.compiler.disable(self._clip_and_step), prepend=True
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Every state tensor by a mesh-independent name, after pending updates."""
        self.flush_deferred_updates()
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.parameters_by_name.items()
            for key, tensor in self._state[parameter].items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips the gradients, updates the weights and frees the gradients.

        Returns two device scalars: the gradient norm over the whole mesh before clipping, and
        whether it is finite. A non-finite norm leaves weights and state unchanged on every rank,
        without a host sync: the fused kernel reads `found_inf`, the flag of gradient scalers.
        Raises RankFailedError, naming the parameters without gradient.
        """
        self.flush_deferred_updates()
        norm = self.grad_norm()
        # None holds the parameters that are not deferred, which are updated now.
        self._pending = dict.fromkeys(self._parameters_by_module, (lr, norm))
        self._clip_and_step(None)
        return norm, norm.isfinite()

    def flush_deferred_updates(self) -> None:
        for module in [*self._pending]:
            self._clip_and_step(module)

    @torch.no_grad()
    @record_function("clip and optimizer step")
    def _clip_and_step(self, module: nn.Module | None, *_: Any) -> None:
        if module not in self._pending:
            return
        lr, norm = self._pending.pop(module)
        weights = {x: _local_with_grad(x) for x in self._parameters_by_module[module]}
        # Rules of extensions need not clip. torch's function clips by the norm of the whole mesh,
        # which it does not compute itself.
        if not self._rule.clips:
            nn.utils.clip_grads_with_norm_([*weights.values()], self._config.max_grad_norm, norm)
        # The fused kernel takes one weight decay for all of its tensors.
        for decays in (True, False):
            members = [x for x in weights if self._decays[x] == decays]
            states = [
                {key: to_local(each) for key, each in self._state[x].items()} for x in members
            ]
            weight_decay = self._config.weight_decay if decays else 0.0
            self._rule.update(
                [weights[x] for x in members], states, lr=lr, weight_decay=weight_decay, norm=norm
            )
        for parameter in weights:
            parameter.grad = None

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the mesh, squares summed in float64; replicas count
        once.
        """
        if lost := [
            name for name, parameter in self.parameters_by_name.items() if parameter.grad is None
        ]:
            named = ", ".join(lost[:MAX_NAMED_PARAMETERS])
            if len(lost) > MAX_NAMED_PARAMETERS:
                named += ", ..."
            count = f"{len(lost)} of {len(self.parameters_by_name)} parameters"
            raise RankFailedError(
                EXIT_NO_RETRY, f"the backward pass computed no gradient of {count}: {named}"
            )
        # All ranks add their squares. A shard that n ranks hold is counted n times, so its squares
        # are divided by n.
        grads_by_replicas: defaultdict[int, list[Tensor]] = defaultdict(list)
        for grad in (
            cast(Tensor, parameter.grad) for parameter in self.parameters_by_name.values()
        ):
            grads_by_replicas[num_replicas(grad)].extend(_norm_chunks(to_local(grad)))
        squares = [
            # Squared in float64: the square of a large float32 norm is infinite, which would skip
            # the step.
            nn.utils.get_total_norm(grads).double().square() / count
            for count, grads in grads_by_replicas.items()
        ]
        return self._all_reduce(torch.stack(squares).sum()).sqrt()


def _norm_chunks(grad: Tensor) -> tuple[Tensor, ...]:
    return (grad,) if runs_as_on_gpu(grad) else grad.flatten().split(HOST_NORM_ELEMENTS)


class AdamW:
    """Loshchilov & Hutter (2019), by torch's fused kernel.

    Moments are sharded like the weights.
    """

    clips = True

    def __init__(self, config: OptimizerSection, moment_dtype: torch.dtype | None) -> None:
        self._config = config
        self._moment_dtype = moment_dtype

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Moments and step count, all zero, by `STATE_KEYS`."""
        moments = (torch.zeros_like(parameter, dtype=self._moment_dtype) for _ in range(2))
        # The fused kernel wants the step count as a float32 tensor on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return dict(zip(STATE_KEYS, (*moments, step), strict=True))

    def update(
        self,
        weights: list[Tensor],
        states: list[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        norm: Tensor,
    ) -> None:
        """A non-finite norm changes no weight: the kernel reads `found_inf`, the flag of gradient
        scalers.
        """
        beta1, beta2 = self._config.betas
        options: dict[str, Any] = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": self._config.eps,
        }
        options |= {
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": False,
            "fused": True,
        }
        options |= {"found_inf": (~norm.isfinite()).float()} | _clipping(
            weights, self._config.max_grad_norm, norm
        )
        by_key = ([state[key] for state in states] for key in STATE_KEYS)
        run = _adamw_in_chunks if self._moment_dtype == torch.bfloat16 else _adamw
        run(weights, *by_key, **options)


RULES: dict[str, Callable[[OptimizerSection, torch.dtype | None], UpdateRule]] = {"adamw": AdamW}
"""Update rules by `optimizer.name`: those of `trainer.config.extension.BUILT_IN_OPTIMIZERS`."""


def update_rule(config: OptimizerSection, moment_dtype: torch.dtype | None) -> UpdateRule:
    known = RULES.copy()
    for each in extension.installed():
        known.update(each.extension.optimizers)
    return known[config.name](config, moment_dtype)


def _clipping(weights: list[Tensor], max_norm: float, norm: Tensor) -> dict[str, Tensor]:
    """Options with which the fused kernel clips gradients while it changes the weights, in one
    pass.

    The kernel divides by a float32 scale, too coarse for float64 gradients, which are clipped
    here.
    """
    if any(weight.dtype == torch.float64 for weight in weights):
        nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        return {}
    # The kernel divides gradients by this scale: the inverse of the usual clipping factor min(1,
    # max_norm / (norm + eps)).
    return {"grad_scale": ((norm + CLIP_EPSILON) / max_norm).clamp(min=1).float()}


def _local_with_grad(parameter: nn.Parameter) -> Tensor:
    """The local shard of a parameter; its `grad` is that of the gradient.

    The fused kernel ignores strides.
    """
    # In this order: to detach a DTensor takes the host twenty times as long.
    weight = to_local(parameter).detach()
    weight.grad = to_local(cast(Tensor, parameter.grad)).contiguous()
    return weight


def _adamw(
    weights: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    **options: Any,
) -> None:
    grads = [cast(Tensor, weight.grad) for weight in weights]
    adamw(weights, grads, exp_avgs, exp_avg_sqs, [], steps, **options)


def _adamw_in_chunks(weights: list[Tensor], *states: list[Tensor], **options: Any) -> None:
    """`_adamw` for bfloat16 moments: runs the fused kernel on float32 copies, chunk by chunk, and
    rounds them.
    """
    for weight, exp_avg, exp_avg_sq, step in zip(weights, *states, strict=True):
        # The kernel increments the step count with each call, but all chunks belong to one step.
        step_before = step.clone()
        flat = (
            weight.view(-1),
            weight.grad.view(-1),
            exp_avg.view(-1),
            exp_avg_sq.view(-1),
        )
        for weight_chunk, grad_chunk, *moments in zip(
            *(x.split(OPTIMIZER_CHUNK_ELEMENTS) for x in flat), strict=True
        ):
            first, second = ([moment.float()] for moment in moments)
            weight_chunk.grad = grad_chunk
            _adamw([weight_chunk], first, second, [step.copy_(step_before)], **options)
            for moment, fp32_moment in zip(moments, (first, second), strict=True):
                moment.copy_(fp32_moment.pop())
