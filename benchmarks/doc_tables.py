"""Generate tables of docs/parallelism.md, docs/memory.md and docs/reliability.md from the code
that they describe.

    python -m benchmarks.doc_tables           rewrite the tables between their markers
    python -m benchmarks.doc_tables --check   exit 1 if a page differs from what would be written

Nothing is timed and nothing needs torch. A page holds `<!-- table: NAME -->`, the table and `<!--
end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import trainer.errors
from models.presets import FAMILIES
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.pipeline_plan import PipelinePlan, PipelineSchedule
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ENDINGS, RankFailedError, RunError
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.memory.block import BlockMemory
from trainer.memory.rank import RankMemory
from trainer.memory.recompute import recompute_moments
from trainer.plan.memory_advice import memory_savings
from trainer.plan.memory_estimate import MemoryEstimate, estimate_memory, rank_memory
from trainer.plan.plan import TrainingPlan, plan_stage
from trainer.trace.tensors import total_bytes

DOCS = Path(__file__).resolve().parents[1] / "docs"
DEVICE = "h100-80gb"
SHIPPED = (
    "llama2_7b_32k",
    "llama3_8b_128k",
    "llama3_8b_1m_8gpu",
    "llama3_8b_1m",
    "llama3_70b_128k",
    "llama3_405b_128k",
)
ALTERNATIVES = (
    ("llama2_7b_32k", "parallelism.dp_shard=8 parallelism.cp=1 memory.recompute=keep_attention"),
    ("llama3_8b_128k", "parallelism.dp_shard=4 parallelism.cp=2"),
    ("llama3_8b_128k", "parallelism.dp_shard=1 parallelism.cp=8"),
    ("llama3_8b_128k", "memory.recompute=full"),
    ("llama3_8b_1m", "parallelism.cp=32 parallelism.tp=1 parallelism.cp_ulysses=8"),
    ("llama3_8b_1m", "parallelism.cp=4 parallelism.tp=8 parallelism.cp_ulysses=1"),
    ("llama3_8b_1m_8gpu", "memory.offload=none"),
    ("llama3_70b_128k", "parallelism.cp=16 parallelism.tp=1 parallelism.cp_ulysses=8"),
    ("llama3_70b_128k", "parallelism.dp_shard=1 parallelism.tp=8 parallelism.cp_ulysses=1"),
    ("llama3_405b_128k", "parallelism.pp=1 parallelism.dp_shard=128 parallelism.cp=4"),
)
SCHEDULES: tuple[tuple[PipelineSchedule, int], ...] = (
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
)
Table = list[str]


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    lines = [
        "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
        for cells in (heading, *rows)
    ]
    return [lines[0], "|" + "---|" * len(heading), *lines[1:]]


@cache
def configured(name: str, changes: str = "") -> tuple[Config, int]:
    """A shipped file with `section.key=value` changes, and the world size that its degrees
    state.
    """
    config = load(["--config", name, *(f"--{change}" for change in changes.split())])
    return config, prod(config.parallelism.degrees(1).values())


@cache
def planned(name: str, changes: str = "") -> TrainingPlan:
    return plan_stage(*configured(name, changes), load_device(DEVICE))


# ---- docs/parallelism.md


def shipped() -> Table:
    plans = [planned(name) for name in SHIPPED]

    def degrees(plan: TrainingPlan) -> str:
        mesh = plan.config.parallelism.degrees(plan.world_size)
        return " x ".join(str(mesh[dim]) for dim in ("dp_shard", "cp", "tp", "pp"))

    def method(plan: TrainingPlan) -> str:
        context = plan.config.context_plan()
        return (
            f"hybrid, {context.ulysses_degree} x {context.ring_degree}"
            if context.resolved_method == "hybrid"
            else context.resolved_method
        )

    def tokens_per_device(plan: TrainingPlan) -> str:
        training = plan.config.training
        mesh = plan.config.parallelism.degrees(plan.world_size)
        return (
            f"{training.micro_batch_size * training.seq_len // (mesh['cp'] * mesh['tp']) // 1024}K"
        )

    rows = {
        "GPUs": [f"{plan.world_size:,}" for plan in plans],
        "dp_shard x cp x tp x pp": map(degrees, plans),
        "`cp_method`, resolved": map(method, plans),
        "tokens per step": [
            f"{plan.config.training.tokens_per_step / 1e6:.1f} M" for plan in plans
        ],
        "micro-batches per step, m": [
            str(plan.config.micro_batches(plan.world_size)[1]) for plan in plans
        ],
        "tokens per GPU and micro-batch": map(tokens_per_device, plans),
        "peak memory, GiB of 80": [f"{plan.peak_memory.device_bytes / GIB:.1f}" for plan in plans],
        "MFU, %": [f"{100 * plan.mfu:.0f}" for plan in plans],
        "**% of the step:** attention": [_share(plan, "attention") for plan in plans],
        "recomputation": [_share(plan, "recompute") for plan in plans],
        "exposed: tp": [_share(plan, "tp") for plan in plans],
        "exposed: cp": [_share(plan, "cp", "rotate", "exchange") for plan in plans],
        "exposed: FSDP": [_share(plan, "fsdp") for plan in plans],
        "pipeline bubble": [_share(plan, "bubble") for plan in plans],
    }
    return markdown(
        ["", *(f"`{name}`" for name in SHIPPED)], [[name, *cells] for name, cells in rows.items()]
    )


def _share(plan: TrainingPlan, *kinds: str) -> str:
    """Percent of a step that the busiest rank spends on these kinds of work or exposed
    communication.
    """
    busiest = plan.step_time.busiest
    components = {**busiest.compute, **busiest.exposed, "bubble": busiest.bubble}
    seconds = sum(components.get(kind, 0.0) for kind in kinds)
    percent = 100 * seconds / plan.step_seconds
    return "" if percent < 0.05 else f"{percent:.{0 if percent >= 9.5 else 1}f}"


def alternatives() -> Table:
    rows = []
    for name, changes in ALTERNATIVES:
        base = planned(name)
        plan = planned(name, changes)
        cells = [
            f"{base.peak_memory.device_bytes / GIB:.1f} → {plan.peak_memory.device_bytes / GIB:.1f}"
        ]
        cells += [
            f"{100 * base.mfu:.1f} → {100 * plan.mfu:.1f}",
            "" if plan.fits else "does not fit",
        ]
        rows.append(
            [
                f"`{name}`",
                " ".join(f"`{change}`" for change in changes.replace("parallelism.", "").split()),
                *cells,
            ]
        )
    return markdown(["file", "with", "peak GiB", "MFU, %", ""], rows)


def saved() -> Table:
    model = FAMILIES["llama3.1"]["8b"]
    rows = []
    cases = (
        ("`full`", "full", True),
        ("`keep_attention`", "keep_attention", True),
        ("`none`", "none", True),
    )
    for name, policy, compiled in (*cases, ("`none`, not compiled", "none", False)):
        sizes = [
            total_bytes(
                BlockMemory(
                    model, model.layer_kinds[0], tokens=tp, tp=tp, compiled=compiled
                ).saved(policy)
            )
            / (2 * model.dim)
            for tp in (1, 2, 8)
        ]
        rows.append([name, *(f"{size:#.3g}" for size in sizes)])
    return markdown(["`memory.recompute`", "tp 1", "tp 2", "tp 8"], rows)


def bubbles(pp: int = 4, micro_batches: int = 16) -> Table:
    """Share of a step that a rank waits."""
    rows = []
    for schedule, each in SCHEDULES:
        plan = PipelinePlan(
            pp=pp,
            schedule=schedule,
            num_layers=pp * each,
            pp_stages_per_rank=each,
            num_micro_batches=micro_batches,
        )
        share = 100 * plan.bubble_fraction
        cells = [f"{share:.{0 if share >= 9.95 else 1}f} %", f"{in_flight(schedule, each, pp):g}"]
        rows.append([f"`{schedule}`", str(each), *cells])
    return markdown(
        ["`pp_schedule`", "stages per rank", "bubble", "micro-batches in flight"], rows
    )


def in_flight(schedule: PipelineSchedule, each: int, pp: int) -> float:
    """Micro-batches whose activations the first rank holds, through all of its blocks."""
    layers = pp * each
    base, _ = configured(
        "debug",
        f"model.num_layers={max(4, layers)} training.global_batch_size=16 training.micro_batch_size=1",
    )
    changes = {"pp": pp, "pp_schedule": schedule, "pp_stages_per_rank": each}
    section = base.parallelism.model_copy(update=changes)
    config = base.model_copy(update={"parallelism": section})
    return config.pipeline_plan(pp).in_flight(0)


def reductions() -> Table:
    """A pipeline's gradients, whole or reduced after every micro-batch."""
    rows = []
    for when in ("per_step", "per_micro_batch"):
        plan = planned("llama3_405b_128k", f"parallelism.pp_reduce_gradients={when}")
        sizes = [
            plan.peak_memory.item(line).device_bytes
            for line in ("gradients", "unreduced gradients")
        ]
        exposed = plan.step_time.busiest.exposed.get("fsdp", 0)
        cells = [
            *map(_gib, (*sizes, plan.peak_memory.device_bytes)),
            f"{exposed:.1f}",
            f"{plan.step_seconds:.1f}",
        ]
        rows.append([f'`"{when}"`', *cells])
    heading = [
        "`pp_reduce_gradients`",
        "gradients, GiB",
        "unreduced, GiB",
        "peak, GiB",
        "exposed FSDP, s",
        "step, s",
    ]
    return markdown(heading, rows)


