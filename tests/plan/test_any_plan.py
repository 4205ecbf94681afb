"""Plans of drawn configurations of the shipped families, on every device file: none fails,
nothing is negative, and parts add up.
"""

from __future__ import annotations

import random
from itertools import cycle, islice
from math import isfinite, prod

import pytest

from models.presets import FAMILIES
from tests.plan.made_up_traces import made_up_traces
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.hardware.device_specs import DeviceSpec, device_names, load_device
from trainer.plan.report import plan_report
from trainer.plan.run_plan import RunPlan, plan_run
from trainer.plan.step_time import STEP_OVERHEAD, StepTime
from trainer.plan.tracing import Trace, traced_plans

DEVICES = tuple(device_names())
MANY = 2000
PART = 50
SEVERAL = (1, 1, 2, 3, 4, 8, 16)
LEVELS: dict[str, tuple[object, ...]] = {
    "parallelism.dp_replicate": SEVERAL,
    "parallelism.dp_shard": SEVERAL,
    "parallelism.cp": SEVERAL,
    "parallelism.tp": (1, 1, 2, 4, 8),
    "parallelism.pp": (1, 1, 2, 3, 4, 8),
    "parallelism.cp_method": ("auto", "allgather", "ring", "alltoall", "ulysses", "hybrid"),
    "parallelism.cp_layout": ("auto", "headtail", "balanced", "contiguous"),
    "parallelism.sequence_parallel": ("true", "false"),
    "parallelism.loss_parallel": ("true", "false"),
    "parallelism.reshard_after_forward": ("true", "false"),
    "parallelism.pp_schedule": ("1F1B", "GPipe", "Interleaved1F1B"),
    "parallelism.pp_reduce_gradients": ("per_step", "per_micro_batch"),
    "training.seq_len": (1000, 8192, 131_072, 1 << 20),
    "training.global_batch_size": (1, 4, 16, 96),
    "training.micro_batch_size": (1, 1, 2, 3),
    "training.dtype": ("bfloat16", "float32", "float64"),
    "training.reduce_dtype": ("float32", "bfloat16"),
    "training.compile": ("false", "true"),
    "training.deterministic": ("false", "true"),
    "memory.recompute": ("auto", "none", "keep_attention", "full"),
    "memory.offload": ("none", "inputs", "inputs_and_attention"),
    "memory.host_budget_gib": (None, 1, 100),
    "memory.blocks_per_checkpoint": (1, 2, 3),
    "memory.head_groups": (1, 2, 8),
    "memory.mlp_tile_mib": (None, 1, 256),
    "memory.optimizer_placement": ("device", "host"),
    "memory.optimizer_dtype": ("float32", "bfloat16"),
}


def draw(rng: random.Random, family: str) -> tuple[Config, int]:
    """A legal configuration, with few changes if many are refused."""
    size = rng.choice([*FAMILIES[family]])
    base = {"model.family": family, "model.size": size, "data.corpus": "copy", "training.steps": 4}
    for attempt in range(1000):
        kept = rng.sample([*LEVELS], max(2, len(LEVELS) - attempt // 4))
        values = base | {key: rng.choice(LEVELS[key]) for key in kept}
        try:
            config = load(
                [f"--{key}={value}" for key, value in values.items() if value is not None]
            )
        except ConfigError:
            continue
        world_size = prod(config.parallelism.degrees(1).values())
        if not checks.layout_problems(config, world_size):
            return config, world_size
    raise AssertionError(f"no legal configuration of {family}")


def planned(config: Config, world_size: int, device: DeviceSpec, trace: Trace) -> RunPlan | None:
    """None if every candidate breaks a rule, or if a pipeline shares too small a host budget."""
    try:
        return plan_run(config, world_size, device, trace=trace)
    except ConfigError:
        is_shared = config.memory.host_budget_gib is not None and config.parallelism.pp > 1
        assert config.memory.recompute == "auto" or is_shared
        return None


def require_sound(time: StepTime) -> None:
    """Nothing is negative, and the parts of every rank add up to the step."""
    for rank in time.ranks:
        parts = [
            *rank.compute.values(),
            *rank.exposed.values(),
            rank.contention,
            rank.optimizer,
            rank.bubble,
            STEP_OVERHEAD,
        ]
        # The waits of a rank are a difference of sums.
        assert min(*parts, *rank.overlapped.values()) >= -1e-9 * time.seconds
        assert sum(parts) == pytest.approx(time.seconds)


@pytest.mark.parametrize(
    ("first", "count", "trace"),
    [
        (0, 20, made_up_traces()),
        *(
            pytest.param(first, PART, traced_plans, marks=pytest.mark.slow)
            for first in range(0, MANY, PART)
        ),
    ],
)
def test_any_plan_is_made_and_its_parts_add_up(first: int, count: int, trace: Trace) -> None:
    rng = random.Random(first)
    pairs = zip(cycle(DEVICES), cycle(FAMILIES), strict=False)
    for name, family in islice(pairs, first, first + count):
        (config, world_size), device = draw(rng, family), load_device(name)
        run = planned(config, world_size, device, trace)
        if run is None:
            continue
        (found,) = run.stages
        for moment in found.memory_by_pp_rank:
            assert all(each.bytes >= 0 for each in moment.tensors), (config, moment)
            by_line = sum(item.device_bytes for item in moment.items)
            assert by_line == pytest.approx(moment.device_bytes)
        assert isfinite(found.step_seconds), config
        assert found.step_seconds > 0, config
        require_sound(found.step_time)
        assert plan_report(run, why=True).sections
