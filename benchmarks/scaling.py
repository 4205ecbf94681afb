"""docs/scaling.md: what 8B, 70B and 405B would do on 8 to 16,384 GPUs with rows of 8K to 16M tokens, by the planner.

    python -m benchmarks.scaling [--quick]

Nothing is timed: every figure is a plan for H100 (`trainer/hardware/specs/h100-80gb.toml`) with the fastest mesh that
`trainer.plan search` finds, beside what others published. Takes some minutes of two cores; `--quick` fills few cells, in
`outputs/scaling`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import published
from benchmarks.mesh_arithmetic import table
from trainer.config import checks
from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.hardware.device_specs import load_device
from trainer.memory.estimator import GIB, RankMemory
from trainer.plan import svg
from trainer.plan.document import LineChart
from trainer.plan.plan import plan_stage
from trainer.plan.search import LayoutPlan, describe_layout, longest_sequence, search, with_overrides
from trainer.plan.style import stylesheet
from trainer.plan.svg import tag

DOCS = Path(__file__).resolve().parents[1] / "docs"
K, M = 1 << 10, 1 << 20
MODELS = {"8B": ("llama3", "8b"), "70B": ("llama3", "70b"), "405B": ("llama3.1", "405b")}
GPUS = (8, 64, 512, 4096, 16_384)
LENGTHS = (8 * K, 32 * K, 128 * K, 512 * K, M, 4 * M, 16 * M)
TOKENS, EACH = 4 * M, 16 * K
"""Of an update: so many, or so many for each GPU, if that is more; at least a row."""
STRONG, STRONG_LENGTH = 16 * M, 128 * K
DEVICE = load_device("h100-80gb")
WIDTH, LEFT = 760, 60


def of_size(name: str, length: int, tokens: int) -> Recipe:
    family, size = MODELS[name]
    return load(
        [
            *("--config", "llama3_8b_128k", "--model.family", family, "--model.size", size),
            *("--training.seq_len", str(length), "--training.global_batch_size", str(max(1, tokens // length))),
            *("--training.attention", "cudnn", "--training.compile", "true"),
        ]
    )


@dataclass(frozen=True)
class Cell:
    """The fastest way to train a model on so many GPUs with such rows; None where none fits."""

    model: str
    gpus: int
    length: int
    way: LayoutPlan | None

    def words(self) -> str:
        if self.way is None:
            return "-"
        return f"**{100 * self.way.plan.mfu:.0f}** {short(self.way)}"


def cell(model: str, gpus: int, length: int, tokens: int) -> Cell:
    found = search(of_size(model, length, tokens), gpus, DEVICE, max_results=1)
    return Cell(model, gpus, length, found.best[0] if found.best else None)


def weak(model: str, gpus: int, length: int) -> Cell:
    return cell(model, gpus, length, max(TOKENS, EACH * gpus))


def short(way: LayoutPlan) -> str:
    """`dp 4 cp 8u tp 2 pp 4`, with the first letter of how rows are shared."""
    mesh = way.mesh
    sizes = {"dp": mesh["dp_replicate"] * mesh["dp_shard"], **{axis: mesh[axis] for axis in ("cp", "tp", "pp")}}
    method = way.plan.config.parallelism.cp_method
    letter = {"ring": "r", "allgather": "g", "ulysses": "u", "hybrid": "h"}.get(method, "")
    words = [f"{axis} {size}{letter * (axis == 'cp')}" for axis, size in sizes.items() if size > 1]
    return " ".join(words)


# ---- pieces of the page


def grid(model: str, cells: Sequence[Cell]) -> list[str]:
    found = {(each.gpus, each.length): each for each in cells if each.model == model}
    gpus, lengths = sorted({at for at, _ in found}), sorted({at for _, at in found})
    rows = [[size(length), *(found[count, length].words() for count in gpus)] for length in lengths]
    return table(["row", *(f"{count:,} GPUs" for count in gpus)], rows)


def strong(cells: Sequence[Cell]) -> tuple[LineChart, list[str]]:
    """MFU by the number of GPUs, and what the time of the smallest and the largest is spent on."""
    lines = {
        model: [(float(each.gpus), 100 * each.way.plan.mfu) for each in cells if each.model == model and each.way]
        for model in MODELS
    }
    rows = []
    for each in cells:
        if each.way is None:
            continue
        plan = each.way.plan
        parts = plan.step_time.busiest.breakdown()
        work = sum(parts.get(name, 0) for name in ("matrix products", "attention", "the head"))
        others = sorted(
            ((seconds, name) for name, seconds in parts.items() if seconds and name not in WORK), reverse=True
        )
        lost = ", ".join(f"{name} {100 * seconds / plan.step_seconds:.0f} %" for seconds, name in others[:3])
        rows.append(
            [each.model, f"{each.gpus:,}", short(each.way), f"{plan.step_seconds:.3g}", f"{100 * plan.mfu:.1f}",
             f"{100 * work / plan.step_seconds:.0f} %", lost]
        )  # fmt: skip
    heading = ["model", "GPUs", "mesh", "s / step", "MFU %", "matmul and attention", "largest of the rest"]
    drawn = LineChart(
        title="strong scaling",
        x="GPUs",
        y="MFU %",
        log_x=True,
        log_y=False,
        lines={name: line for name, line in lines.items() if line},
    )
    return drawn, table(heading, rows)


WORK = ("matrix products", "attention", "the head")
RANKS = (2, 4, 8, 16, 32, 64, 128, 256)


def hidden(model: str, length: int) -> LineChart:
    """Percent of an update that is waited for attention's messages, by how many ranks share a row."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for method in ("ring", "allgather", "ulysses", "hybrid"):
        for ranks in RANKS:
            config = with_overrides(of_size(model, length, length), sharing(ranks, method))
            if checks.layout_problems(config, ranks):
                continue
            plan = plan_stage(config, ranks, DEVICE)
            waits = {
                name: seconds for name, seconds in plan.step_time.busiest.breakdown().items() if name.endswith("(cp)")
            }
            lines.setdefault(method, []).append((float(ranks), 100 * sum(waits.values()) / plan.step_seconds))
    title = f"{model}, rows of {size(length)}: what is waited for messages of attention"
    return LineChart(title=title, x="ranks that share a row", y="% of an update", log_x=True, log_y=False, lines=lines)