# ---- docs/memory.md


def estimates() -> Table:
    found = [estimate_memory(*configured(name)) for name in SHIPPED]
    rows = []
    multiples = []
    for name, one in zip(SHIPPED, found, strict=True):
        multiples.append(
            residual_multiple(one.device_bytes, one, rank_memory(*configured(name), one.pp_rank))
        )
    for item in found[0].items:
        sizes = [one.item(item.name).device_bytes for one in found]
        if any(_gib(size) for size in sizes):
            rows.append([item.name, *map(_gib, sizes)])
    rows.append(["**peak**", *(_gib(one.device_bytes) for one in found)])
    rows.append(["host", *(_gib(one.host_bytes) for one in found)])
    rows.append(["k", *(f"{multiple:.0f}" for multiple in multiples)])
    rows.append(
        [
            "reached",
            *(one.phase.replace(", backward", "").replace(", forward", "") for one in found),
        ]
    )
    return markdown(["GiB of the fullest rank", *(f"`{name}`" for name in SHIPPED)], rows)


def residual_multiple(peak: float, estimate: MemoryEstimate, rank: RankMemory) -> float:
    """k, where the peak is parameters, gradients and optimizer state plus k times the residual
    stream on one rank.
    """
    states = sum(item.device_bytes for item in estimate.items[:3])
    return (peak - states) / rank.block.residual_bytes


