"""The tables of docs/parallelism.md: what the shipped files hold and send, and how long pipelines wait.

    python -m benchmarks.mesh_arithmetic

Nothing is timed. Bytes and FLOPs follow from the files by the formulas of that page, in its letters. Pipelines are
counted: torch's schedules run with stages that only note what is asked of them, and each noted action then takes its
time on a clock, as soon as what it needs is there.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from typing import Any

from models.config import ModelConfig
from models.presets import FAMILIES
from parallelisms.parallel_dims import ContextPlan
from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, PipelinePlan, PipelineSchedule
from trainer.config.parse import load
from trainer.memory.block import BlockMemory
from trainer.memory.estimator import estimate_memory
from trainer.memory.report import memory_savings

FLOPS = 550e12  # per second, that a GPU really computes
INSIDE, BETWEEN = 450e9, 50e9  # bytes per second and GPU, each way, in a node and between nodes
NODE = 8
GIB = 2**30
SHIPPED = ("llama2_7b_32k", "llama3_8b_128k", "llama3_8b_1m", "llama3_70b_128k", "llama3_405b_128k")
# Of tp, in a block: 4 forward, 4 backward, and again all but the last, whose sum no gradient needs. `full` enters attention
# twice, to compute it and to find its gradient.
EXCHANGES = {"none": 8, "keep_attention": 11, "full": 12}
PASSES = {"none": 2, "keep_attention": 3, "full": 4}  # Of an exchange of heads.

Action = tuple[str, int, int]  # what is done, its stage, its micro-batch


def kept(model: ModelConfig, policy: str, *, tp: int = 1, compiled: bool = False) -> int:
    """Bytes that a block keeps of a token for its backward pass."""
    return BlockMemory(model, tokens=tp, tp=tp, compiled=compiled).saved_bytes(policy)


class Run:
    """A shipped file with changes, and what follows for the GPU that has most of each."""

    def __init__(self, name: str, changes: str = "") -> None:
        """`changes` are words such as `tp=2`."""
        sections = {"recompute": "memory"}
        words = [f"--{sections.get(word.split('=')[0], 'parallelism')}.{word}" for word in changes.split()]
        self.config = load(["--config", name, *words])
        self.model, self.policy = self.config.model.build(), self.config.memory.recompute
        self.degrees = self.config.parallelism.degrees(1)  # All are stated.
        self.ranks = prod(self.degrees.values())
        self.cp, self.tp, self.pp = (self.degrees[axis] for axis in ("cp", "tp", "pp"))
        self.n = self.degrees["dp_shard"] * self.cp
        self.row = self.config.training.micro_batch_size * self.config.training.seq_len  # B T
        self.tokens = self.row // (self.cp * self.tp)  # S / tp
        self.context, self.pipeline = self.config.context_plan(), self.config.pipeline_plan(self.ranks)
        # Of one tp rank, repeated until they divide among those that exchange heads.
        self.kv_heads = lcm(max(1, self.model.num_kv_heads // self.tp), self.context.ulysses_degree)

    @cached_property
    def actions(self) -> list[list[Action]]:
        return actions(self.pipeline)

    # ---- bytes of one GPU

    def kept(self, policy: str, *, compiled: bool) -> float:
        return self._block(compiled=compiled).saved_bytes(policy)

    def _block(self, *, compiled: bool) -> BlockMemory:
        memory, context = self.config.memory, self.context if self.cp > 1 else None
        tile = None if memory.mlp_tile_mib is None else memory.mlp_tile_mib << 20
        pieces: dict[str, Any] = {"groups": memory.head_groups, "tile": tile}
        tokens = self.tokens * self.tp
        return BlockMemory(self.model, tokens=tokens, tp=self.tp, compiled=compiled, context_plan=context, **pieces)

    def kept_by_all(self, policy: str) -> float:
        blocks = most_held(self.actions, self.pipeline.blocks_per_stage) if self.pp > 1 else self.model.num_layers
        return blocks * self.kept(policy, compiled=self.config.training.compile)

    def states(self) -> float:
        return 16 * self.model.num_parameters / (self.n * self.tp * self.pp)

    def whole(self) -> float:
        """Gathered weights, gradients not yet scattered, and those that the head makes beside its losses."""
        block, head = self.model.block_matrix_parameters, self.model.vocab_size * self.model.dim
        if self.pp == 1:
            return (10 * block + 6 * head) / self.tp
        last = self.pipeline.num_stages - 1
        sizes = [block * blocks + head * (i in (0, last)) for i, blocks in enumerate(self.pipeline.blocks_per_stage)]
        own = 4 * head * most_held(self.actions, [0] * last + [1])
        found = []
        for rank in range(self.pp):
            mine = sorted(sizes[stage] for stage in self.pipeline.stages_of(rank))
            found.append(4 * sum(mine) + 2 * sum(mine[-3:]) + own * (rank == self.pipeline.last_rank))
        return max(found) / self.tp

    def passing(self) -> float:
        """Of the block at work, beside what other blocks keep: gradients, and what it computes again."""
        block = self._block(compiled=False)
        if self.policy == "none":
            return max(block.feed_forward_backward_bytes(), block.attention_backward_bytes(4))
        return max(
            block.feed_forward_recompute_bytes(), block.attention_recompute_bytes(4), block.qkv_recompute_bytes()
        )

    def buffers(self) -> float:
        """Of a pipeline: torch has one for each input and each gradient that a stage receives in an update."""
        if self.pp == 1:
            return 0
        each = (
            3 if self.pipeline.schedule in SPLIT_BACKWARD_SCHEDULES else 2
        )  # Gradients of inputs stay too, where they are found first.
        count = each * self.pipeline.num_micro_batches * self.pipeline.stages_per_rank
        return count * 2 * self.model.dim * self.tokens

    def parts(self) -> list[float]:
        return [self.states(), self.kept_by_all(self.policy), self.buffers(), self.whole(), self.passing()]

    # ---- percent of the time of a block's FLOPs

    def work(self) -> float:
        """FLOPs of one block per token."""
        block = replace(self.model, num_layers=1, vocab_size=0)
        return block.hardware_flops(tokens=1, pairs=self.config.training.seq_len / 2, recompute=self.policy)

    def of_tp(self) -> float:
        return self._percent(EXCHANGES[self.policy] * 2 * self.model.dim * self.tokens * (self.tp - 1), INSIDE)

    def of_heads(self) -> float:
        """Of queries, keys, values and outputs: forward, backward, and again unless everything is kept, `full` twice."""
        heads = 2 * self.model.num_heads // self.tp + 2 * self.kv_heads
        sent = 2 * heads * self.model.head_dim * self.tokens * self.tp * (1 - 1 / self.context.ulysses_degree)
        return self._percent(sent * PASSES[self.policy], INSIDE)

    def of_keys(self) -> float:
        """Twice in bfloat16, once more with `full`, and their gradients in float32."""
        values = 2 * self.row * self.kv_heads // self.context.ulysses_degree * self.model.head_dim
        return self._percent(
            values * (2 + 2 * (self.policy == "full") + 2 + 4) * (1 - 1 / self.context.ring_degree), BETWEEN
        )

    def of_weights(self) -> float:
        """Of a pipeline, what it would be if each micro-batch gathered them. The GPUs of a node fetch one copy."""
        sent = 8 * self.model.block_matrix_parameters * (1 - 1 / self.n)
        return self._percent(sent / self.tp, INSIDE) if self.ranks <= NODE else self._percent(sent, NODE * BETWEEN)

    def of_stages(self) -> float:
        """The same as the schedule gathers them, with gradients reduced once per update."""
        if self.pp == 1:
            return self.of_weights()
        blocks = self.pipeline.blocks_per_stage
        rank = max(range(self.pp), key=lambda rank: sum(blocks[stage] for stage in self.pipeline.stages_of(rank)))
        mine = sum(blocks[stage] for stage in self.pipeline.stages_of(rank))
        gathered = sum(blocks[stage] for kind, stage, _ in self.actions[rank] if kind == "gather")
        return self.of_weights() * (2 * gathered + 4 * mine) / (8 * mine * self.pipeline.num_micro_batches)

    def _percent(self, sent: float, speed: float) -> float:
        return 100 * sent / speed / (self.work() * self.tokens / FLOPS)


# ---- pipelines


class Noting:
    """A stage that notes what a schedule asks of it."""

    def __init__(self, plan: PipelinePlan, stage: int, notes: list[Action]) -> None:
        self.stage_index, self.num_stages = stage, plan.num_stages
        self.group_rank, self.group_size = plan.rank_of(stage), plan.pp
        self.is_first, self.is_last = stage == 0, stage == plan.num_stages - 1
        self.submod, self._notes = None, notes

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self._notes.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, *, full_backward: bool = True, **_: Any) -> None:
        self._notes.append(("B" if full_backward else "I", self.stage_index, number))

    def backward_weight_one_chunk(self, number: int, **_: Any) -> None:
        self._notes.append(("W", self.stage_index, number))

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: []  # Nothing to send, nothing to receive.


def actions(plan: PipelinePlan) -> list[list[Action]]:
    """What each rank does in an update: F forward, B backward or, apart, I of inputs and W of weights; and gathers."""
    from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

    found: list[list[Action]] = [[] for _ in range(plan.pp)]
    schedule: Any = None
    for rank, notes in enumerate(found):
        stages: Any = [Noting(plan, stage, notes) for stage in plan.stages_of(rank)]
        if plan.schedule in SINGLE_STAGE_SCHEDULES:
            schedule = get_schedule_class(plan.schedule)(stages[0], plan.num_micro_batches, loss_fn=lambda *_: None)
            notes.append(("gather", rank, 0))
        elif rank == 0:
            schedule = get_schedule_class(plan.schedule)(stages, plan.num_micro_batches, loss_fn=lambda *_: None)
            schedule.register_custom_function(
                _ComputationType.UNSHARD,
                lambda action, run: found[run.schedule_ref.rank].append(("gather", action.stage_index, 0)),
            )
        # Private to torch. Without tensors there is nothing to prepare; and one schedule has the lists of all ranks.
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: None
        schedule.rank, schedule._stages = rank, stages
        schedule._step_microbatches(target_mbs=[None] * plan.num_micro_batches, return_outputs=False)
    return found


def times(model: ModelConfig, tokens: int) -> dict[str, float]:
    """Of a block's forward pass, gradient of inputs and gradient of weights; the first takes 1."""
    matrices, attention = 2 * model.block_matrix_parameters, 2 * model.num_heads * model.head_dim * tokens
    forward, inputs = matrices + attention, matrices + 2.5 * attention
    return {"F": 1, "I": inputs / forward, "W": matrices / forward, "B": (inputs + matrices) / forward}


