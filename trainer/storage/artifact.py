"""Sealed files: what the trainer writes in order to read it again.

    {"kind": "manifest", "schema": 2, "made_from": ..., "writer": "longhaul 0.1.0", "owner": ..., "content": {...},
     "sha256": ...}

The hash covers everything before it, so that a file says by itself whether it is whole. The
envelope of a binary file is its first `HEADER_BYTES`, filled up with spaces; its content holds
size and hash of what follows. A subclass of `Artifact` per kind has the content's schema, and the
changes between its versions. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from models import files
from trainer import __version__
from trainer.config.migrations import Migration, apply_migrations
from trainer.errors import ResumeError
from trainer.storage.durable_io import write_atomic

HEADER_BYTES = 4096
"""A page, so that what follows can be mapped into memory."""
SEAL = ',\n "sha256": "{}"\n}}\n'
SEAL_BYTES = len(SEAL.format("0" * 64))
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(
    dict[str, Any], config=ConfigDict(allow_inf_nan=False, strict=True)
)


class DamageError(Exception):
    """A file is missing or differs from what was written. A retry does not help."""


class NewerFormatError(ResumeError):
    """A later version wrote the file. A retry does not help."""


class Artifact(BaseModel):
    """The content of a kind of sealed file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    kind: ClassVar[str]
    """Name of the kind, in words, as errors use it."""
    migrations: ClassVar[tuple[Migration, ...]] = ()
    """migrations[n - 1] leads from version n of the content to n + 1."""

    @classmethod
    def version(cls) -> int:
        return len(cls.migrations) + 1

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        """Reads a file that was written before there were envelopes: its content and version.

        Raises `DamageError` for other bytes.
        """
        del data
        raise DamageError(f"it is not a {cls.kind}")

    @classmethod
    def validated(cls, content: dict[str, Any], *, version: int) -> Self:
        """Migrates content to today's version and validates it.

        Raises `DamageError` with the first field that is wrong, and `NewerFormatError`.
        """
        if not isinstance(version, int) or version < 1:
            raise DamageError(f"it is not a {cls.kind} of any version")
        if version > cls.version():
            raise NewerFormatError(
                f'it has version {version} of "{cls.kind}"; {WRITER} reads versions 1 to {cls.version()}'
            )
        try:
            # Validated as JSON: in strict mode a list of Python would be refused where the schema
            # has a tuple.
            return cls.model_validate_json(
                json.dumps(apply_migrations(content, cls.migrations[version - 1 :]))
            )
        except ValidationError as error:
            raise DamageError(first_problem(error)) from None
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise DamageError(f"it is not a {cls.kind} of version {version}") from None


A = TypeVar("A", bound=Artifact)
WRITER = f"longhaul {__version__}"


class _Envelope(BaseModel):
    model_config = Artifact.model_config
    kind: str
    version: int = Field(alias="schema", ge=1)
    made_from: str
    writer: str
    owner: str
    content: dict[str, Any]


class Sealed(NamedTuple):
    """Facts of an envelope besides the content of its file."""

    made_from: str
    """Fingerprint of what the content was computed from; empty if it came from nothing stored."""
    writer: str
    owner: str
    """The launch of a run; empty for what runs share."""


# ---- writing


def seal(content: Artifact, *, made_from: str = "", owner: str = "") -> bytes:
    envelope = {"kind": content.kind, "schema": content.version(), "made_from": made_from}
    return seal_object(
        envelope | {"writer": WRITER, "owner": owner, "content": content.model_dump(mode="json")}
    )


def seal_object(envelope: Mapping[str, Any]) -> bytes:
    text = json.dumps(envelope, indent=1, allow_nan=False, ensure_ascii=False)
    body = (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    )  # Names of files may be any bytes.
    # The closing brace makes way for the hash of the whole object, brace included: `unseal` puts
    # it back before it hashes.
    return body[:-2] + SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def write_artifact(path: Path, content: Artifact, *, made_from: str = "", owner: str = "") -> None:
    write_atomic(path, seal(content, made_from=made_from, owner=owner))


def sealed_header(content: Artifact, *, made_from: str) -> bytes:
    """The beginning of a binary file, `HEADER_BYTES` long."""
    header = seal(content, made_from=made_from)
    # Spaces before the last line end, so that the header can be stripped back to what was sealed.
    return header[:-1] + b" " * (HEADER_BYTES - len(header)) + b"\n"


# ---- reading


def read_artifact(path: Path, kind: type[A]) -> A:
    """Reads a sealed file of this kind.

    Raises `DamageError`, `NewerFormatError`, and OSError if the file cannot be read.
    """
    return unseal(read_regular(path, max_bytes=files.MAX_SEALED_BYTES), kind)[0]


def unseal(data: bytes, kind: type[A]) -> tuple[A, Sealed]:
    """Checks the seal; returns the content, migrated to today's version, and the facts of the
    envelope.

    Raises `DamageError` and `NewerFormatError`.
    """
    # The envelope's first key is at a fixed place; files of earlier versions begin otherwise.
    if b'"kind"' not in data[:16]:
        values, version = kind.from_unsealed(data)
        return kind.validated(values, version=version), Sealed("", "", "")
    # Checked on the bytes, before JSON is parsed: a damaged file need not be JSON.
    body = data[:-SEAL_BYTES] + b"\n}"
    if data[-SEAL_BYTES:] != SEAL.format(hashlib.sha256(body).hexdigest()).encode():
        raise DamageError("it does not match its own checksum")
    try:
        envelope = _Envelope.model_validate(parse_object(body))
    except ValidationError as error:
        raise DamageError(first_problem(error)) from None
    if envelope.kind != kind.kind:
        raise DamageError(f'it is a "{envelope.kind[:80]}", not a {kind.kind}')
    content = kind.validated(envelope.content, version=envelope.version)
    return content, Sealed(envelope.made_from, envelope.writer, envelope.owner)


def unseal_header(data: bytes, kind: type[A]) -> tuple[A, Sealed]:
    """Unseals the header at the beginning of a binary file. Raises as `unseal`."""
    return unseal(data[:HEADER_BYTES].rstrip() + b"\n", kind)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object from any source: finite numbers, valid Unicode, bounded nesting.

    Raises `DamageError`.
    """
    try:
        return _OBJECT.validate_json(data)
    except ValidationError as error:
        raise DamageError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Field and reason of the first error, without the value, which may be long."""
    problem, *_ = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(map(str, problem["loc"]))[:200]
    return f"{where}: {problem['msg'][:200]}" if where else problem["msg"][:200]


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """`models.files.read_regular` that raises `DamageError` for other kinds of files."""
    try:
        return files.read_regular(path, max_bytes=max_bytes)
    except files.UnusableFileError as error:
        raise DamageError(error.strerror) from None


def open_regular(path: Path) -> BufferedReader:
    """`models.files.open_regular` that raises `DamageError` for other kinds of files."""
    try:
        return files.open_regular(path)
    except files.UnusableFileError as error:
        raise DamageError(error.strerror) from None
