"""The configuration of a run: all sections, and what follows from them for a world size. Imports no torch."""

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

BYTE_VOCAB_SIZE = 264  # 256 byte values and 8 special tokens


class Config(Section):
    """A run in one stage."""

    job: JobSection = JobSection()
    """Name and folder of the run."""
    model: ModelSection = ModelSection()
    """The model."""
    tokenizer: TokenizerSection = TokenizerSection()
    """The tokenizer."""
    data: DataSection = DataSection()
    """Training data."""
    training: TrainingSection = TrainingSection()
    """Batch size, sequence length and number of steps."""
    parallelism: ParallelismSection = ParallelismSection()
    """The device mesh."""
    memory: MemorySection = MemorySection()
    """Activation checkpointing, offload and chunking."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer."""
    schedule: ScheduleSection = ScheduleSection()
    """Learning rate schedule."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are written and which are kept."""
    validation: ValidationSection = ValidationSection()
    """Validation during training."""
    metrics: MetricsSection = MetricsSection()
    """Metrics and logging."""
    health: HealthSection = HealthSection()
    """Detection of loss spikes, non-finite gradients and stragglers."""
    profiler: ProfilerSection = ProfilerSection()
    """Traces and memory recordings."""
    distributed: DistributedSection = DistributedSection()
    """Timeouts and restarts."""
    slurm: SlurmSection = SlurmSection()
    """The SLURM job (`python -m trainer.slurm`)."""
    plan: PlanSection = PlanSection()
    """The planner (`python -m trainer.plan`)."""

    @property
    def training_stages(self) -> tuple[TrainingStage, ...]:
        """The stages of the run, in order. The configuration must have no problems."""
        return (TrainingStage(self, total_steps=self.training.steps),)

    @property
    def output_dir(self) -> Path:
        return self.job.output_dir or Path("outputs") / self.job.name

    def problems(self, world_size: int, *, first_stage: int = 0) -> list[str]:
        """Everything that keeps this run, from stage `first_stage` on, from starting on `world_size` processes."""
        return [*self.data_problems(), *self.layout_problems(world_size, first_stage=first_stage)]

    def data_problems(self) -> list[str]:
        """Problems of corpora and tokenizer, whose files may be on another machine."""
        return [*self._tokenizer_problems(), *self.data.path_problems(self.validation.sources)]

    def layout_problems(self, world_size: int, *, first_stage: int = 0) -> list[str]:
        """All other problems."""
        del first_stage
        return self.single_stage_problems(world_size) + self.profiler_problems(self.training.steps)

    def single_stage_problems(self, world_size: int) -> list[str]:
        """Problems that do not depend on other stages."""
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
            problems.append(f'schedule.decay_steps = {decay} is only used with schedule.kind = "wsd", not "{kind}"')
        return problems + self._batch_problems()

    def require_valid(self, world_size: int, *, first_stage: int = 0) -> None:
        """Raises `ConfigError` with all problems."""
        if problems := self.problems(world_size, first_stage=first_stage):
            raise ConfigError(problems)

    def require_vocab_size(self, required_vocab_size: int) -> None:
        """Raises `ConfigError` unless the model has an embedding for each of the tokenizer's tokens."""
        if problems := self._vocab_size_problems(required_vocab_size):
            raise ConfigError(problems)

    def _tokenizer_problems(self) -> list[str]:
        if self.is_synthetic:
            return []
        vocab_size_is_known = self.tokenizer.kind == "byte" and not self.model.problems()
        return self.tokenizer.problems() + (self._vocab_size_problems(BYTE_VOCAB_SIZE) if vocab_size_is_known else [])

    @property
    def is_synthetic(self) -> bool:
        """Whether all sequences are of the `copy` corpus, which needs no tokenizer."""
        return self.data.corpus == COPY_CORPUS and all(
            item.source == DEFAULT_SOURCE for item in self.data.effective_mix
        )

    def _vocab_size_problems(self, required_vocab_size: int) -> list[str]:
        size, kind = self.model.build().vocab_size, self.tokenizer.kind
        if required_vocab_size <= size:
            return []
        return [
            f'model.vocab_size = {size} must be at least {required_vocab_size}, the vocabulary size of tokenizer.kind = "{kind}"'
        ]

    def context_plan(self) -> ContextPlan:
        """How cp ranks share sequences. The model must have no problems."""
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
        """Pipeline stages and schedule. The model must have no problems."""
        section, model = self.parallelism, self.model.build()
        # The output projection counts by its FLOPs; the embedding, which has none, by its equal number of weights.
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
        """Process groups. The model must have no problems."""
        section = self.parallelism
        degrees = section.degrees(world_size)
        return Topology(
            degrees=degrees, context_plan=self.context_plan(), ranks_per_node=section.ranks_per_node, num_nodes=nodes
        )

    def parallelism_summary(self, world_size: int) -> list[str]:
        """Lines for the log: rotary embedding and parallelism. The model must have no problems."""
        section = self.parallelism
        lines = [rope_summary(self.model.build(), self.training.seq_len)]
        if section.cp > 1:
            lines.append(f"context parallelism: {self.context_plan().summary()}")
        if section.tp > 1:
            sharded = {"tokens": section.sequence_parallel, "vocabulary": section.loss_parallel}
            details = ", ".join(
                f"{name} {'sharded' if is_sharded else 'replicated'}" for name, is_sharded in sharded.items()
            )
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
        is_indivisible = (
            self.training.global_batch_size % self.training.micro_batch_size > 0
        )  # Reported as a problem of the batch size.
        return [] if is_indivisible or self.model.problems() else self.pipeline_plan(world_size).problems()

    def _attention_problems(self) -> list[str]:
        kernel, dtype = self.training.attention, self.training.dtype
        if kernel == "cudnn" and self.training.deterministic:
            return ['training.attention = "cudnn" is not deterministic, but training.deterministic = true']
        supported_dtypes = {"efficient": ("bfloat16", "float32")} | dict.fromkeys(
            ("flash", "cudnn", "fa3", "fa4"), ("bfloat16",)
        )
        if kernel not in supported_dtypes or dtype in supported_dtypes[kernel]:
            return []
        return [
            f'training.attention = "{kernel}" supports {" or ".join(supported_dtypes[kernel])}, not training.dtype = "{dtype}"'
        ]

    def _head_group_problems(self) -> list[str]:
        if self.model.problems() or (groups := self.memory.head_groups) == 1:
            return []
        plan = self.context_plan()
        if plan.kv_heads % groups:
            return [
                f"memory.head_groups = {groups} must divide the {plan.kv_heads} KV heads of a rank "
                "(model.num_kv_heads / parallelism.tp)"
            ]
        if plan.cp > 1 and not plan.problems() and plan.heads // groups % plan.ulysses_degree:
            return [
                f"memory.head_groups = {groups} leaves {plan.heads // groups} query heads per group, which "
                f'{plan.ulysses_degree} ranks cannot divide (parallelism.cp_method = "{plan.resolved_method}")'
            ]
        return []

    def _optimizer_dtype_problems(self) -> list[str]:
        if self.memory.optimizer_dtype == "float32":
            return []
        key, max_beta, problems = 'memory.optimizer_dtype = "bfloat16"', max(self.optimizer.betas), []
        if self.training.dtype == "float64":
            problems.append(f'{key} contradicts training.dtype = "float64"')
        if max_beta > 0.99:
            problems.append(
                f"{key} needs optimizer.betas up to 0.99, not {max_beta}: bfloat16 rounds smaller changes away"
            )
        return problems

    def _context_problems(self) -> list[str]:
        if self.model.problems():
            return []
        plan = self.context_plan()
        if plan.heads % plan.kv_heads:  # A problem of tp, reported there.
            return []
        return [f"parallelism.{problem}" for problem in plan.problems()]

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(micro-batches per step, micro-batches per data-parallel rank); the last ones may be empty."""
        degrees = self.parallelism.degrees(world_size)
        total = self.training.global_batch_size // self.training.micro_batch_size
        return total, -(-total // (degrees["dp_replicate"] * degrees["dp_shard"]))

    def warnings(self, world_size: int) -> list[str]:
        """Settings that are valid on `world_size` processes but rarely intended."""
        total, per_rank = self.micro_batches(world_size)
        degrees = self.parallelism.degrees(world_size)
        slots = per_rank * degrees["dp_replicate"] * degrees["dp_shard"]
        steps, warmup = self.training.steps, self.schedule.warmup_steps
        lines = []
        if slots != total:
            lines.append(
                f"training.global_batch_size = {self.training.global_batch_size} makes {total} micro-batches, which "
                f"{slots // per_rank} data-parallel ranks do not divide: {slots - total} of {slots} are empty in every step"
            )
        if warmup >= steps and self.schedule.over == "stage":
            lines.append(
                f"schedule.warmup_steps = {warmup} is not below training.steps = {steps}: the learning rate never reaches its peak"
            )
        training_sources = {item.source for item in self.data.effective_mix}
        lines += [
            f"validation.sets.{name} validates on training documents: data.holdout = 0"
            for name, each in self.validation.sets.items()
            if each.source in training_sources and not self.data.holdout
        ]
        lines += [
            f"parallelism.{key} is not used with parallelism.pp = 1"
            for key in ("pp_layers", "pp_stages_per_rank")
            if degrees["pp"] == 1 and getattr(self.parallelism, key) is not None
        ]
        length, plan = self.training.seq_len, self.context_plan()
        if length % plan.seq_len_divisor:
            padding = -length % plan.seq_len_divisor
            axes = ", ".join(f"{axis} = {degrees[axis]}" for axis in ("cp", "tp") if degrees[axis] > 1)
            lines.append(
                f"training.seq_len = {length} is not a multiple of {plan.seq_len_divisor} ({axes}): "
                f"every sequence is padded by {padding} token{'s' if padding > 1 else ''}"
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
            f"profiler.{name}_step = {start} and profiler.{name}_steps = {count} must end by training.steps = {steps}"
            for name, (start, count) in windows.items()
            if start is not None and start + count - 1 > steps
        ]


@dataclass(frozen=True)
class TrainingStage:
    """One stage of a run: its configuration, whose `training.steps` are those of the stage, and its position."""

    config: Config
    name: str = ""
    index: int = 0
    num_stages: int = 1
    start_step: int = 0
    """Steps before this stage."""
    total_steps: int = 0
    """Steps of the whole run."""
    resets_optimizer: bool = False
    """Whether the optimizer state starts fresh."""
    length_in_tokens: bool = False
    """Whether the length is given in tokens, so that the steps depend on the batch size."""

    def __str__(self) -> str:
        return f'stage "{self.name}"'

    @property
    def end_step(self) -> int:
        return self.start_step + self.config.training.steps

    def summary(self) -> str:
        training = self.config.training
        global_batch_size = training.global_batch_size
        return (
            f"{self} ({self.index + 1} of {self.num_stages}): steps {self.start_step + 1} to {self.end_step}, "
            f"each {global_batch_size} x {training.seq_len:,} tokens; {global_batch_size * training.seq_len * training.steps:,} tokens in total"
        )
