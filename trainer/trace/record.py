"""Records a step of the real trainer on one rank, on fake tensors and a fake process group.

Initializes the process group of this process. Nothing is computed, so a model of any size takes
seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor

from models.batch import Batch
from models.config import ModelConfig
from models.kernel_choice import FLASH_VERSIONS
from models.transformer import Transformer
from parallelisms.activation_offload import MAX_PENDING_OFFLOADS
from parallelisms.mesh.collectives import to_local
from parallelisms.mesh.shard_layout import SeqLayout
from trainer.config.job_config import Config
from trainer.config.model import ModelSection
from trainer.data.sequences import BlendedDataset
from trainer.hardware.host import GIB
from trainer.step.process_group import World
from trainer.step.trainer import Trainer
from trainer.trace.collector import uncollected
from trainer.trace.compiled import compiled_with
from trainer.trace.compose import ComposedStep, compose
from trainer.trace.errors import UntraceableError
from trainer.trace.host_budget import offloaded_by_block, within_budget
from trainer.trace.host_weights import weights_on_host
from trainer.trace.inputs import balanced_experts, micro_batches, paths_of_gpu
from trainer.trace.loops import shortened_loops
from trainer.trace.operators import OpCounterMode, dtype_name, fake_process_group
from trainer.trace.pieces import BEGIN, OPTIMIZER, Place, State, Trace, renumbered
from trainer.trace.recorder import PieceRecorder, mark_pieces, recorded_messages, recorded_offload
from trainer.trace.shorten import ShortStep


class NoData:
    """Stands in for a dataset of which the trainer only reads the source names."""

    names = ("fake",)


MAX_EXTRA_MICRO_BATCHES = 2
MAX_IMBALANCE = 1.05
"""Pairs of the busiest rank of a ring over those of the first, up to which that one stands for all:
it may hold more.
"""


class TracedStep(NamedTuple):
    """A step of one rank as composed from a trace of a shorter one."""

    whole: ComposedStep
    short: ShortStep
    trace: Trace


def trace_step(
    config: Config,
    world_size: int,
    rank: int = 0,
    *,
    kernel: str | None = None,
    compiled: bool = False,
) -> TracedStep:
    """The shortest step of a rank from which its whole step follows, and the latter.

    `kernel`, `compiled`: as in `record`. Raises UntraceableError if the micro-batches of a
    pipeline share too small a host budget.
    """
    return _trace(
        config,
        world_size,
        rank,
        partial(record, kernel=kernel, compiled=compiled),
        on_gpu=kernel is not None,
    )


def trace_pp_ranks(
    config: Config, world_size: int, *, kernel: str | None = None, compiled: bool = False
) -> list[TracedStep]:
    """`trace_step` of the busiest rank of every pipeline rank.

    Ranks whose blocks are alike share a recorded step.
    """
    recorded: dict[Hashable, tuple[ShortStep, Trace]] = {}

    def run(step: ShortStep) -> Trace:
        if step.likeness not in recorded:
            recorded[step.likeness] = step, record(step, kernel=kernel, compiled=compiled)
        other, trace = recorded[step.likeness]
        return renumbered(trace, dict(zip(other.stages, step.stages, strict=True)))

    ranks = range(
        busiest_rank(config, world_size), world_size, world_size // config.parallelism.pp
    )
    return [_trace(config, world_size, rank, run, on_gpu=kernel is not None) for rank in ranks]


def busiest_rank(config: Config, world_size: int) -> int:
    """The rank of the first pipeline rank whose queries attend to most keys, of sequences that are
    one document; the first rank where none has much more to do.
    """
    plan = config.context_plan()
    seq_len = config.training.seq_len
    boundaries = 0, seq_len, plan.padded_length(seq_len)
    layout = SeqLayout(plan.resolved_layout, plan.ring_degree, boundaries)
    windows = Counter(kind.window for kind in config.model.build().layer_kinds)
    by_window = [
        [layers * pairs for pairs in layout.pairs_per_rank(window)]
        for window, layers in windows.items()
    ]
    pairs = [*map(sum, zip(*by_window, strict=True))]
    if max(pairs) <= MAX_IMBALANCE * pairs[0]:
        return 0
    # Ranks that exchange heads are next to each other, and those of tp between them.
    distance = plan.ulysses_degree * config.parallelism.degrees(world_size)["tp"]
    return pairs.index(max(pairs)) * distance


def _trace(
    config: Config, world_size: int, rank: int, run: Callable[[ShortStep], Trace], *, on_gpu: bool
) -> TracedStep:
    # On a GPU a tensor may wait for its copy to the host while as many others are offloaded.
    extra = MAX_PENDING_OFFLOADS if on_gpu and config.memory.offload == "inputs" else 0
    step = _with_host_budget(ShortStep(config, world_size, rank, extra), run)
    while True:
        trace = run(step)
        whole = compose(trace, step.order(), step.correspondence, step.target)
        if whole.is_closed:
            return TracedStep(whole, step, trace)
        longer = _longer(step, whole)
        # Without more to record, a longer trace would be the same.
        if longer.size == step.size:
            tensors = whole.missing.total() + whole.left.total()
            raise UntraceableError(
                [f"the ends of {tensors:,} tensors of this step do not follow from a short trace"]
            )
        step = longer


def _longer(step: ShortStep, whole: ComposedStep) -> ShortStep:
    may_grow = step.plan.pp > 1 and step.extra_micro_batches < MAX_EXTRA_MICRO_BATCHES
    if whole.needs_micro_batches and may_grow:
        return replace(step, extra_micro_batches=step.extra_micro_batches + 1)
    return replace(step, extra=step.extra + 2)


def _with_host_budget(step: ShortStep, run: Callable[[ShortStep], Trace]) -> ShortStep:
    """The step with what the host budget lets each block offload, of what it would offload without
    one.
    """
    memory = step.whole.memory
    if memory.host_budget_gib is None or memory.offload == "none":
        return step
    unlimited = replace(
        step,
        whole=step.whole.model_copy(
            update={"memory": memory.model_copy(update={"host_budget_gib": None})}
        ),
    )
    # First without a budget: which blocks stay within it follows from what each would offload.
    trace = run(unlimited)
    budget = int(memory.host_budget_gib * GIB) // step.ranks_per_node
    # Micro-batches share the budget in the order of the whole schedule, which no short step shows.
    if step.plan.pp > 1:
        needed = compose(
            trace, unlimited.order(), unlimited.correspondence, unlimited.target
        ).offloaded_bytes
        if needed > budget:
            raise UntraceableError(
                [
                    f"memory.host_budget_gib = {memory.host_budget_gib:g} is less than the {needed * step.ranks_per_node / GIB:.1f} "
                    "GiB that a node offloads: which micro-batches of a pipeline share it is not planned"
                ]
            )
        return unlimited
    offloaded = offloaded_by_block(trace)
    wanted = [offloaded[block] for block in unlimited.stages[0].originals]
    return replace(step, offloaded=within_budget(wanted, budget, memory.blocks_per_checkpoint))


def record(step: ShortStep, *, kernel: str | None = None, compiled: bool = False) -> Trace:
    """One step of `step.config` on `step.rank`.

    `kernel`: of attention, as `training.attention` names it, for a step as on a GPU; None: as on a
    CPU. `compiled`: blocks and pieces of blocks are compiled.
    """
    recorder = PieceRecorder()
    counter = OpCounterMode(recorder)
    with (
        uncollected(),
        traced(
            step.config,
            step.world_size,
            step.rank,
            counter,
            model=step.model,
            kernel=kernel,
            compiled=compiled,
        ) as trainer,
        recorded_offload(recorder),
        recorded_messages(recorder, counter),
        shortened_loops(counter),
    ):
        states = [*_states(trainer)]
        # Everything else that lives before the step, such as the trainer's counters.
        other_states = recorder.device_bytes - sum(state.size for state in states)
        start = partial(recorder.start, counter=counter)
        mark_pieces(trainer, start)
        counter.reset_counts()
        start(BEGIN)
        batches = micro_batches(
            trainer, counter, on_load=lambda number: start(Place("load", micro_batch=number))
        )
        run_step(trainer, counter, batches, lambda: start(OPTIMIZER))
        # Copied, because whatever dies after the step is no part of it.
        pieces = tuple(replace(piece, events=[*piece.events]) for piece in recorder.pieces)
    return Trace(pieces, tuple(states), other_states)


@contextmanager
def traced(
    config: Config,
    world_size: int,
    rank: int,
    counter: OpCounterMode,
    *,
    model: ModelConfig | None = None,
    kernel: str | None = None,
    compiled: bool = False,
) -> Iterator[Trainer]:
    """The trainer of one rank, whose operations `counter` sees.

    `model`: in place of the configured one. `kernel`, `compiled`: as in `record`.
    """
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(rank, world_size))
        stack.enter_context(counter.enable())
        stack.enter_context(balanced_experts(counter))
        if model is not None:
            stack.enter_context(patch.object(ModelSection, "build", lambda _: model))
        if kernel is not None:
            # As torch calls the version that is active.
            kernel = "flash" if kernel in FLASH_VERSIONS else kernel
            stack.enter_context(paths_of_gpu(counter))
            counter.deterministic = config.training.deterministic
            if config.memory.optimizer_placement == "host":
                stack.enter_context(weights_on_host(counter))
        if compiled:
            stack.enter_context(compiled_with(counter))
        nodes = max(1, world_size // config.parallelism.ranks_per_node)
        world = World(rank, world_size, torch.device("cpu"), nodes)
        trainer = Trainer(
            _traced_config(config, compiled=compiled),
            world,
            cast(BlendedDataset, NoData()),
            kernel=kernel,
        )
        for module in trainer.stage_modules.values():
            _register_phase_hooks(module, counter)
        yield trainer


def run_step(
    trainer: Trainer,
    counter: OpCounterMode,
    batches: list[Batch],
    on_optimizer: Callable[[], None] = lambda: None,
) -> None:
    """The next step. `on_optimizer` is called before the optimizer runs."""
    counter.phase = "step"
    trainer.step += 1
    accumulated = trainer.accumulate_gradients(batches)
    counter.phase = "step"
    on_optimizer()
    trainer.optimizer_step(accumulated, trainer.config.optimizer.lr)
    # On the host, the optimizer waits for the forward pass of the next step.
    trainer.optimizer.flush_deferred_updates()


def _traced_config(config: Config, *, compiled: bool) -> Config:
    """Without GPU-only options and weight initialization."""
    overrides: dict[str, dict[str, Any]] = {
        "training": {"compile": compiled, "deterministic": False, "attention": "auto"},
        "parallelism": {"async_tp": False},
        "checkpoint": {"initial_load_path": "skip initialization"},
    }
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in overrides.items()
    }
    return config.model_copy(update=sections)


def _register_phase_hooks(model_part: Transformer, counter: OpCounterMode) -> None:
    """Sets the counter's phase around the forward of a pipeline stage and of its loss head."""

    def set_phase(phase: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counter.phase = phase

        return hook

    # Prepended, so that FSDP's gather, which is a hook as well, counts with this phase.
    model_part.register_forward_pre_hook(set_phase("forward"), prepend=True)
    model_part.register_forward_hook(set_phase("backward"))
    if model_part.head is not None:
        model_part.head.register_forward_pre_hook(set_phase("head"), prepend=True)
        model_part.head.register_forward_hook(set_phase("forward"))


def _states(trainer: Trainer) -> Iterator[State]:
    """Parameters, buffers and optimizer state, as far as they take memory of their own."""
    moments = {
        name: value
        for name, value in trainer.optimizer.state_dict().items()
        if isinstance(value, Tensor)
    }
    seen = set[int]()
    for stage, module in trainer.stage_modules.items():
        places = {name: place for place, name in enumerate(module.blocks)}
        tensors: dict[str, dict[str, Tensor]] = {
            "parameters": dict(module.named_parameters()),
            "buffers": dict(module.named_buffers()),
            "optimizer state": moments,
        }
        for kind, named in tensors.items():
            for name, each in named.items():
                local = to_local(each)
                storage = local.untyped_storage()
                _, is_of_block, rest = name.partition("blocks.")
                number, _, inner = rest.partition(".")
                is_of_other_stage = is_of_block and number not in places
                # Tied weights share a storage, and the optimizer's state names parameters of all
                # stages.
                if is_of_other_stage or storage._cdata in seen or not storage.nbytes():
                    continue
                seen.add(storage._cdata)
                block = (stage, places[number]) if is_of_block else None
                shown = f"blocks.*.{inner}" if is_of_block else name
                yield State(
                    kind,
                    shown,
                    storage.nbytes(),
                    tuple(local.shape),
                    dtype_name(local.dtype),
                    block,
                )
