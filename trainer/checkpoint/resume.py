"""Resume: verify the newest checkpoint, quarantine damaged ones, and load the state; or load the
initial weights.

The ranks share the hashing of a checkpoint's files. A file that cannot be read now is not damaged:
the run fails with a retryable error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from models.config import ModelConfig
from models.hf import HuggingFaceError, SafetensorsReader
from parallelisms.init_weights import local_ranges
from parallelisms.mesh.collectives import all_gather_values, to_local
from trainer.checkpoint.initial_weights import is_hugging_face, is_text_only, resolve_initial_path
from trainer.checkpoint.load import MODEL_PREFIX, find_metadata_damage, load_tensors
from trainer.checkpoint.rank_sync import run_and_gather, run_on_all_ranks, run_on_rank_zero
from trainer.checkpoint.save import current_versions, optimizer_steps
from trainer.config.job_config import Config
from trainer.errors import (
    EXIT_NO_RETRY,
    RankFailedError,
    ResumeError,
    RunFailedError,
    UnreadableError,
)
from trainer.step.trainer import Trainer
from trainer.storage import lineage, manifest
from trainer.storage.artifact import DamageError
from trainer.storage.manifest import Manifest
from trainer.storage.retention import quarantine
from trainer.storage.run_dir import (
    RunDir,
    branch_command,
    check_resume,
    describe_differences,
    flatten_config,
    raise_if_all_damaged,
)
from trainer.storage.train_state import STATE_FILE, TrainState

log = logging.getLogger("trainer")


def resume(config: Config, run_dir: RunDir, trainer: Trainer, group: ProcessGroup) -> Path | None:
    """Loads the newest intact checkpoint and returns it, or loads the initial weights and returns
    None. Collective.

    Raises `ResumeError` if the checkpoint is of another run, has other tensors or data, or if all
    are damaged. Raises `RunFailedError` if it cannot be read now or is of an earlier stage than
    the trainer.
    """
    checkpoint = latest_verified_checkpoint(run_dir, group) if config.checkpoint.enabled else None
    if checkpoint is None:
        if config.checkpoint.initial_load_path is not None:
            _load_initial_weights(config.checkpoint.initial_load_path, trainer, group)
        return None
    state = run_on_all_ranks(lambda: check_resume(config, checkpoint), group)
    if config.checkpoint.initial_load_path is not None:
        log.info(
            "checkpoint.initial_load_path is ignored: the run has checkpoints and resumes from the newest"
        )
    if state.step < trainer.stage.start_step:
        raise RunFailedError(
            f"{trainer.stage} cannot resume from {checkpoint}, which is at step {state.step} of an earlier stage; "
            "run the same command again to resume that stage"
        )
    starts_new_stage = state.stage.index != trainer.stage.index
    _require_same_data(run_dir, checkpoint, state, trainer)
    optimizer_start = run_on_all_ranks(lambda: _optimizer_start(config, state), group)
    # Where the optimizer starts only weights are taken; its moments stay zero.
    resets_optimizer = starts_new_stage and trainer.stage.resets_optimizer
    prefix = MODEL_PREFIX if resets_optimizer or optimizer_start == state.step else ""
    tensors = {
        name: tensor for name, tensor in trainer.state_dict().items() if name.startswith(prefix)
    }
    load_tensors(checkpoint, tensors, trainer.mesh.pp_group, prefix=prefix, group=group)
    _log_other_versions(manifest.read(checkpoint))
    trainer.load_train_state(state.trainer.model_dump())
    if not prefix:
        run_on_all_ranks(
            lambda: _require_one_step(checkpoint, state, tensors, optimizer_start), group
        )
    trainer.config_changes = (
        []
        if starts_new_stage
        else describe_differences(state.config, flatten_config(trainer.config))
    )
    return checkpoint


def _require_same_data(
    run_dir: RunDir, checkpoint: Path, state: TrainState, trainer: Trainer
) -> None:
    """Raises `ResumeError` if the checkpoint was trained on other data, or on data packed
    otherwise.
    """
    saved_data = state.data
    current_data = trainer.dataset.fingerprints
    starts_new_stage = state.stage.index != trainer.stage.index
    if starts_new_stage:
        # Of the copy task, which fits the sequence length, each stage has another version.
        shared = (
            set() if trainer.config.data.is_synthetic else saved_data.keys() & current_data.keys()
        )
        saved_data, current_data = (
            {name: data[name] for name in shared} for data in (saved_data, current_data)
        )
    fresh_data = branch_command(run_dir.path, checkpoint, "--fresh-data")
    hint = f"; to train on with this data, in a run of its own: {fresh_data}"
    # A branch with fresh data has read nothing yet.
    if state.data and (mismatches := describe_differences(saved_data, current_data)):
        listed = "; ".join(mismatches)
        raise ResumeError(f"{checkpoint} was trained on other data: {listed}{hint}")
    plans = trainer.dataset.plan_fingerprints
    if (
        state.plans
        and not starts_new_stage
        and (mismatches := describe_differences(state.plans, plans))
    ):
        raise ResumeError(
            f"{checkpoint} was trained on otherwise packed data: {'; '.join(mismatches)}{hint}"
        )


def _optimizer_start(config: Config, state: TrainState) -> int:
    """The step after which the optimizer of a checkpoint started."""
    branch = lineage.read(config.output_dir)
    stages = config.training_stages[: state.stage.index + 1]
    starts = [stage.start_step for stage in stages if stage.resets_optimizer]
    return max([0 if branch is None else branch.optimizer_start, *starts])


def _require_one_step(
    checkpoint: Path, state: TrainState, tensors: Mapping[str, Tensor], start: int
) -> None:
    """Raises `ResumeError` if the optimizer's tensors are of another step than `state.json`.

    `start`: the step after which the optimizer started.
    """
    # The optimizer counts the steps since its last reset that were not skipped. Skips are counted
    # over the whole run, so after a reset they only bound the number.
    most = state.step - start
    least = most - state.trainer.skipped
    found = optimizer_steps(tensors)
    if found is not None and not (
        least <= found <= (most if start else least) and state.optimizer_steps in (None, found)
    ):
        raise ResumeError(
            f"{checkpoint} does not fit together: its optimizer tensors count {found} steps, and {STATE_FILE} is for step "
            f"{state.step}, of which {state.trainer.skipped} were skipped"
        )


def _log_other_versions(written: Manifest) -> None:
    """Logs the versions that wrote the checkpoint, where they differ from these."""
    current = current_versions()
    if others := [
        f"{name} {version}"
        for name, version in written.versions.items()
        if current.get(name) != version
    ]:
        now = ", ".join(f"{name} {version}" for name, version in current.items())
        log.info("the checkpoint was written with %s; these are %s", ", ".join(others), now)


def _load_initial_weights(initial: str, trainer: Trainer, group: ProcessGroup) -> None:
    """Loads the weights that `checkpoint.initial_load_path` names.

    Raises `RankFailedError` for a Hugging Face model that only this rank cannot read.
    """
    # Rank 0 chooses: the other run may commit a checkpoint while the ranks look.
    cache = trainer.config.data.cache_dir
    folder = Path(run_and_gather(lambda: str(resolve_initial_path(initial, cache)), group)[0])
    weights = {
        name: tensor
        for name, tensor in trainer.state_dict().items()
        if name.startswith(MODEL_PREFIX)
    }
    if is_hugging_face(initial):
        try:
            reader = SafetensorsReader(folder, text_only=is_text_only(initial))
            by_name = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in weights.items()}
            _load_hf_weights(reader, trainer.config.model.build(), by_name)
        except HuggingFaceError as error:
            raise RankFailedError(EXIT_NO_RETRY, str(error)) from error
    else:
        require_verified(folder, group)
        load_tensors(folder, weights, trainer.mesh.pp_group, prefix=MODEL_PREFIX, group=group)
    log.info("initial weights: %s", folder)


def _load_hf_weights(
    reader: SafetensorsReader, model: ModelConfig, weights: Mapping[str, Tensor]
) -> None:
    """Fills this rank's weights, reading only its shards from safetensors. Raises
    `HuggingFaceError`.

    The counts of routers, which no folder has, stay.
    """
    specs = reader.specs(model)
    stored = [name for name in weights if name not in model.buffers or model.buffers[name].hf_name]
    for name in stored:
        spec = specs[name]
        ranges = local_ranges(weights[name])
        values = reader.read(spec, ranges)
        # A NaN in one weight reaches all gradients, and every step would be skipped.
        if not bool(values.isfinite().all()):
            raise HuggingFaceError([f"{spec.name} has values that are not finite"])
        to_local(weights[name]).copy_(values)
        # Some tied models store the head, too. If it differs from the embedding, the model is not
        # tied, and loading would lose the head.
        if name == "embed.weight" and (problems := reader.tied_head_problems(model, ranges)):
            raise HuggingFaceError(problems)


# ---- verification


def latest_verified_checkpoint(run_dir: RunDir, group: ProcessGroup) -> Path | None:
    """The newest checkpoint with intact files; None if the run has no checkpoint. Collective.

    Quarantines damaged checkpoints as `bad-step-*`, and those that the device cannot read, once
    one before them is intact. Raises `ResumeError` if all are damaged, or `RunFailedError`.
    """
    # Rank 0's listing counts for all: each verification is collective, so all ranks need the same
    # list.
    committed = all_gather_values(
        [str(path) for _, path in run_dir.committed_checkpoints()], group
    )[0]
    unreadable = dict[Path, UnreadableError]()
    for checkpoint in map(Path, reversed(committed)):
        try:
            problems = verify_checkpoint(checkpoint, group)
        except UnreadableError as error:
            unreadable[checkpoint] = error
            continue
        if not problems:
            # An older checkpoint is readable, so the device works and the file is lost. Without
            # one, nothing is renamed: the device may recover.
            for other, problem in unreadable.items():
                run_on_rank_zero(partial(_quarantine, run_dir, other, str(problem)), group)
            return checkpoint
        run_on_rank_zero(partial(_quarantine, run_dir, checkpoint, "; ".join(problems)), group)
    for problem in unreadable.values():
        raise problem
    run_on_rank_zero(lambda: raise_if_all_damaged(run_dir), group)
    return None


def require_verified(checkpoint: Path, group: ProcessGroup | None) -> None:
    """Raises `ResumeError` or `RunFailedError` unless all files are intact.

    Renames nothing. Collective.
    """
    if problems := verify_checkpoint(checkpoint, group):
        raise ResumeError(f"{checkpoint} is damaged: {'; '.join(problems)}")


def verify_checkpoint(checkpoint: Path, group: ProcessGroup | None) -> list[str]:
    """Damage of a checkpoint's files, the same on all ranks.

    Collective. Raises `ResumeError` or `RunFailedError`.
    """

    def read_manifest() -> dict[str, Any]:
        try:
            found = manifest.read_validated(checkpoint)
        except DamageError as error:
            return {"damage": [str(error)]}
        damage = manifest.find_damage(checkpoint, found, found.files, check_hashes=False)
        return {"damage": damage, "manifest": found.model_dump_json()}

    # Of rank 0 for all: another may not see the file yet.
    answer = run_on_rank_zero(read_manifest, group)
    if answer["damage"]:
        return list(answer["damage"])
    found = Manifest.model_validate_json(answer["manifest"])
    # Each rank hashes its share of the files, so that terabytes are read once, by all nodes.
    rank_files = sorted(found.files)[
        distributed.get_rank(group) :: distributed.get_world_size(group)
    ]
    damage = [
        *chain(*run_and_gather(lambda: manifest.find_damage(checkpoint, found, rank_files), group))
    ]
    return damage or run_on_rank_zero(lambda: find_metadata_damage(checkpoint), group)


def _quarantine(run_dir: RunDir, checkpoint: Path, reason: str) -> None:
    try:
        quarantined = quarantine(checkpoint, reason)
    except OSError as error:
        raise RunFailedError(
            f"{checkpoint} is damaged ({reason}) and cannot be renamed: {error.strerror}"
        ) from None
    log.warning("%s is damaged, renamed to %s: %s", checkpoint, quarantined.name, reason)
    run_dir.log_event("quarantined", path=str(checkpoint), moved=str(quarantined), reason=reason)
