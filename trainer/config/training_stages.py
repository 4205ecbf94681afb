"""`[[stage]]`: a run in several parts, each with a length, a mix and a mesh of its own.

A recipe becomes configurations of single stages, which is all that the rest of a run sees. Nothing here imports torch.
"""

from __future__ import annotations

from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.data import DEFAULT_SOURCE, MixSection
from trainer.config.job_config import Config, TrainingStage
from trainer.config.sections import (
    Fraction,
    MemorySection,
    ParallelismSection,
    PositiveFloat,
    PositiveInt,
    RopeSection,
    ScheduleSection,
    Section,
    TrainingSection,
)

DEFAULT_GLOBAL_BATCH_SIZE = TrainingSection().global_batch_size
ConfigValues = dict[str, Any]

# What each stage can have of its own.
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
    """One stage of a recipe; what is left out is as in the sections."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """What it is called in logs and metrics."""
    seq_len: Annotated[int, Field(ge=2)]
    """Tokens in a row."""
    steps: PositiveInt | None = None
    """Updates of this stage."""
    tokens: PositiveInt | None = None
    """Instead of `steps`: tokens of this stage, in whole updates."""
    batch_tokens: PositiveInt | None = None
    """Tokens of an update, a multiple of `seq_len`. Left out: `training.global_batch_size` rows."""
    micro_batch_size: PositiveInt | None = None
    """Rows that a rank carries through the model at once."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding, in place of [model.rope]."""
    mix: tuple[MixSection, ...] = ()
    """Which sources rows are drawn from, in place of `data.mix`."""
    mask: Literal["document", "none"] | None = None
    """Whether attention stays inside a document."""
    packing: Literal["best_fit", "concat", "single"] | None = None
    """How documents fill rows."""
    lr: PositiveFloat | None = None
    """Highest learning rate."""
    warmup: Fraction | None = None
    """Part of the stage's updates over which the learning rate rises from zero."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate over the stage, or with `over = "run"` over all stages; over what [schedule] says."""
    optimizer: Literal["carry", "fresh"] = "carry"
    """Whether the optimizer goes on with its state, or begins without."""
    parallelism: ParallelismSection = ParallelismSection()
    """The mesh of this stage, over what [parallelism] says."""
    memory: MemorySection = MemorySection()
    """What is kept, over what [memory] says."""

    def problems(self) -> list[str]:
        problems = []
        if (self.steps is None) == (self.tokens is None):
            problems.append("one of steps and tokens must be given")
        if self.batch_tokens is not None and self.batch_tokens % self.seq_len:
            rounded_down = self.batch_tokens // self.seq_len * self.seq_len
            suggestion = " or ".join(str(tokens) for tokens in (rounded_down, rounded_down + self.seq_len) if tokens)
            problems.append(
                f"batch_tokens = {self.batch_tokens} must be a multiple of seq_len = {self.seq_len}, as {suggestion} is"
            )
        if self.warmup is not None and "warmup_steps" in self.schedule.model_fields_set:
            problems.append(f"warmup = {self.warmup} and schedule.warmup_steps say the same thing")
        if self.warmup is not None and self.schedule.over == "run":
            problems.append(
                f'warmup = {self.warmup} is part of a stage, and schedule.over = "run" has one curve over all'
            )
        return problems

    def merge_into(self, base: ConfigValues) -> ConfigValues:
        """The values of a configuration that is this stage alone, made of those that are given in the sections."""
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
        training = values.setdefault("training", {})
        training["seq_len"] = self.seq_len
        if self.batch_tokens is not None:
            training["global_batch_size"] = max(1, self.batch_tokens // self.seq_len)
        if self.micro_batch_size is not None:
            training["micro_batch_size"] = self.micro_batch_size
        global_batch_size = training.get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
        training["steps"] = self.steps or max(1, -(-(self.tokens or 0) // (global_batch_size * self.seq_len)))
        for name in ("schedule", "parallelism", "memory"):
            values[name] = values.get(name, {}) | getattr(self, name).model_dump(exclude_unset=True)
        if self.rope.model_fields_set:
            values["model"] = values.get("model", {}) | {"rope": self.rope.model_dump(exclude_unset=True)}
        overrides = {"mix": self.mix or None, "mask": self.mask, "packing": self.packing}
        values["data"] = values.get("data", {}) | {key: value for key, value in overrides.items() if value is not None}
        if self.lr is not None:
            values["optimizer"] = values.get("optimizer", {}) | {"lr": self.lr}
        if self.warmup is not None:
            values["schedule"]["warmup_steps"] = round(self.warmup * training["steps"])
        return values


class Recipe(Config):
    """A run of Longhaul, in one stage or several."""

    stage: tuple[StageSection, ...] = ()
    """Parts of the run, one after the other. Left out: it has one, which is what the sections say."""

    @property
    def training_stages(self) -> tuple[TrainingStage, ...]:
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

    def data_problems(self) -> list[str]:
        """Of all stages, each problem once."""
        stages = () if self.stage_problems() else self.training_stages
        return [*dict.fromkeys(problem for stage in stages for problem in stage.config.data_problems())]

    def layout_problems(self, world_size: int, *, first_stage: int = 0) -> list[str]:
        """Those of the stages from `first` on; what is done may need another world."""
        if problems := self.stage_problems():
            return problems
        for stage in self.training_stages[first_stage:]:
            prefix = f"{stage}: " if stage.name else ""
            problems += [prefix + problem for problem in stage.config.single_stage_problems(world_size)]
        return problems + self.profiler_problems(self.training_stages[0].total_steps)

    def stage_problems(self) -> list[str]:
        """What keeps the stages from being told apart."""
        names = [stage.name for stage in self.stage]
        problems = [f'stage "{stage.name}": {problem}' for stage in self.stage for problem in stage.problems()]
        problems += [f'two stages have the name "{name}"' for name in sorted({x for x in names if names.count(x) > 1})]
        redundant = self.training.model_fields_set & {"steps", "seq_len"} if self.stage else ()
        problems += [
            f"training.{key} = {getattr(self.training, key)} has no use beside [[stage]]" for key in sorted(redundant)
        ]
        for key, stage_key in STAGE_OVERRIDES.items() if self.stage else ():
            section = reduce(getattr, key.split(".")[:-1], self)
            if key.split(".")[-1] in section.model_fields_set and all(
                stage_key in stage.model_fields_set for stage in self.stage
            ):
                problems.append(f"{key} has no use: every [[stage]] has its own {stage_key}")
        if len(names) > 1 and not self.checkpoint.enabled:
            problems.append("checkpoint.enabled = false: a stage goes on from the checkpoint of the one before")
        training_sources = {item.source for stage in self.stage for item in stage.mix or self.data.mix} or {
            item.source for item in self.data.effective_mix
        }
        known = {DEFAULT_SOURCE, *self.data.sources}
        for name, each in self.validation.sets.items():
            settings = self.data.document_settings(each.source) if each.source in known else {}
            for other in sorted(training_sources & known - {each.source}):
                if (
                    settings.get("path") == (other_settings := self.data.document_settings(other))["path"]
                    and settings != other_settings
                ):
                    problems.append(
                        f'validation.sets.{name}: source = "{each.source}" is the corpus of "{other}", which is trained '
                        "on, cut into other documents: none can be held out"
                    )
        used = {item.source for mix in (self.data.effective_mix, *(stage.mix for stage in self.stage)) for item in mix}
        used |= self.validation.sources
        problems += [f"data.sources.{name}: nothing draws from it" for name in self.data.sources if name not in used]
        return problems
