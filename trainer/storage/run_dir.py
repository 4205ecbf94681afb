"""The run folder: paths, committed checkpoints, and whether a configuration can resume from it.
Imports no torch.

config.toml                resolved configuration of the newest launch
lineage.json               the checkpoint of another run that this one branched from, if any
initial/                   weights of another run that a branch starts from, if it takes only these
prediction.json            memory and step time that the launcher predicted
metrics.jsonl              one line per logged step
events.jsonl               starts, resumes, checkpoints, validations, skipped steps, the end
run_id                     the name of the run in Weights & Biases, trackio and MLflow, and at checkpoint.remote
tensorboard/  logs/
checkpoints/step-<N>/      committed by a rename; its manifest lists every file with its hash
checkpoints/.tmp-*/        being written or deleted, or left by a killed process
checkpoints/bad-step-<N>-* damaged and quarantined
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.files import MAX_LINE_BYTES
from trainer.command_table import typed
from trainer.config import extension
from trainer.config.data import PACKING_VERSION
from trainer.config.job_config import Config, TrainingStage
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError, RunError, UnreadableError
from trainer.errors import ResumeError as ResumeError
from trainer.storage import lineage, manifest
from trainer.storage.artifact import DamageError, open_regular, parse_object
from trainer.storage.durable_io import LineAppender, write_atomic
from trainer.storage.retention import list_quarantined, parse_step
from trainer.storage.train_state import StagePosition, TrainState, flatten, flatten_model

log = logging.getLogger("trainer")

# Values that must not change on resume. The path of the corpus may change: its fingerprint is
# compared instead.
IDENTITY_KEYS = (
    *(
        "model.",
        "tokenizer.kind.",
        "data.",
        "training.seq_len.",
        "training.seed.",
        "optimizer.name.",
    ),
    "extension.",
)
NON_IDENTITY_KEYS = (
    "model.model_type",
    "data.cache_dir",
    "data.remote_cache_gib",
    "data.bad_files",
    "data.corpus",
    "data.files",
    "data.workers",
)

# Values that fix what the weights mean, or their shapes: a branch cannot change them either.
FIXED_KEYS = ("model.", "tokenizer.kind.")
ROPE_KEYS = ("model.rope.", "model.local_rope.")
TYPEABLE_KEYS = ("training.", "optimizer.", "data.packing", "data.mask", "data.holdout")
"""Identity keys of which every value can be written on a command line."""
BEFORE_START = ("restart", "quarantined", "remote_damaged", "checkpoint_downloaded")
"""Events of the launcher, and of the search for a checkpoint."""


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.prediction_path = path / "prediction.json"
        self.events_path = path / "events.jsonl"
        self._event_log = LineAppender(self.events_path)
        self.tensorboard_dir = path / "tensorboard"
        self.checkpoints_dir = path / "checkpoints"
        self.logs_dir = path / "logs"
        self.hangs_dir = self.logs_dir / "hang"
        self.require_lease: Callable[[], None] = lambda: None
        """Hook that raises `RunFailedError` if another launch has taken the folder over.

        The launch that trains sets it.
        """
        self.announce_event: Callable[[dict[str, Any]], None] = lambda _: None
        """Hook that is called with every event that this process logs, from any of its threads."""
        self.announce_commit: Callable[[], None] = lambda: None
        """Hook that is called after a checkpoint was committed; `Uploads` sets it."""
        self.is_in_use: Callable[[Path], bool] = lambda _: False
        """Hook that says whether a checkpoint is read and must stay; `Uploads` sets it."""

    def create(self) -> None:
        """Creates the folder.

        Raises `ConfigError` if it is not writable, or holds something else in place of a file.
        """
        if problems := self.problems():
            raise ConfigError(problems)
        try:
            for folder in (self.checkpoints_dir, self.logs_dir):
                folder.mkdir(parents=True, exist_ok=True)
            # Permission bits do not show a read-only mount, a quota, or root squash on NFS.
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ConfigError(
                [f"job.output_dir = {self.path} is not writable: {error.strerror}"]
            ) from None

    def problems(self) -> list[str]:
        """Why a run could not write here. Creates nothing."""
        try:
            return self._problems()
        except OSError as error:
            return [f"job.output_dir = {self.path} cannot be used: {error.strerror}"]

    def _problems(self) -> list[str]:
        # The nearest folder that exists decides whether the rest can be created.
        folder = next(
            each for each in (self.path.absolute(), *self.path.absolute().parents) if _exists(each)
        )
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            reason = "is not writable" if folder.is_dir() else "is not a folder"
            return [f"job.output_dir = {self.path} cannot be used: {folder} {reason}"]
        files = [self.config_path, self.metrics_path, self.prediction_path, self.events_path]
        files += self.logs_dir.glob("rank-*.log")
        return [
            f"{path} is not a regular file"
            for path in files
            if _exists(path) and not path.is_file()
        ]

    def record_start(self, config: Config, step: int) -> None:
        """Writes config.toml and cuts metrics.jsonl after `step`.

        Called on rank 0 when a run starts or resumes.
        """
        write_atomic(self.config_path, to_toml(config).encode())
        self.truncate_metrics(step)

    def log_event(self, kind: str, **fields: Any) -> None:
        """Appends to events.jsonl. Called on rank 0."""
        event = {"time": time.time(), "event": kind, **fields}
        self._event_log.append(json.dumps(event, allow_nan=False))
        self.announce_event(event)

    def close_events(self) -> str:
        """Ends the events: see `LineAppender.close`. Called on rank 0."""
        return self._event_log.close()

    def committed_checkpoints(self) -> list[tuple[int, Path]]:
        """Committed checkpoints as (step, folder), oldest first."""
        folders = self.checkpoints_dir.glob("step-*") if self.checkpoints_dir.is_dir() else ()
        numbered = ((parse_step(folder.name), folder) for folder in folders if folder.is_dir())
        return sorted((number, folder) for number, folder in numbered if number is not None)

    def resume_checkpoint(self, config: Config) -> Path | None:
        """The checkpoint to resume from, judged by manifests alone; None for a fresh start.

        Raises as `latest_valid_checkpoint`.
        """
        return self.latest_valid_checkpoint() if config.checkpoint.enabled else None

    def latest_valid_checkpoint(self) -> Path | None:
        """The newest checkpoint with an intact manifest and `state.json`; None if the run has no
        checkpoint.

        Raises `ResumeError` if all checkpoints are damaged, `RunFailedError` if one cannot be read
        now and none before it can.
        """
        damaged = []
        unreadable = None
        for _, checkpoint in reversed(self.committed_checkpoints()):
            try:
                manifest.read_validated(checkpoint)
                return checkpoint
            except DamageError as error:
                damaged.append(f"{checkpoint.name}: {error}")
            except UnreadableError as error:
                # An older checkpoint may be readable, so look on; the error counts only if none
                # is.
                unreadable = unreadable or error
        if unreadable is not None:
            raise unreadable
        raise_if_all_damaged(self, damaged)
        return None

    def first_loss(self) -> float | None:
        """Loss of the first logged step."""
        with suppress(OSError):
            return next(
                (record.get("loss") for _, record in _read_json_lines(self.metrics_path)), None
            )
        return None

    def first_validation_loss(self, name: str) -> float | None:
        """Loss of the first validation of the set `name` since the run last started at step 0."""
        first: float | None = None
        for _, event in _read_json_lines(self.events_path):
            # Losses of an earlier run in this folder do not count.
            if event.get("event") == "start" and event.get("step") == 0:
                first = None
            elif event.get("event") == "validation" and event.get("set") == name and first is None:
                first = event.get("loss")
        return first

    def events_before_start(self) -> list[dict[str, Any]]:
        """The events that the launcher and the search for a checkpoint logged since the last
        launch started.
        """
        events = list[dict[str, Any]]()
        for _, event in _read_json_lines(self.events_path):
            kind = event.get("event")
            if kind == "start":
                events = []
            elif kind in BEFORE_START:
                events.append(event)
        return events

    def truncate_metrics(self, step: int) -> None:
        """Drops lines after `step` and a torn last line, so that a resumed run logs each step
        once.
        """
        # Steps after the checkpoint run again, and two lines of one step would be ambiguous.
        kept_lines = list[bytes]()
        num_lines = 0
        for line, record in _read_json_lines(self.metrics_path):
            num_lines += 1
            if (
                line.endswith(b"\n")
                and isinstance(number := record.get("step"), int)
                and number <= step
            ):
                kept_lines.append(line)
        if len(kept_lines) != num_lines:
            write_atomic(self.metrics_path, b"".join(kept_lines))


def find_checkpoints(path: Path) -> tuple[RunDir, list[tuple[int, Path]]]:
    """The run folder of `path` and the committed checkpoints that `path` names, oldest first.

    `path` is a run folder, which names all of its checkpoints, or one checkpoint in it.
    """
    run_dir = RunDir(path.parents[1] if path.parent.name == "checkpoints" else path)
    return run_dir, [
        entry for entry in run_dir.committed_checkpoints() if path in (run_dir.path, entry[1])
    ]


def raise_if_all_damaged(run_dir: RunDir, damaged: Sequence[str] = ()) -> None:
    """Raises `ResumeError` if there are damaged checkpoints: a run must not silently start over at
    step 0.
    """
    if reasons := [*damaged, *list_quarantined(run_dir.checkpoints_dir)]:
        listed = "".join(f"\n  {line}" for line in reasons)
        raise ResumeError(
            f"no checkpoint in {run_dir.checkpoints_dir} is intact:{listed}\n"
            f"to start over, choose another job.output_dir or remove {run_dir.checkpoints_dir}"
        )


def _exists(path: Path) -> bool:
    """Whether there is anything of this name, a link to nothing included."""
    return path.is_symlink() or path.exists()


def _read_json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line and its object, which is empty for a torn line; nothing without a file."""
    try:
        lines = open_regular(path)
    except FileNotFoundError:
        return
    except DamageError as error:
        raise ResumeError(f"{path} cannot be read: {error}") from None
    with lines:
        while line := lines.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ResumeError(
                    f"{path} cannot be read: a line has more than {MAX_LINE_BYTES:,} bytes"
                )
            value: dict[str, Any] = {}
            with suppress(DamageError):
                value = parse_object(line)
            yield line, value


