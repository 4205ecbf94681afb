"""Plans and searches in words and figures: what `report.py` describes. Without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DEFAULT, NOBODYS, Device, device_for, load_device
from trainer.memory.estimator import GIB, Ledger
from trainer.plan.console import show
from trainer.plan.document import Bar, Bars, Curve, Report, Table
from trainer.plan.plan import Change, Plan, RunPlan, plan_of, run_plan
from trainer.plan.search import Found, Way, laid_out, why_slower
from trainer.plan.step_time import TOLD

LENGTHS = 9
"""Points of a curve of lengths: of each, half the one after it."""
SHORTEST = 1024
KEPT_FREE = "kept free for kernels and fragments"


def planned(run: RunPlan, *, curve: bool = True, notes: Sequence[str] = ()) -> Report:
    """A run's plan; of a recipe, memory and time of the stage that is fullest."""
    plan = max(run.stages, key=lambda stage: (not stage.fits, stage.overfull))
    name = plan.config.job.name
    parts: list[Bars | Table | Curve] = []
    if len(run.stages) > 1:
        parts.append(_stages(run))
    parts += _pages(plan)
    if curve:
        parts += _curves(plan)
    filled = f"{_gib(plan.fullest.device)} of {_gib(plan.device_room)} GiB that may be filled"
    return Report(
        title=f"{name} on {_ranks(plan)}{f', stage {plan.name}' if plan.name else ''}",
        verdict="; ".join(run.misfits) or f"{filled}, with {laid_out(plan)}",
        fits=run.fits,
        facts=_facts(run, plan),
        parts=parts,
        notes=[*_notes(plan), *notes],
    )


def searched(found: Found, question: str, device: Device, *, notes: Sequence[str] = ()) -> Report:
    """What a search found."""
    parts: list[Bars | Table | Curve] = []
    if found.best:
        rows = [_row(way, found.best[0]) for way in found.best]
        columns = ("layout", "s / update", "MFU %", "tokens / s / device", "GiB", "host GiB", "what it loses by")
        parts.append(Table(title="the fastest that fit", columns=columns, rows=rows, best=0))
    if found.misfits:
        misfits = [(laid_out(way.plan), f"{way.seconds:.4g}", way.plan.misfits[0]) for way in found.misfits]
        missing = ("layout", "s / update", "what is missing, where least is kept")
        parts.append(Table(title="would be faster, and do not fit", columns=missing, rows=misfits))
    best = found.best[0].plan if found.best else None
    parts += _pages(best) if best else []
    about = _notes(best) if best else [f"devices are {device.description}"]
    return Report(
        title=question,
        verdict=laid_out(best) if best else "; ".join(found.problems) or "no layout fits",
        fits=best is not None,
        facts=_facts(RunPlan((best,)), best) if best else [],
        parts=parts,
        notes=[*about, *notes, f"{found.tried:,} plans were made"],
        toml="\n\n".join(map(_pasted, found.best)),
    )


def _pasted(way: Way) -> str:
    return f"# {laid_out(way.plan)}: {_seconds(way.seconds)} an update\n{way.toml()}"


def _pages(plan: Plan) -> list[Bars | Table | Curve]:
    parts: list[Bars | Table | Curve] = [_device_memory(plan), _host_memory(plan), _time(plan)]
    return [*parts, _communication(plan)] if plan.world_size > 1 else parts


def _notes(plan: Plan) -> list[str]:
    return [
        f"devices are {plan.device.description}",
        *plan.limits[len(plan.misfits) :],
        *map(_change, plan.changes),
        *plan.assumptions,
        *plan.config.remarks(plan.world_size),
    ]


def show_before(config: Config, world_size: int) -> None:
    """What a run is to take, before it starts; what does not fit may still be tried."""
    known = device_for(config)
    found = run_plan(config, world_size, known or load_device(DEFAULT))
    show(planned(found, curve=False, notes=[] if known else [NOBODYS]))
    for problem in found.misfits:
        sys.stderr.write(f"warning: this does not fit: {problem}\n")


# ---- pieces


def _facts(run: RunPlan, plan: Plan) -> list[tuple[str, str]]:
    training = plan.config.training
    rows, length = training.global_batch_size, training.seq_len
    return [
        ("an update", _seconds(plan.seconds)),
        ("MFU", f"{plan.mfu:.1%}"),
        ("HFU", f"{plan.hfu:.1%}"),
        ("tokens / s", f"{plan.tokens_per_second:,.0f}"),
        ("tokens / s of a device", f"{plan.tokens_per_second_per_device:,.0f}"),
        ("rows of an update", f"{rows:,} x {length:,}"),
        ("tokens of the run", _amount(run.tokens)),
        ("the run", _duration(run.days)),
        ("device hours", f"{run.device_hours:,.3g}" if run.device_hours < 100 else f"{run.device_hours:,.0f}"),
        ("host memory of a node", f"{_gib(plan.host_needed)} GiB"),
        ("a checkpoint", f"{_gib(plan.checkpoint)} GiB"),
    ]