def idle(plan: PipelinePlan, ranks: Sequence[Sequence[Action]], takes: Mapping[str, float], *, hop: float = 0) -> float:
    """Percent of an update that ranks wait, all stages alike; what goes to another rank is on its way for so long."""
    queues = [deque(action for action in rank if action[0] in takes) for rank in ranks]
    busy = sum(takes[kind] for queue in queues for kind, *_ in queue) / len(queues)
    clocks = [0.0] * len(queues)
    # When the output of a stage (F), or the gradient of its input (I), is there.
    ends = (("F", -1), ("I", plan.num_stages))
    there = {(kind, stage, number): 0.0 for kind, stage in ends for number in range(plan.num_micro_batches)}
    while left := sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, number = queue[0]
                needed = ("F", stage - 1, number) if kind == "F" else ("I", stage + (kind != "W"), number)
                if needed not in there:
                    break
                source = needed[1] if 0 <= needed[1] < plan.num_stages else stage
                late = hop * (plan.rank_of(source) != rank)
                clocks[rank] = max(clocks[rank], there[needed] + late) + takes[kind]
                there.setdefault(("F" if kind == "F" else "I", stage, number), clocks[rank])
                queue.popleft()
        if left == sum(map(len, queues)):
            raise RuntimeError(f"{plan.schedule} waits for itself: {[queue[0] for queue in queues if queue]}")
    return 100 * (1 - busy / max(clocks))