def flatten_config(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, with the model preset resolved; without [job], [[stage]],
    [slurm] and [plan].
    """
    values = config.model_dump(mode="json", exclude={"job", "stage", "slurm", "plan"})
    # Replaced below by the built model, so that a preset and its values written out are the same
    # run.
    del values["model"]
    values["data"]["packing_version"] = config.data.packing_version or PACKING_VERSION
    extensions = extension.identity() | extension.source_hashes()
    return flatten(values) | flatten_model(config.model.build()) | extensions


def run_identity(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `flatten_config` that must not change when a run resumes."""
    # Sources outside the stage's mix may change.
    mixed_sources = tuple(f"data.sources.{source}." for source in _sources_of(values))
    return {
        key: value
        for key, value in values.items()
        if f"{key}.".startswith(IDENTITY_KEYS)
        and key not in NON_IDENTITY_KEYS
        and not is_source_path(key)
        and (key.startswith(mixed_sources) or not key.startswith("data.sources."))
    }


def _sources_of(values: dict[str, Any]) -> list[str]:
    """Sources of the mix; of values that a stranger has sealed, as far as they are a mix."""
    mix = values.get("data.mix")
    items = mix if isinstance(mix, list) else []
    return [str(item.get("source")) for item in items if isinstance(item, dict)]


def is_source_path(key: str) -> bool:
    """Whether the key says which files a source reads; the fingerprint of their tokens must
    stay.
    """
    return key.startswith("data.sources.") and key.endswith((".path", ".files"))


def is_fixed(key: str) -> bool:
    """Whether not even a branch can change the key."""
    return f"{key}.".startswith(FIXED_KEYS) and not key.startswith(ROPE_KEYS)


def describe_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """One line per key whose value differs."""
    return [
        f"{key} was {json.dumps(saved.get(key))} and is now {json.dumps(current.get(key))}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def check_resume(config: Config, checkpoint: Path) -> TrainState:
    """The state of the checkpoint. Raises `ResumeError` with every difference if `config` is of
    another run.

    Compares the stage that wrote the checkpoint and its start step. Later stages may change.
    """
    state = lineage.read_state(config.output_dir, checkpoint)
    index = state.stage.index
    if index >= len(config.training_stages):
        raise ResumeError(
            f"{checkpoint} is from stage {index + 1} of a run with {len(config.training_stages)} stages"
        )
    stage = config.training_stages[index]
    saved = run_identity(state.config) | flatten(state.stage.model_dump(), "stage.")
    position = flatten(stage_position(stage).model_dump(), "stage.")
    current = run_identity(flatten_config(stage.config)) | position
    mismatches = describe_differences(saved, current)
    # The last stage may have been shortened, which only ends the run; an earlier one would have
    # trained on what is now the next.
    if stage.index + 1 < stage.num_stages and state.step > stage.end_step:
        mismatches.append(
            f"{stage} was at step {state.step} and now ends at step {stage.end_step}"
        )
    if mismatches:
        listed = "".join(f"\n  {line}" for line in mismatches)
        raise ResumeError(
            f"{checkpoint} belongs to another run:{listed}\n"
            f"revert these changes or choose another job.output_dir{_branch_hint(config, checkpoint, saved, current)}"
        )
    return state


def _branch_hint(
    config: Config, checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]
) -> str:
    """How to train on from the checkpoint with the changes; empty if not even a branch can."""
    changed = [
        key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)
    ]
    if not changed or any(is_fixed(key) for key in changed):
        return ""
    # Tables and stages can only be set in a file.
    words = ["--config FILE"]
    if all(key.startswith(TYPEABLE_KEYS) for key in changed):
        values = [current[key] for key in changed]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        words = [f"--{key} {shlex.quote(text)}" for key, text in zip(changed, texts, strict=True)]
    command = " ".join([branch_command(config.output_dir, checkpoint), *words])
    return f"; to train on from here with them, in a run of its own: {command}"


