"""Whole steps that follow from short traces, beside dry runs of the whole step, on shipped files.

    python -m benchmarks.traced_steps [TEXT]...

TEXT is part of a row's name. A row's rank runs as on a GPU, with the attention kernels that the
device takes, once in full and once shortened. Minutes of a core each; rows are those of
docs/planning.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from benchmarks.doc_tables import markdown
from benchmarks.dry_run import dry_run
from trainer.config.parse import load
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.host import GIB
from trainer.trace.record import trace_step


class Row(NamedTuple):
    name: str
    arguments: str
    stage: int = 0
    """Pipeline rank."""
    compiled: bool = False


ROWS = (
    Row("pipeline, first rank", "llama3_405b_128k"),
    Row("pipeline, last rank", "llama3_405b_128k", stage=15),
    Row(
        "interleaved pipeline",
        "llama3_405b_128k --parallelism.pp_schedule Interleaved1F1B",
        stage=3,
    ),
    Row("experts over 8 ranks", "gpt_oss_20b_128k --training.global_batch_size 6"),
    Row("offload, head groups, tiles", "llama3_8b_1m"),
    Row(
        "a budget of the host",
        "llama3_8b_128k --memory.offload inputs_and_attention --memory.host_budget_gib 60 --training.global_batch_size 4",
    ),
    Row(
        "an input in four blocks",
        "llama3_1b_1m_1gpu --training.seq_len 131072 --memory.offload inputs_and_attention --memory.blocks_per_checkpoint 4",
    ),
    Row("compiled pieces", "llama3_8b_128k --training.global_batch_size 4", compiled=True),
    Row(
        "compiled blocks",
        "llama3_8b --memory.recompute none --training.global_batch_size 16",
        compiled=True,
    ),
    Row("windows and full attention in turn", "gemma3_4b_128k --training.global_batch_size 4"),
)
HEADER = (
    "step",
    "options",
    "blocks run",
    "micro-batches",
    "CPU-s",
    "GiB",
    "off by",
    "FLOPs",
    "bytes sent",
    "whole run, CPU-s",
)


def measured(row: Row) -> list[str]:
    name, *options = row.arguments.split()
    config = load(["--config", name, *options])
    world_size = prod(config.parallelism.degrees(1).values())
    rank = row.stage * world_size // config.parallelism.pp
    kernel = with_attention_choice(config).training.attention
    began = time.process_time()
    found, step, _ = trace_step(config, world_size, rank, kernel=kernel, compiled=row.compiled)
    composed_seconds = time.process_time() - began
    began = time.process_time()
    whole = dry_run(config, world_size, rank=rank, kernel=kernel, compiled=row.compiled)
    whole_seconds = time.process_time() - began
    flops = found.work.matmul_flops.total() + found.work.attention_flops.total()
    whole_flops = sum(whole.matmul_flops.values()) + sum(whole.attention_flops.values())
    sent = found.work.sent_bytes.total()
    whole_sent = sum(message.bytes for message in whole.messages)
    blocks = [(len(each.kept), len(each.originals)) for each in step.stages.values()]
    return [
        row.name,
        f"`{row.arguments}`",
        f"{sum(kept for kept, _ in blocks)} of {sum(count for _, count in blocks)}",
        f"{step.micro_batches} of {step.plan.num_micro_batches}",
        f"{composed_seconds:.0f}",
        f"{found.peak.size / GIB:.3f}",
        f"{found.peak.size / whole.peak_bytes - 1:+.4%}",
        _ratio(flops, whole_flops),
        _ratio(sent, whole_sent),
        f"{whole_seconds:.0f}",
    ]


def _ratio(found: float, whole: float) -> str:
    return "equal" if found == whole else f"{found / whole - 1:+.1e}"


def main(argv: Sequence[str]) -> int:
    rows = [row for row in ROWS if not argv or any(text in row.name for text in argv)]
    found = []
    for row in rows:
        found.append(measured(row))
        sys.stderr.write(" | ".join(found[-1]) + "\n")
    sys.stdout.write("\n".join(markdown(list(HEADER), found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
