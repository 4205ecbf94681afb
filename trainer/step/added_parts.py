"""Start-up check of the parts that extensions add to a step: layers, the optimizer and the loss,
each tried once on small tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from models.loss_head import LossHead, TokenLoss
from parallelisms.gradient_check import SMALL
from parallelisms.layer_check import LayerError, verify_layers
from trainer.config import extension
from trainer.config.job_config import Config
from trainer.config.sections import OptimizerSection
from trainer.errors import EXIT_BAD_CONFIG, RankFailedError
from trainer.metrics.loggers import write_traceback
from trainer.step.optimizer import UpdateRule, update_rule

log = logging.getLogger(__name__)

TRIED_UPDATES = 3
"""Updates after which a weight must have changed: some rules only gather at first."""


def require_sound_parts(config: Config, device: torch.device, *, is_sharded: bool = False) -> None:
    """Tries the added layers, optimizer and loss of a run. Raises RankFailedError, which names the
    extension.

    `is_sharded`: ranks may hold shards of weights.
    """
    # Trying must not change the random numbers of the run.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        _try(lambda: _try_layers(config, device))
        _try(lambda: verify_rule(config.optimizer, device, is_sharded=is_sharded))
        if (loss := extension.added_loss(config.training.loss)) is not None:
            _try(lambda: verify_loss(loss, config, device))


def require_sound_parts_on_host(config: Config, *, runs_on_gpu: bool, is_sharded: bool) -> None:
    """`require_sound_parts` before anything is prepared, without a device: of a run on GPUs the
    layers alone, since a rule or a loss may have no kernels for a CPU.
    """
    if not runs_on_gpu:
        require_sound_parts(config, torch.device("cpu"), is_sharded=is_sharded)
        return
    with torch.random.fork_rng([]):
        _try(lambda: _try_layers(config, torch.device("cuda")))


def _try(part: Callable[[], None]) -> None:
    try:
        part()
    except Exception as error:
        if (problem := extension.describe_error(error)) is None:
            raise
        write_traceback(error)
        raise RankFailedError(EXIT_BAD_CONFIG, problem) from error


def _try_layers(config: Config, device: torch.device) -> None:
    model = config.model.build()
    added = {
        f'{field} "{name}"'
        for kind in model.kinds
        for field, name in (("mixer", kind.mixer), ("feed_forward", kind.feed_forward))
        if extension.adding(f"{field}s", name)
    }
    if not added:
        return
    try:
        verify_layers(model, added)
    except LayerError:
        raise
    except Exception as error:
        if device.type == "cpu":
            raise
        # It may have kernels of a GPU alone.
        log.warning(
            "%s: cannot be checked on the host: %s",
            ", ".join(sorted(added)),
            extension.describe_error(error),
        )


def verify_rule(config: OptimizerSection, device: torch.device, *, is_sharded: bool) -> None:
    """Raises ValueError if the rule has no states by name, changes no weight, changes something
    where the norm is not finite, does not clip although it says so, or changes shards of a weight
    otherwise than the whole.
    """
    rule = update_rule(config, None)
    _ = rule.clips  # Read before the first step, too.
    # `Optimizer` updates matrices and vectors apart.
    for shape in ((4, 4), (4,)):
        grad = torch.linspace(-1, 2, math.prod(shape), device=device).view(shape)
        problems = _rule_problems(rule, config.max_grad_norm, grad, is_sharded=is_sharded)
        if (problem := next(problems, None)) is not None:
            raise ValueError(f'optimizer "{config.name}": {problem}')


def _rule_problems(
    rule: UpdateRule, max_norm: float, grad: Tensor, *, is_sharded: bool
) -> Iterator[str]:
    tried = _new_weight(rule, grad)
    weight, state = tried
    if not isinstance(state, dict):
        yield f"new_state must return a dict of tensors by name, not {type(state).__name__}"
        return
    norm = grad.norm()
    for _ in range(TRIED_UPDATES):
        _update(rule, tried, grad, norm=norm)
    if bool((weight == 1).all()):
        yield f"{TRIED_UPDATES} updates changed no weight; its `update` must change weights in place"
    before = [each.clone() for each in (weight, *state.values())]
    infinite = torch.full_like(grad, torch.inf)
    _update(rule, tried, infinite, norm=infinite.norm())
    after = [weight, *state.values()]
    if not all(map(torch.equal, before, after)):
        yield (
            "an update whose norm is not finite must change neither weights nor states; "
            "torch.where(norm.isfinite(), ...) does not wait for the device"
        )
    if rule.clips:
        allowed = grad * (max_norm / norm)
        large = 1000 * allowed
        expected = _updated(rule, allowed, norm=allowed.norm())
        found = _updated(rule, large, norm=large.norm())
        if not all(map(_is_close, found, expected)):
            yield "a norm above optimizer.max_grad_norm must be clipped where it has clips = True"
    if is_sharded and getattr(rule, "elementwise", True):
        whole, *_ = _updated(rule, grad, norm=norm)
        for dim in range(grad.ndim):
            halves = grad.chunk(2, dim)
            shards = [_updated(rule, half, norm=norm)[0] for half in halves]
            if not _is_close(torch.cat(shards, dim), whole):
                yield (
                    "two halves of a weight change otherwise than the whole, and ranks hold shards; "
                    "a rule that gathers them by itself has elementwise = False"
                )


def _new_weight(rule: UpdateRule, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight for this gradient, and its state."""
    parameter = nn.Parameter(torch.ones_like(grad))
    weight = parameter.detach()
    state = rule.new_state(parameter)
    return weight, state


def _updated(rule: UpdateRule, grad: Tensor, *, norm: Tensor) -> list[Tensor]:
    """A weight and its state after an update."""
    tried = _new_weight(rule, grad)
    _update(rule, tried, grad, norm=norm)
    weight, state = tried
    return [weight, *state.values()]


@torch.no_grad()
def _update(
    rule: UpdateRule, tried: tuple[Tensor, dict[str, Tensor]], grad: Tensor, *, norm: Tensor
) -> None:
    weight, state = tried
    # Of its own: a rule may change the gradient.
    weight.grad = grad.clone()
    rule.update([weight], [state], lr=0.1, weight_decay=0.1, norm=norm)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def verify_loss(loss: TokenLoss, config: Config, device: torch.device) -> None:
    """Raises ValueError unless the loss is one per token, which autograd differentiates."""
    # The vocabulary of the run, which a loss may know.
    model = config.model.build()
    labels_BS = torch.arange(3, device=device)[None] % model.vocab_size
    with torch.device(device):
        head = LossHead(dataclasses.replace(model, dim=SMALL["dim"]))
        x_BSE = torch.randn(1, labels_BS.numel(), SMALL["dim"])
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.02)
    head.loss = loss
    head(x_BSE, labels_BS).sum().backward()