def branch_command(run_folder: Path, checkpoint: Path, *words: object) -> str:
    """The command that branches from a checkpoint of the run."""
    step = checkpoint.name.removeprefix("step-")
    return typed("branch", f"{run_folder}@{step}", "NEW", *words)


def keep_packing_version(config: Recipe) -> Recipe:
    """Sets a `data.packing_version` that is left out: to that of the run's newest checkpoint, or
    to the newest version.
    """
    if config.data.packing_version is not None:
        return config
    version = None
    with suppress(RunError):  # Reported when the run resumes.
        if checkpoint := RunDir(config.output_dir).resume_checkpoint(config):
            # A run keeps its version for good: another one would pack documents into other
            # sequences.
            version = manifest.read_state(checkpoint).config.get("data.packing_version")
    data = config.data.model_copy(update={"packing_version": version or PACKING_VERSION})
    return config.model_copy(update={"data": data})


def stage_position(stage: TrainingStage) -> StagePosition:
    batch_size = stage.config.training.global_batch_size if stage.length_in_tokens else None
    return StagePosition(
        name=stage.name,
        index=stage.index,
        start_step=stage.start_step,
        global_batch_size=batch_size,
    )


def next_stage(config: Config) -> TrainingStage | None:
    """The first stage that the newest checkpoint has not completed; None if the run is done.

    Raises `ResumeError` if the run cannot resume, or if it would start over in a folder with
    checkpoints.
    """
    _, step = _resume_point(config)
    return next((stage for stage in config.training_stages if step < stage.end_step), None)


