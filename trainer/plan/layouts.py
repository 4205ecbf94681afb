"""The layouts of a number of devices that are worth a look. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.interconnect import used_domain_size

MAX_MICRO_BATCH_TOKENS = 32_768
"""Per micro-batch and rank: larger micro-batches make no matmul faster."""
MIN_TOKENS_PER_RANK = 512
"""Per sequence and rank, if sharded: smaller shards are dominated by communication."""
SEARCHED_CP_METHODS = ("ring", "allgather", "ulysses", "hybrid")
"""alltoall has the same predicted cost as ring."""
PP_SCHEDULES = (
    ("1F1B", None, "per_step"),
    ("1F1B", None, "per_micro_batch"),
    ("Interleaved1F1B", None, "per_step"),
    ("Interleaved1F1B", 4, "per_step"),
)
"""(schedule, stages per rank, when gradients are reduced); None is the schedule's default."""
MESH_DEPENDENT_DEFAULTS = {"cp_layout": "auto", "cp_outer_method": "auto", "pp_layers": None}
"""Keys that only make sense for the mesh they were written for."""


def enumerate_layouts(
    config: Config, world_size: int, device: DeviceSpec
) -> Iterator[dict[str, Any]]:
    """Plausible layouts of `world_size` ranks; not validated."""
    model = config.model.build()
    global_batch_size = config.training.global_batch_size
    seq_len = config.training.seq_len
    for tp, cp, pp in product(divisors(world_size), repeat=3):
        if world_size % (tp * cp * pp) or tp > model.num_heads or pp > model.num_layers:
            continue
        domain_size = used_domain_size([range(world_size), range(tp * cp)], world_size, device)
        # Tensor parallelism sends activations in every layer, too much for the network.
        if tp > domain_size:
            continue
        if tp * cp > 1 and seq_len // (tp * cp) < MIN_TOKENS_PER_RANK:
            continue
        dp = world_size // (tp * cp * pp)
        # A data-parallel rank without a sequence would only wait.
        if dp > global_batch_size:
            continue
        mesh: dict[str, Any] = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.pp": pp}
        mesh |= {f"parallelism.{key}": value for key, value in MESH_DEPENDENT_DEFAULTS.items()}
        mesh["parallelism.async_tp"] = config.parallelism.async_tp and tp > 1
        for replicas, micro_batch_size, method, (schedule, stages, reduces) in product(
            _with_stated(
                _dp_replicate_sizes(dp, cp * tp, domain_size), config.parallelism.dp_replicate, dp
            ),
            _with_stated(
                _micro_batch_sizes(global_batch_size, dp, seq_len // cp),
                config.training.micro_batch_size,
                global_batch_size,
            ),
            SEARCHED_CP_METHODS if cp > 1 else ("auto",),
            PP_SCHEDULES if pp > 1 else PP_SCHEDULES[:1],
        ):
            choices = product(
                _ulysses_sizes(method, cp, tp, model.num_heads, domain_size),
                _with_stated(
                    _ep_sizes(model.num_experts, dp // replicas * cp, tp, domain_size),
                    config.parallelism.ep,
                    dp // replicas * cp,
                ),
            )
            for ulysses, ep in choices:
                yield {
                    **mesh,
                    "parallelism.dp_replicate": replicas,
                    "parallelism.dp_shard": dp // replicas,
                    "parallelism.ep": ep,
                    "parallelism.cp_method": method,
                    "parallelism.cp_ulysses": ulysses,
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "parallelism.pp_reduce_gradients": reduces,
                    "training.micro_batch_size": micro_batch_size,
                }


def _with_stated(sizes: list[int], stated: int, whole: int) -> list[int]:
    """The sizes, and the configuration's own if it divides the whole: it may be pinned."""
    return sizes if stated in sizes or whole % stated else sorted([*sizes, stated])


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _dp_replicate_sizes(dp: int, ranks_per_replica: int, domain_size: int) -> list[int]:
    """One replica, or one per link domain."""
    replicas_per_domain = max(1, domain_size // ranks_per_replica)
    return (
        [1]
        if dp <= replicas_per_domain or dp % replicas_per_domain
        else [1, dp // replicas_per_domain]
    )


def _micro_batch_sizes(global_batch_size: int, dp: int, tokens_per_sequence: int) -> list[int]:
    """One sequence, and the two largest sizes within MAX_MICRO_BATCH_TOKENS."""
    sequences_per_rank = -(-global_batch_size // dp)
    fitting = [
        count
        for count in divisors(sequences_per_rank)
        if global_batch_size % count == 0 and count * tokens_per_sequence <= MAX_MICRO_BATCH_TOKENS
    ]
    return sorted({1, *fitting[-2:]})


def _ulysses_sizes(
    method: str, cp: int, tp: int, heads: int, domain_size: int
) -> Iterator[int | None]:
    """Ulysses degrees of the hybrid method; None for methods without a choice."""
    if method != "hybrid":
        yield None
        return
    for count in divisors(cp):
        if 1 < count < cp and count * tp <= domain_size and heads // tp % count == 0:
            yield count


def _ep_sizes(num_experts: int, ranks: int, tp: int, domain_size: int) -> list[int]:
    """One, the most in a link domain, and the most of all."""
    possible = (
        [size for size in divisors(ranks) if num_experts % size == 0] if num_experts else [1]
    )
    return sorted({1, max(size for size in possible if size * tp <= domain_size), possible[-1]})