def sharing(ranks: int, method: str) -> dict[str, object]:
    """One row on all ranks, of which everything is computed again."""
    parallelism = {"cp": ranks, "dp_shard": 1, "cp_method": method}
    changes = {f"parallelism.{key}": value for key, value in parallelism.items()}
    return changes | {"memory.recompute": "full", "training.micro_batch_size": 1}


def most(model: str, gpus: int) -> list[str]:
    """The longest rows, and what stops longer ones."""
    length, found, _ = longest_sequence(of_size(model, 64 * K, 64 * K), gpus, DEVICE)
    if not length:
        return [model, f"{gpus:,}", "none", "", "", ""]
    plan = found.best[0].plan
    stops = (
        "host memory"
        if plan.host_memory_needed / plan.usable_host_memory > plan.peak_memory.device_bytes / plan.usable_device_memory
        else "device memory"
    )
    return [
        model, f"{gpus:,}", f"{length / M:.2f}M", describe_layout(plan),
        f"{plan.peak_memory.device_bytes / GIB:.0f} of {plan.usable_device_memory / GIB:.0f}, {plan.host_memory_needed / GIB:,.0f} of {plan.usable_host_memory / GIB:,.0f}",
        stops,
    ]  # fmt: skip


def gathered(length: int) -> list[list[str]]:
    """Memory of the methods by how many ranks share a row."""
    rows = []
    for ranks in (8, 32, 128):
        words = [f"{ranks}"]
        for method in ("ring", "allgather", "ulysses"):
            config = with_overrides(of_size("8B", length, length), sharing(ranks, method))
            held = (
                moment.item("a block in passing").device_bytes / GIB
                for moment in RankMemory(config, ranks, 0).phase_estimates()
            )
            words.append("-" if checks.layout_problems(config, ranks) else f"{max(held):.1f}")
        rows.append(words)
    return rows


