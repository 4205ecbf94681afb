"""Fill docs/scaling.md: predicted 8B, 70B and 405B runs on 8 to 16,384 GPUs, sequences of 8K to
16M tokens.

    python -m benchmarks.scaling [--without-searches | --toy]

Nothing is timed: every figure is a plan for H100 (`trainer/hardware/specs/h100-80gb.toml`), of the
fastest mesh that `longhaul plan search` finds or of the mesh that is named, and some are compared
with published measurements. Takes half an hour of two cores until all traces are known;
`--without-searches` leaves the tables and the picture of searches as they are, `--toy` fills few
cells, in `outputs/scaling`. Text outside the generated parts is written in the page itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import published
from benchmarks.doc_tables import markdown
from trainer.config import checks
from trainer.config.overrides import with_overrides
from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.document import LineChart, PlanReport
from trainer.plan.html import render_html
from trainer.plan.layout_words import describe_layout
from trainer.plan.plan import TrainingPlan
from trainer.plan.run_plan import plan_stage
from trainer.plan.search import longest_sequence, search
from trainer.trace.tensors import TRANSIENT_ACTIVATIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
K = 1 << 10
M = 1 << 20
MODELS = {"8B": ("llama3", "8b"), "70B": ("llama3", "70b"), "405B": ("llama3.1", "405b")}
GPUS = (8, 64, 512, 4096)
LENGTHS = (8 * K, 32 * K, 128 * K, M, 16 * M)
TOKENS = 4 * M
EACH = 16 * K
"""Tokens of a step, and the least per GPU; at least one sequence."""
STRONG = 16 * M
STRONG_LENGTH = 128 * K
DEVICE = load_device("h100-80gb")
SVG_STYLE = "svg { font: 12px system-ui, sans-serif; color: #1b1f23; background: #fff } .rule { stroke: #dde1e5 }"
BEGIN = "<!-- generated:begin -->"
END = "<!-- generated:end -->"
GENERATED = re.compile(rf"{BEGIN}.*?{END}", re.DOTALL)


def of_size(name: str, length: int, tokens: int) -> Recipe:
    family, size = MODELS[name]
    return load(
        [
            *("--config", "llama3_8b_128k", "--model.family", family, "--model.size", size),
            *(
                "--training.seq_len",
                str(length),
                "--training.global_batch_size",
                str(max(1, tokens // length)),
            ),
            *("--training.attention", "cudnn", "--training.compile", "true"),
        ]
    )


@dataclass(frozen=True)
class Cell:
    """The fastest plan for a model, a number of GPUs and a sequence length; None if none fits."""

    model: str
    gpus: int
    length: int
    way: TrainingPlan | None

    def words(self) -> str:
        if self.way is None:
            return "-"
        return f"**{100 * self.way.mfu:.0f}** {short(self.way)}"


def cell(model: str, gpus: int, length: int, tokens: int) -> Cell:
    found = search(of_size(model, length, tokens), gpus, DEVICE, max_results=1)
    return Cell(model, gpus, length, found.best[0] if found.best else None)


def weak(model: str, gpus: int, length: int) -> Cell:
    return cell(model, gpus, length, max(TOKENS, EACH * gpus))


def short(way: TrainingPlan) -> str:
    """`dp 4 cp 8u tp 2 pp 4`, with the first letter of how rows are shared."""
    mesh = way.mesh
    sizes = {
        "dp": mesh["dp_replicate"] * mesh["dp_shard"],
        **{axis: mesh[axis] for axis in ("cp", "tp", "pp")},
    }
    method = way.config.parallelism.cp_method
    letter = {"ring": "r", "allgather": "g", "ulysses": "u", "hybrid": "h"}.get(method, "")
    words = [f"{axis} {size}{letter * (axis == 'cp')}" for axis, size in sizes.items() if size > 1]
    return " ".join(words)


# ---- pieces of the page


def grid(model: str, cells: Sequence[Cell]) -> list[str]:
    found = {(each.gpus, each.length): each for each in cells if each.model == model}
    gpus = sorted({at for at, _ in found})
    lengths = sorted({at for _, at in found})
    rows = [
        [size(length), *(found[count, length].words() for count in gpus)] for length in lengths
    ]
    return markdown(["sequence", *(f"{count:,} GPUs" for count in gpus)], rows)


def strong(cells: Sequence[Cell]) -> tuple[LineChart, list[str]]:
    """MFU by the number of GPUs, and where each step spends its time."""
    lines = {
        model: [
            (float(each.gpus), 100 * each.way.mfu)
            for each in cells
            if each.model == model and each.way
        ]
        for model in MODELS
    }
    rows = []
    for each in cells:
        if each.way is None:
            continue
        plan = each.way
        parts = plan.step_time.busiest.breakdown()
        work = sum(parts.get(name, 0) for name in ("matmul", "attention", "loss head"))
        others = sorted(
            ((seconds, name) for name, seconds in parts.items() if seconds and name not in WORK),
            reverse=True,
        )
        lost = ", ".join(
            f"{name} {100 * seconds / plan.step_seconds:.0f} %" for seconds, name in others[:3]
        )
        rows.append(
            [each.model, f"{each.gpus:,}", short(each.way), f"{plan.step_seconds:.3g}", f"{100 * plan.mfu:.1f}",
             f"{100 * work / plan.step_seconds:.0f} %", lost]
        )  # fmt: skip
    heading = [
        "model",
        "GPUs",
        "mesh",
        "s / step",
        "MFU %",
        "matmul and attention",
        "largest of the rest",
    ]
    drawn = LineChart(
        title="strong scaling",
        x="GPUs",
        y="MFU %",
        log_x=True,
        log_y=False,
        lines={name: line for name, line in lines.items() if line},
    )
    return drawn, markdown(heading, rows)


WORK = ("matmul", "attention", "loss head")
RANKS = (2, 4, 8, 16, 32, 64, 128, 256)


def hidden(model: str, length: int) -> LineChart:
    """Exposed communication of attention in percent of a step, by context-parallel ranks."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for method in ("ring", "allgather", "ulysses", "hybrid"):
        for ranks in RANKS:
            config = with_overrides(of_size(model, length, length), sharing(ranks, method))
            if checks.layout_problems(config, ranks):
                continue
            plan = plan_stage(config, ranks, DEVICE)
            waits = {
                name: seconds
                for name, seconds in plan.step_time.busiest.breakdown().items()
                if name.endswith("(cp)")
            }
            lines.setdefault(method, []).append(
                (float(ranks), 100 * sum(waits.values()) / plan.step_seconds)
            )
    title = f"{model}, sequences of {size(length)}: exposed communication of attention"
    return LineChart(
        title=title,
        x="context-parallel ranks",
        y="% of a step",
        log_x=True,
        log_y=False,
        lines=lines,
    )