def savings() -> Table:
    changes = (
        "memory.recompute=none",
        "memory.recompute=full",
        "memory.recompute=full parallelism.cp=8 parallelism.dp_shard=1",
    )
    runs = [configured("llama3_8b_128k", change) for change in changes]
    found = [memory_savings(*run) for run in runs]
    order = sorted(
        {change for one in found for change in one},
        key=lambda change: (-max(one.get(change, 0) for one in found), change),
    )
    rows = [["peak", *(_gib(estimate_memory(*run).device_bytes) for run in runs)]]
    rows += [[f"`{change}`", *(_gib(one.get(change, 0)) for one in found)] for change in order]
    return markdown(["GiB freed by", "`none`, 2 x 4", "`full`, 2 x 4", "`full`, 1 x 8"], rows)


ATTENTION_PARTS = (
    "the rotation of queries",
    "the rotation of keys",
    "attention to own keys",
    "attention",
    "the reduce-scatter of KV gradients",
)
FEED_FORWARD_PARTS = (
    "feed-forward",
    "the input gradient of the feed-forward",
    "the norm before the feed-forward",
)


def held(block: BlockMemory, *parts: str) -> float:
    """What a recomputed block holds in these parts of its backward pass, in residual streams."""
    moments = recompute_moments(block, "float32", ())
    return (
        max(total_bytes(alive) for name, alive in moments if name in parts) / block.residual_bytes
    )


