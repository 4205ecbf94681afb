"""Folders at a URL: `s3://bucket/prefix`, and by the same library `gs://` and `az://`. Imports no
torch.

An object appears whole or not at all. Credentials come from where the library looks for them:
environment, instance, web identity. They are never written or printed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, RunFailedError, missing_package
from trainer.storage.artifact import DamageError, open_regular

CHUNK_BYTES = 16 << 20
MAX_PARTS = 9000
"""Parts of one upload; S3 takes 10,000."""
MAX_REASON_CHARS = 300
REQUESTS_AT_ONCE = 8
REQUEST_SECONDS = 300
"""Limit of one request with its content, at most `CHUNK_BYTES` or a part, on a slow link."""
CONNECT_SECONDS = 10
RETRY: dict[str, Any] = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=120),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
"""Retries of one request, for 5xx, lost connections and time-outs."""
REFUSAL_CODES = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
NO_BUCKET_CODE = "NoSuchBucket"
CREDENTIALS_HINT = "for s3:// set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or give the machine a role"
METADATA_SERVICE = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Where credentials are looked for last: without any, its error is all that there is."""


class RemoteError(Exception):
    """A request failed, after the library's retries. Another try may succeed."""


class RemoteRefusedError(RemoteError):
    """Credentials are missing, wrong or expired, or the request is not allowed.

    `hint` says what helps.
    """

    hint = CREDENTIALS_HINT


class NoBucketError(RemoteRefusedError):
    """The bucket does not exist, or only in another region."""

    hint = "create the bucket, or correct its name or AWS_REGION"


class UnencryptedEndpointError(RemoteRefusedError):
    """The endpoint is of http, which the environment does not allow."""

    hint = "set AWS_ALLOW_HTTP=true if nobody else is on the way there"


class RemoteMissingError(RemoteError):
    """There is no object of this name."""


def missing_library(key: str, url: str) -> str | None:
    """The reason why URLs cannot be used here, with the command that helps; None if they can.

    `key` names the URL: a key of the configuration, or an option.
    """
    if find_spec("obstore") is not None:
        return None
    return str(missing_package("obstore", f'{key} = "{url}"'))


@contextmanager
def reporting(key: str, url: str) -> Iterator[None]:
    """Raises `ConfigError` if the library is missing or the store refuses, `RunFailedError` if it
    fails.
    """
    if problem := missing_library(key, url):
        raise ConfigError([problem])
    try:
        yield
    except RemoteRefusedError as error:
        raise ConfigError([f"{key}: {error}; {error.hint}"]) from None
    except RemoteError as error:
        raise RunFailedError(f"{key}: {error}; the same command continues") from None