def bubble() -> list[list[str]]:
    """Of 405B over 16 stages, by how many micro-batches each data-parallel rank has."""
    rows = []
    for count in (128, 64, 32, 16):
        words = [f"{count}"]
        for schedule, stages in (("1F1B", 1), ("Interleaved1F1B", 2)):
            base = load(["--config", "llama3_405b_128k"])
            degrees = base.parallelism.degrees(1)
            config = with_overrides(
                base,
                {
                    "training.global_batch_size": count * degrees["dp_replicate"] * degrees["dp_shard"],
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "parallelism.pp_layers": None,
                },
            )
            plan = plan_stage(config, 4096, DEVICE)
            words.append(f"{100 * plan.step_time.busiest.bubble / plan.step_seconds:.0f} %, {100 * plan.mfu:.1f}")
        rows.append(words)
    return rows


def updating() -> list[list[str]]:
    """The optimizer's step, on the device and on the host, as a share of an update."""
    rows = []
    for length in (8 * K, 128 * K, M):
        words = [size(length)]
        for placement in ("device", "host"):
            config = with_overrides(
                of_size("8B", length, 8 * length),
                {"parallelism.dp_shard": 8, "memory.optimizer_placement": placement, "memory.recompute": "full",
                 "memory.offload": "inputs", "memory.mlp_tile_mib": 256, "memory.head_groups": 8 if length == M else 1},
            )  # fmt: skip
            plan = plan_stage(config, 8, DEVICE)
            words.append(
                f"{plan.step_time.busiest.optimizer:.2f} s, {100 * plan.step_time.busiest.optimizer / plan.step_seconds:.1f} %"
            )
        rows.append(words)
    return rows


# ---- the page


def page(
    cells: Sequence[Cell], strongly: Sequence[Cell], lengths: Sequence[Sequence[str]], folder: Path
) -> Iterator[str]:
    yield INTRODUCTION
    for model in MODELS:
        yield from (f"### {model}\n", *grid(model, cells), "")
    drawn, spent = strong(strongly)
    picture(folder / "scaling_strong.svg", drawn)
    yield STRONGLY
    yield from (*spent, "")
    picture(folder / "scaling_methods.svg", hidden("8B", M))
    picture(folder / "scaling_methods_128k.svg", hidden("8B", 128 * K))
    yield METHODS
    yield LONGEST
    yield from (
        *table(["model", "GPUs", "longest row", "with", "GiB of a device, of a node", "stopped by"], lengths),
        "",
    )
    yield BREAKS_GATHER
    yield from (*table(["ranks", "ring", "allgather", "ulysses"], gathered(M)), "")
    yield BREAKS_BUBBLE
    yield from (*table(["micro-batches", "1F1B: bubble, MFU %", "Interleaved1F1B"], bubble()), "")
    yield BREAKS_STEP
    yield from (*table(["row", "on the device", "on the host"], updating()), "")
    yield PUBLISHED
    yield from (*published.report(published.rows()), "")


def picture(file: Path, drawn: LineChart) -> None:
    """A file beside the page."""
    sides = svg.margins(drawn)
    height = svg.CURVE_HEIGHT + 80
    inside = str(svg.render_curve(drawn)).replace(
        "<svg ", f'<svg x="{LEFT}" y="36" width="{WIDTH - LEFT - sides["right"]}" ', 1
    )
    made = tag(
        "svg", tag("style", "{}"), tag("rect", class_="paper", width="100%", height="100%"),
        tag("text", drawn.y, x=8, y=20, class_="label"), svg.Markup(inside),
        tag("text", drawn.x, x=WIDTH / 2, y=height - 8, class_="label", text_anchor="middle"),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height,
    )  # fmt: skip
    style = (
        stylesheet()
        + "svg { font-family: system-ui, sans-serif } .paper { fill: var(--paper) } svg svg { width: auto }"
    )
    file.write_text(str(made).replace("{}", style, 1) + "\n")


