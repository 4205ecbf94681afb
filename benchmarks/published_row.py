"""A line of a published table beside the planner's prediction for an equivalent configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.hardware.device_specs import MEMORY_SHARE, DeviceSpec, load_device
from trainer.hardware.host import GIB
from trainer.plan.plan import TrainingPlan
from trainer.plan.run_plan import plan_stage

Values = dict[str, Any]
Group = Literal["used to set a constant", "held out", "another system"]
USED: Group = "used to set a constant"
HELD_OUT: Group = "held out"
OTHER: Group = "another system"
"""Lines that a constant was chosen by, lines of an equivalent configuration, and lines of programs
that do something else.
"""
K = 1 << 10
M = 1 << 20
H100, A100, B200 = (load_device(name) for name in ("h100-80gb", "a100-80gb", "b200"))
NARROW_PRODUCTS = 1.5
"""How much faster linear layers in 8 bits are, with their casts: it makes of 6,667 tokens/s,
torchtitan's 8B at 8K, the 8,532 that it reaches with them.
"""
COOL = 0.85
"""Of the rates of H100 at 700 W, at 500 W: estimated from what clocks lose."""


@dataclass(frozen=True)
class Row:
    """A published measurement.

    `rate` is tokens/s of a device, or what follows from a published share of the peak.
    """

    system: str
    setting: str
    config: Config
    device: DeviceSpec
    rate: float
    gib: float | None = None
    why: str = ""
    """What is different in it, as far as known."""
    group: Group = HELD_OUT

    @cached_property
    def plan(self) -> TrainingPlan:
        return plan_stage(self.config, self.world_size, self.device)

    @property
    def seconds(self) -> float:
        """Predicted for a step."""
        return self.plan.step_time.seconds

    @property
    def world_size(self) -> int:
        return prod(self.config.parallelism.degrees(1).values())

    @property
    def error(self) -> float:
        """Of what is predicted, over what was published."""
        return self.plan.tokens_per_second_per_device / self.rate - 1

    @property
    def bound(self) -> str:
        """What takes most of the predicted step."""
        seconds = dict.fromkeys(("attention", "matmul", "communication"), 0.0)
        for name, part in self.plan.step_time.busiest.breakdown().items():
            if name in ("attention", "matmul"):
                seconds[name] += part
            elif name in ("recompute", "loss head"):
                seconds["matmul"] += part
            elif name.startswith("exposed") or name == "contention":
                seconds["communication"] += part
        return max(seconds, key=lambda name: seconds[name])


@dataclass(frozen=True)
class PublishedTable:
    """All lines of a published table, as far as they are known here."""

    source: str
    rows: list[Row]
    left_out: list[LeftOut]
    is_whole: bool = True
    """Whether these are all lines of the source."""


@dataclass(frozen=True)
class LeftOut:
    """Lines of a table that are not predicted."""

    lines: int
    what: str
    why: str


def configured(
    size: str,
    tokens: int,
    *,
    family: str = "llama3",
    rows: int = 1,
    training: Values | None = None,
    parallelism: Values | None = None,
    memory: Values | None = None,
) -> Config:
    """A configuration, of which every degree is stated that is not 1.

    Raises ValueError if it breaks a rule.
    """
    batch: Values = {"seq_len": tokens, "global_batch_size": rows, "compile": True}
    config = Config.model_validate(
        {
            "model": {"family": family, "size": size},
            "training": batch | (training or {}),
            "parallelism": {"dp_shard": 1} | (parallelism or {}),
            "memory": memory or {},
        }
    )
    if problems := checks.layout_problems(config, prod(config.parallelism.degrees(1).values())):
        raise ValueError("; ".join(problems))
    return config


def in_eight_bits(device: DeviceSpec) -> DeviceSpec:
    return replace(device, matmul_flops=device.matmul_flops * NARROW_PRODUCTS)


def on_grand_teton() -> DeviceSpec:
    """torchtitan's: H100 of 96 GB and 2.4 TB/s, held at 500 W."""
    attention = {
        kernel: {
            width: (forward * COOL, backward * COOL)
            for width, (forward, backward) in widths.items()
        }
        for kernel, widths in H100.attention_flops.items()
    }
    return replace(
        H100,
        memory=95 * GIB,
        hbm_bandwidth=MEMORY_SHARE * 2.4e12,
        matmul_flops=H100.matmul_flops * COOL,
        attention_flops=attention,
    )


def of_peak(config: Config, device: DeviceSpec, percent: float) -> float:
    """Tokens/s of a device, from the share of its peak that model FLOPs have."""
    tokens = config.training.seq_len
    flops = config.model.build().flops(
        tokens=1, pairs=config.model.build().mean_pairs(tokens) / tokens
    )
    return percent / 100 * device.peak_flops / flops


def short_length(tokens: int) -> str:
    if tokens % K:
        return f"{tokens / 1e6:g}M"
    return f"{tokens // K}K" if tokens < M else f"{tokens / M:g}M"
