"""Turns plans and search results into reports. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from trainer.config.checks import placed_problems
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.summary import warnings
from trainer.errors import RunError
from trainer.hardware.device_specs import (
    DEFAULT_DEVICE,
    DEFAULT_DEVICE_NOTE,
    DeviceSpec,
    load_device,
    select_device,
)
from trainer.hardware.host import GIB
from trainer.plan.console import show, show_suggestions
from trainer.plan.document import (
    BarChart,
    LineChart,
    PlanReport,
    StackedBar,
    Table,
    format_gib,
    format_seconds,
)
from trainer.plan.layout_words import describe_layout, layout_toml, why_slower
from trainer.plan.plan import TrainingPlan
from trainer.plan.run_plan import RunPlan, plan_run
from trainer.plan.search import SearchResult
from trainer.plan.step_time import CHANNEL_LABELS, sequence_cost
from trainer.plan.suggestions import suggestions
from trainer.plan.tracing import Trace, tracing_processes
from trainer.trace.tensors import LINES, MemoryEstimate

CURVE_FACTORS = (1 / 16, 1 / 4, 1, 2, 4)
"""Lengths of a curve, relative to that of the plan."""
MIN_CURVE_LENGTH = 1024
RESERVE_LABEL = "reserve"

PINNED_NOTE = "the table of host memory has a sixteenth more than the tensors: pinned buffers are powers of two"


def plan_report(run: RunPlan, *, why: bool = False, notes: Sequence[str] = ()) -> PlanReport:
    """Report of a run, which details the stage to explain.

    `why`: also lists its tensors one by one.
    """
    plan = run.fullest_stage
    name = plan.config.job.name
    sections: list[BarChart | Table | LineChart] = []
    if len(run.stages) > 1:
        sections.append(_stages_table(run))
    sections += _plan_sections(plan)
    if why:
        sections += _tensor_tables(plan)
    needed = format_gib(plan.peak_memory.device_bytes)
    usable = format_gib(plan.usable_device_memory)
    return PlanReport(
        title=f"{name} on {_devices_text(plan)}{f', stage {plan.name}' if plan.name else ''}",
        verdict="; ".join(run.memory_shortages)
        or f"{needed} of {usable} usable GiB with {describe_layout(plan)}",
        fits=run.fits,
        facts=_facts(run, plan),
        sections=sections,
        notes=[
            *_notes(plan),
            *([PINNED_NOTE] if why and plan.config.memory.offload != "none" else []),
            *notes,
        ],
    )


def search_report(
    result: SearchResult, question: str, device: DeviceSpec, *, notes: Sequence[str] = ()
) -> PlanReport:
    sections: list[BarChart | Table | LineChart] = []
    if result.best:
        rows = [_search_row(plan, result.best[0]) for plan in result.best]
        headings = (
            "layout",
            "s / step",
            "MFU %",
            "tokens / s / device",
            "GiB",
            "host GiB",
            "slower because of",
        )
        sections.append(
            Table(title="fastest layouts that fit", columns=headings, rows=rows, best=0)
        )
    if result.not_fitting:
        shortages = [
            (describe_layout(plan), _table_seconds(plan), plan.memory_shortages[0])
            for plan in result.not_fitting
        ]
        columns = ("layout", "s / step", "shortage with the leanest memory options")
        title = "faster layouts that do not fit" if result.best else "leanest layouts"
        sections.append(Table(title=title, columns=columns, rows=shortages))
    best = result.best[0] if result.best else None
    sections += _plan_sections(best) if best else []
    plan_notes = _notes(best) if best else [f"device: {device.description}"]
    return PlanReport(
        title=question,
        verdict=describe_layout(best) if best else "; ".join(result.problems) or "no layout fits",
        fits=best is not None,
        facts=_facts(RunPlan([best]), best) if best else [],
        sections=sections,
        notes=[
            *plan_notes,
            *notes,
            f"{result.num_layouts:,} layouts estimated, {result.num_traces} traced",
        ],
        configurations=[
            f"# {describe_layout(plan)}: {format_seconds(plan.step_seconds)} per step\n{layout_toml(plan.config)}"
            for plan in result.best
        ],
    )


def _plan_sections(plan: TrainingPlan) -> list[BarChart | Table | LineChart]:
    charts = [_device_memory_chart(plan), _host_memory_chart(plan), _step_time_chart(plan)]
    tables = [_communication_table(plan)] if plan.world_size > 1 else []
    return [
        *charts,
        *tables,
        *([_window_table(plan)] if plan.config.model.build().windows else []),
    ]


def _notes(plan: TrainingPlan) -> list[str]:
    return [
        f"device: {plan.device.description}",
        *plan.bottlenecks[len(plan.memory_shortages) :],
        *plan.assumptions,
        *warnings(plan.config, plan.world_size),
    ]


def search_suggestions(result: SearchResult, trace: Trace) -> list[str]:
    """Changes of the best layout, or of the first one that does not fit."""
    if result.best:
        return [*map(str, suggestions(result.best[0], trace))]
    return [
        f"the first: {suggestion}"
        for plan in result.not_fitting[:1]
        for suggestion in suggestions(plan, trace)
    ]


def show_plan_at_launch(config: Config, world_size: int) -> bool:
    """Prints the plan of a run. Returns whether it fits."""
    device = select_device(config)
    with tracing_processes() as trace:
        run = plan_run(config, world_size, device or load_device(DEFAULT_DEVICE), trace=trace)
        notes = [*([] if device else [DEFAULT_DEVICE_NOTE]), *_documents(run.stages[0])]
        show(plan_report(run, notes=notes))
        show_suggestions([*map(str, suggestions(run.fullest_stage, trace))])
    for problem in run.memory_shortages:
        sys.stderr.write(f"error: the run does not fit: {problem}\n")
    return not run.memory_shortages


def _documents(plan: TrainingPlan) -> Iterator[str]:
    """Note on what the packed documents of the first stage change, if they are prepared."""
    if not plan.config.context_plan().packs_documents:
        return
    from trainer.data.balance import first_steps  # Imports torch.

    try:
        work = first_steps(plan.config, plan.world_size)
    except RunError as error:
        yield f"the corpus cannot be read: {error}"
        return
    if work is None:
        yield "the corpus is not prepared yet: its documents and their balance between ranks are unknown"
        return
    cost = sequence_cost(plan.config, plan.world_size, plan.step_time)
    seq_len = plan.config.training.seq_len
    model = plan.config.model.build()
    # Pairs of as many tokens if each sequence were one document, which the plan assumes.
    whole = work.tokens / seq_len * model.mean_pairs(seq_len)
    # Only attention depends on pairs; all else takes as long per token as planned.
    seconds = plan.step_seconds - plan.step_time.attention_seconds * (
        1 - work.busiest_pairs / whole
    )
    yield (
        f"with the documents of the first {work.steps} steps: {work.mean_pairs / whole:.1%} of the (query, key) pairs, "
        f"dp imbalance {work.imbalance(cost):.2f}, {format_seconds(seconds)} a step"
    )


# ---- sections


def _facts(run: RunPlan, plan: TrainingPlan) -> list[tuple[str, str]]:
    training = plan.config.training
    global_batch_size = training.global_batch_size
    seq_len = training.seq_len
    return [
        ("step time", format_seconds(plan.step_seconds)),
        ("MFU", f"{plan.mfu:.1%}"),
        ("HFU", f"{plan.hfu:.1%}"),
        ("tokens / s", f"{plan.tokens_per_second:,.0f}"),
        ("tokens / s / device", f"{plan.tokens_per_second_per_device:,.0f}"),
        ("sequences per step", f"{global_batch_size:,} x {seq_len:,}"),
        ("total tokens", _amount(run.total_tokens)),
        ("total time", _duration(run.days)),
        (
            "device hours",
            f"{run.device_hours:,.3g}" if run.device_hours < 100 else f"{run.device_hours:,.0f}",
        ),
        ("host memory per node", f"{format_gib(plan.host_memory_needed)} GiB"),
        ("checkpoint size", f"{format_gib(plan.checkpoint_bytes)} GiB"),
    ]


def _stages_table(run: RunPlan) -> Table:
    rows = [
        (
            stage.name,
            f"{stage.config.training.seq_len:,}",
            f"{stage.config.training.steps:,}",
            format_seconds(stage.step_seconds),
            f"{100 * stage.mfu:.1f}",
            format_gib(stage.peak_memory.device_bytes),
            f"{stage.days:,.2f}",
            "yes" if stage.fits else "no",
        )
        for stage in run.stages
    ]
    columns = ("stage", "seq len", "steps", "step time", "MFU %", "GiB", "days", "fits")
    return Table(title="training stages", columns=columns, rows=rows)


def _device_memory_chart(plan: TrainingPlan) -> BarChart:
    bars = [_memory_bar(estimate, plan) for estimate in plan.memory_by_pp_rank]
    return BarChart(title=f"peak device memory, {plan.peak_memory.phase}", unit="GiB", bars=bars)


def _memory_bar(estimate: MemoryEstimate, plan: TrainingPlan) -> StackedBar:
    segments = {item.name: item.device_bytes / GIB for item in estimate.items}
    segments[RESERVE_LABEL] = plan.device_reserve / GIB
    return StackedBar(
        label=_pp_rank_label(estimate.pp_rank, plan),
        segments=segments,
        limit=plan.device.memory / GIB,
    )


def _tensor_tables(plan: TrainingPlan) -> Iterator[Table]:
    """Every tensor of the fullest device and of the fullest host, by line and by the code that
    allocates it.
    """
    alive = [each for each in plan.peak_memory.tensors if not each.on_host]
    alive += [each for each in plan.peak_host_memory.tensors if each.on_host]
    places = dict.fromkeys((each.line, each.source) for each in alive)
    for line, source in sorted(places, key=lambda place: LINES.index(place[0])):
        tensors = [
            each for each in alive if (each.line, each.source) == (line, source) and each.bytes
        ]
        rows = [
            (
                f"{each.bytes / GIB:.3f}",
                each.name,
                ("" if each.copies == 1 else f"{each.copies:.4g} x ")
                + f"{list(each.shape)} {each.dtype}",
                f"{each.lifetime}, on the host" if each.on_host else each.lifetime,
            )
            for each in sorted(tensors, key=lambda each: -each.bytes)
        ]
        if rows:
            yield Table(
                title=f"{line}, allocated in {source}",
                columns=("GiB", "tensor", "shape", "alive"),
                rows=rows,
            )


def _host_memory_chart(plan: TrainingPlan) -> BarChart:
    segments = {kind: size / GIB for kind, size in plan.host_memory.items()}
    label = f"{plan.ranks_per_node} rank{'s' if plan.ranks_per_node > 1 else ''}"
    bar = StackedBar(label=label, segments=segments, limit=plan.usable_host_memory / GIB)
    return BarChart(title="host memory per node", unit="GiB", bars=[bar])


def _step_time_chart(plan: TrainingPlan) -> BarChart:
    ranks = plan.step_time.ranks
    bars = [
        StackedBar(label=_pp_rank_label(rank.pp_rank, plan), segments=rank.breakdown())
        for rank in ranks
    ]
    return BarChart(
        title="step time", unit="s", bars=bars, focus=ranks.index(plan.step_time.busiest)
    )


def _communication_table(plan: TrainingPlan) -> Table:
    """Communication of the busiest rank, by channel."""
    busiest = plan.step_time.busiest
    channels = sorted(
        {**busiest.exposed, **busiest.overlapped}, key=lambda name: -busiest.exposed.get(name, 0)
    )
    times = (busiest.exposed, busiest.overlapped)
    rows = [
        [CHANNEL_LABELS.get(name, name), *(f"{each.get(name, 0):.3g}" for each in times)]
        for name in channels
    ]
    return Table(
        title="communication and copies per step",
        columns=("payload", "s exposed", "s overlapped"),
        rows=rows,
    )


def _window_table(plan: TrainingPlan) -> Table:
    """Attention of the busiest rank, by window."""
    rows = [
        (
            "none" if window is None else f"{window:,}",
            f"{share.layers}",
            f"{share.flops / 1e12:,.4g}",
            f"{share.sent_bytes / GIB:,.3g}",
        )
        for window, share in plan.attention_by_window.items()
    ]
    return Table(
        title="attention per step, by window",
        columns=("window", "layers", "TFLOP", "GiB sent"),
        rows=rows,
    )


def _pp_rank_label(pp_rank: int, plan: TrainingPlan) -> str:
    return f"pp rank {pp_rank}" if plan.config.parallelism.pp > 1 else "every rank"


def curves(plan: TrainingPlan, trace: Trace) -> list[LineChart]:
    """Memory and MFU by sequence length, on the same mesh, with the same number of sequences per
    step.
    """
    seq_len = plan.config.training.seq_len
    lengths = [round(factor * seq_len) for factor in CURVE_FACTORS]
    configs = (
        with_overrides(plan.config, {"training.seq_len": length})
        for length in lengths
        if length >= MIN_CURVE_LENGTH or length == seq_len
    )
    valid = [config for config in configs if not [*placed_problems(config, plan.world_size)]]
    plans = trace([TrainingPlan(config, plan.world_size, plan.device) for config in valid])
    traced = [each for each in plans if each is not None]
    if len(traced) < 2:
        return []
    memory = [
        (float(each.config.training.seq_len), each.peak_memory.device_bytes / GIB)
        for each in traced
    ]
    mfu = [(float(each.config.training.seq_len), 100 * each.mfu) for each in traced]
    limit = plan.usable_device_memory / GIB
    by_length = partial(LineChart, x="sequence length", log_x=True)
    return [
        by_length(
            title="memory by sequence length",
            y="GiB per device",
            log_y=True,
            lines={"peak": memory},
            limit=limit,
        ),
        by_length(title="MFU by sequence length", y="MFU %", log_y=False, lines={"MFU": mfu}),
    ]


def _search_row(plan: TrainingPlan, best: TrainingPlan) -> Sequence[str]:
    return (
        describe_layout(plan),
        _table_seconds(plan),
        f"{100 * plan.mfu:.1f}",
        f"{plan.tokens_per_second_per_device:,.0f}",
        format_gib(plan.peak_memory.device_bytes),
        format_gib(plan.host_memory_needed),
        why_slower(plan, best) if plan is not best else "",
    )


def _devices_text(plan: TrainingPlan) -> str:
    nodes = -(-plan.world_size // plan.device.devices_per_node)
    return f"{plan.world_size:,} x {plan.device.name}" + (
        f" ({nodes:,} nodes)" if nodes > 1 else ""
    )


def _table_seconds(plan: TrainingPlan) -> str:
    return f"{plan.step_seconds:,.0f}" if plan.step_seconds >= 1000 else f"{plan.step_seconds:.4g}"


def _amount(tokens: float) -> str:
    power = min(3, max(0, (len(f"{tokens:.0f}") - 1) // 3 - 1))
    return f"{tokens / 1000 ** (power + 1):,.3g} {'KMBT'[power]}"


def _duration(days: float) -> str:
    seconds = 86_400 * days
    units = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(
        (f"{seconds / unit:,.1f} {name}" for name, unit in units if seconds >= unit),
        f"{seconds:.3g} seconds",
    )
