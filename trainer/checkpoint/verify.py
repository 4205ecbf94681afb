"""Whether a checkpoint is what was written, by the hashes of all its files, which ranks share among them.

A run goes on from the newest that is. Others are put aside and told; what cannot be read just now is not damaged, and
ends the run for the next start to try again.
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path

from torch import distributed
from torch.distributed import ProcessGroup

from parallelisms.collectives import gather_over
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.rank_sync import agreed, everywhere
from trainer.checkpoint.retention import quarantine
from trainer.checkpoint.run_dir import RunFolder, no_good_checkpoint
from trainer.errors import ResumeError, RunError

log = logging.getLogger("trainer")


def newest_good(folder: RunFolder, group: ProcessGroup) -> Path | None:
    """The newest checkpoint whose files are as they were written; None if there was never one. Collective.

    What is damaged is renamed to `bad-step-*`. Raises `ResumeError` if nothing else is there, and `RunError`.
    """
    leading = group.rank() == 0
    committed = gather_over(folder.committed(), group)[0]
    for _, checkpoint in reversed(committed):
        found = damage(checkpoint, group)
        if not found:
            return checkpoint
        reason = "; ".join(found)
        everywhere(lambda place=checkpoint, why=reason: _put_aside(folder, place, why) if leading else None, group)  # type: ignore[misc]
    everywhere(lambda: no_good_checkpoint(folder) if leading else None, group)
    return None


def require_good(checkpoint: Path, group: ProcessGroup | None) -> None:
    """Of a checkpoint that is not the run's own, so that nothing is renamed. Raises `ResumeError` or `RunError`."""
    if found := damage(checkpoint, group):
        raise ResumeError(f"{checkpoint} is damaged: {'; '.join(found)}")


def damage(checkpoint: Path, group: ProcessGroup | None) -> list[str]:
    """What is wrong with a checkpoint, on all ranks alike. Collective. Raises `ResumeError` or `RunError`."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)

    def about() -> manifest.Manifest | str | None:
        try:
            return manifest.sound(checkpoint) if rank == 0 else None
        except DamageError as error:
            return str(error)

    found = agreed(about, group)[0]
    if not isinstance(found, manifest.Manifest):
        return [str(found)]
    mine = sorted(found.files)[rank::ranks]
    wrong = agreed(lambda: manifest.damage(checkpoint, found, found.files, hashed=False) if rank == 0 else [], group)[0]
    shares = [] if wrong else agreed(lambda: manifest.damage(checkpoint, found, mine), group)
    return [*wrong, *chain.from_iterable(shares)]


def _put_aside(folder: RunFolder, checkpoint: Path, reason: str) -> None:
    try:
        aside = quarantine(checkpoint, reason)
    except OSError as error:
        raise RunError(f"{checkpoint} is damaged ({reason}) and cannot be put aside: {error.strerror}") from None
    log.warning("%s is damaged and was put aside as %s: %s", checkpoint, aside.name, reason)
    folder.event("quarantined", path=str(checkpoint), moved=str(aside), reason=reason)