def most_held(ranks: Sequence[Sequence[Action]], blocks: Sequence[int]) -> int:
    """The most blocks of which a rank keeps a micro-batch at once."""
    step = {"F": 1, "B": -1, "W": -1}
    return max(max(accumulate(step.get(kind, 0) * blocks[stage] for kind, stage, _ in rank)) for rank in ranks)


# ---- tables


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (heading, *rows)]
    return [lines[0], "|" + "---|" * len(heading), *lines[1:]]


def gib(count: float) -> str:
    return f"{count / GIB:.{0 if count >= 100 * GIB else 1}f}"


def percent(share: float) -> str:
    return "" if share < 0.05 else f"{share:.{0 if share >= 1.95 else 1}f}"


def method(run: Run) -> str:
    plan = run.context
    return (
        f"hybrid, {plan.ulysses_degree} x {plan.ring_degree}"
        if plan.resolved_method == "hybrid"
        else plan.resolved_method
    )


def shipped() -> list[str]:
    runs = [Run(name) for name in SHIPPED]

    def kept(policy: str) -> list[str]:
        cells = [gib(run.kept_by_all(policy)) for run in runs]
        return [f"**{cell}**" if run.policy == policy else cell for run, cell in zip(runs, cells, strict=True)]

    rows = {
        "GPUs": [str(run.ranks) for run in runs],
        "dp_shard x cp x tp x pp": [f"{run.degrees['dp_shard']} x {run.cp} x {run.tp} x {run.pp}" for run in runs],
        "`cp_method`": [method(run) for run in runs],
        "tokens per update": [
            f"{run.config.training.global_batch_size * run.config.training.seq_len / 1e6:.1f} M" for run in runs
        ],
        "micro-batches, m": [str(run.config.micro_batches(run.ranks)[1]) for run in runs],
        "S / tp, tokens per GPU": [f"{run.tokens // 1024}K" for run in runs],
        "u, MiB": [f"{2 * run.model.dim * run.tokens / 2**20:.0f}" for run in runs],
        "**GiB per GPU:** states": [gib(run.states()) for run in runs],
        **{f"kept, `{policy}`": kept(policy) for policy in ("full", "keep_attention", "none")},
        "buffers of the pipeline": [gib(run.buffers()) if run.pp > 1 else "" for run in runs],
        "whole weights, gradients": [gib(run.whole()) for run in runs],
        "in passing": [gib(run.passing()) for run in runs],
        f"together, of {80e9 / GIB:.1f}": [f"{sum(run.parts()) / GIB:.0f}" for run in runs],
        "**% of the time:** bubble": [percent(100 * (run.pipeline.bubble_fraction or 0)) for run in runs],
        "exchanges of tp": [percent(run.of_tp()) for run in runs],
        "exchange of heads": [percent(run.of_heads()) for run in runs],
        "keys and values between nodes, partly hidden": [percent(run.of_keys()) for run in runs],
        "weights and their gradients, hidden": [percent(run.of_stages()) for run in runs],
    }
    return table(["", *(f"`{name}`" for name in SHIPPED)], [[name, *cells] for name, cells in rows.items()])


