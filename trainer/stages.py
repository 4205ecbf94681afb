"""`[[stage]]`: a run in several parts, each with a length, a mix and a mesh of its own. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.corpora import MixSection
from trainer.sections import (
    Count,
    Fraction,
    MemorySection,
    ParallelismSection,
    Positive,
    RopeSection,
    ScheduleSection,
    Section,
    TrainingSection,
)

DEFAULT_ROWS = TrainingSection().global_batch_size
Values = dict[str, Any]


class StageSection(Section):
    """One stage of a recipe; what is left out is as in the sections."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """What it is called in logs and metrics."""
    seq_len: Annotated[int, Field(ge=2)]
    """Tokens in a row."""
    steps: Count | None = None
    """Updates of this stage."""
    tokens: Count | None = None
    """Instead of `steps`: tokens of this stage, in whole updates."""
    batch_tokens: Count | None = None
    """Tokens of an update, a multiple of `seq_len`. Left out: `training.global_batch_size` rows."""
    micro_batch_size: Count | None = None
    """Rows that a rank carries through the model at once."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding, in place of [model.rope]."""
    mix: tuple[MixSection, ...] = ()
    """Which sources rows are drawn from, in place of `data.mix`."""
    mask: Literal["document", "none"] | None = None
    """Whether attention stays inside a document."""
    packing: Literal["best_fit", "concat", "single"] | None = None
    """How documents fill rows."""
    lr: Positive | None = None
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
        found = []
        if (self.steps is None) == (self.tokens is None):
            found.append("one of steps and tokens must be given")
        if self.batch_tokens is not None and self.batch_tokens % self.seq_len:
            down = self.batch_tokens // self.seq_len * self.seq_len
            near = f"{down or self.seq_len} or {down + self.seq_len}" if down else f"{self.seq_len}"
            found.append(
                f"batch_tokens = {self.batch_tokens} must be a multiple of seq_len = {self.seq_len}, as {near} is"
            )
        if self.warmup is not None and "warmup_steps" in self.schedule.model_fields_set:
            found.append(f"warmup = {self.warmup} and schedule.warmup_steps say the same thing")
        return found

    def over(self, base: Values) -> Values:
        """The values of a configuration that is this stage alone, made of those that are given in the sections."""
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
        training = values.setdefault("training", {})
        training["seq_len"] = self.seq_len
        if self.batch_tokens is not None:
            training["global_batch_size"] = max(1, self.batch_tokens // self.seq_len)
        if self.micro_batch_size is not None:
            training["micro_batch_size"] = self.micro_batch_size
        rows = training.get("global_batch_size", DEFAULT_ROWS)
        training["steps"] = self.steps or max(1, -(-(self.tokens or 0) // (rows * self.seq_len)))
        for name in ("schedule", "parallelism", "memory"):
            values[name] = values.get(name, {}) | getattr(self, name).model_dump(exclude_unset=True)
        if self.rope.model_fields_set:
            values["model"] = values.get("model", {}) | {"rope": self.rope.model_dump(exclude_unset=True)}
        given = {"mix": self.mix or None, "mask": self.mask, "packing": self.packing}
        values["data"] = values.get("data", {}) | {key: value for key, value in given.items() if value is not None}
        if self.lr is not None:
            values["optimizer"] = values.get("optimizer", {}) | {"lr": self.lr}
        if self.warmup is not None:
            values["schedule"]["warmup_steps"] = round(self.warmup * training["steps"])
        return values
