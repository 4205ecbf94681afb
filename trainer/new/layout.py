"""A new run: the fastest layout that the planner finds, and its files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from trainer.command_table import typed
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.config.slurm import SlurmSection
from trainer.config.toml_format import values_to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError, DoesNotFitError
from trainer.hardware.device_specs import DeviceSpec
from trainer.launch.cluster import pluralize
from trainer.launch.initial_checks import validate_initial_weights
from trainer.launch.initial_tokenizer import validate_initial_tokenizer
from trainer.launch.launcher import collecting, corpora_problems
from trainer.new.epochs import describe_repetition
from trainer.new.model_source import ModelSource
from trainer.plan import search as layouts
from trainer.plan.__main__ import pinned_keys
from trainer.plan.layout_words import TOML_SECTIONS, describe_layout
from trainer.plan.search import SearchResult
from trainer.plan.tracing import Trace
from trainer.slurm.__main__ import render_script
from trainer.storage.run_dir import RunDir

Values = dict[str, Any]

CHECKPOINT_LEAD_SECONDS = 180
"""Time before a job's end for two checkpoints, besides two steps."""
MORE_DEVICES = (2, 4, 8)
"""Multiples of the devices that are tried if none of their layouts fits."""
STATED_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Degrees that stand in the file even where they are 1: their product is the world size."""


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run whose choices are all made."""

    source: ModelSource
    given: Values
    """The values that the command line states."""
    config: Recipe
    """The configuration before a layout is chosen."""
    corpus_tokens: int | None
    """Tokens of the corpora, estimated; None if unknown."""
    device: DeviceSpec
    world_size: int
    ranks_per_node: int
    answers: Sequence[str]
    """Options that stand for what was answered on a terminal."""

    @property
    def is_cluster(self) -> bool:
        return "slurm" in self.given

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    @property
    def remarks(self) -> list[str]:
        """Notes on the model and the corpus that a user should read."""
        training = self.config.training
        longest = self.source.max_positions
        seq_len = training.seq_len
        remarks = [*self.source.remarks]
        if longest is not None and seq_len > longest and "rope" not in self.given.get("model", {}):
            remarks.append(
                f"the weights were trained for {longest:,} tokens: for {seq_len:,} choose model.rope, "
                "as theta = 2.8e9 of train_configs/llama3_8b_1m.toml"
            )
        if repetition := describe_repetition(
            self.corpus_tokens, training.tokens_per_step, training.steps
        ):
            remarks.append(repetition)
        return remarks

    def fastest_layouts(self, overrides: Sequence[str], trace: Trace) -> SearchResult:
        """The layouts that fit, fastest first.

        Raises `ConfigError` if the run cannot start, `DoesNotFitError` if none fits.
        """
        config = self.config
        if problems := [*_problems(config)]:
            raise ConfigError(problems)
        pinned = pinned_keys(overrides)
        result = layouts.search(config, self.world_size, self.device, pinned=pinned, trace=trace)
        if result.problems:
            raise ConfigError([*result.problems])
        if not result.best:
            raise DoesNotFitError(*self._shortage(config, result, pinned))
        return result

    def _shortage(
        self, config: Recipe, result: SearchResult, pinned: Sequence[str]
    ) -> Iterator[str]:
        """Why nothing fits, and what would."""
        seq_len = config.training.seq_len
        problem = f"{seq_len:,} tokens fit no layout of {self.world_size:,} x {self.device.name}"
        # None if no trace shows even the leanest.
        for leanest in result.not_fitting[:1]:
            problem += f"; with {describe_layout(leanest)}, {leanest.memory_shortages[0]}"
        yield problem
        fits = partial(self._fits, pinned=pinned)
        sizes = [factor * self.world_size for factor in MORE_DEVICES]
        enough = next((size for size in sizes if fits(config, size)), None)
        if enough is None:
            yield f"nor any layout of {sizes[-1]:,} devices"
        else:
            yield f"{enough:,} devices would do: --gpus {enough}"
        # Of lengths, the shortest first: where that does not fit, none does.
        shortest = layouts.with_seq_len(config, layouts.SEQ_LEN_STEP)
        if seq_len <= layouts.SEQ_LEN_STEP or not fits(shortest, self.world_size):
            yield "shorter sequences do not fit either"
            return
        length = seq_len // 2
        while length > layouts.SEQ_LEN_STEP and not fits(
            layouts.with_seq_len(config, length), self.world_size
        ):
            length //= 2
        yield f"{max(length, layouts.SEQ_LEN_STEP):,} tokens would: --seq-len {max(length, layouts.SEQ_LEN_STEP)}"

    def _fits(self, config: Recipe, world_size: int, *, pinned: Sequence[str]) -> bool:
        """Whether a layout of `world_size` devices fits, by its trace."""
        if not layouts.any_layout_might_fit(config, world_size, self.device, pinned=pinned):
            return False
        result = layouts.search(
            config, world_size, self.device, max_results=1, min_traced=1, pinned=pinned
        )
        return bool(result.best)

    def toml(self, best: Config, step_seconds: float) -> str:
        """The configuration on the layout of a plan."""
        values = best.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        for name in TOML_SECTIONS:
            section = getattr(best, name)
            stated = self.given.get(name, {})
            fields = type(section).model_fields
            values[name] = {
                key: value
                for key, value in values[name].items()
                if key in stated
                or key in STATED_DEGREES
                or getattr(section, key) != fields[key].default
            }
        # Left to the run, whose start-up check may have to take the next kernel.
        if "attention" not in self.given.get("training", {}):
            values["training"].pop("attention", None)
        if self.is_cluster and "lead_seconds" not in self.given["slurm"]:
            lead = 60 * ceil((2 * step_seconds + CHECKPOINT_LEAD_SECONDS) / 60)
            values["slurm"]["lead_seconds"] = max(lead, SlurmSection().lead_seconds)
        header = (
            f"# Written by longhaul new; {best.job.name}.md says why. Any key may be changed.\n"
        )
        return header + values_to_toml(values)

    def next_commands(self, config: Config, file: Path) -> Iterator[tuple[str, str]]:
        """The commands that follow, each with what it does."""
        argument = ("--config", file)
        # Nothing is tokenized for a synthetic corpus.
        if not config.data.is_synthetic:
            yield typed("prepare", *argument), "tokenize the corpus before a GPU waits for it"
        yield typed("selfcheck", *argument), "compare the mesh with one process, on this CPU"
        if self.is_cluster:
            yield typed("slurm", "submit", *argument), "submit the job, which requeues itself"
            return
        command = f"NGPU={self.ranks_per_node} {typed('train', *argument)}"
        if self.num_nodes == 1:
            yield command, "train"
            return
        variables = f"NNODES={self.num_nodes} NODE_RANK=0 MASTER_ADDR=NODE0 MASTER_PORT=29500"
        where = f"on {pluralize(self.num_nodes, 'node')}, each with its own NODE_RANK"
        yield f"{variables} {command}", where


def _problems(config: Recipe) -> Iterator[str]:
    """Everything that keeps the run from starting on any layout."""
    yield from (model_problems := config.model.problems())
    yield from checks.data_section_problems(config.data)
    yield from checks.slurm_problems(config.slurm)
    yield from RunDir(config.output_dir).problems()
    if model_problems:
        return
    yield from checks.data_problems(config)
    yield from corpora_problems(config)
    found = list[str]()
    for validate in (validate_initial_weights, validate_initial_tokenizer):
        with collecting(found):
            validate(config)
    yield from found


def script(file: Path) -> str:
    """The batch script of the configuration in a file."""
    argument = ["--config", str(file.absolute())]
    return render_script(load(argument), argument)