def thumb() -> list[str]:
    rows = []
    for size, model in ((size, FAMILIES["llama3.1"][size]) for size in ("8b", "70b", "405b")):
        products = 8 * model.block_matrix_parameters / FLOPS
        sent = EXCHANGES["keep_attention"] * 2 * model.dim / INSIDE
        cells = [f"{100 * sent * (tp - 1) / products:.0f}" for tp in (2, 4, 8)]
        rows.append([f"{size.upper()}, E {model.dim}", *cells])
    return table(["", "tp 2", "tp 4", "tp 8"], rows)


def keeps() -> list[str]:
    model, rows = FAMILIES["llama3.1"]["8b"], []
    for name, policy, compiled in (
        ("`full`", "full", True),
        ("`keep_attention`", "keep_attention", True),
        ("`none`", "none", True),
        ("`none`, not compiled", "none", False),
    ):
        in_u = [kept(model, policy, tp=tp, compiled=compiled) / (2 * model.dim) for tp in (1, 2, 8)]
        rows.append([name, *(f"{count:#.3g}" for count in in_u)])
    return table(["`memory.recompute`", "8B: u", "tp 2", "tp 8"], rows)


def eight() -> list[str]:
    rows = []
    for tp in (1, 2, 4, 8):
        run = Run("llama3_8b_1m", f"tp={tp} cp={32 // tp} cp_ulysses={8 // tp}")
        name = f"tp {tp}, `cp_ulysses` {8 // tp}" if tp < 8 else "tp 8, no exchange"
        shares = [f"{share:.1f} %" if share else "" for share in (run.of_tp(), run.of_heads())]
        inputs = 3 * 2 * run.model.dim * run.tokens * tp / GIB
        rows.append([name, *shares, f"{gib(run.whole())} GiB", f"{inputs:g} GiB"])
    gathered = "inputs of a block, gathered, and their gradient"
    return table(["", "exchanges of tp", "exchange of heads", "whole weights", gathered], rows)