def size(length: int) -> str:
    return f"{length // M}M" if length >= M else f"{length // K}K"


def main(words: Sequence[str]) -> None:
    quick = "--quick" in words
    gpus, lengths = ((8, 64), (8 * K, M)) if quick else (GPUS, LENGTHS)
    models = ["8B"] if quick else [*MODELS]
    counts = (8, 64) if quick else (8, 32, 128, 512, 2048, 8192, 16_384)
    calls: list[Callable[[], Cell]] = [
        partial(weak, *at) for at in ((m, n, t) for m in models for n in gpus for t in lengths)
    ]
    ends = len(calls)
    calls += [partial(cell, model, count, STRONG_LENGTH, STRONG) for model in models for count in counts]
    rows = [(model, count) for model in models for count in ((8,) if quick else (8, 32, 128, 512))]
    with ProcessPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(call) for call in calls]
        reached = [pool.submit(most, *row) for row in rows]
        cells = []
        for number, future in enumerate(futures, 1):
            cells.append(future.result())
            sys.stderr.write(f"{number} of {len(futures)} searches\n")
        folder = DOCS.parent / "outputs" / "scaling" if quick else DOCS
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(page(cells[:ends], cells[ends:], [each.result() for each in reached], folder))
    (folder / "scaling.md").write_text(text)


INTRODUCTION = """\
# Scaling, on paper

Made by `python -m benchmarks.scaling`: nothing on this page was run. Every figure is a plan ([planning](planning.md)) for
H100 SXM with 80 GB, eight to a node, 400 Gb/s of network each, cuDNN's attention, blocks compiled, one document per row,
with the fastest mesh that the search finds. [Below](#against-what-was-published) the same planner stands beside what
others measured.

## Weak scaling

MFU in percent and the mesh of the fastest plan that fits; an update has 4M tokens, or 16K for each GPU if that is more,
and a row at least. After `cp` stands how rows are shared: **r**ing, all-**g**ather, **u**lysses, **h**ybrid. A dash:
nothing fits.
"""
STRONGLY = """\
## Strong scaling

16M tokens in an update, rows of 128K, on more and more GPUs.

![MFU by the number of GPUs](scaling_strong.svg)
"""
METHODS = """\
## Where messages of attention stop hiding

Of 8B, all computed again, one row on all ranks: the part of an update that is waited for keys, values and heads. Up to
eight ranks share a node. A ring's hop hides behind the attention of the one before, whose work falls with the square of
what a rank holds, its bytes with the rank's tokens alone; a gather hides behind nothing of its own layer; an exchange of
heads moves less the more ranks there are, and is waited for.

Rows of a million tokens:

![percent of an update by ranks, 1M](scaling_methods.svg)

Rows of 128K:

![percent of an update by ranks, 128K](scaling_methods_128k.svg)
"""
LONGEST = """\
## What breaks first

**Memory.** The longest rows that fit, one row on all GPUs of a group, and what stops longer ones:
"""
BREAKS_GATHER = """\
**The gather.** GiB that a block of 8B holds in passing at a million tokens, by how many ranks share the row: the keys and
values that an all-gather holds do not become fewer.
"""
BREAKS_BUBBLE = """\
**The bubble.** `llama3_405b_128k` on 4,096 GPUs, 16 stages, with smaller and smaller batches:
"""
BREAKS_STEP = """\
**The optimizer's step.** 8B on eight GPUs, eight rows in an update: what of it is waited for. On the host
it hides behind the next forward pass, if that is long enough.
"""
PUBLISHED = """\
## Against what was published

Kernel rates are those of the device tables, the same for all rows; nothing is fitted to a row. The rate of FP8 products is
one factor, found from two rows of torchtitan's first table, which are then no evidence. Where a row does something that
Longhaul does not, the last column says so. Made by `python -m benchmarks.published`.
"""

if __name__ == "__main__":
    main(sys.argv[1:])
