"""What context parallelism costs in compute, rank by rank in one process, without transport.

    python -m benchmarks.context_parallel [--tokens 16384] [--cp 2 4 8] [--heads 8 2] [--methods ring] [--rounds 3]
                                          [--packed] [--device cuda --dtype bfloat16 --kernel flash]
    python -m benchmarks.context_parallel --balance
    python -m benchmarks.context_parallel --windows

Every rank's forward and backward of one attention layer runs alone, with its received tensors
prepared, and is timed (CPU-seconds of one thread, or CUDA events). The slowest rank is compared
with the ideal: the time of the whole sequence in one process, divided by the number of ranks.
Also: attended pairs of the busiest rank over the mean, bytes that a rank sends (counted as it
hands them over), and the peak of what it allocates on top of its inputs.

--balance prints, for twenty sequences of 128K tokens packed with documents of several kinds, the largest ratio of the
busiest rank's attended pairs to the mean; nothing is timed.

--windows writes to docs/benchmarks.md what a layer with a window sends by a halo and by an all-gather, and its balance;
nothing is timed.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.pages import replace_block
from models import attention_op
from models.score_pairs import Scores
from parallelisms.context import ring
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.context.ring import AllGather, KVExchange, Ring
from parallelisms.mesh.context_plan import CP_METHODS, ContextPlan, ShardLayout, kv_head_repeats
from parallelisms.mesh.shard_layout import SeqLayout

Job = Callable[[], None]


@dataclass(frozen=True)
class Item:
    """One layer's attention."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    boundaries: tuple[int, ...]
    dtype: torch.dtype
    device: str
    kernel: str

    def draw(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.width, device=self.device, dtype=self.dtype)


@dataclass
class Wire:
    """Hands a rank what it would receive, and counts what it sends."""

    received: list[Tensor]
    sent: int = 0
    step: int = 0
    passing: int = 0

    def rotate(self, x: Tensor) -> Arrived:
        """Keys and values come from the rank before; of gradients only the size matters."""
        self.sent += x.nbytes
        if self.step and x.data_ptr() != self.passing:
            return Arrived(torch.zeros_like(x))
        self.step += 1
        arrived = self.received[self.step].clone()
        self.passing = arrived.data_ptr()
        return Arrived(arrived)

    def gather(self, x: Tensor) -> Arrived:
        self.sent += x.nbytes * (len(self.received) - 1)
        return Arrived(torch.stack(self.received))

    def reduce_scatter(self, x: Tensor) -> Arrived:
        self.sent += x.nbytes * (len(self.received) - 1) // len(self.received)
        return Arrived(x[0].clone())


@dataclass(frozen=True)
class Arrived:
    x: Tensor

    def wait(self) -> Tensor:
        return self.x


