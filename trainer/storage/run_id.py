"""The id of a run, over all its launches and machines. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from secrets import token_hex
from typing import Annotated, ClassVar

from pydantic import Field

from trainer.errors import ConfigError, ResumeError
from trainer.storage.artifact import Artifact, DamageError, open_regular, seal, unseal
from trainer.storage.durable_io import write_atomic
from trainer.storage.object_store import RemoteFolder

FILE = "run_id"
RUN_ID = re.compile(r"[0-9a-f]{16}")
OWNER_FILE = "run.json"
MAX_OWNER_BYTES = 1 << 16


class Owner(Artifact):
    """The run whose copies are at a URL."""

    kind: ClassVar[str] = "owner of copies"
    run_id: Annotated[str, Field(pattern=RUN_ID.pattern)]
    name: str


def run_id(folder: Path) -> str:
    """Kept in the run folder from the first call on."""
    if found := recorded_run_id(folder):
        return found
    created = token_hex(8)
    _record(folder, created)
    return created


def recorded_run_id(folder: Path) -> str | None:
    """The id of a run; None if it had none, or the file is damaged."""
    try:
        with open_regular(folder / FILE) as file:
            text = file.read(64).decode("ascii", "replace").strip()
    except (OSError, DamageError):
        return None
    return text if RUN_ID.fullmatch(text) else None


def require_own_copies(
    folder: Path, name: str, store: RemoteFolder, objects: Collection[str], *, claims: bool
) -> None:
    """Raises `ConfigError` if the copies at a URL are of another run than that in `folder`.

    A folder without an id belongs to the run of this name, as on a new machine. `objects` are the
    names of all objects there. With `claims`, a URL that no run has becomes this run's. Raises
    `RemoteError`.
    """
    if OWNER_FILE not in objects:
        if not claims:
            return
        # Of two runs that come at once, the first one's stays.
        store.create(OWNER_FILE, seal(Owner(run_id=run_id(folder), name=name)))
    try:
        owner, _ = unseal(store.read(OWNER_FILE, max_bytes=MAX_OWNER_BYTES), Owner)
    except (DamageError, ResumeError) as error:
        raise ConfigError([f"{store.url}/{OWNER_FILE} is damaged: {error}; delete it"]) from None
    own = recorded_run_id(folder)
    if own is None and owner.name == name:
        _record(folder, owner.run_id)
    elif own != owner.run_id:
        raise ConfigError(
            [
                f'checkpoint.remote = "{store.url}" has the copies of another run, "{owner.name}": '
                "each run needs a URL of its own"
            ]
        )


def _record(folder: Path, text: str) -> None:
    write_atomic(folder / FILE, f"{text}\n".encode())