def sharing(ranks: int, method: str) -> dict[str, object]:
    """Changes that give one sequence to all ranks, with full recomputation."""
    parallelism = {"cp": ranks, "dp_shard": 1, "cp_method": method}
    changes = {f"parallelism.{key}": value for key, value in parallelism.items()}
    return changes | {"memory.recompute": "full", "training.micro_batch_size": 1}


def most(model: str, gpus: int) -> list[str]:
    """The longest sequence that fits, and what stops longer ones."""
    found = longest_sequence(of_size(model, 64 * K, 64 * K), gpus, DEVICE)
    if not found.best:
        return [model, f"{gpus:,}", "none", "", "", ""]
    plan = found.best[0]
    length = plan.config.training.seq_len
    stops = (
        "host memory"
        if plan.host_memory_needed / plan.usable_host_memory
        > plan.peak_memory.device_bytes / plan.usable_device_memory
        else "device memory"
    )
    return [
        model, f"{gpus:,}", f"{length / M:.2f}M", describe_layout(plan),
        f"{plan.peak_memory.device_bytes / GIB:.0f} of {plan.usable_device_memory / GIB:.0f}, {plan.host_memory_needed / GIB:,.0f} of {plan.usable_host_memory / GIB:,.0f}",
        stops,
    ]  # fmt: skip


def gathered(length: int) -> list[list[str]]:
    """Transient activations of each method at the peak, by context-parallel ranks."""
    rows = []
    for ranks in (8, 32, 128):
        words = [f"{ranks}"]
        for method in ("ring", "allgather", "ulysses"):
            config = with_overrides(of_size("8B", length, length), sharing(ranks, method))
            if checks.layout_problems(config, ranks):
                words.append("-")
                continue
            peak = plan_stage(config, ranks, DEVICE).peak_memory
            words.append(f"{peak.item(TRANSIENT_ACTIVATIONS).device_bytes / GIB:.1f}")
        rows.append(words)
    return rows


def bubble() -> list[list[str]]:
    """405B over 16 pipeline ranks, by micro-batches per data-parallel rank."""
    rows = []
    for count in (128, 64, 32, 16):
        words = [f"{count}"]
        for schedule, stages in (("1F1B", 1), ("Interleaved1F1B", 2)):
            base = load(["--config", "llama3_405b_128k"])
            degrees = base.parallelism.degrees(1)
            config = with_overrides(
                base,
                {
                    "training.global_batch_size": count
                    * degrees["dp_replicate"]
                    * degrees["dp_shard"],
                    "parallelism.pp_schedule": schedule,
                    "parallelism.pp_stages_per_rank": stages,
                    "parallelism.pp_layers": None,
                },
            )
            plan = plan_stage(config, 4096, DEVICE)
            words.append(
                f"{100 * plan.step_time.busiest.bubble / plan.step_seconds:.0f} %, {100 * plan.mfu:.1f}"
            )
        rows.append(words)
    return rows