def pipelines(pp: int = 4, micro_batches: int = 16) -> list[str]:
    schedules: tuple[tuple[PipelineSchedule, int], ...] = (
        ("GPipe", 1),
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 4),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    )
    takes: list[dict[str, float]] = [
        {"F": 1, "I": 1, "W": 1, "B": 2},
        times(FAMILIES["llama3.1"]["405b"], 2**17),
        times(FAMILIES["llama3.1"]["8b"], 2**20),
    ]
    rows = []
    for schedule, each in schedules:
        blocks = (1,) * (pp * each)
        counts: dict[str, Any] = {"num_layers": pp * each, "layers": blocks, "micro_batches": micro_batches}
        plan = PipelinePlan(pp=pp, schedule=schedule, pp_stages_per_rank=each, **counts)
        done = actions(plan)
        waits = [f"{wait:.{0 if wait >= 9.95 else 1}f} %" for wait in (idle(plan, done, of) for of in takes)]
        held = [f"{most_held(done, blocks) / each:g}", str(most_held(done, [0] * (len(blocks) - 1) + [1]))]
        rows.append([f"`{schedule}`", str(each), *waits, *held])
    ratios = ["bubble, equal times", *(f"1 : {of['I']:.1f} : {of['W']:.2f}" for of in takes[1:])]
    return table(["`pp_schedule`", "stages per rank", *ratios, "micro-batches in flight", "in the head"], rows)


def others() -> list[str]:
    """Meshes that the page's text speaks of, beside the shipped ones."""
    changed = (
        ("llama2_7b_32k", "dp_shard=8 cp=1 recompute=keep_attention"),
        ("llama3_8b_128k", "dp_shard=4 cp=2"),
        ("llama3_8b_128k", "dp_shard=1 cp=8"),
        ("llama3_8b_128k", "recompute=full"),
        ("llama3_8b_1m", "recompute=full"),
        ("llama3_8b_1m", "cp=8 tp=1 cp_ulysses=8"),
        ("llama3_70b_128k", "cp=16 tp=1 cp_ulysses=8"),
        ("llama3_70b_128k", "dp_shard=1 tp=8 cp_ulysses=1"),
        ("llama3_405b_128k", "pp=1"),
        ("llama3_405b_128k", "dp_shard=128 cp=4 pp=1"),
    )
    rows = []
    for name, changes in changed:
        run = Run(name, changes)
        parts = [gib(part) for part in (*run.parts(), sum(run.parts())) if part]  # None has a pipeline's buffers.
        shares = [percent(share) for share in (run.of_tp(), run.of_heads(), run.of_weights())]
        rows.append([name, changes, *parts, *shares, f"{run.work() / Run(name).work():.3f}"])
    parts = ["states", "kept", "whole", "in passing", "together, GiB"]
    return table(["file", "with", *parts, "% of tp", "heads", "weights", "work"], rows)


