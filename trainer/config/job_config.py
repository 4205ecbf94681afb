"""A run, as data: the sections together, and what is wrong or seldom meant about them for a number of processes.

Nothing here imports torch: a configuration is checked, for the world size it would run at, in one process and in a
fraction of a second, before any worker starts. Reading files and the command line is `trainer/config/parse.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.rope_scaling import rope_summary
from parallelisms.parallel_dims import ContextPlan, tensor_parallel_problems
from parallelisms.pipeline_plan import PipelinePlan
from parallelisms.process_groups import Topology
from trainer.config.data import COPY_CORPUS, DEFAULT_SOURCE, STDLIB_CORPUS, DataSection, TokenizerSection
from trainer.config.sections import (
    MAX_SEQ_LEN,
    CheckpointSection,
    DistributedSection,
    HealthSection,
    JobSection,
    MemorySection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    PlanSection,
    ProfilerSection,
    ScheduleSection,
    Section,
    TrainingSection,
)
from trainer.config.slurm import SlurmSection
from trainer.config.validation import ValidationSection
from trainer.errors import ConfigError

__all__ = [
    "BYTE_VOCAB_SIZE",
    "COPY_CORPUS",
    "DEFAULT_SOURCE",
    "STDLIB_CORPUS",
    "Config",
    "DataSection",
    "DistributedSection",
    "OptimizerSection",
    "ScheduleSection",
    "Section",
    "TrainingStage",
]

BYTE_VOCAB_SIZE = 264  # the byte tokenizer's: 256 values and 8 special tokens


class Config(Section):
    """A run of Longhaul."""

    job: JobSection = JobSection()
    """The run and its folder."""
    model: ModelSection = ModelSection()
    """What is trained."""
    tokenizer: TokenizerSection = TokenizerSection()
    """How text becomes tokens."""
    data: DataSection = DataSection()
    """What it is trained on."""
    training: TrainingSection = TrainingSection()
    """Batch, length and number of updates."""
    parallelism: ParallelismSection = ParallelismSection()
    """The mesh."""
    memory: MemorySection = MemorySection()
    """What is kept and what is computed again."""
    optimizer: OptimizerSection = OptimizerSection()
    """How weights are updated."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate over the run."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When state is saved."""
    validation: ValidationSection = ValidationSection()
    """What it is judged by meanwhile."""
    metrics: MetricsSection = MetricsSection()
    """What is measured and when it is written."""
    health: HealthSection = HealthSection()
    """What is wrong with a run that goes on."""
    profiler: ProfilerSection = ProfilerSection()
    """Traces and memory recordings."""
    distributed: DistributedSection = DistributedSection()
    """Processes and their patience."""
    slurm: SlurmSection = SlurmSection()
    """The job of a batch scheduler (`python -m trainer.slurm`)."""
    plan: PlanSection = PlanSection()
    """What a run would cost (`python -m trainer.plan`)."""

    @property
    def training_stages(self) -> tuple[TrainingStage, ...]:
        """The run's parts in their order, each with a configuration of its own; it must have no problems."""
        return (TrainingStage(self, total_steps=self.training.steps),)

    @property
    def output_dir(self) -> Path:
        return self.job.output_dir or Path("outputs") / self.job.name

    def problems(self, world_size: int, *, first_stage: int = 0) -> list[str]:
        """Everything that would stop this run, from stage `first` on, on `world_size` processes, all at once."""
        return [*self.data_problems(), *self.layout_problems(world_size, first_stage=first_stage)]

    def data_problems(self) -> list[str]:
        """What is wrong with the text and the tokenizer, whose files may lie elsewhere."""
        return [*self._tokenizer_problems(), *self.data.path_problems(self.validation.sources)]

    def layout_problems(self, world_size: int, *, first_stage: int = 0) -> list[str]:
        """What is wrong with everything else."""
        del first_stage
        return self.single_stage_problems(world_size) + self.profiler_problems(self.training.steps)

    def single_stage_problems(self, world_size: int) -> list[str]:
        """What is wrong with it whatever the run's other stages are."""
        problems = [
            *self.data.problems(),
            *self.validation.problems(self.data),
            *self.model.problems(),
            *self.memory.problems(),
            *self.slurm.problems(),
            *self._head_group_problems(),
            *self._optimizer_dtype_problems(),
            *self.parallelism.problems(world_size),
            *self._tensor_problems(),
            *self._context_problems(),
            *self._pipeline_problems(world_size),
            *self._attention_problems(),
        ]
        if self.schedule.decay_steps is not None and self.schedule.kind != "wsd":
            decay, kind = self.schedule.decay_steps, self.schedule.kind
            problems.append(f'schedule.decay_steps = {decay} has no use with schedule.kind = "{kind}"')
        return problems + self._batch_problems()

    def require_valid(self, world_size: int, *, first_stage: int = 0) -> None:
        """Raises `ConfigError` with all problems, if there are any."""
        if problems := self.problems(world_size, first_stage=first_stage):
            raise ConfigError(problems)

    def require_vocab_size(self, required_vocab_size: int) -> None:
        """Raises `ConfigError` unless the model has a row for each of the tokenizer's tokens."""
        if problems := self._vocab_size_problems(required_vocab_size):
            raise ConfigError(problems)

    def _tokenizer_problems(self) -> list[str]:
        if self.is_synthetic:
            return []
        vocab_size_is_known = self.tokenizer.kind == "byte" and not self.model.problems()
        return self.tokenizer.problems() + (self._vocab_size_problems(BYTE_VOCAB_SIZE) if vocab_size_is_known else [])

    @property
    def is_synthetic(self) -> bool:
        """Whether all rows are of the `copy` corpus, which needs no tokenizer and has the model's vocabulary."""
        return self.data.corpus == COPY_CORPUS and all(
            item.source == DEFAULT_SOURCE for item in self.data.effective_mix
        )

    def _vocab_size_problems(self, required_vocab_size: int) -> list[str]:
        size, kind = self.model.build().vocab_size, self.tokenizer.kind
        if required_vocab_size <= size:
            return []
        return [
            f'model.vocab_size = {size} must be at least {required_vocab_size}, the tokens of tokenizer.kind = "{kind}"'
        ]

    def context_plan(self) -> ContextPlan:
        """How the cp ranks share rows. The model must have no problems."""
        section, model, training = self.parallelism, self.model.build(), self.training
        is_packed = self.data.mask == "document" and self.data.packing != "single" and not self.is_synthetic
        return ContextPlan(
            cp=section.cp,
            method=section.cp_method,
            layout=section.cp_layout,
            cp_ulysses=section.cp_ulysses,
            outer_method=section.cp_outer_method,
            heads=model.num_heads // section.tp,
            kv_heads=max(1, model.num_kv_heads // section.tp),
            head_dim=model.head_dim,
            seq_len=training.micro_batch_size * training.seq_len,
            packs_documents=is_packed,
            ranks_per_node=max(1, section.ranks_per_node // section.tp),
            tp=section.tp if section.sequence_parallel else 1,
        )

    def pipeline_plan(self, world_size: int) -> PipelinePlan:
        """How the layers are cut into stages, and who runs them when. The model must have no problems."""
        section, model = self.parallelism, self.model.build()
        # The head counts by its products, and so does the embedding, which does nothing but hold as many weights.
        attention_cost = self.training.seq_len / 2 * model.num_heads * model.head_dim * 2
        vocab_cost = model.vocab_size * model.dim / (model.block_matrix_parameters + attention_cost)
        return PipelinePlan(
            pp=section.pp,
            schedule=section.pp_schedule,
            num_layers=model.num_layers,
            pp_stages_per_rank=section.pp_stages_per_rank,
            pp_layers=section.pp_layers,
            embed_cost=vocab_cost,
            head_cost=vocab_cost,
            num_micro_batches=self.micro_batches(world_size)[1],
            tie_embeddings=model.tie_embeddings,
            compiled=self.training.compile,
            recompute="none" if self.memory.recompute == "auto" else self.memory.recompute,
        )

    def topology(self, world_size: int, *, nodes: int = 1) -> Topology:
        """Who talks to whom. The model must have no problems."""
        section = self.parallelism
        degrees = section.degrees(world_size)
        return Topology(
            degrees=degrees, context_plan=self.context_plan(), ranks_per_node=section.ranks_per_node, num_nodes=nodes
        )

    def parallelism_summary(self, world_size: int) -> list[str]:
        """What positions mean, and what is done along the axes that leave a choice, a line each. The model must have no
        problems.
        """
        section = self.parallelism
        lines = [rope_summary(self.model.build(), self.training.seq_len)]
        if section.cp > 1:
            lines.append(f"context parallelism: {self.context_plan().summary()}")
        if section.tp > 1:
            sharded = {"tokens": section.sequence_parallel, "vocabulary": section.loss_parallel}
            details = ", ".join(f"{name} {'shared' if is_sharded else 'whole'}" for name, is_sharded in sharded.items())
            lines.append(f"tensor parallelism: {section.tp} ranks, {details}")
        if section.pp > 1:
            lines.append(f"pipeline parallelism: {self.pipeline_plan(world_size).summary()}")
        return lines

    def _tensor_problems(self) -> list[str]:
        if self.model.problems():
            return []
        section, model = self.parallelism, self.model.build()
        requirements = {
            "parallelism.tp above 1": section.tp > 1,
            "parallelism.sequence_parallel = true": section.sequence_parallel,
            "training.compile = true": self.training.compile,
        }
        missing = [requirement for requirement, is_met in requirements.items() if section.async_tp and not is_met]
        problems = [f"parallelism.async_tp = true needs {' and '.join(missing)}"] if missing else []
        return problems + tensor_parallel_problems(
            section.tp,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            ffn_dim=model.ffn_dim,
            vocab_size=model.vocab_size,
            # Only a tied embedding is kept whole with its head.
            replicate_vocab=model.tie_embeddings and not section.loss_parallel,
        )

    def _pipeline_problems(self, world_size: int) -> list[str]:
        is_indivisible = self.training.global_batch_size % self.training.micro_batch_size > 0  # Its own problem.
        return [] if is_indivisible or self.model.problems() else self.pipeline_plan(world_size).problems()

    def _attention_problems(self) -> list[str]:
        kernel, dtype = self.training.attention, self.training.dtype
        if kernel == "cudnn" and self.training.deterministic:
            return ['training.attention = "cudnn" is not deterministic, which training.deterministic = true asks for']
        supported_dtypes = {"efficient": ("bfloat16", "float32")} | dict.fromkeys(
            ("flash", "cudnn", "fa3", "fa4"), ("bfloat16",)
        )
        if kernel not in supported_dtypes or dtype in supported_dtypes[kernel]:
            return []
        return [
            f'training.attention = "{kernel}" takes {" or ".join(supported_dtypes[kernel])}, not training.dtype = "{dtype}"'
        ]

    def _head_group_problems(self) -> list[str]:
        if self.model.problems() or (groups := self.memory.head_groups) == 1:
            return []
        plan = self.context_plan()
        if plan.kv_heads % groups:
            return [
                f"memory.head_groups = {groups} must divide the {plan.kv_heads} key/value heads of a rank "
                "(model.num_kv_heads / parallelism.tp)"
            ]
        if plan.cp > 1 and not plan.problems() and plan.heads // groups % plan.ulysses_degree:
            return [
                f"memory.head_groups = {groups} leaves {plan.heads // groups} query heads in a group, which "
                f'{plan.ulysses_degree} ranks cannot exchange (parallelism.cp_method = "{plan.resolved_method}")'
            ]
        return []

    def _optimizer_dtype_problems(self) -> list[str]:
        if self.memory.optimizer_dtype == "float32":
            return []
        key, max_beta, problems = 'memory.optimizer_dtype = "bfloat16"', max(self.optimizer.betas), []
        if self.training.dtype == "float64":
            problems.append(f'{key} has no use with training.dtype = "float64", which is to round nothing')
        if max_beta > 0.99:
            problems.append(f"{key} needs optimizer.betas up to 0.99, not {max_beta}: smaller changes are rounded away")
        return problems

    def _context_problems(self) -> list[str]:
        if self.model.problems():
            return []
        plan = self.context_plan()
        if plan.heads % plan.kv_heads:  # What tp leaves of heads that it does not divide is not cp's to judge.
            return []
        return [f"parallelism.{problem}" for problem in plan.problems()]

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(micro-batches of one update, how many of them each data-parallel rank runs); the last may be empty."""
        degrees = self.parallelism.degrees(world_size)
        total = self.training.global_batch_size // self.training.micro_batch_size
        return total, -(-total // (degrees["dp_replicate"] * degrees["dp_shard"]))

    def warnings(self, world_size: int) -> list[str]:
        """What is allowed on `world_size` processes, and seldom meant."""
        total, per_rank = self.micro_batches(world_size)
        degrees = self.parallelism.degrees(world_size)
        slots = per_rank * degrees["dp_replicate"] * degrees["dp_shard"]
        steps, warmup = self.training.steps, self.schedule.warmup_steps
        lines = []
        if slots != total:
            lines.append(
                f"training.global_batch_size = {self.training.global_batch_size} makes {total} micro-batches for "
                f"{slots} places on {slots // per_rank} data-parallel ranks: {slots - total} run empty in every update"
            )
        if warmup >= steps and self.schedule.over == "stage":
            lines.append(
                f"schedule.warmup_steps = {warmup} is all of training.steps = {steps}: the learning rate only rises"
            )
        training_sources = {item.source for item in self.data.effective_mix}
        lines += [
            f"validation.sets.{name} judges by documents that are trained on: data.holdout = 0"
            for name, each in self.validation.sets.items()
            if each.source in training_sources and not self.data.holdout
        ]
        lines += [
            f"parallelism.{key} has no use with parallelism.pp = 1"
            for key in ("pp_layers", "pp_stages_per_rank")
            if degrees["pp"] == 1 and getattr(self.parallelism, key) is not None
        ]
        length, plan = self.training.seq_len, self.context_plan()
        if length % plan.seq_len_divisor:
            padding = -length % plan.seq_len_divisor
            axes = ", ".join(f"{axis} = {degrees[axis]}" for axis in ("cp", "tp") if degrees[axis] > 1)
            lines.append(
                f"training.seq_len = {length} does not divide by {plan.seq_len_divisor} ({axes}): "
                f"every row is padded by {padding} token{'s' if padding > 1 else ''}"
            )
        return lines

    def _batch_problems(self) -> list[str]:
        global_batch_size, micro_batch_size = self.training.global_batch_size, self.training.micro_batch_size
        problems = []
        if self.training.seq_len > MAX_SEQ_LEN:
            problems.append(f"training.seq_len = {self.training.seq_len} must be at most {MAX_SEQ_LEN}")
        period = self.data.copy_period
        if self.data.corpus == COPY_CORPUS and period is not None and period >= self.training.seq_len:
            problems.append(f"data.copy_period = {period} must be below training.seq_len = {self.training.seq_len}")
        if global_batch_size % micro_batch_size:
            problems.append(
                f"training.global_batch_size = {global_batch_size} must be a multiple of training.micro_batch_size = {micro_batch_size}"
            )
        return problems

    def profiler_problems(self, steps: int) -> list[str]:
        section = self.profiler
        windows = {
            "trace": (section.trace_step, section.trace_steps),
            "memory": (section.memory_step, section.memory_steps),
        }
        return [
            f"profiler.{name}_step = {start} and profiler.{name}_steps = {count} reach past training.steps = {steps}"
            for name, (start, count) in windows.items()
            if start is not None and start + count - 1 > steps
        ]


@dataclass(frozen=True)
class TrainingStage:
    """A part of a run: its configuration, whose `training.steps` are its own, and where it stands."""

    config: Config
    name: str = ""
    index: int = 0
    num_stages: int = 1
    start_step: int = 0
    """Updates before it."""
    total_steps: int = 0
    """Updates of the whole run."""
    resets_optimizer: bool = False
    """Whether its optimizer begins without state."""
    length_in_tokens: bool = False
    """Whether its length is given in tokens, so that its updates depend on its batch."""

    def __str__(self) -> str:
        return f'stage "{self.name}"'

    @property
    def end_step(self) -> int:
        return self.start_step + self.config.training.steps

    def summary(self) -> str:
        """One line for the log."""
        training = self.config.training
        global_batch_size = training.global_batch_size
        return (
            f"{self} ({self.index + 1} of {self.num_stages}): updates {self.start_step + 1} to {self.end_step} of "
            f"{global_batch_size} x {training.seq_len:,} tokens = {global_batch_size * training.seq_len * training.steps:,} tokens"
        )
