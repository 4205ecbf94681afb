"""Whether a checkpoint is what was written, by the hashes of all its files, which ranks share among them.

A run goes on from the newest that is. Others are put aside and told; what cannot be read just now is not damaged, and
ends the run for the next start to try again.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import chain
from pathlib import Path

from torch import distributed
from torch.distributed import ProcessGroup

from parallelisms.collectives import all_gather_object
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.rank_sync import run_and_gather, run_on_all_ranks
from trainer.checkpoint.retention import quarantine
from trainer.checkpoint.run_dir import RunDir, raise_if_all_damaged
from trainer.errors import ResumeError, RunFailedError

log = logging.getLogger("trainer")


def latest_verified_checkpoint(run_dir: RunDir, group: ProcessGroup) -> Path | None:
    """The newest checkpoint whose files are as they were written; None if there was never one. Collective.

    What is damaged is renamed to `bad-step-*`. Raises `ResumeError` if nothing else is there, and `RunError`.
    """
    is_rank_zero = group.rank() == 0
    committed = all_gather_object(run_dir.committed_checkpoints(), group)[0]
    for _, checkpoint in reversed(committed):
        problems = verify_checkpoint(checkpoint, group)
        if not problems:
            return checkpoint
        reason = "; ".join(problems)
        quarantine = partial(_quarantine, run_dir, checkpoint, reason) if is_rank_zero else lambda: None
        run_on_all_ranks(quarantine, group)
    run_on_all_ranks(lambda: raise_if_all_damaged(run_dir) if is_rank_zero else None, group)
    return None


def require_verified(checkpoint: Path, group: ProcessGroup | None) -> None:
    """Of a checkpoint that is not the run's own, so that nothing is renamed. Raises `ResumeError` or `RunError`."""
    if problems := verify_checkpoint(checkpoint, group):
        raise ResumeError(f"{checkpoint} is damaged: {'; '.join(problems)}")


def verify_checkpoint(checkpoint: Path, group: ProcessGroup | None) -> list[str]:
    """What is wrong with a checkpoint, on all ranks alike. Collective. Raises `ResumeError` or `RunError`."""
    rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)

    def read_manifest() -> manifest.Manifest | str | None:
        try:
            return manifest.read_validated(checkpoint) if rank == 0 else None
        except DamageError as error:
            return str(error)

    manifest_or_problem = run_and_gather(read_manifest, group)[0]
    if not isinstance(manifest_or_problem, manifest.Manifest):
        return [str(manifest_or_problem)]
    rank_files = sorted(manifest_or_problem.files)[rank::world_size]
    size_problems = run_and_gather(
        lambda: (
            manifest.find_damage(checkpoint, manifest_or_problem, manifest_or_problem.files, check_hashes=False)
            if rank == 0
            else []
        ),
        group,
    )[0]
    hash_problems = (
        []
        if size_problems
        else run_and_gather(lambda: manifest.find_damage(checkpoint, manifest_or_problem, rank_files), group)
    )
    return [*size_problems, *chain.from_iterable(hash_problems)]


def _quarantine(run_dir: RunDir, checkpoint: Path, reason: str) -> None:
    try:
        quarantined = quarantine(checkpoint, reason)
    except OSError as error:
        raise RunFailedError(f"{checkpoint} is damaged ({reason}) and cannot be put aside: {error.strerror}") from None
    log.warning("%s is damaged and was put aside as %s: %s", checkpoint, quarantined.name, reason)
    run_dir.log_event("quarantined", path=str(checkpoint), moved=str(quarantined), reason=reason)
