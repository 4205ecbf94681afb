"""`training.compile = "auto"`: on where a GPU compiles blocks and their gradients stay the
same.
"""

from __future__ import annotations

import logging
import time

import torch

from parallelisms.gradient_check import verify_code_generation
from parallelisms.mesh.collectives import all_gather_values
from trainer.config.job_config import Config
from trainer.errors import RankFailedError
from trainer.step.build import require_right_gradients
from trainer.step.process_group import World

log = logging.getLogger(__name__)


def resolve_auto_compile(config: Config, world: World) -> Config:
    """Replaces `training.compile = "auto"`: on, if the device of every rank compiles and gradients
    stay the same.

    Logs what it is, why, and the seconds that it took to know. Collective.
    """
    if config.training.compile != "auto":
        return config
    started = time.perf_counter()
    reason = ""
    if world.device.type != "cuda":
        reason = "there is no GPU"
    elif not config.compiles_on_gpu:
        reason = "training.deterministic = true, and the compiler times kernels to choose them"
    else:
        reason = _compiler_problem(_with_compile(config, value=True), world.device)
    # Compiled and eager ranks round differently, so all compile or none does.
    reason = next(filter(None, all_gather_values(reason)), "")
    if world.rank == 0:
        seconds = time.perf_counter() - started
        outcome = (
            f"off, because {reason}"
            if reason
            else f"on; compiled gradients were compared in {seconds:.1f} s"
        )
        log.info('training.compile = "auto": %s', outcome)
    return _with_compile(config, value=not reason)


def _with_compile(config: Config, *, value: bool) -> Config:
    return config.model_copy(
        update={"training": config.training.model_copy(update={"compile": value})}
    )


def _compiler_problem(config: Config, device: torch.device) -> str:
    """Why blocks are not compiled on a device; empty if they can be."""
    # Recomputation is chosen after this, so "auto" must be right for each policy.
    policies = (
        ("none", "keep_attention", "full")
        if config.memory.recompute == "auto"
        else (config.memory.recompute,)
    )
    try:
        verify_code_generation(device)
        for policy in policies:
            memory = config.memory.model_copy(update={"recompute": policy})
            require_right_gradients(config.model_copy(update={"memory": memory}))
    except (RankFailedError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return ""