def _stages(run: RunPlan) -> Table:
    rows = [
        (
            stage.name, f"{stage.config.training.seq_len:,}", f"{stage.config.training.steps:,}", _seconds(stage.seconds),
            f"{100 * stage.mfu:.1f}", _gib(stage.fullest.device), f"{stage.days:,.2f}", "yes" if stage.fits else "no",
        )
        for stage in run.stages
    ]  # fmt: skip
    columns = ("stage", "row", "updates", "an update", "MFU %", "GiB", "days", "fits")
    return Table(title="stages of the run", columns=columns, rows=rows)


def _device_memory(plan: Plan) -> Bars:
    bars = [_bar(ledger, plan) for ledger in plan.ledgers]
    where = plan.fullest.moment
    return Bars(title=f"memory of a device when it is fullest: {where}", unit="GiB", bars=bars)


def _bar(ledger: Ledger, plan: Plan) -> Bar:
    parts = {line.name: line.device / GIB for line in ledger.lines}
    parts[KEPT_FREE] = plan.reserve / GIB
    return Bar(label=_place(ledger.place, plan), parts=parts, limit=plan.device.memory / GIB)


def _host_memory(plan: Plan) -> Bars:
    parts = {kind: size / GIB for kind, size in plan.host.items()}
    bar = Bar(label=f"{plan.node_ranks} ranks", parts=parts, limit=plan.host_room / GIB)
    return Bars(title="host memory of a node", unit="GiB", bars=[bar])


def _time(plan: Plan) -> Bars:
    bars = [Bar(label=_place(stage.place, plan), parts=stage.parts()) for stage in plan.times.stages]
    return Bars(title="time of an update", unit="s", bars=bars)


def _communication(plan: Plan) -> Table:
    """Of the rank that has most to do, by channel."""
    busiest = plan.times.busiest
    channels = sorted({**busiest.exposed, **busiest.hidden}, key=lambda name: -busiest.exposed.get(name, 0))
    rows = [
        (TOLD.get(name, name), f"{busiest.exposed.get(name, 0):.3g}", f"{busiest.hidden.get(name, 0):.3g}")
        for name in channels
    ]
    return Table(
        title="messages and copies of an update", columns=("of", "s that are waited for", "s hidden"), rows=rows
    )


def _place(place: int, plan: Plan) -> str:
    return f"place {place + 1} of {plan.config.parallelism.pp}" if plan.config.parallelism.pp > 1 else "every rank"


def _curves(plan: Plan) -> list[Curve]:
    """Memory and MFU of rows of other lengths, on the same mesh."""
    longer = [_of_length(plan, length) for length in _lengths(plan.config)]
    tokens = [float(other.config.training.seq_len) for other in longer]
    memory = [(at, other.fullest.device / GIB) for at, other in zip(tokens, longer, strict=True)]
    mfu = [(at, 100 * other.mfu) for at, other in zip(tokens, longer, strict=True)]
    if len(tokens) < 2:
        return []
    room = plan.device_room / GIB
    return [
        Curve(title="longer and shorter rows: memory", x="tokens of a row", y="GiB of a device", log_x=True, log_y=True,
              lines={"the fullest rank": memory}, limit=room),
        Curve(title="longer and shorter rows: MFU", x="tokens of a row", y="MFU %", log_x=True, log_y=False,
              lines={"MFU": mfu}),
    ]  # fmt: skip


def _lengths(config: Config) -> Iterable[int]:
    own = config.training.seq_len
    lengths = [own * 2**power // 2 ** (LENGTHS // 2) for power in range(LENGTHS)]
    return [length for length in lengths if length >= SHORTEST or length == own]


def _of_length(plan: Plan, length: int) -> Plan:
    """With as many rows as there are: what is asked is what a row costs."""
    training = plan.config.training.model_copy(update={"seq_len": length})
    return plan_of(plan.config.model_copy(update={"training": training}), plan.world_size, plan.device)


def _row(way: Way, best: Way) -> Sequence[str]:
    plan = way.plan
    return (
        laid_out(plan), f"{way.seconds:.4g}", f"{100 * plan.mfu:.1f}", f"{plan.tokens_per_second_per_device:,.0f}",
        _gib(plan.fullest.device), _gib(plan.host_needed), why_slower(way, best) if way is not best else "",
    )  # fmt: skip


def _change(change: Change) -> str:
    gain = [f"frees {_gib(change.frees)} GiB"] * (change.frees > 0) + [
        f"saves {_seconds(change.saves)} of an update"
    ] * (change.saves > 0)
    return f"{change.text}: {' and '.join(gain) or 'needs less'}, then {'fits' if change.plan.fits else 'still does not fit'}"


def _ranks(plan: Plan) -> str:
    nodes = -(-plan.world_size // plan.device.node)
    return f"{plan.world_size:,} x {plan.device.name}" + (f" ({nodes:,} nodes)" if nodes > 1 else "")


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _amount(tokens: float) -> str:
    power = min(3, max(0, (len(f"{tokens:.0f}") - 1) // 3 - 1))
    return f"{tokens / 1000 ** (power + 1):,.3g} {'KMBT'[power]}"


def _duration(days: float) -> str:
    seconds = 86_400 * days
    units = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((f"{seconds / unit:,.1f} {name}" for name, unit in units if seconds >= unit), f"{seconds:.3g} seconds")


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}" if size < 1000 * GIB else f"{size / GIB:,.0f}"
