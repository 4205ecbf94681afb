"""Runs a suspicious step again before the optimizer's update: an equal result accuses the data,
another one the hardware.

Only with deterministic kernels are two results comparable bit by bit. Weights change after the
second result, so that nothing wrong is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from socket import gethostname

from torch import Tensor

from parallelisms.mesh.collectives import all_gather_values, to_local
from trainer.config.job_config import Config
from trainer.errors import RunFailedError
from trainer.metrics.accumulator import MetricAccumulator
from trainer.resilience.anomalies import LossSpikeDetector
from trainer.resilience.replicas import MAX_NAMED_RANKS, MULTIPLIER, hash_powers, polynomial_hash
from trainer.step.optimizer import Optimizer


class UnstableStepError(RunFailedError):
    """A step gave another result when it was run again from the same weights and batch."""

    def __init__(self, ranks: list[dict[str, object]], losses: tuple[float, float]) -> None:
        self.ranks = ranks
        named = "; ".join(
            "rank {rank} on {host} ({differs})".format_map(each)
            for each in ranks[:MAX_NAMED_RANKS]
        )
        first, second = losses
        super().__init__(
            f"a step that was run twice has a loss of {first:.6g} and of {second:.6g}: {named}; suspect the hardware"
        )


def reruns_suspicious_steps(config: Config) -> bool:
    return config.health.rerun_suspicious and config.training.deterministic


class StepRerun:
    """Reads loss and gradient norm of each step before the optimizer's update, for which the host
    waits for the device.
    """

    def __init__(
        self, config: Config, optimizer: Optimizer, accumulator: MetricAccumulator
    ) -> None:
        self._optimizer = optimizer
        self._accumulator = accumulator
        self._losses = LossSpikeDetector(config)
        self._norms = LossSpikeDetector(config)
        self.was_rerun = False
        """Whether the last step was, with an equal result."""

    def check(self, values: Tensor, again: Callable[[], Tensor]) -> Tensor:
        """The metric vector of the step. Collective.

        `values` are the metrics of this rank, whose gradients are accumulated; `again` accumulates
        them once more. Raises UnstableStepError on all ranks if a result differs.
        """
        loss, self.was_rerun = self._observe(values)
        if not self.was_rerun:
            return values
        # Hashes instead of copies: a second set of gradients may not fit.
        first = self._hashes(values)
        for parameter in self._optimizer.parameters_by_name.values():
            parameter.grad = None
        values = again()
        differing = [
            name for name, digest in self._hashes(values).items() if digest != first[name]
        ]
        # Every rank takes part: only one of them may have another result.
        found = all_gather_values([gethostname(), *differing])
        ranks = [
            {"rank": rank, "host": host, "differs": " and ".join(names)}
            for rank, (host, *names) in enumerate(found)
            if names
        ]
        if ranks:
            raise UnstableStepError(ranks, (loss, self._loss(values)))
        return values

    def _observe(self, values: Tensor) -> tuple[float, bool]:
        """Adds a step; returns its loss, and whether that or the gradient norm jumps or is not
        finite.

        Both are equal on all ranks.
        """
        loss = self._loss(values)
        norm = self._optimizer.grad_norm().item()
        jumps = [
            detector.observe(value, skipped=False)
            for detector, value in ((self._losses, loss), (self._norms, norm))
        ]
        return loss, any(jump is not None for jump in jumps) or not (
            isfinite(loss) and isfinite(norm)
        )

    def _loss(self, values: Tensor) -> float:
        # A copy, because the reduction works in place and `optimizer_step` reduces the vector
        # itself.
        reduced = self._accumulator.all_reduce(values.clone())
        loss, targets = (reduced[name].item() for name in ("loss", "targets"))
        return float(loss / max(1.0, targets))

    def _hashes(self, values: Tensor) -> dict[str, int]:
        """Hashes of this rank's results: the metrics of its tokens, and its shards of the
        gradients.
        """
        powers = hash_powers(values.device)
        gradients = powers.new_zeros(1)
        for parameter in self._optimizer.parameters_by_name.values():
            if parameter.grad is not None:
                gradient = to_local(parameter.grad).contiguous()
                # A polynomial over parameters, too, so that exchanged gradients do not cancel.
                gradients = gradients * MULTIPLIER + polynomial_hash(
                    gradient, powers.to(gradient.device)
                )
        return {"losses": int(polynomial_hash(values, powers)), "gradients": int(gradients)}
