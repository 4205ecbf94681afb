"""The configuration of a run: all sections, and what follows from them for a world size.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from models.kernel_choice import AttentionNeeds
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config import sections
from trainer.config.data import DataSection, TokenizerSection, ValidationSection
from trainer.config.model import ModelSection
from trainer.config.sections import Section
from trainer.config.slurm import SlurmSection

BYTE_VOCAB_SIZE = 264  # 256 byte values and 8 special tokens


class Config(Section):
    """A run in one stage."""

    job: sections.JobSection = sections.JobSection()
    """Name and folder of the run."""
    model: ModelSection = ModelSection()
    """The model."""
    tokenizer: TokenizerSection = TokenizerSection()
    """The tokenizer."""
    data: DataSection = DataSection()
    """Training data."""
    training: sections.TrainingSection = sections.TrainingSection()
    """Batch size, sequence length and number of steps."""
    parallelism: sections.ParallelismSection = sections.ParallelismSection()
    """The device mesh."""
    memory: sections.MemorySection = sections.MemorySection()
    """Activation checkpointing, offload and chunking."""
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    """The optimizer."""
    schedule: sections.ScheduleSection = sections.ScheduleSection()
    """Learning rate schedule."""
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    """When checkpoints are written and which are kept."""
    validation: ValidationSection = ValidationSection()
    """Validation during training."""
    metrics: sections.MetricsSection = sections.MetricsSection()
    """Metrics and logging."""
    health: sections.HealthSection = sections.HealthSection()
    """Detection of loss spikes, non-finite gradients and stragglers."""
    profiler: sections.ProfilerSection = sections.ProfilerSection()
    """Traces and memory recordings."""
    distributed: sections.DistributedSection = sections.DistributedSection()
    """Timeouts and restarts."""
    slurm: SlurmSection = SlurmSection()
    """The SLURM job (`longhaul slurm`)."""
    plan: sections.PlanSection = sections.PlanSection()
    """The planner (`longhaul plan`)."""

    @property
    def training_stages(self) -> tuple[TrainingStage, ...]:
        """The stages of the run, in order. The configuration must have no problems."""
        return (TrainingStage(self, total_steps=self.training.steps),)

    @property
    def stated_world_size(self) -> int:
        """The product of the stated mesh degrees, of the stage where it is largest."""
        return max(
            prod(stage.config.parallelism.degrees(1).values()) for stage in self.training_stages
        )

    @property
    def output_dir(self) -> Path:
        return self.job.output_dir or Path("outputs") / self.job.name

    def context_plan(self) -> ContextPlan:
        """How cp ranks share sequences. The model must have no problems."""
        section = self.parallelism
        model = self.model.build()
        training = self.training
        is_packed = (
            self.data.mask == "document"
            and self.data.packing != "single"
            and not self.data.is_synthetic
        )
        return ContextPlan(
            cp=section.cp,
            method=section.cp_method,
            layout=section.cp_layout,
            cp_ulysses=section.cp_ulysses,
            outer_method=section.cp_outer_method,
            # tp shards heads before cp sees them. With more tp ranks than KV heads, each rank has
            # a replica of one. A micro-batch counts as one sequence of all its tokens.
            heads=model.num_heads // section.tp,
            kv_heads=max(1, model.num_kv_heads // section.tp),
            head_dim=model.head_dim,
            seq_len=training.micro_batch_size * training.seq_len,
            packs_documents=is_packed,
            windows=(*model.layers_by_window,),
            # tp is the innermost mesh dimension, so each node has this many cp ranks.
            ranks_per_node=max(1, section.ranks_per_node // section.tp),
            tp=section.tp if section.sequence_parallel else 1,
        )

    def attention_needs(self, generation: str | None = None) -> AttentionNeeds:
        """Requirements on attention kernels, on devices of a generation.

        The model must have no problems.
        """
        training = self.training
        model = self.model.build()
        return AttentionNeeds(
            dtype=training.dtype,
            head_dim=model.head_dim,
            softcap=model.score_softcap,
            deterministic=training.deterministic,
            generation=generation,
        )

    @property
    def compiles_on_gpu(self) -> bool:
        """Whether blocks are compiled on a GPU, where the start-up check finds nothing wrong.

        Inductor times reductions and takes the fastest, so that another start may round otherwise.
        """
        return self.training.compile is True or (
            self.training.compile == "auto" and not self.training.deterministic
        )

    def pipeline_plan(self, world_size: int) -> PipelinePlan:
        """Pipeline stages and schedule. The model must have no problems."""
        section = self.parallelism
        model = self.model.build()
        # Costs are in parameters, each 2 FLOPs per token, so attention counts half its FLOPs. The
        # embedding has no FLOPs; it costs as much as the output projection, for its equal weights.
        seq_len = self.training.seq_len
        attention_cost = (
            model.attention_flops(model.layer_kinds, model.mean_pairs(seq_len) / seq_len)
            / 2
            / model.num_layers
        )
        head_parameters = model.vocab_size * model.dim
        block_cost = (
            model.matrix_parameters - head_parameters
        ) / model.num_layers + attention_cost
        vocab_cost = head_parameters / block_cost
        return PipelinePlan(
            pp=section.pp,
            schedule=section.pp_schedule,
            num_layers=model.num_layers,
            pp_stages_per_rank=section.pp_stages_per_rank,
            pp_layers=section.pp_layers,
            embed_cost=vocab_cost,
            head_cost=vocab_cost,
            num_micro_batches=self.micro_batches(world_size)[1],
            reduces_per_micro_batch=section.pp_reduce_gradients == "per_micro_batch",
            tie_embeddings=model.tie_embeddings,
        )

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(micro-batches per step, micro-batches per data-parallel rank); the last ones may be
        empty.
        """
        degrees = self.parallelism.degrees(world_size)
        total = self.training.global_batch_size // self.training.micro_batch_size
        return total, -(-total // (degrees["dp_replicate"] * degrees["dp_shard"]))


@dataclass(frozen=True)
class TrainingStage:
    """One stage of a run: its configuration, whose `training.steps` are those of the stage, and
    its position.
    """

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

    @cached_property
    def end_step(self) -> int:
        return self.start_step + self.config.training.steps

    def summary(self) -> str:
        training = self.config.training
        global_batch_size = training.global_batch_size
        return (
            f"{self} ({self.index + 1} of {self.num_stages}): steps {self.start_step + 1} to {self.end_step}, "
            f"each {global_batch_size} x {training.seq_len:,} tokens; {training.tokens_per_step * training.steps:,} tokens in total"
        )
