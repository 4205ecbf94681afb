"""How equal the work of data-parallel ranks is, by packing and by dealing.

    python -m benchmarks.balance            prints the table of docs/data.md
    python -m benchmarks.balance --write    writes it

Four corpora of 10^6 documents (10^5 where they are books), at 128K and 1M tokens a sequence; a
step has four micro-batches of one sequence a rank. dp imbalance is the work of the busiest rank of
each micro-batch over the mean, summed over micro-batches, averaged over at most 200 steps; work is
seconds of Llama 3 8B on an H100, by the planner. `bound`: what no deal can beat, because the
largest sequence of a step needs its time and the mean is the mean.

    log-normal   median 735 tokens, sigma 1.6: as pages of the web, with a heavy tail
    Pareto       exponent 1.2, at least 400 tokens: as repositories and dumps
    ProLong 512K the published mix of Gao et al., 2024 (arXiv:2410.02660): half of the code in pieces of 512K, half of 64K,
                 a sixth of the books in 512K, the rest in 64K, 40 % short documents (log-normal, median 600)
    ProLong 64K  the same paper's first stage: 60 % in pieces of 64K, 40 % short documents
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.pages import replace_block
from trainer.config.parse import load
from trainer.data.deal import Cost, busiest_and_means, deal_sequences
from trainer.data.packing import Packing, PackingPlan, pack_documents
from trainer.data.packing_stats import between_sequences, sequence_pairs
from trainer.data.shuffle import shuffled_order
from trainer.hardware.device_specs import load_device
from trainer.plan.run_plan import plan_stage
from trainer.plan.step_time import sequence_cost

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
DOCUMENTS = 1_000_000
MICRO_BATCHES = 4
MAX_STEPS = 200
PACKED: dict[str, tuple[Packing, int]] = {
    "version 1": ("best_fit", 1),
    "version 2": ("best_fit", 2),
    "concat": ("concat", 2),
}


def log_normal(count: int, median: float, sigma: float, seed: int = 0) -> Tensor:
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal * sigma).exp().mul(median).clamp(min=16).long()


def pareto(count: int) -> Tensor:
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (400 * uniform.pow(-1 / 1.2)).clamp(max=2e7).long()


def prolong(count: int, shares: dict[int, float]) -> Tensor:
    """Short documents, and pieces of these lengths with these shares of the tokens; in a mixed
    order.
    """
    short = log_normal(count, 600, 1.1).clamp(max=60_000)
    total = int(short.sum()) / (1 - sum(shares.values()))
    pieces = [
        torch.full((round(total * share / length),), length) for length, share in shares.items()
    ]
    lengths = torch.cat([short, *pieces])
    return lengths[shuffled_order(len(lengths), seed=1)]


CORPORA: dict[str, Callable[[int], Tensor]] = {
    "log-normal": lambda count: log_normal(count, 735, 1.6),
    "Pareto": pareto,
    "ProLong 512K": lambda count: prolong(count, {524_288: 0.2, 65_536: 0.4}),
    "ProLong 64K": lambda count: prolong(count, {65_536: 0.6}),
}


def cost_of(seq_len: int) -> Cost:
    """Seconds of Llama 3 8B on 8 H100, with as much context parallelism as the length needs."""
    config = load(["--config", "llama3_8b_128k" if seq_len < 1 << 20 else "llama3_8b_1m_8gpu"])
    plan = plan_stage(config, 8, load_device("h100-80gb"))
    return sequence_cost(plan.config, plan.world_size, plan.step_time)


def imbalances(plan: PackingPlan, cost: Cost, dp_size: int) -> tuple[float, float, float]:
    """(by number, dealt, bound), averaged over steps."""
    work = (cost.of_pair * sequence_pairs(plan) + cost.of_token * plan.seq_len)[
        shuffled_order(plan.num_sequences, seed=3)
    ]
    size = dp_size * MICRO_BATCHES
    found = list[tuple[float, float, float]]()
    for step in work.split(size)[:MAX_STEPS]:
        if len(step) < size:
            break
        dealt = deal_sequences(step.tolist(), dp_size=dp_size, micro_batch_size=1)
        by_number = float(step.view(MICRO_BATCHES, dp_size).max(1).values.sum())
        mean = float(step.sum()) / dp_size
        busiest = sum(each for each, _ in busiest_and_means(step.tolist(), dealt))
        found.append((by_number / mean, busiest / mean, max(mean, float(step.max())) / mean))
    if not found:
        return 0.0, 0.0, 0.0
    count = len(found)
    return (
        sum(each[0] for each in found) / count,
        sum(each[1] for each in found) / count,
        sum(each[2] for each in found) / count,
    )


def rows(documents: int) -> Iterator[str]:
    yield "| corpus | tokens a sequence | packing | padding | between sequences | dp 8: by number, dealt (bound) | dp 64 | s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, draw in CORPORA.items():
        lengths = draw(documents)
        for seq_len in (1 << 17, 1 << 20):
            cost = cost_of(seq_len)
            for label, (packing, version) in PACKED.items():
                start = time.process_time()
                plan = pack_documents(lengths, seq_len=seq_len, packing=packing, version=version)
                seconds = time.process_time() - start
                cells = []
                for dp_size in (8, 64):
                    by_number, dealt, bound = imbalances(plan, cost, dp_size)
                    cells.append(
                        f"{by_number:.2f}, {dealt:.2f} ({bound:.2f})"
                        if by_number
                        else "too few sequences"
                    )
                padding = plan.num_padding_tokens / (plan.num_sequences * seq_len)
                facts = f"{padding:.2%} | {between_sequences(plan):.2f} | {' | '.join(cells)} | {seconds:.1f}"
                yield f"| {name} | {seq_len >> 10}K | {label} | {facts} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--write", action="store_true", help="write the table of docs/data.md")
    options = parser.parse_args()
    lines = []
    for line in rows(options.documents):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        lines.append(line)
    if options.write:
        PAGE.write_text(replace_block(PAGE.read_text(), "balance", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
