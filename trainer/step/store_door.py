"""A door between the ranks of a launch and the store in which they meet, for those who know the
launch's secret.

    rank 1 --loopback--> its door --network, admitted by the secret--> door of rank 0 --loopback--> store of rank 0

torch's store asks nobody who they are, so it listens on loopback only, and doors pass its bytes
on. A door is a process of its own: torch waits for the store in places where it may hold the
interpreter's lock, and a thread could then pass nothing on. It imports the standard library only,
and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
ADMISSION_SECONDS = 10.0
"""Longest time that either side waits for the other's proof."""
PATIENCE_SECONDS = 30.0
"""Longest time in which a rank tries again after it was refused: an earlier launch may still have
the port.
"""
RETRY_SECONDS = 0.2
MAX_NOTICES = 5
"""Refused connections that are reported; a stranger must not fill the log."""
CHUNK_BYTES = 1 << 16
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


MAX_PENDING = 512
"""Connections that are not led on yet. One more ends the oldest, so that silent ones leave room."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RefusedError(Exception):
    """The other side does not know the secret."""


REFUSALS = (RefusedError, OSError, EOFError, TimeoutError)
"""Errors by which a connection is not led on."""


def start_server(
    listener: socket.socket, host: str, port: int, secret: bytes
) -> subprocess.Popen[bytes]:
    """Passes connections to `listener` on to the store at host:port, if they prove the secret."""
    return _start("serve", listener, host, port, secret)


def start_client(
    listener: socket.socket, host: str, port: int, secret: bytes, *, timeout_seconds: float
) -> tuple[subprocess.Popen[bytes], str]:
    """Passes connections to `listener` on to the door at host:port. Returns when that door has
    admitted this one.

    Also returns why it did not, empty if it did.
    """
    door = _start("join", listener, host, port, secret, timeout_seconds)
    assert door.stdout is not None  # noqa: S101
    return door, door.stdout.readline().decode().strip()


def _start(
    role: str,
    listener: socket.socket,
    host: str,
    port: int,
    secret: bytes,
    timeout_seconds: float = 0.0,
) -> subprocess.Popen[bytes]:
    descriptor = listener.fileno()
    command = [
        sys.executable,
        "-I",
        __file__,
        role,
        str(descriptor),
        host,
        str(port),
        str(timeout_seconds),
    ]
    # A scheduler signals every process of a task, but a rank that gets one still saves, and
    # needs its door. The door inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        door = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert door.stdin is not None  # noqa: S101
    # Through a pipe: others can read command lines. It stays open, and its end tells the door that
    # this process ended.
    door.stdin.write(secret.hex().encode() + b"\n")
    door.stdin.flush()
    return door


# ---- the door's own process


def main() -> None:
    role, descriptor, host, port, timeout_seconds = sys.argv[1:]
    secret = bytes.fromhex(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The usual limit is made for programs that cannot use more than 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.socket(fileno=int(descriptor))
    if role == "serve":
        asyncio.run(_serve(listener, host, int(port), secret))
    else:
        asyncio.run(_join(listener, host, int(port), secret, float(timeout_seconds)))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


async def _serve(listener: socket.socket, host: str, port: int, secret: bytes) -> None:
    warn = _limited_warnings()

    async def lead_to_store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
        address, *_ = writer.get_extra_info("peername") or ("an unknown address",)
        try:
            await asyncio.wait_for(_admit(reader, writer, secret), ADMISSION_SECONDS)
        except (*REFUSALS, asyncio.CancelledError):
            warn(f"{address} reached this launch without its secret and was refused")
            raise
        return await asyncio.open_connection(host, port)

    await _accept(listener, lead_to_store)


async def _join(
    listener: socket.socket, host: str, port: int, secret: bytes, timeout_seconds: float
) -> None:
    warn = _limited_warnings()

    async def lead_to_door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
        del reader
        if not _is_of_this_user(writer.get_extra_info("socket")):
            warn("another user of this host reached a rank of this launch and was refused")
            raise RefusedError
        return await _ask(host, port, secret)

    sys.stdout.write(await _first_answer(host, port, secret, timeout_seconds) + "\n")
    sys.stdout.flush()
    await _accept(listener, lead_to_door)


def _limited_warnings() -> Callable[[str], None]:
    """Writes warnings, until a stranger has caused many."""
    number = 0

    def warn(message: str) -> None:
        nonlocal number
        number += 1
        if number <= MAX_NOTICES:
            sys.stderr.write(f"warning: {message}\n")

    return warn


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the other end of a connection over loopback is open in a process of this user.

    The kernel lists both ends of it, each with its owner. What a process has closed is listed
    without one, as if it were root's.
    """
    ends = connection.getpeername(), connection.getsockname()
    # A socket of IPv6 may speak IPv4, and is listed with a longer address.
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        if connection.family in (socket.AF_INET, family):
            listed = " ".join(_as_listed(host, port, family) for host, port, *_ in ends)
            for line in Path("/proc/net", table).read_text().splitlines():
                if f" {listed} " in line:
                    _, _, _, _, _, _, _, owner, _, inode, *_ = line.split()
                    return int(owner) == os.getuid() and inode != "0"
    return False


