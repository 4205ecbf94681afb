"""What a run goes on from, or begins with: loaded into the trainer, if it is of this run and whole."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.distributed import ProcessGroup

from models.hf_config import HuggingFaceError
from parallelisms.collectives import gather_over
from trainer.checkpoint.initial_weights import folder_of, is_hugging_face, load_hugging_face
from trainer.checkpoint.load import WEIGHTS, load
from trainer.checkpoint.rank_sync import everywhere
from trainer.checkpoint.run_dir import RunFolder, check_resume, differences, flat
from trainer.checkpoint.verify import newest_good, require_good
from trainer.config.job_config import Config
from trainer.errors import NO_RETRY, RankError, ResumeError, RunError
from trainer.trainer import Trainer

log = logging.getLogger("trainer")


def resume(config: Config, folder: RunFolder, trainer: Trainer, group: ProcessGroup) -> Path | None:
    """Loads the newest good checkpoint into the trainer, if there is one; else weights to begin with. Collective.

    Raises `ResumeError` when it is of another run or holds other tensors than the trainer needs, or when there are
    checkpoints and none is good; `RunError` when one cannot be read now, or is of another stage than this trainer.
    """
    checkpoint = newest_good(folder, group) if config.checkpoint.enabled else None
    if checkpoint is None:
        if config.checkpoint.initial is not None:
            _begin(config.checkpoint.initial, trainer, group)
        return None
    state = everywhere(lambda: check_resume(config, checkpoint), group)
    if state["step"] < trainer.stage.first_step:
        raise RunError(
            f"{trainer.stage} cannot go on from {checkpoint}, which is of update {state['step']} of an earlier one; "
            "the same command goes on from there"
        )
    theirs, mine = state["data"], trainer.rows.fingerprints
    shared = theirs.keys() & mine.keys()
    if begins := state["stage"]["index"] != trainer.stage.index:
        theirs = {name: theirs[name] for name in shared}
        mine = {name: mine[name] for name in shared}
    if changed := differences(theirs, mine):
        raise ResumeError(f"{checkpoint} was trained on other data: {'; '.join(changed)}")
    prefix = WEIGHTS if begins and trainer.stage.is_fresh else ""
    tensors = {name: tensor for name, tensor in trainer.tensors().items() if name.startswith(prefix)}
    load(checkpoint, tensors, trainer.mesh.pp, prefix=prefix, group=group)
    trainer.restore(state["trainer"])
    trainer.changes = [] if begins else differences(state["config"], flat(trainer.config))
    return checkpoint


def _begin(initial: str, trainer: Trainer, group: ProcessGroup) -> None:
    """Only the weights. What is wrong with them on this rank alone raises `RankError`."""
    # Another run may commit while ranks look for its newest.
    folder = gather_over(everywhere(lambda: folder_of(initial), group), group)[0]
    if is_hugging_face(initial):
        try:
            load_hugging_face(folder, trainer.config.model.build(), trainer.optimizer.named)
        except HuggingFaceError as error:
            raise RankError(NO_RETRY, str(error)) from error
    else:
        require_good(folder, group)
        weights = {name: tensor for name, tensor in trainer.tensors().items() if name.startswith(WEIGHTS)}
        load(folder, weights, trainer.mesh.pp, prefix=WEIGHTS, group=group)
    log.info("the run begins with the weights of %s", folder)