class RemoteFolder:
    """The objects whose names begin with a URL."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        self.url = url.rstrip("/")
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            # The library reads the variable only where no options are given.
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        if endpoint.startswith("http://") and not options["allow_http"]:
            # The library's own error would be one of each request, and no other try helps.
            raise UnencryptedEndpointError(f"{self.url}: AWS_ENDPOINT_URL is not encrypted")
        # Its types have a signature for each scheme, and the scheme is known at run time only.
        open_store: Callable[..., Any] = from_url
        with self._explained():
            self._store = open_store(self.url, retry_config=RETRY, client_options=options)

    def require_conditional_writes(self) -> None:
        """Raises `RemoteRefusedError` unless objects can be created, once, and deleted."""
        name = f"probe-{secrets.token_hex(8)}"
        if not self.create(name, b"") or self.create(name, b""):
            raise RemoteRefusedError(
                f"{self.url}: the store replaces objects that exist; it must know conditional writes (If-None-Match)"
            )
        self.delete([name])

    def is_empty(self) -> bool:
        with self._explained():
            return not any(self._store.list())

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of all objects in a folder, by name."""
        return {name: size for name, (size, _) in self.versions(prefix).items()}

    def versions(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """(bytes, tag) of all objects in a folder, by name; the tag changes with the content."""
        with self._explained():
            return {
                item["path"]: (item["size"], item["e_tag"] or "")
                for batch in self._store.list(prefix or None)
                for item in batch
            }

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Raises `RemoteMissingError`, and `DamageError` for an object that is larger."""
        with self._explained():
            answer = self._store.get(name)
            if answer.meta["size"] > max_bytes:
                raise DamageError(f"{name} has more than {max_bytes:,} bytes")
            return bytes(answer.bytes())

    def read_ranges(self, name: str, starts: list[int], lengths: list[int]) -> list[bytes]:
        """Parts of an object, several at once; neighbours are one request.

        Raises `RemoteMissingError`.
        """
        with self._explained():
            parts = self._store.get_ranges(name, starts=starts, lengths=lengths, coalesce=0)
            return [bytes(part) for part in parts]

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one; returns whether there was none."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._explained():
            try:
                self._store.put(name, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def upload(
        self, path: Path, name: str, *, size: int, digest: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Writes an object from a file that has this size and sha256.

        Raises `DamageError` for another file, of which nothing appears.
        """
        parts = _checked_parts(path, size, digest, on_bytes)
        with self._explained():
            self._store.put(
                name,
                parts,
                use_multipart=size > CHUNK_BYTES,
                chunk_size=max(CHUNK_BYTES, size // MAX_PARTS + 1),
                max_concurrency=REQUESTS_AT_ONCE,
            )

    def download(
        self, name: str, path: Path, *, size: int, digest: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Writes a file from an object that has this size and sha256, or any if `digest` is "".

        Raises `DamageError` for another object.
        """
        with path.open("wb") as file:
            for part in self._checked_ranges(name, size, digest):
                file.write(part)
                on_bytes(len(part))
            file.flush()
            os.fsync(file.fileno())

    def verify(
        self, name: str, *, size: int, digest: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Reads an object. Raises `DamageError` unless it has this size and sha256."""
        for part in self._checked_ranges(name, size, digest):
            on_bytes(len(part))

    def _checked_ranges(self, name: str, size: int, digest: str) -> Iterator[bytes]:
        """The bytes of an object. Raises `DamageError`, for a wrong hash after the last of them."""
        found = hashlib.sha256()
        try:
            with self._explained():
                if (actual := self._store.head(name)["size"]) != size:
                    raise DamageError(f"{name} has {actual:,} bytes instead of {size:,}")
                # By ranges: each is a request with its own retries and time limit.
                for start in range(0, size, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, size - start)
                    part = bytes(self._store.get_range(name, start=start, length=length))
                    found.update(part)
                    yield part
        except RemoteMissingError:
            raise DamageError(f"{name} is missing") from None
        if digest and found.hexdigest() != digest:
            raise DamageError(f"{name}: checksum mismatch ({size:,} bytes)")

    def delete(self, names: list[str]) -> None:
        """Deletes objects; one that does not exist counts as deleted."""
        with self._explained():
            if names:
                self._store.delete(names)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises the library's errors as ours, in one line."""
        from obstore import exceptions

        try:
            yield
        except FileNotFoundError as error:
            code, reason = _reason(error)
            # A bucket that does not exist is reported as a missing object, too.
            if code == NO_BUCKET_CODE:
                raise NoBucketError(f"{self.url}: {reason}") from None
            raise RemoteMissingError(f"{self.url}: {reason}") from None
        except exceptions.BaseError as error:
            code, reason = _reason(error)
            refused = code in REFUSAL_CODES or isinstance(
                error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
            )
            if any(host in str(error) for host in METADATA_SERVICE):
                refused = True
                reason = "there are no credentials in the environment or from this machine"
            kind = RemoteRefusedError if refused else RemoteError
            if code == NO_BUCKET_CODE:
                kind = NoBucketError
            raise kind(f"{self.url}: {reason}") from None


def _checked_parts(
    path: Path, size: int, digest: str, on_bytes: Callable[[int], None]
) -> Iterator[bytes]:
    """The bytes of a file, the last of them only once all are known to be right."""
    found = hashlib.sha256()
    num_bytes = 0
    waiting = b""
    with open_regular(path) as file:
        while part := file.read(CHUNK_BYTES):
            found.update(part)
            num_bytes += len(part)
            # An upload that ends with an error leaves no object, so the last part waits for the
            # hash.
            if waiting:
                yield waiting
                on_bytes(len(waiting))
            waiting = part
    if (num_bytes, found.hexdigest()) != (size, digest):
        raise DamageError(f"{path.name} differs from its manifest")
    yield waiting
    on_bytes(len(waiting))


def _reason(error: Exception) -> tuple[str, str]:
    """The code of an answer of S3, or "", and what happened, without what the library adds."""
    text = str(error).partition("\n\nDebug source")[0]
    status = re.search(r"status code: (\d+ [A-Z][A-Za-z ]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if status is None:
        return "", " ".join(text.split())[:MAX_REASON_CHARS]
    # Only these: the rest of an answer may quote the request.
    said = [each[1].strip() for each in (status, code, message) if each is not None]
    return code[1] if code else "", ": ".join(said)[:MAX_REASON_CHARS]