def _as_listed(host: str, port: int, family: socket.AddressFamily) -> str:
    """Address and port as the kernel's table has them: words of four bytes in the host's order."""
    if family == socket.AF_INET6 and ":" not in host:
        host = f"::ffff:{host}"
    packed = socket.inet_pton(family, host)
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    address = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{address}:{port:04X}"


async def _accept(
    listener: socket.socket,
    lead: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Streams]],
) -> None:
    """Passes the bytes of every connection on to where `lead` leads it; ends those that it refuses.

    asyncio's own server would write a hundred tracebacks at once when a stranger has taken all
    descriptors.
    """
    pending: dict[socket.socket, asyncio.Task[None]] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def connect(peer: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=peer)
        try:
            far = await lead(reader, writer)
        except (*REFUSALS, asyncio.CancelledError):
            writer.close()
            return
        finally:
            pending.pop(peer, None)
        await _connect_streams(reader, writer, *far)

    def end_oldest() -> None:
        # A rank proves the secret at once, so who has waited longest is a stranger.
        for peer in [*pending][:1]:
            pending.pop(peer).cancel()

    listener.setblocking(False)  # noqa: FBT003 - it takes no keyword
    loop = asyncio.get_running_loop()
    while True:
        if len(pending) >= MAX_PENDING:
            end_oldest()
        try:
            peer, _ = await loop.sock_accept(listener)
        except OSError:  # No descriptor is left, or the peer has gone.
            end_oldest()
            await asyncio.sleep(RETRY_SECONDS)
            continue
        task = asyncio.create_task(connect(peer))
        pending[peer] = task
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # Accepting does not wait while others are queued; connections before them get their turn.
        await asyncio.sleep(0)


async def _first_answer(host: str, port: int, secret: bytes, timeout_seconds: float) -> str:
    """Asks until the far door admits this one; returns why it does not, empty if it does."""
    begun = time.monotonic()
    while True:
        patience = timeout_seconds
        try:
            _, writer = await _ask(host, port, secret)
        except RefusedError as error:
            reason = str(error)
            patience = min(PATIENCE_SECONDS, timeout_seconds)
        except (OSError, EOFError, TimeoutError) as error:
            reason = f"rank 0 cannot be reached ({str(error) or type(error).__name__})"
        else:
            writer.close()
            return ""
        if time.monotonic() - begun > patience:
            return reason
        await asyncio.sleep(RETRY_SECONDS)


async def _admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """Raises `RefusedError` unless the other side proves the secret; then proves it as well."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    writer.write(challenge)
    theirs = await reader.readexactly(CHALLENGE_BYTES)
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"join", challenge, theirs)):
        raise RefusedError
    writer.write(_proof(secret, b"serve", challenge, theirs))
    await writer.drain()


async def _ask(
    host: str, port: int, secret: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was admitted.

    Raises `RefusedError` if either side does not believe the other.
    """
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ADMISSION_SECONDS)
    try:
        async with asyncio.timeout(ADMISSION_SECONDS):
            theirs = await reader.readexactly(CHALLENGE_BYTES)
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            writer.write(challenge + _proof(secret, b"join", theirs, challenge))
            try:
                proof = await reader.readexactly(PROOF_BYTES)
            except (EOFError, ConnectionResetError):
                raise RefusedError("rank 0 has another secret of this launch") from None
            if not hmac.compare_digest(proof, _proof(secret, b"serve", theirs, challenge)):
                raise RefusedError("whoever listens there does not know this launch's secret")
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _proof(secret: bytes, role: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """Proves the secret for these challenges and this side alone: an answer cannot be sent back or
    used again.
    """
    return hmac.digest(
        secret, b"longhaul store " + role + server_challenge + client_challenge, "sha256"
    )


async def _connect_streams(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Passes bytes on in both directions until both sides have ended."""
    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    with suppress(OSError):
        target.close()


if __name__ == "__main__":
    main()
