"""What a run goes on from, or begins with: loaded into the trainer, if it is of this run and whole."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.distributed import ProcessGroup

from models.hf_config import HuggingFaceError
from parallelisms.collectives import all_gather_object
from trainer.checkpoint.initial_weights import is_hugging_face, load_hf_weights, resolve_initial_path
from trainer.checkpoint.load import MODEL_PREFIX, load_tensors
from trainer.checkpoint.rank_sync import run_on_all_ranks
from trainer.checkpoint.run_dir import RunDir, check_resume, describe_differences, flatten_config
from trainer.checkpoint.verify import latest_verified_checkpoint, require_verified
from trainer.config.job_config import Config
from trainer.errors import EXIT_NO_RETRY, RankFailedError, ResumeError, RunFailedError
from trainer.trainer import Trainer

log = logging.getLogger("trainer")


def resume(config: Config, run_dir: RunDir, trainer: Trainer, group: ProcessGroup) -> Path | None:
    """Loads the newest good checkpoint into the trainer, if there is one; else weights to begin with. Collective.

    Raises `ResumeError` when it is of another run or holds other tensors than the trainer needs, or when there are
    checkpoints and none is good; `RunError` when one cannot be read now, or is of another stage than this trainer.
    """
    checkpoint = latest_verified_checkpoint(run_dir, group) if config.checkpoint.enabled else None
    if checkpoint is None:
        if config.checkpoint.initial_load_path is not None:
            _load_initial_weights(config.checkpoint.initial_load_path, trainer, group)
        return None
    state = run_on_all_ranks(lambda: check_resume(config, checkpoint), group)
    if state["step"] < trainer.stage.start_step:
        raise RunFailedError(
            f"{trainer.stage} cannot go on from {checkpoint}, which is of update {state['step']} of an earlier one; "
            "the same command goes on from there"
        )
    saved_data, current_data = state["data"], trainer.dataset.fingerprints
    shared = saved_data.keys() & current_data.keys()
    if starts_new_stage := state["stage"]["index"] != trainer.stage.index:
        saved_data = {name: saved_data[name] for name in shared}
        current_data = {name: current_data[name] for name in shared}
    if mismatches := describe_differences(saved_data, current_data):
        raise ResumeError(f"{checkpoint} was trained on other data: {'; '.join(mismatches)}")
    prefix = MODEL_PREFIX if starts_new_stage and trainer.stage.resets_optimizer else ""
    tensors = {name: tensor for name, tensor in trainer.state_dict().items() if name.startswith(prefix)}
    load_tensors(checkpoint, tensors, trainer.mesh.pp_group, prefix=prefix, group=group)
    trainer.load_train_state(state["trainer"])
    trainer.config_changes = (
        [] if starts_new_stage else describe_differences(state["config"], flatten_config(trainer.config))
    )
    return checkpoint


def _load_initial_weights(initial: str, trainer: Trainer, group: ProcessGroup) -> None:
    """Only the weights. What is wrong with them on this rank alone raises `RankError`."""
    # Another run may commit while ranks look for its newest.
    folder = all_gather_object(run_on_all_ranks(lambda: resolve_initial_path(initial), group), group)[0]
    if is_hugging_face(initial):
        try:
            load_hf_weights(folder, trainer.config.model.build(), trainer.optimizer.parameters_by_name)
        except HuggingFaceError as error:
            raise RankFailedError(EXIT_NO_RETRY, str(error)) from error
    else:
        require_verified(folder, group)
        weights = {name: tensor for name, tensor in trainer.state_dict().items() if name.startswith(MODEL_PREFIX)}
        load_tensors(folder, weights, trainer.mesh.pp_group, prefix=MODEL_PREFIX, group=group)
    log.info("the run begins with the weights of %s", folder)
