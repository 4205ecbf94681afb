"""The page of a new run: what to type next, and why the planner chose its layout."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.job_config import Config
from trainer.launch.cluster import pluralize
from trainer.plan.document import PlanReport
from trainer.plan.markdown import escape, render_markdown


def render_page(
    config: Config,
    report: PlanReport,
    *,
    model: str,
    remarks: Sequence[str],
    commands: Sequence[tuple[str, str]],
) -> str:
    """The page in Markdown; `commands` come with what they do."""
    training = config.training
    lines = [
        f"# {config.job.name}",
        "",
        f"{escape(model)}; corpus {escape(config.data.corpus)}; {training.steps:,} steps of "
        f"{pluralize(training.global_batch_size, 'sequence')} of {training.seq_len:,} tokens.",
        "",
        *(f"- {escape(remark)}" for remark in remarks),
        *([""] if remarks else []),
        "```bash",
        *(f"{line}  # {meaning}" for line, meaning in commands),
        "```",
        "",
    ]
    return "\n".join(lines) + "\n" + render_markdown(report)
