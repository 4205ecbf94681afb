"""The trainer: model, optimizer and data of this rank, and the training step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import mode
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from models.router import statistics_length
from parallelisms.fsdp import fsdp_modules
from parallelisms.mesh.collectives import all_reduce
from trainer.config.job_config import Config, TrainingStage
from trainer.data.loader import MicroBatchLoader
from trainer.data.sequences import BlendedDataset
from trainer.errors import RunFailedError
from trainer.hardware.device import AsyncHostCopy, Stopwatch
from trainer.metrics.accumulator import MetricAccumulator, MetricLayout, safe_divide
from trainer.resilience.anomalies import Goodput, LossSpikeDetector
from trainer.step.build import ParallelModel, build_pipeline
from trainer.step.lr_schedule import learning_rate
from trainer.step.optimizer import Optimizer
from trainer.step.process_group import World
from trainer.step.rerun import StepRerun, reruns_suspicious_steps
from trainer.step.routers import Routers, expert_layers


@dataclass(frozen=True)
class StepResult:
    """Result of one step.

    Its metrics may still be on the device: `read` waits, so callers read them one step later.
    """

    step: int
    lr: float
    next_sequence: int
    """The first sequence of the next step, counted within the training stage."""
    data_wait_seconds: float
    stopwatch: Stopwatch
    values: AsyncHostCopy
    layout: MetricLayout
    busiest_pairs: float = 0.0
    """(query, key) pairs of the busiest data-parallel rank of each micro-batch, summed: the mean
    over layers.
    """
    mean_pairs: float = 0.0
    """(query, key) pairs per data-parallel rank: the mean over all of them."""
    was_rerun: bool = False
    """Whether it was suspicious, and gave an equal result when it was run again."""

    def read(self) -> StepMetrics:
        """The metrics over all ranks.

        Waits for the step. Raises RunFailedError if cp ranks read other documents.
        """
        metrics = self.layout.split(self.values.read())
        checksums = metrics["documents_by_shard"]
        if differing := [
            rank for rank, checksum in enumerate(checksums) if checksum != mode(checksums)
        ]:
            raise RunFailedError(
                f"step {self.step}: context-parallel rank{'s'[: len(differing) > 1]} {', '.join(map(str, differing))} of "
                f"{len(checksums)} read other documents than the rest: the prepared corpus differs between ranks"
            )
        scalars = {name: values[0] for name, values in metrics.items() if values}
        by_position, by_shard, by_source = (
            safe_divide(metrics[f"loss_by_{key}"], metrics[f"targets_by_{key}"])
            for key in ("position", "shard", "source")
        )
        return StepMetrics(
            loss=scalars["loss"] / max(1.0, scalars["targets"]),
            grad_norm=scalars["grad_norm"],
            skipped=not scalars["finite"],
            tokens=scalars["tokens"],
            attended_pairs=scalars["pairs"],
            attention_imbalance=scalars["attention_imbalance"],
            tokens_seen=int(scalars["tokens_seen"]),
            step_seconds=self.stopwatch.seconds(),
            loss_by_position=by_position,
            loss_by_shard=by_shard if self.layout.num_shards > 1 else None,
            loss_by_source=by_source,
            tokens_by_source=metrics["tokens_by_source"],
            router_sums=metrics["routers"],
            targets=scalars["targets"],
        )


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of a step, summed or averaged over the global batch."""

    loss: float
    grad_norm: float
    skipped: bool
    tokens: float
    attended_pairs: float
    tokens_seen: int
    step_seconds: float
    attention_imbalance: float
    """Attended pairs on the busiest rank over the mean of all ranks with different tokens."""
    loss_by_position: list[float | None]
    loss_by_shard: list[float | None] | None
    """Mean loss by cp rank; None without context parallelism."""
    loss_by_source: list[float | None]
    tokens_by_source: list[float]
    """Tokens of each source since the run began."""
    router_sums: list[float]
    """Statistics of every router; see `trainer.step.routers`."""
    targets: float


def _build_optimizer(config: Config, parallel_model: ParallelModel) -> Optimizer:
    stage_modules = parallel_model.stage_modules
    # Some pipeline schedules gather weights before the forward hooks of their module run.
    defer_updates = (
        config.memory.optimizer_placement == "host" and parallel_model.pipeline_plan.pp == 1
    )
    return Optimizer(
        [*stage_modules.values()],
        config.optimizer,
        moment_dtype=torch.bfloat16 if config.memory.optimizer_dtype == "bfloat16" else None,
        deferred_modules=fsdp_modules(stage_modules[0]) if defer_updates else (),
        all_reduce=partial(all_reduce, None),
    )