def head_groups() -> Table:
    """What the block in its backward pass holds, in u, for sequences so long that tiles and
    weights do not count.
    """
    model = FAMILIES["llama3.1"]["8b"]
    tokens = 1 << 26
    heads: dict[str, Any] = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
    plans = [
        None,
        *(
            ContextPlan(cp=8, method=method, **heads)
            for method in ("ulysses", "ring", "allgather")
        ),
    ]
    base = BlockMemory(model, model.layer_kinds[0], tokens, mlp_tile_bytes=1 << 20)
    counts = (1, 2, 4, 8)
    rows = []
    for plan in plans:
        cells = []
        for groups in counts:
            divides = plan is None or model.num_heads // groups % plan.ulysses_degree == 0
            block = replace(base, context_plan=plan, head_groups=groups)
            cells.append(f"{held(block, *ATTENTION_PARTS):.1f}" if divides else "")
        rows.append(
            [f"attention, {f'`{plan.resolved_method}` over 8' if plan else 'cp 1'}", *cells]
        )
    for name, parts in (
        ("feed-forward", FEED_FORWARD_PARTS),
        ("projections", ("the rotation of gradients", "projections")),
    ):
        rows.append([name, *[f"{held(base, *parts):.1f}"] * len(counts)])
    return markdown(
        ["u held by", *(f"{count} group{'s' * (count > 1)}" for count in counts)], rows
    )


def endings() -> Table:
    """The ways in which a launch ends, and the errors that lead there."""
    errors = [
        each
        for each in vars(trainer.errors).values()
        if isinstance(each, type) and issubclass(each, RunError)
    ]
    rows = []
    for ending in ENDINGS:
        causes = [
            " ".join(str(each.__doc__).split())
            for each in errors
            if ending.exit_code
            and each.status == ending.exit_code
            and each not in (RunError, RankFailedError)
        ]
        rows.append(
            [
                f"{ending.exit_code}",
                f"`{ending.marker}`",
                ending.meaning,
                ending.then,
                " ".join(causes),
            ]
        )
    return markdown(["exit code", "marker", "meaning", "what follows", "errors"], rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= 0.05 * GIB else ""


TABLES: dict[str, dict[str, Callable[[], Table]]] = {
    "parallelism.md": {
        "shipped": shipped,
        "alternatives": alternatives,
        "saved": saved,
        "bubbles": bubbles,
        "reductions": reductions,
    },
    "reliability.md": {"endings": endings},
    "memory.md": {"estimates": estimates, "savings": savings, "head_groups": head_groups},
}


def regenerated(page: str) -> str:
    """The page with every table made again."""
    text = (DOCS / page).read_text()
    for name, make in TABLES[page].items():
        pattern = re.compile(rf"( *)<!-- table: {name} -->\n.*?<!-- end -->", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"docs/{page} has no table {name}")
        indent = found[1]
        lines = [f"<!-- table: {name} -->", "", *make(), "", "<!-- end -->"]
        block = "\n".join(f"{indent}{line}".rstrip() for line in lines)
        text = text[: found.start()] + block + text[found.end() :]
    return text


def main(argv: Sequence[str]) -> int:
    stale = []
    for page in TABLES:
        text = regenerated(page)
        if text != (DOCS / page).read_text():
            stale.append(page)
            if "--check" not in argv:
                (DOCS / page).write_text(text)
    sys.stdout.write(
        "".join(
            f"docs/{page} {'differs' if '--check' in argv else 'rewritten'}\n" for page in stale
        )
    )
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
