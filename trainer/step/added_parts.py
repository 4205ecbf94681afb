"""Start-up check of the parts that extensions add to a step: layers, the optimizer and the loss,
each tried once on small tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import nn

from models.loss_head import LossHead, TokenLoss
from parallelisms.gradient_check import SMALL
from parallelisms.layer_check import LayerError, verify_layers
from trainer.config import extension
from trainer.config.job_config import Config
from trainer.config.sections import OptimizerSection
from trainer.errors import EXIT_BAD_CONFIG, RankFailedError
from trainer.metrics.loggers import write_traceback
from trainer.step.optimizer import update_rule

log = logging.getLogger(__name__)

TRIED_UPDATES = 3
"""Updates after which a weight must have changed: some rules only gather at first."""


def require_sound_parts(config: Config, device: torch.device) -> None:
    """Tries the added layers, optimizer and loss of a run. Raises RankFailedError, which names the
    extension.
    """
    # Trying must not change the random numbers of the run.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        _try(lambda: _try_layers(config, device))
        if extension.adding("optimizers", config.optimizer.name) is not None:
            _try(lambda: verify_rule(config.optimizer, device))
        if (loss := extension.added_loss(config.training.loss)) is not None:
            _try(lambda: verify_loss(loss, config, device))


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


def verify_rule(config: OptimizerSection, device: torch.device) -> None:
    """Raises ValueError if the rule has no states by name, changes no weight, or changes something
    where the norm is not finite.
    """
    rule = update_rule(config, None)
    _ = rule.clips  # Read before the first step, too.
    # `Optimizer` updates matrices and vectors apart.
    for shape in ((4, 4), (4,)):
        parameter = nn.Parameter(torch.ones(shape, device=device))
        state = rule.new_state(parameter)
        if not isinstance(state, dict):
            raise ValueError(  # noqa: TRY004
                f'optimizer "{config.name}": new_state must return a dict of tensors by name, '
                f"not {type(state).__name__}"
            )
        weight = parameter.detach()
        grad = torch.linspace(-1, 2, weight.numel(), device=device).view(shape)
        with torch.no_grad():
            for _ in range(TRIED_UPDATES):
                weight.grad = grad.clone()
                rule.update([weight], [state], lr=0.1, weight_decay=0.0, norm=grad.norm())
        if bool((weight == 1).all()):
            raise ValueError(
                f'optimizer "{config.name}": {TRIED_UPDATES} updates changed no weight; '
                "its `update` must change weights in place"
            )
        before = [weight.clone(), *(each.clone() for each in state.values())]
        with torch.no_grad():
            weight.grad = torch.full_like(grad, torch.inf)
            rule.update([weight], [state], lr=0.1, weight_decay=0.0, norm=weight.grad.norm())
        if not all(map(torch.equal, before, [weight, *state.values()])):
            raise ValueError(
                f'optimizer "{config.name}": an update whose norm is not finite must change neither '
                "weights nor states; torch.where(norm.isfinite(), ...) does not wait for the device"
            )


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
