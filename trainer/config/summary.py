"""A configuration in words: what `--check` prints and a run logs when it starts.

Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import log2

from models.rope_scaling import rope_summary
from parallelisms.mesh.process_groups import Topology
from parallelisms.mesh.shard_layout import SeqLayout
from trainer.config.job_config import Config


def topology(config: Config, world_size: int, *, nodes: int = 1) -> Topology:
    """Process groups. The model must have no problems."""
    section = config.parallelism
    degrees = section.degrees(world_size)
    return Topology(
        degrees=degrees,
        context_plan=config.context_plan(),
        ranks_per_node=section.ranks_per_node,
        num_nodes=nodes,
    )


def parallelism_summary(config: Config, world_size: int) -> list[str]:
    """Lines for the log: rotary embedding and parallelism. The model must have no problems."""
    section = config.parallelism
    lines = [rope_summary(config.model.build(), config.training.seq_len)]
    if section.cp > 1:
        lines.append(
            f"context parallelism: {config.context_plan().summary()}; {_attention_imbalance(config)}"
        )
    if section.ep > 1:
        each = config.model.build().num_experts // section.ep
        lines.append(f"expert parallelism: {section.ep} ranks with {each} experts of each layer")
    if section.tp > 1:
        sharded = {"tokens": section.sequence_parallel, "vocabulary": section.loss_parallel}
        details = ", ".join(
            f"{name} {'sharded' if is_sharded else 'replicated'}"
            for name, is_sharded in sharded.items()
        )
        lines.append(f"tensor parallelism: {section.tp} ranks, {details}")
    if section.pp > 1:
        lines.append(f"pipeline parallelism: {config.pipeline_plan(world_size).summary()}")
    return lines


def _attention_imbalance(config: Config) -> str:
    """The busiest rank over the mean, for a sequence of one document and one of sampled
    documents.
    """
    plan = config.context_plan()
    seq_len = config.training.seq_len
    # Document lengths are log-uniform between 64 tokens and a whole sequence. The seed is fixed,
    # so that a configuration always prints the same figure.
    rng = random.Random(0)
    longest = max(6, log2(seq_len))
    sampled = [0]
    while sampled[-1] < seq_len:
        length = int(2 ** rng.uniform(6, longest))
        sampled.append(min(seq_len, sampled[-1] + length))
    padded = [plan.padded_length(seq_len)]
    one, packed = (
        SeqLayout(plan.resolved_layout, plan.ring_degree, tuple(boundaries + padded)).imbalance
        for boundaries in ([0, seq_len], sampled)
    )
    documents = f", {packed:.2f} with documents of mixed lengths" if plan.packs_documents else ""
    return f"attention imbalance {one:.2f} with one document{documents}"


def warnings(config: Config, world_size: int) -> Iterator[str]:
    """Settings that are valid on `world_size` processes but rarely intended."""
    total, per_rank = config.micro_batches(world_size)
    degrees = config.parallelism.degrees(world_size)
    slots = per_rank * degrees["dp_replicate"] * degrees["dp_shard"]
    steps = config.training.steps
    warmup = config.schedule.warmup_steps
    # Ranks run the same number of micro-batches, because collectives need all of them. Places
    # beyond the global batch hold padding.
    if slots != total:
        yield (
            f"training.global_batch_size = {config.training.global_batch_size} makes {total} micro-batches, which "
            f"{slots // per_rank} data-parallel ranks do not divide: {slots - total} of {slots} are empty in every step"
        )
    if warmup >= steps and config.schedule.over == "stage":
        rule = f"not below training.steps = {steps}: the learning rate never reaches its peak"
        yield f"schedule.warmup_steps = {warmup} is {rule}"
    training_sources = {item.source for item in config.data.effective_mix}
    for name, each in config.validation.sets.items():
        if each.source in training_sources and not config.data.holdout:
            yield f"validation.sets.{name} validates on training documents: data.holdout = 0"
    if (
        config.health.replica_check_interval is not None
        and degrees["dp_replicate"] == degrees["tp"] == 1
    ):
        yield "health.replica_check_interval compares nothing: dp_replicate = 1 and tp = 1 leave no copies of weights"
    for key in ("pp_layers", "pp_stages_per_rank"):
        if degrees["pp"] == 1 and getattr(config.parallelism, key) is not None:
            yield f"parallelism.{key} is not used with parallelism.pp = 1"
    yield from _model_warnings(config)
    length = config.training.seq_len
    plan = config.context_plan()
    if length % plan.seq_len_divisor:
        padding = -length % plan.seq_len_divisor
        axes = ", ".join(f"{axis} = {degrees[axis]}" for axis in ("cp", "tp") if degrees[axis] > 1)
        yield (
            f"training.seq_len = {length} is not a multiple of {plan.seq_len_divisor} ({axes}): "
            f"every sequence is padded by {padding} token{'s' if padding > 1 else ''}"
        )


def _model_warnings(config: Config) -> Iterator[str]:
    model = config.model.build()
    training = config.training
    if model.num_experts and not training.balance_loss and not training.correction_bias_rate:
        yield (
            "nothing balances the load of experts: training.balance_loss = 0 and training.correction_bias_rate = 0; most "
            "tokens may go to a few"
        )
    num_layers = model.num_layers
    stated = sum(each.repeat for each in config.model.layers)
    if stated > num_layers:
        yield f"model.layers states {stated} layers, of which model.num_layers = {num_layers} uses the first {num_layers}"
