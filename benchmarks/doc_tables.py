"""Generate tables of docs/parallelism.md, docs/memory.md, docs/reliability.md and docs/experts.md
from the code that they describe.

    python -m benchmarks.doc_tables             rewrite the tables between their markers
    python -m benchmarks.doc_tables --check     exit 1 if a page differs from what would be written
    python -m benchmarks.doc_tables --untraced  leave out tables of traced plans: seconds each

Nothing is timed. A page holds `<!-- table: NAME -->`, the table and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path

import trainer.errors
from parallelisms.mesh.pipeline_plan import PipelinePlan, PipelineSchedule
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ENDINGS, RankFailedError, RunError
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.plan import TrainingPlan
from trainer.plan.run_plan import plan_stage
from trainer.trace.record import trace_step
from trainer.trace.tensors import SAVED_ACTIVATIONS, TRANSIENT_ACTIVATIONS

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
SAVING = (
    "memory.recompute=full",
    "memory.recompute=keep_attention",
    "parallelism.cp=8 parallelism.dp_shard=1",
    "parallelism.tp=2 parallelism.dp_shard=1",
    "memory.optimizer_placement=host",
    "memory.offload=inputs",
    "memory.optimizer_dtype=bfloat16",
)
SHORT_MIXTURE = (
    "model.num_layers=4 training.seq_len=16384 training.global_batch_size=1 parallelism.cp=1 parallelism.ep=1 "
    "memory.optimizer_placement=device memory.mlp_tile_mib=null memory.offload=none"
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


def residual_bytes(plan: TrainingPlan) -> float:
    """Bytes of one residual stream on one rank, in bfloat16."""
    training = plan.config.training
    ranks = plan.mesh["cp"] * plan.mesh["tp"]
    tokens = training.micro_batch_size * training.seq_len / ranks
    return 2 * plan.config.model.build().dim * tokens


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
    """The difference between models of four and of six layers."""
    rows = []
    for name, changes in (
        ("`full`", "memory.recompute=full"),
        ("`keep_attention`", "memory.recompute=keep_attention"),
        ("`none`", "memory.recompute=none training.compile=true"),
        ("`none`, not compiled", "memory.recompute=none training.compile=false"),
    ):
        cells = []
        for tp in (1, 2, 8):
            mesh = f"{changes} parallelism.dp_shard=1 parallelism.cp=1 parallelism.tp={tp}"
            plans = [
                planned("llama3_8b_128k", f"{mesh} model.num_layers={layers}") for layers in (4, 6)
            ]
            four, six = (plan.peak_memory.item(SAVED_ACTIVATIONS).device_bytes for plan in plans)
            cells.append(f"{(six - four) / 2 / residual_bytes(plans[0]):#.3g}")
        rows.append([name, *cells])
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
        exposed = sum(plan.step_time.busiest.exposed.values())
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
        "exposed, s",
        "step, s",
    ]
    return markdown(heading, rows)


# ---- docs/memory.md


def peaks() -> Table:
    plans = [planned(name) for name in SHIPPED]
    found = [plan.peak_memory for plan in plans]
    rows = []
    for item in found[0].items:
        sizes = [_gib(one.item(item.name).device_bytes) for one in found]
        if any(sizes):
            rows.append([item.name, *sizes])
    rows.append(["**peak**", *(_gib(one.device_bytes) for one in found)])
    rows.append(["host", *(_gib(plan.peak_host_memory.host_bytes) for plan in plans)])
    rows.append(["k", *(f"{streams(plan):.0f}" for plan in plans)])
    rows.append(["reached in", *(one.phase.partition(",")[0] for one in found)])
    return markdown(["GiB of the fullest rank", *(f"`{name}`" for name in SHIPPED)], rows)


def streams(plan: TrainingPlan) -> float:
    """k, where the peak is parameters, gradients and optimizer state plus k times the residual
    stream on one rank.
    """
    states = sum(item.device_bytes for item in plan.peak_memory.items[:3])
    return (plan.peak_memory.device_bytes - states) / residual_bytes(plan)


def savings() -> Table:
    bases = (
        "memory.recompute=none",
        "memory.recompute=full",
        "memory.recompute=full parallelism.cp=8 parallelism.dp_shard=1",
    )
    before = [planned("llama3_8b_128k", base) for base in bases]
    rows = [["peak", *(_gib(plan.peak_memory.device_bytes) for plan in before)]]
    for change in SAVING:
        after = [planned("llama3_8b_128k", f"{base} {change}") for base in bases]
        freed = [
            old.peak_memory.device_bytes - new.peak_memory.device_bytes
            if new.world_size == old.world_size
            else 0
            for old, new in zip(before, after, strict=True)
        ]
        rows.append([" ".join(f"`{each}`" for each in change.split()), *map(_gib, freed)])
    return markdown(["GiB freed by", "`none`, 2 x 4", "`full`, 2 x 4", "`full`, 1 x 8"], rows)


def head_groups() -> Table:
    """Transient activations at the peak, of sequences so long that tiles and the head do not
    count.
    """
    counts = (1, 2, 4, 8)
    rows = []
    for method, mesh in (
        ("cp 1", "parallelism.dp_shard=8 parallelism.cp=1"),
        *(
            (f"`{method}` over 8", f"parallelism.cp_method={method}")
            for method in ("ulysses", "ring", "allgather")
        ),
    ):
        cells = []
        for groups in counts:
            if method.startswith("`ulysses") and groups == 8:
                cells.append("")  # Groups of four query heads do not divide among eight ranks.
                continue
            length = 1 << (19 if method == "cp 1" else 22)
            plan = planned(
                "llama3_8b_1m_8gpu",
                f"{mesh} memory.head_groups={groups} training.seq_len={length} training.global_batch_size=8",
            )
            held = plan.peak_memory.item(TRANSIENT_ACTIVATIONS).device_bytes
            cells.append(f"{held / residual_bytes(plan):.1f}")
        rows.append([method, *cells])
    return markdown(
        ["u held by", *(f"{count} group{'s' * (count > 1)}" for count in counts)], rows
    )


def block_kernels() -> Table:
    """Kernels that a block with experts launches in both passes, recomputation included."""
    rows = []
    for model, name in (
        ("Qwen3-30B-A3B", "qwen3_30b_a3b_1m"),
        ("gpt-oss-20b", "gpt_oss_20b_128k"),
    ):
        for ranks, mesh in (
            ("one GPU", "parallelism.dp_shard=1"),
            ("8, FSDP", "parallelism.dp_shard=8 training.global_batch_size=8"),
            (
                "8, `ep = 8`",
                "parallelism.dp_shard=8 parallelism.ep=8 training.global_batch_size=8",
            ),
        ):
            config, world_size = configured(name, f"{SHORT_MIXTURE} {mesh}")
            kernel = with_attention_choice(config).training.attention
            cells = []
            for compiled in (False, True):
                trace = trace_step(config, world_size, kernel=kernel, compiled=compiled).trace
                of_block = (
                    piece.work.kernels.total()
                    for piece in trace.pieces
                    if piece.place.unit == 1 and piece.place.micro_batch == 0
                )
                cells.append(str(sum(of_block)))
            rows.append([model, ranks, *cells])
    return markdown(["", "GPUs", "eager", "compiled"], rows)


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
    "experts.md": {"block_kernels": block_kernels},
    "memory.md": {"peaks": peaks, "savings": savings, "head_groups": head_groups},
}
UNTRACED = ("bubbles", "endings")
"""Tables that no plan is traced for."""


def regenerated(page: str, *, traced_too: bool) -> str:
    """The page with its tables made again."""
    text = (DOCS / page).read_text()
    for name, make in TABLES[page].items():
        if not traced_too and name not in UNTRACED:
            continue
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
        text = regenerated(page, traced_too="--untraced" not in argv)
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