def updating() -> list[list[str]]:
    """Exposed optimizer time, on the device and on the host."""
    rows = []
    for length in (8 * K, 128 * K, M):
        words = [size(length)]
        for placement in ("device", "host"):
            config = with_overrides(
                of_size("8B", length, 8 * length),
                {"memory.optimizer_placement": placement, "memory.recompute": "full",
                 "memory.offload": "inputs", "memory.mlp_tile_mib": 256, "memory.head_groups": 8 if length == M else 1},
            )  # fmt: skip
            plan = plan_stage(config, 8, DEVICE)
            words.append(
                f"{plan.step_time.busiest.optimizer:.2f} s, {100 * plan.step_time.busiest.optimizer / plan.step_seconds:.1f} %"
            )
        rows.append(words)
    return rows


# ---- the page


def render_svg(chart: LineChart) -> str:
    """The line chart as a standalone SVG file."""
    page = render_html(PlanReport(title="", verdict="", fits=True, facts=[], sections=[chart]))
    svg = page[page.index("<svg ") : page.index("</svg>")] + "</svg>\n"
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace("</title>\n", f"</title>\n<style>{SVG_STYLE}</style>\n", 1)


def without_searches(pool: Executor, folder: Path) -> list[list[str]]:
    """Parts of the page that name their meshes; pictures go to the folder."""
    of_lengths = [pool.submit(hidden, "8B", length) for length in (M, 128 * K)]
    rows = [pool.submit(gathered, 4 * M), pool.submit(bubble), pool.submit(updating)]
    for name, chart in zip(("methods", "methods_128k"), of_lengths, strict=True):
        (folder / f"scaling_{name}.svg").write_text(render_svg(chart.result()))
    headings = [
        ["ranks", "ring", "allgather", "ulysses"],
        ["micro-batches", "1F1B: bubble, MFU %", "Interleaved1F1B"],
        ["sequence", "on the device", "on the host"],
    ]
    return [markdown(*each) for each in zip(headings, (row.result() for row in rows), strict=True)]


def with_searches(pool: Executor, folder: Path, *, is_toy: bool) -> list[list[str]]:
    """The first parts of the page, of the fastest meshes; pictures go to the folder."""
    gpus, lengths = ((8,), (8 * K, M)) if is_toy else (GPUS, LENGTHS)
    models = ["8B"] if is_toy else [*MODELS]
    counts = (8,) if is_toy else (8, 32, 128, 512, 2048, 8192, 16_384)
    calls: list[Callable[[], Cell]] = [
        partial(weak, *at) for at in ((m, n, t) for m in models for n in gpus for t in lengths)
    ]
    ends = len(calls)
    calls += [
        partial(cell, model, count, STRONG_LENGTH, STRONG) for model in models for count in counts
    ]
    rows = [
        (model, count) for model in models for count in ((8,) if is_toy else (8, 32, 128, 512))
    ]
    futures = [pool.submit(call) for call in calls]
    reached = [pool.submit(most, *row) for row in rows]
    cells = []
    for number, future in enumerate(futures, 1):
        cells.append(future.result())
        sys.stderr.write(f"{number} of {len(futures)} searches\n")
    longest = [each.result() for each in reached]
    drawn, spent = strong(cells[ends:])
    (folder / "scaling_strong.svg").write_text(render_svg(drawn))
    heading = ["model", "GPUs", "longest sequence", "with", "GiB of a device, of a node"]
    return [
        *(grid(model, cells[:ends]) for model in MODELS),
        spent,
        markdown([*heading, "stopped by"], longest),
    ]


def fill(page: str, parts: Sequence[Sequence[str]]) -> str:
    """The page with the last of its generated parts replaced, one after the other."""
    blocks = GENERATED.findall(page)
    texts = ["\n".join((BEGIN, "", *part, "", END)) for part in parts]
    kept = len(blocks) - len(texts)
    if kept < 0:
        raise ValueError(f"the page has {len(blocks)} generated parts, not {len(texts)}")
    found = iter([*blocks[:kept], *texts])
    return GENERATED.sub(lambda _: next(found), page)


def size(length: int) -> str:
    return f"{length // M}M" if length >= M else f"{length // K}K"


def main(words: Sequence[str]) -> None:
    is_toy = "--toy" in words
    folder = DOCS.parent / "outputs" / "scaling" if is_toy else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        # It takes longest, and would run alone at the end.
        compared = pool.submit(published.report, [*published.tables()])
        searched = (
            [] if "--without-searches" in words else with_searches(pool, folder, is_toy=is_toy)
        )
        parts = [*searched, *without_searches(pool, folder), compared.result()]
    (folder / "scaling.md").write_text(fill((DOCS / "scaling.md").read_text(), parts))


if __name__ == "__main__":
    main(sys.argv[1:])