def _build_loader(
    config: Config, parallel_model: ParallelModel, dataset: BlendedDataset, world: World
) -> MicroBatchLoader:
    return MicroBatchLoader(
        dataset,
        dp_rank=parallel_model.mesh.dp_rank,
        dp_size=parallel_model.mesh.dp_degree,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        shard=parallel_model.sequence_shard,
        plan_attention=parallel_model.plan_attention,
        pin_memory=world.device.type == "cuda",
        num_workers=config.data.workers,
    )


class Trainer:
    def __init__(
        self,
        config: Config,
        world: World,
        dataset: BlendedDataset,
        *,
        stage: TrainingStage | None = None,
        kernel: str | None = None,
    ) -> None:
        """`config` and `dataset` are those of `stage`, a training stage of the run; `kernel` as in
        `ParallelModel`.
        """
        self.config = config
        model = config.model.build()
        self.stage = stage or config.training_stages[0]
        self.world = world
        self.dataset = dataset
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)  # noqa: FBT003 - the launcher configures cuBLAS
        parallel_model = ParallelModel(config, world, kernel=kernel)
        self.parallel_model = parallel_model
        # While weights load: evaluation, which builds the model as well, offloads nothing.
        parallel_model.pin_input_memory()
        self.mesh = parallel_model.mesh
        self.stage_modules = parallel_model.stage_modules
        self.context_parallel = parallel_model.context_parallel
        self.pipeline = build_pipeline(config, parallel_model)
        # The optimizer's state exists before a checkpoint is loaded, which writes into these
        # tensors.
        self.optimizer = _build_optimizer(config, parallel_model)
        self.loader = _build_loader(config, parallel_model, dataset, world)
        # Without sequence parallelism all tp ranks route the same tokens, which must count once.
        splits_tokens = config.parallelism.sequence_parallel and self.mesh.tp_group is not None
        self.routers = Routers(
            [*self.stage_modules.values()],
            config.training,
            self.mesh.tp_group if splits_tokens else None,
        )
        self.config_changes: list[str] = []
        """Configuration keys that differ from the resumed checkpoint."""
        self.step = 0
        self.next_sequence = 0
        """First sequence of the next step, counted within the training stage."""
        router_sums = len(expert_layers(model)) * statistics_length(model.num_experts)
        self.accumulator = MetricAccumulator(
            self.mesh, world.device, num_sources=len(dataset.names), router_sums=router_sums
        )
        reruns = reruns_suspicious_steps(config)
        self.rerun = StepRerun(config, self.optimizer, self.accumulator) if reruns else None
        self.counters = torch.zeros(2 + len(dataset.names), dtype=torch.int64, device=world.device)
        """Tokens seen, steps skipped and tokens of each source since the run began."""
        self.loss_spikes = LossSpikeDetector(config)
        self.goodput = Goodput()
        self.earlier_tokens_by_source: dict[str, int] = {}
        """Tokens per source at the last resume, including sources of earlier training stages
        only.
        """

    def train_steps(self) -> Generator[StepResult, None, None]:
        """Runs the remaining steps, one per item."""
        training = self.config.training
        with (
            closing(self.loader.steps(start_sequence=self.next_sequence)) as batches,
            _manual_gc(training.gc_interval) as collect_garbage,
        ):
            is_first_step = True
            while self.step < self.stage.end_step:
                stopwatch = Stopwatch(self.world.device)
                stopwatch.start()
                # Inside the step's time: a slow loader must show in throughput.
                fetch_start = time.perf_counter()
                micro_batches = next(batches)
                data_wait_seconds = time.perf_counter() - fetch_start
                self.step += 1
                lr = learning_rate(self.stage, self.step)
                # The copy to the host starts now and is read one step later: neither host nor
                # device waits.
                values = AsyncHostCopy(self.train_step(micro_batches, lr))
                if is_first_step:
                    # The first step compiles and connects NCCL, which takes minutes; later, a
                    # short timeout finds hangs.
                    self.mesh.set_timeout(
                        timedelta(minutes=self.config.distributed.timeout_minutes)
                    )
                is_first_step = False
                self.next_sequence += training.global_batch_size
                collect_garbage(self.step)
                stopwatch.stop()
                dealt = (
                    sum(b.busiest_pairs for b in micro_batches),
                    sum(b.mean_pairs for b in micro_batches),
                )
                progress = (self.step, lr, self.next_sequence, data_wait_seconds)
                was_rerun = self.rerun is not None and self.rerun.was_rerun
                yield StepResult(
                    *progress, stopwatch, values, self.accumulator.layout, *dealt, was_rerun
                )

    def train_step(self, micro_batches: list[Batch], lr: float) -> Tensor:
        """Forward, backward and optimizer step; returns the metric vector, laid out by
        `accumulator.layout`.
        """
        values = self.accumulate_gradients(micro_batches)
        if self.rerun is not None:
            values = self.rerun.check(values, partial(self.accumulate_gradients, micro_batches))
        return self.optimizer_step(values, lr)

    def accumulate_gradients(self, micro_batches: list[Batch]) -> Tensor:
        """Accumulates the gradients of the mean loss over the global batch; returns this rank's
        metric vector.
        """
        device = self.world.device
        # The loss is a mean over the targets of the global batch, not of a micro-batch or rank.
        num_targets = (
            torch.stack([batch.num_targets() for batch in micro_batches])
            .sum()
            .to(device, non_blocking=True)
        )
        # At least one: a batch of padding only would divide by zero.
        global_num_targets = all_reduce(self.mesh.dp_cp_group, num_targets).clamp(min=1)
        values = self.accumulator.new_vector(micro_batches)
        self.routers.begin_step(global_num_targets)
        forward_backward = self.forward_backward if self.pipeline is None else self.pipeline.run
        forward_backward(
            (batch.to(device) for batch in micro_batches),
            global_num_targets,
            partial(self.accumulator.add, values),
        )
        self.routers.end_step(self.accumulator.layout.split(values)["routers"])
        return values

    def forward_backward(
        self,
        batches: Iterable[Batch],
        num_targets: Tensor,
        on_losses: Callable[[Tensor, Batch], None],
    ) -> None:
        """`Pipeline.run` without a pipeline: one micro-batch after the other."""
        for batch in batches:
            losses_BS = self.stage_modules[0](batch)
            # Divided by the global count, so that gradients of ranks and micro-batches are summed,
            # not averaged.
            (losses_BS.sum() / num_targets).backward()
            on_losses(losses_BS.detach(), batch)
            # Its graph would live through the next forward.
            del losses_BS

    def optimizer_step(self, values: Tensor, lr: float) -> Tensor:
        """Clips the gradients and updates the weights (`Optimizer.step`); returns the metric
        vector of all ranks.
        """
        norm, finite = (
            scalar.to(values.device, non_blocking=True) for scalar in self.optimizer.step(lr)
        )
        metrics = self.accumulator.all_reduce(values)
        # Counts are exact in float64 up to 2^53, and are kept as integers over the run.
        self.counters += torch.cat(
            (metrics["tokens"], (~finite).view(1), metrics["tokens_by_source"])
        ).long()
        # These are views of `values`. Written after the all-reduce, because each is global
        # already.
        metrics["grad_norm"][0] = norm
        metrics["finite"][0] = finite
        metrics["tokens_seen"][0] = self.counters[0]
        self.routers.adjust(metrics["routers"], finite)
        metrics["tokens_by_source"].copy_(self.counters[2:])
        return values

    # ---- state

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by a mesh-independent name; loading writes into these
        tensors.
        """
        modules = self.stage_modules.values()
        weights = {
            f"model.{name}": each
            for module in modules
            for name, each in module.named_tensors().items()
        }
        return weights | {
            f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_dict().items()
        }

    def train_state(self) -> dict[str, Any]:
        """The rest of a checkpoint. Waits for the device."""
        tokens, skipped, *tokens_by_source = self.counters.tolist()
        # Sources of earlier stages keep their counts, although this stage does not read them.
        sources = self.earlier_tokens_by_source | dict(
            zip(self.dataset.names, tokens_by_source, strict=True)
        )
        detector_state = {
            "losses": self.loss_spikes.state_dict(),
            "goodput": self.goodput.state_dict(),
        }
        counter_state = {"tokens": tokens, "skipped": skipped, "sources": sources}
        return {
            "step": self.step,
            "next_sequence": self.next_sequence,
            **counter_state,
            **detector_state,
        }

    def load_train_state(self, train_state: dict[str, Any]) -> None:
        """Restores `train_state()` of this training stage, or of the previous one, whose sequences
        do not count here.
        """
        self.step = train_state["step"]
        self.earlier_tokens_by_source = train_state["sources"]
        if train_state["goodput"] is not None:
            self.goodput.load_state_dict(train_state["goodput"])
        # A new stage has sequences of its own, and losses of another data mix.
        self.next_sequence, self.loss_spikes = 0, LossSpikeDetector(self.config)
        if self.step > self.stage.start_step:
            self.next_sequence = train_state["next_sequence"]
            self.loss_spikes.load_state_dict(train_state["losses"])
        tokens_by_source = [
            self.earlier_tokens_by_source.get(name, 0) for name in self.dataset.names
        ]
        self.counters.copy_(
            torch.tensor([train_state["tokens"], train_state["skipped"], *tokens_by_source])
        )


@contextmanager
def _manual_gc(interval: int) -> Iterator[Callable[[int], None]]:
    """Garbage collection at the same steps on all ranks, so that no rank waits for another's."""
    # Frozen objects, such as torch's modules, are never walked again.
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % interval == 0:
            # The young generations suffice: cycles of a step are young, and a full collection
            # pauses for longer.
            gc.collect(1)

    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
