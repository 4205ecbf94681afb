"""Composes a new run from its choices, and from defaults for all else."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer.commands import count
from trainer.config import extension
from trainer.config.data import COPY_CORPUS
from trainer.config.parse import (
    COMMAND_LINE,
    ConfigSource,
    deep_merge,
    merge_sources,
    parse_arguments,
)
from trainer.config.sections import TrainingSection
from trainer.config.slurm import SlurmSection
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.hardware.device_specs import DEFAULT_DEVICE, detect_device, load_device
from trainer.new.choices import CORPUS, Choices, Question
from trainer.new.epochs import enough_steps, estimated_tokens
from trainer.new.layout import NewRun, Values
from trainer.new.model_source import (
    MODEL_HELP,
    TOKENIZER_HELP,
    ModelSource,
    open_model,
    open_tokenizer_section,
)

TOKENS_PER_STEP = 1 << 22
"""Tokens per step that are aimed at, as in the shipped configurations of long sequences."""
STEPS = 1000
WARMUP_SHARE = 10
"""The steps of a run over those of its warmup."""
TUNING_LR = 2e-5
"""Peak learning rate of a run that starts from weights: Gradient's for Llama 3 at 1M."""
CHECKPOINT_MINUTES = 30.0
"""Limit between checkpoints: a step of long sequences may take minutes."""


def given_values(name: str, overrides: list[str]) -> Values:
    """The values that the command line states, with the name. Raises `ConfigError`."""
    arguments = parse_arguments(overrides)
    problems = [*arguments.problems]
    if arguments.values.get("job", {}).get("name", name) != name:
        problems.append(f"{COMMAND_LINE}: --job.name is NAME, {name}: leave it out")
    values = deep_merge(arguments.values, {"job": {"name": name}})
    return merge_sources([ConfigSource(name=COMMAND_LINE, values=values, typed=False)], problems)


class RunChoices:
    """The choices of a run: given as options or keys, or asked for."""

    def __init__(
        self,
        options: Namespace,
        given: Values,
        environment: Mapping[str, str],
        *,
        is_terminal: bool,
    ) -> None:
        self.options = options
        self.given = given
        self.environment = environment
        self.choices = Choices(is_terminal)

    def new_run(self) -> NewRun:
        """The run with all choices made. Raises `ConfigError` with all that are missing."""
        source = self._source()
        seq_len = self.choices.choose(
            self._stated("training", "seq_len"),
            Question("--seq-len", "tokens of a sequence", length, "128K"),
        )
        device = self.choices.choose(
            self._stated("plan", "device") or detected_device(),
            Question("--device", "device, a name or a file", known_device, DEFAULT_DEVICE),
        )
        world_size = self._world_size(device)
        corpus = self.choices.choose(self._stated("data", "corpus"), CORPUS)
        tokenizer = self._tokenizer(source, corpus)
        # All at once, so that one call names everything that a script has to add.
        if not source or not seq_len or not device or not world_size or self.choices.missing:
            raise ConfigError(self.choices.missing)
        defaults: Values = {
            "tokenizer": tokenizer,
            "data": {"corpus": corpus},
            "training": {
                "seq_len": seq_len,
                "global_batch_size": max(1, TOKENS_PER_STEP // seq_len),
            },
            "checkpoint": {"interval_minutes": CHECKPOINT_MINUTES},
            "optimizer": {"lr": TUNING_LR} if source.has_weights else {},
            "slurm": self._job(world_size, device) if "slurm" in self.given else {},
            "plan": {"device": device},
        }
        values = deep_merge(deep_merge(source.values, defaults), self.given)
        config = Recipe.model_validate(values)
        corpus_tokens = estimated_tokens(config)
        return NewRun(
            source=source,
            given=self.given,
            config=Recipe.model_validate(
                deep_merge(self._duration(config.training, corpus_tokens), values)
            ),
            corpus_tokens=corpus_tokens,
            device=load_device(device),
            world_size=world_size,
            ranks_per_node=min(self._ranks_per_node(device), world_size),
            answers=self.choices.answers,
        )

    def _duration(self, training: TrainingSection, corpus_tokens: int | None) -> Values:
        steps = self._stated("training", "steps") or enough_steps(
            corpus_tokens, training.tokens_per_step, STEPS
        )
        return {"training": {"steps": steps}, "schedule": {"warmup_steps": steps // WARMUP_SHARE}}

    def _stated(self, section: str, key: str) -> Any:
        return self.given.get(section, {}).get(key)

    def _source(self) -> ModelSource | None:
        extension.install(self.given["job"].get("extension", ()))
        find_model = partial(
            open_model,
            environment=self.environment,
            text_only=self.options.text_only,
            ignore_keys=self.options.ignore_key,
        )
        name = self.options.model
        return self.choices.choose(
            None if name is None else find_model(name),
            Question("--model", MODEL_HELP, find_model),
        )

    def _tokenizer(self, source: ModelSource | None, corpus: str | None) -> Values:
        """The section [tokenizer]: the stated one, else the model's own."""
        if self.options.tokenizer is not None:
            return open_tokenizer_section(self.options.tokenizer)
        is_known = source is None or "tokenizer" in source.values or "tokenizer" in self.given
        if is_known or corpus == COPY_CORPUS:
            return {}
        question = Question("--tokenizer", TOKENIZER_HELP, open_tokenizer_section)
        return self.choices.choose(None, question) or {}

    def _world_size(self, device: str | None) -> int | None:
        ranks_per_node = self._ranks_per_node(device)
        nodes = self.options.nodes or self._stated("slurm", "nodes")
        stated = {self.options.gpus, nodes and nodes * ranks_per_node} - {None}
        # Both may be given if they agree.
        if len(stated) > 1:
            raise ConfigError(
                [
                    f"--gpus {self.options.gpus} must be the devices of {nodes} nodes, "
                    f"{nodes * ranks_per_node}, or be left out"
                ]
            )
        question = Question("--gpus", "number of devices", count, str(ranks_per_node))
        return self.choices.choose(stated.pop() if stated else None, question)

    def _ranks_per_node(self, device: str | None) -> int:
        if self._stated("slurm", "gpus_per_node") is not None:
            return SlurmSection.model_validate(self.given["slurm"]).nproc_per_node
        return load_device(device or DEFAULT_DEVICE).devices_per_node

    def _job(self, world_size: int, device: str) -> Values:
        """Nodes and devices of the job. Raises `ConfigError` unless its nodes are alike."""
        ranks_per_node = min(self._ranks_per_node(device), world_size)
        if world_size % ranks_per_node:
            raise ConfigError(
                [f"--gpus {world_size} must be a multiple of the {ranks_per_node} of a node"]
            )
        return {"nodes": world_size // ranks_per_node, "gpus_per_node": ranks_per_node}


def length(text: str) -> int:
    """The parser of a sequence length."""
    return count(text, minimum=2)


def known_device(name: str) -> str:
    """The parser of a device's name."""
    load_device(name)
    return name


def detected_device() -> str | None:
    device = detect_device()
    return None if device is None else device.name