def working() -> list[str]:
    """What the block at work holds, in u, of rows so long that tiles and weights count for nothing."""
    model, tokens = FAMILIES["llama3.1"]["8b"], 1 << 26
    heads: dict[str, Any] = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
    plans = [None, *(ContextPlan(cp=8, method=method, **heads) for method in ("ulysses", "ring", "allgather"))]
    rows = []
    for plan in plans:
        name = f"`{plan.resolved_method}` over 8" if plan else "whole rows on a rank"
        cells = []
        for groups in (1, 2, 4, 8):
            held = BlockMemory(model, tokens, context_plan=plan, head_groups=groups, mlp_tile_bytes=1 << 20)
            fits = plan is None or model.num_heads // groups % plan.ulysses_degree == 0
            cells.append(f"{held.attention_recompute_bytes(4) / held.residual_bytes:.1f}" if fits else "")
        rows.append([name, *cells])
    block = BlockMemory(model, tokens, mlp_tile_bytes=1 << 20)
    others = {"feed-forward": block.feed_forward_recompute_bytes(), "projections": block.qkv_recompute_bytes()}
    rows += [[name, *[f"{size / block.residual_bytes:.1f}"] * 4] for name, size in others.items()]
    return table(["backward, in u", *(f"{groups} group{'s' * (groups > 1)}" for groups in (1, 2, 4, 8))], rows)


def memory() -> list[str]:
    """The page on memory: the ledger of each shipped file, at its fullest moment."""
    found = [estimate_memory(run.config, run.ranks) for run in map(Run, SHIPPED)]
    names = [line.name for line in found[0].items]
    rows = [[name, *(_gib(one.item(name).device_bytes) for one in found)] for name in names]
    rows.append(["**together**", *(_gib(one.device_bytes) for one in found)])
    rows.append(["k", *(f"{one.residual_multiple:.0f}" for one in found)])
    rows.append(["fullest", *(one.phase.replace(", backward", "").replace(", forward", "") for one in found)])
    return table(["GiB of the fullest rank", *(f"`{name}`" for name in SHIPPED)], rows)


def pulled() -> list[str]:
    """The page on memory: what changes of single keys free."""
    runs = [
        Run("llama3_8b_128k", changes)
        for changes in ("recompute=none", "recompute=full", "recompute=full cp=8 dp_shard=1")
    ]
    found = [{lever.change: lever.freed_bytes for lever in memory_savings(run.config, run.ranks)} for run in runs]
    changes = sorted(
        {change for one in found for change in one},
        key=lambda change: (-max(one.get(change, 0) for one in found), change),
    )
    rows = [[f"`{change}`", *(_gib(one.get(change, 0)) for one in found)] for change in changes]
    peaks = ["predicted", *(_gib(estimate_memory(run.config, run.ranks).device_bytes) for run in runs)]
    return table(["frees GiB", "`none`, 2 x 4", "`full`, 2 x 4", "`full`, 1 x 8"], [peaks, *rows])


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count >= 0.05 * GIB else ""


if __name__ == "__main__":
    for made in (thumb, keeps, shipped, eight, pipelines, others, memory, pulled, working):
        sys.stdout.write(f"{made.__name__}\n\n" + "\n".join(made()) + "\n\n")