@dataclass
class Peak(TorchDispatchMode):
    """The most bytes that lived at once, of those allocated inside."""

    bytes: int = 0
    alive: int = 0
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given | self.seen:
                self._born(x.untyped_storage())
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        size = storage.nbytes()
        self.seen.add(place)
        self.alive += size
        self.bytes = max(self.bytes, self.alive)
        weakref.finalize(storage, self._died, place, size)

    def _died(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.alive -= size


def seconds(job: Job, device: str) -> float:
    if device != "cuda":
        start = time.process_time()
        job()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def whole(item: Item, heads: int, kv_heads: int) -> Job:
    """Forward and backward of all tokens in one process."""
    q, grad = (item.draw(item.tokens, heads) for _ in range(2))
    k, v = (item.draw(item.tokens, kv_heads) for _ in range(2))
    squares = attention_op.document_blocks(
        torch.tensor([item.boundaries], dtype=torch.int32), 1, item.tokens
    )

    def job() -> None:
        out, lse = attention_op.forward(q, k, v, squares, kernel=item.kernel)
        attention_op.backward(grad, q, k, v, out, lse, squares, kernel=item.kernel)

    return job


def shares(item: Item, plan: ContextPlan) -> Iterator[tuple[Job, Wire]]:
    """Forward and backward of each rank of the ring, with its part of the heads."""
    heads = item.heads // plan.ulysses_degree
    kv_heads = (
        item.kv_heads * kv_head_repeats(plan.ulysses_degree, item.kv_heads) // plan.ulysses_degree
    )
    if plan.rotate_method is None or plan.ring_degree == 1:
        yield whole(item, heads, kv_heads), Wire([])
        return
    layout = BatchLayout(plan.resolved_layout, plan.ring_degree, torch.tensor([item.boundaries]))
    held = item.tokens // plan.ring_degree
    everyone = [
        torch.stack([item.draw(held, kv_heads) for _ in range(2)]) for _ in range(plan.ring_degree)
    ]
    for rank in range(plan.ring_degree):
        yield share_of(item, plan, RankAttentionPlan(layout, rank), everyone, heads)


def share_of(
    item: Item, plan: ContextPlan, share: RankAttentionPlan, everyone: list[Tensor], heads: int
) -> tuple[Job, Wire]:
    k, v = everyone[share.rank]
    q, grad, k, v = (x[None] for x in (*(item.draw(k.shape[0], heads) for _ in range(2)), k, v))
    wire = Wire(
        [everyone[(share.rank - step) % plan.ring_degree] for step in range(plan.ring_degree)]
    )
    exchange: KVExchange = Ring(share, wire.rotate, torch.float32)
    if plan.rotate_method == "allgather":
        exchange = AllGather(share, wire.gather, wire.reduce_scatter, torch.float32)

    def job() -> None:
        wire.sent = wire.step = 0
        out, lse = ring.forward(
            (q, k, v, exchange.start(k[0], v[0])), exchange, kernel=item.kernel
        )
        wire.step = 0
        started = (q, k, v, exchange.start(k[0], v[0]))
        ring.backward(grad, started, out, lse, exchange, kernel=item.kernel)

    return job, wire


@contextmanager
def measured_peak(device: str) -> Iterator[list[float]]:
    found: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        return
    with Peak() as peak:
        yield found
    found.append(peak.bytes / 2**20)


def exchanged(item: Item, plan: ContextPlan) -> int:
    """Bytes that trading heads for tokens sends, both ways: q, k, v there and o back, and their
    gradients.
    """
    u = plan.ulysses_degree
    kv_heads = item.kv_heads * kv_head_repeats(u, item.kv_heads)
    size = torch.empty(0, dtype=item.dtype).element_size()
    return (
        2
        * (2 * item.heads + 2 * kv_heads)
        * (item.tokens // plan.cp)
        * item.width
        * size
        * (u - 1)
        // u
    )


def row(item: Item, plan: ContextPlan, rounds: int) -> str:
    alone = whole(item, item.heads, item.kv_heads)
    jobs = list(shares(item, plan))
    alone()
    # Rounds alternate, so that a machine whose speed drifts does so for both; the least disturbed
    # of each counts.
    single: list[float] = []
    ranks: list[list[float]] = [[] for _ in jobs]
    for _ in range(rounds):
        single.append(seconds(alone, item.device))
        for times, (job, _) in zip(ranks, jobs, strict=True):
            times.append(seconds(job, item.device))
    slowest = max(min(times) for times in ranks)
    peaks = []
    for job, _ in jobs:
        with measured_peak(item.device) as found:
            job()
        peaks.append(found[0])
    work = SeqLayout(plan.resolved_layout, plan.ring_degree, item.boundaries).pairs_per_rank()
    sent = max(wire.sent for _, wire in jobs) + exchanged(item, plan)
    ideal = min(single) / plan.cp
    cells = (
        f"{plan.resolved_method}, {plan.resolved_layout}"
        if plan.resolved_method != "hybrid"
        else f"hybrid {plan.ulysses_degree} x {plan.ring_degree}, {plan.rotate_method}, {plan.resolved_layout}",
        str(plan.cp),
        f"{item.tokens // plan.cp}",
        f"{slowest:.3f}",
        f"{slowest / ideal - 1:+.1%}",
        f"{max(work) * len(work) / sum(work):.3f}",
        f"{sent / 2**20:.1f}",
        f"{max(peaks):.0f}",
    )
    return "| " + " | ".join(cells) + " |"


KINDS: dict[str, Callable[[random.Random, int], float]] = {
    "log-normal, mean 16K": lambda draw, _: draw.lognormvariate(9.2, 1.0),
    "log-normal, mean 2K": lambda draw, _: draw.lognormvariate(6.9, 1.2),
    "Pareto, from 256": lambda draw, _: 256 * draw.paretovariate(1.1),
    "half the row, then short": lambda draw, number: (
        2**16 if number == 0 else draw.uniform(1, 2000)
    ),
    "one document": lambda *_: 2**17,
}


def drawn(
    length: Callable[[random.Random, int], float], seed: int, tokens: int
) -> tuple[int, ...]:
    """Boundaries of the documents of a sequence."""
    draw = random.Random(seed)
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + max(1, int(length(draw, len(ends) - 1)))))
    return tuple(ends)


def balance(rows: int = 20, tokens: int = 2**17) -> None:
    out = sys.stdout.write
    layouts: tuple[ShardLayout, ...] = ("contiguous", "headtail", "doc_headtail", "balanced")
    out(
        f"| {tokens // 1024}K tokens, documents | cp | {' | '.join(layouts)} |\n|---|---|---|---|---|---|\n"
    )
    for name, length in KINDS.items():
        for cp in (4, 8, 16):
            worst = dict.fromkeys(layouts, 0.0)
            for seed in range(rows):
                ends = drawn(length, seed, tokens)
                for layout in layouts:
                    work = SeqLayout(layout, cp, ends).pairs_per_rank()
                    worst[layout] = max(worst[layout], max(work) * cp / sum(work))
            out(f"| {name} | {cp} | {' | '.join(f'{ratio:.3f}' for ratio in worst.values())} |\n")


PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
WINDOWS = (128, 1024, 4096)
KV_BYTES = 2 * 2 * 8 * 64
"""Of a token: keys and values of 8 heads of 64 in bfloat16."""


def window_table(tokens: int = 2**17, cps: tuple[int, ...] = (8, 32)) -> list[str]:
    """What the busiest rank sends of a layer's keys and values in the forward pass, and pairs of
    the busiest over mean.
    """
    layouts: tuple[ShardLayout, ...] = ("contiguous", "headtail", "doc_headtail", "balanced")
    lines = [
        "| documents | cp | layout | all-gather | "
        + " | ".join(f"w = {window}" for window in WINDOWS)
        + " | balance, no window | "
        + " | ".join(f"w = {window}" for window in WINDOWS)
        + " |",
        "|" + "---|" * (5 + 2 * len(WINDOWS)),
    ]
    for name in ("one document", "log-normal, mean 16K", "log-normal, mean 2K"):
        boundaries = drawn(KINDS[name], 0, tokens)
        for cp in cps:
            gathered = (cp - 1) * (tokens // cp) * KV_BYTES / 2**20
            for kind in layouts:
                layout = SeqLayout(kind, cp, boundaries)
                halos = [f"{window_bytes(layout, window) / 2**20:.2f}" for window in WINDOWS]
                ratios = []
                for window in (None, *WINDOWS):
                    pairs = layout.pairs_per_rank(window)
                    ratios.append(f"{max(pairs) * cp / sum(pairs):.3f}")
                lines.append(
                    f"| {' | '.join((name, str(cp), kind, f'{gathered:.0f}', *halos, *ratios))} |"
                )
    return lines


def window_bytes(layout: SeqLayout, window: int) -> int:
    """What the busiest rank sends."""
    halos = halo_tokens(layout.kind, layout.ring_degree, layout.boundaries, window)
    return max(map(sum, zip(*halos, strict=True))) * KV_BYTES


def halo_tokens(
    kind: ShardLayout, ring_degree: int, boundaries: Sequence[int], window: int
) -> list[list[int]]:
    """[receiver][sender]: keys of other ranks that the receiver's queries see."""
    layout = BatchLayout(kind, ring_degree, torch.tensor([boundaries]))
    scores = Scores(window)
    return [
        RankAttentionPlan(layout, rank, scores=scores).halo_received for rank in range(ring_degree)
    ]


def documents(tokens: int, *, packed: bool) -> tuple[int, ...]:
    """One document, or a row of long-tailed ones (log-normal, median 1K)."""
    if not packed:
        return (0, tokens)
    draw = random.Random(0)
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + max(1, int(draw.lognormvariate(7, 1.2)))))
    return tuple(ends)


def plans(cp: int, item: Item, *, packed: bool) -> Iterator[ContextPlan]:
    shape: dict[str, Any] = {"cp": cp, "heads": item.heads, "kv_heads": item.kv_heads}
    yield ContextPlan(method="ring", **shape)
    yield ContextPlan(method="allgather", **shape)
    if packed:
        yield ContextPlan(method="allgather", layout="headtail", **shape)
    if item.heads % cp == 0:
        yield ContextPlan(method="ulysses", **shape)
    if cp > 2:
        yield ContextPlan(method="hybrid", cp_ulysses=2, outer_method="ring", **shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--heads", type=int, nargs=2, default=[8, 2], metavar=("QUERY", "KEY_VALUE")
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=CP_METHODS, default=CP_METHODS)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--balance", action="store_true")
    parser.add_argument("--windows", action="store_true")
    given = parser.parse_args()
    if given.balance:
        balance()
        return
    if given.windows:
        PAGE.write_text(replace_block(PAGE.read_text(), "windows", window_table()))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads, kv_heads = given.heads
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
    out = sys.stdout.write
    out(
        f"torch {torch.__version__}, {name}, {given.dtype}, {heads}/{kv_heads} heads of {given.width}, "
    )
    out(f"kernel {given.kernel}, {given.rounds} rounds\n")
    for tokens in given.tokens:
        boundaries = documents(tokens, packed=given.packed)
        out(f"\n{tokens} tokens, {len(boundaries) - 1} documents\n\n")
        out(
            "| method, layout | cp | tokens/rank | slowest rank s | over ideal | balance | MiB sent | peak MiB |\n"
        )
        out("|---|---|---|---|---|---|---|---|\n")
        item = Item(
            tokens,
            heads,
            kv_heads,
            given.width,
            boundaries,
            getattr(torch, given.dtype),
            given.device,
            given.kernel,
        )
        for cp in given.cp:
            for plan in plans(cp, item, packed=given.packed):
                if plan.resolved_method not in given.methods:
                    continue
                out(row(item, plan, given.rounds) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