def finished_message(config: Config) -> str | None:
    """A message if the run is done, else None. Raises as `next_stage`."""
    checkpoint, step = _resume_point(config)
    first_stage = config.training_stages[0]
    if step < first_stage.total_steps:
        return None
    extend_hint = "append a [[stage]]" if first_stage.name else "raise --training.steps"
    return (
        f"already done: {checkpoint} is at step {step} of {first_stage.total_steps}. "
        f"To continue, {extend_hint}; to start over, choose another --job.output_dir or remove {config.output_dir}"
    )


def _resume_point(config: Config) -> tuple[Path | None, int]:
    """(checkpoint to resume from, its step); (None, 0) for a fresh start."""
    # Comparing with a checkpoint builds the models.
    if problems := [
        problem for stage in config.training_stages for problem in stage.config.model.problems()
    ]:
        raise ConfigError(problems)
    run_dir = RunDir(config.output_dir)
    if not config.checkpoint.enabled and run_dir.committed_checkpoints():
        raise ResumeError(
            f"checkpoint.enabled = false would start over in {run_dir.path}, which contains checkpoints; "
            "choose another job.output_dir"
        )
    checkpoint = run_dir.resume_checkpoint(config)
    if checkpoint is not None:
        return checkpoint, check_resume(config, checkpoint).step
    # Without the checkpoint that it branched from, the run would silently start over at step 0.
    if (branch := lineage.read(run_dir.path)) is not None and branch.carries_step:
        raise ResumeError(
            f"{run_dir.path} is a branch of {branch} and has lost its checkpoints; branch again"
        )
    return None, 0
