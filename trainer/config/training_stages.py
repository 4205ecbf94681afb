"""`[[stage]]`: a run in stages, each with its own length, data mix and mesh. Imports no torch.

A recipe resolves to one configuration per stage; the rest of the trainer sees only those.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.data import MixSection
from trainer.config.job_config import Config, TrainingStage
from trainer.config.model import RopeSection
from trainer.config.sections import (
    AsTokens,
    Fraction,
    MemorySection,
    ParallelismSection,
    PositiveFloat,
    PositiveInt,
    ScheduleSection,
    Section,
    TrainingSection,
)

DEFAULT_GLOBAL_BATCH_SIZE = TrainingSection().global_batch_size
ConfigValues = dict[str, Any]

# Keys that a stage can override, and their names in [[stage]].
STAGE_OVERRIDES = {
    "training.global_batch_size": "batch_tokens",
    "training.micro_batch_size": "micro_batch_size",
    "model.rope": "rope",
    "data.mix": "mix",
    "data.mask": "mask",
    "data.packing": "packing",
    "optimizer.lr": "lr",
}


class StageSection(Section):
    """One stage of a recipe. Keys that are left out are as in the sections."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name in logs and metrics."""
    seq_len: Annotated[int, Field(ge=2), AsTokens]
    """Tokens per sequence."""
    steps: PositiveInt | None = None
    """Steps of this stage."""
    tokens: Annotated[int, Field(ge=1), AsTokens] | None = None
    """Instead of `steps`: tokens of this stage, rounded up to whole steps."""
    batch_tokens: Annotated[int, Field(ge=1), AsTokens] | None = None
    """Tokens per step, a multiple of `seq_len`.

    Left out: `training.global_batch_size` sequences.
    """
    micro_batch_size: PositiveInt | None = None
    """Sequences per rank and forward pass."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding, instead of [model.rope]."""
    mix: tuple[MixSection, ...] = ()
    """Sources that sequences are drawn from, instead of `data.mix`."""
    mask: Literal["document", "none"] | None = None
    """Whether attention is confined to each document."""
    packing: Literal["best_fit", "concat", "single"] | None = None
    """How documents fill sequences."""
    lr: PositiveFloat | None = None
    """Peak learning rate."""
    warmup: Fraction | None = None
    """Fraction of the stage's steps over which the learning rate rises from zero."""
    schedule: ScheduleSection = ScheduleSection()
    """Learning rate schedule: overrides of [schedule]."""
    optimizer: Literal["carry", "fresh"] = "carry"
    """Whether the optimizer keeps its state from the stage before, or starts fresh."""
    parallelism: ParallelismSection = ParallelismSection()
    """Mesh: overrides of [parallelism]."""
    memory: MemorySection = MemorySection()
    """Memory options: overrides of [memory]."""

    def merge_into(self, base: ConfigValues) -> ConfigValues:
        """The values of `base` with those of this stage, for a configuration of the stage
        alone.
        """
        training = base.get("training", {}) | {"seq_len": self.seq_len}
        if self.batch_tokens is not None:
            training["global_batch_size"] = max(1, self.batch_tokens // self.seq_len)
        if self.micro_batch_size is not None:
            training["micro_batch_size"] = self.micro_batch_size
        tokens_per_step = (
            training.get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE) * self.seq_len
        )
        # Neither steps nor tokens is a problem that `_stage_section_problems` reports. Until then
        # one step keeps the section valid.
        training["steps"] = self.steps or max(1, -(-(self.tokens or 0) // tokens_per_step))
        overrides = {
            name: getattr(self, name).model_dump(exclude_unset=True)
            for name in ("schedule", "parallelism", "memory")
        }
        overrides["training"] = training
        overrides["data"] = {
            key: value for key in ("mix", "mask", "packing") if (value := getattr(self, key))
        }
        if self.warmup is not None:
            overrides["schedule"]["warmup_steps"] = round(self.warmup * training["steps"])
        # A stage's rotary embedding replaces [model.rope] as a whole: keys of two scalings do not
        # mix.
        if self.rope.model_fields_set:
            overrides["model"] = {"rope": self.rope.model_dump(exclude_unset=True)}
        if self.lr is not None:
            overrides["optimizer"] = {"lr": self.lr}
        return base | {name: base.get(name, {}) | values for name, values in overrides.items()}


class Recipe(Config):
    """A run in one stage or several."""

    stage: tuple[StageSection, ...] = ()
    """Stages of the run, in order. Left out: one stage, as the sections describe."""

    @property
    def unused_keys(self) -> dict[str, str]:
        """The keys of other sections that every stage overrides, and what overrides them."""
        keys = STAGE_OVERRIDES if self.stage else {}
        return {
            key: stage_key
            for key, stage_key in keys.items()
            if all(stage_key in stage.model_fields_set for stage in self.stage)
        }

    @property
    def training_stages(self) -> tuple[TrainingStage, ...]:
        # Unset keys remain unset: `recompute = "auto"` chooses only keys that the user left out.
        base = self.model_dump(exclude_unset=True, exclude={"stage"})
        if not self.stage:
            return Config.model_validate(base).training_stages
        configs = [Config.model_validate(stage.merge_into(base)) for stage in self.stage]
        steps = [config.training.steps for config in configs]
        return tuple(
            TrainingStage(
                config,
                stage.name,
                index,
                len(configs),
                sum(steps[:index]),
                sum(steps),
                stage.optimizer == "fresh",
                stage.tokens is not None,
            )
            for index, (stage, config) in enumerate(zip(self.stage, configs, strict=True))
        )
