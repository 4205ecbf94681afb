"""A layout in words and as TOML. Imports no torch."""

from __future__ import annotations

from trainer.config.job_config import Config
from trainer.config.toml_format import toml_value
from trainer.plan.plan import TrainingPlan

TOML_SECTIONS = ("training", "parallelism", "memory")


def layout_toml(config: Config) -> str:
    """Complete sections that replace those of the configuration file."""
    lines = []
    for name in TOML_SECTIONS:
        section = getattr(config, name)
        defaults = {key: field.default for key, field in type(section).model_fields.items()}
        given = [
            (key, value) for key, value in section if value is not None and value != defaults[key]
        ]
        assignments = (f"{key} = {toml_value(value)}" for key, value in given)
        lines.append("\n".join([f"[{name}]", *assignments]))
    return "\n\n".join(lines)


def describe_layout(plan: TrainingPlan) -> str:
    config = plan.config
    parallelism = config.parallelism
    memory = config.memory
    micro_batch_size = config.training.micro_batch_size
    method = config.context_plan().resolved_method
    stages = parallelism.pp_stages_per_rank
    ulysses = (
        f" (ulysses {config.context_plan().ulysses_degree})" if parallelism.cp_ulysses else ""
    )
    phrases = {
        " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
        or "1 rank": True,
        f"ep {parallelism.ep}": parallelism.ep > 1,
        f"{method}{ulysses}": parallelism.cp > 1,
        parallelism.pp_schedule
        + (f" with {stages} stages per rank" if stages else ""): parallelism.pp > 1,
        "gradients reduced per micro-batch": parallelism.pp > 1
        and parallelism.pp_reduce_gradients == "per_micro_batch",
        f"micro-batch {micro_batch_size}": micro_batch_size > 1,
        f"recompute {memory.recompute}": True,
        f"offload {memory.offload}": memory.offload != "none",
        f"MLP tiles of {memory.mlp_tile_mib} MiB": memory.mlp_tile_mib is not None,
        f"{memory.head_groups} head groups": memory.head_groups > 1,
        "optimizer on the host": memory.optimizer_placement == "host",
        f"{memory.blocks_per_checkpoint} blocks per checkpoint": memory.blocks_per_checkpoint > 1,
    }
    return ", ".join(phrase for phrase, is_shown in phrases.items() if is_shown)


def why_slower(plan: TrainingPlan, best: TrainingPlan) -> str:
    """The two components that cost most time compared with the best."""
    seconds, best_seconds = (each.step_time.busiest.breakdown() for each in (plan, best))
    costs = {
        name: seconds.get(name, 0) - best_seconds.get(name, 0)
        for name in seconds.keys() | best_seconds.keys()
    }
    worst = sorted(costs.items(), key=lambda item: -item[1])[:2]
    reasons = [
        f"{name} {cost:+.2f} s" for name, cost in worst if cost >= 0.005 * best.step_seconds
    ]
    more = ", more memory" if plan.memory_utilization > best.memory_utilization else ""
    return ", ".join(reasons) or f"about equal time{more}"
