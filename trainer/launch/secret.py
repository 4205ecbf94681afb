"""The secret of a launch: what its ranks know and nobody else does. Imports no torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from trainer.config.run_spec import SECRET_ENV
from trainer.errors import ConfigError
from trainer.launch.cluster import LaunchWorld

SECRET_FILE_ENV = "LONGHAUL_SECRET_FILE"
DEFAULT_FILE = "~/.longhaul/secret"
MIN_CHARACTERS = 16
MAX_CHARACTERS = 4096
SECRET_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def launch_secret(environment: Mapping[str, str], world: LaunchWorld) -> str | None:
    """The text of `LONGHAUL_SECRET`, a new one, or that of a file which the user's nodes share.

    A launcher that starts all ranks makes a new one. Others share the file, which the first of
    them creates. None under torchrun, whose own store admits anybody. Raises `ConfigError`.
    """
    if SECRET_ENV in environment:
        return _checked(environment[SECRET_ENV], f"environment: {SECRET_ENV}")
    if "TORCHELASTIC_RUN_ID" in environment:
        return None
    if world.rank is None and world.num_nodes == 1:
        return token_hex(SECRET_BYTES)
    path = Path(environment.get(SECRET_FILE_ENV, DEFAULT_FILE))
    try:
        return read_or_create(path.expanduser())
    except RuntimeError:  # A container's user may be in no table and have no HOME.
        raise ConfigError(
            [
                f"the secret of this launch, {path}: this user has no home folder; "
                f"{SECRET_FILE_ENV} names another file that the nodes share"
            ]
        ) from None


def read_or_create(path: Path) -> str:
    """The text of the file, which is the user's own and readable by nobody else."""
    try:
        if not os.path.lexists(path):
            _create(path)
        # A pipe of that name must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError([f"the secret of this launch, {path}, is no regular file"])
            if found.st_uid != os.getuid() or found.st_mode & OTHERS:
                raise ConfigError(
                    [
                        f"the secret of this launch, {path}, may be read or written by others: "
                        f"chmod 600 {path}, if it is yours, else delete it"
                    ]
                )
            return _checked(file.read(MAX_CHARACTERS).strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [
                f"the secret of this launch, {path}: {error}; {SECRET_FILE_ENV} names another file "
                f"that the nodes share, and {SECRET_ENV} gives all of them the same text"
            ]
        ) from None


def _create(path: Path) -> None:
    """Writes a new secret, unless another process does so first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        # A link appears whole or not at all, and never replaces what another process has read.
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        written.unlink()


def _checked(text: str, where: str) -> str:
    if not MIN_CHARACTERS <= len(text) < MAX_CHARACTERS:
        rule = (
            f"must have {MIN_CHARACTERS} to {MAX_CHARACTERS - 1:,} characters, not {len(text):,}"
        )
        raise ConfigError([f"{where} {rule}"])
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError([f"{where} must be UTF-8"]) from None
    return text
