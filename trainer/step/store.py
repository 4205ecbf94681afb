"""The store in which the ranks of a launch meet."""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from ipaddress import ip_address

from torch import distributed

from trainer.config.run_spec import SECRET_ENV, STORE_FILE_ENV
from trainer.errors import EXIT_FAILURE, RankFailedError, RunFailedError
from trainer.hardware.host import loopback_listener
from trainer.step import store_door

PRESENT = "longhaul/present/"
"""Key of each rank that has come, before its number."""
MAX_NAMED = 16
POLL_SECONDS = 0.1
MAX_WAITING = 4096
"""Ranks whose connections wait to be accepted; the kernel's own limit may be lower."""
_doors: list[object] = []
"""Processes of this rank's doors: a Popen that is collected while its process runs warns of it."""


def find_store(
    rank: int, size: int, num_nodes: int, secret: bytes, timeout: timedelta
) -> distributed.Store | None:
    """The store of a launch. None: that of MASTER_ADDR, which torchrun's agent serves.

    Raises `RunFailedError` if rank 0 cannot listen, `RankFailedError` if it cannot be reached or
    has another secret.
    """
    if size == 1:
        # One rank meets nobody, so it opens no port.
        return distributed.HashStore()
    if STORE_FILE_ENV in os.environ:
        store = _inherited_store(size, timeout)
    elif not secret:
        return None
    elif rank == 0:
        store = _serve_store(size, num_nodes, secret, timeout)
    else:
        store = _join_store(size, secret, timeout)
    _await_ranks(store, rank, size, timeout)
    return store


def _await_ranks(store: distributed.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Returns when all ranks have come. torch's own wait ends in a traceback if one does not."""
    store.set(f"{PRESENT}{rank}", "")
    others = [each for each in range(size) if each != rank] if rank == 0 else [0]
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [each for each in others if not store.check([f"{PRESENT}{each}"])]:
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, missing[:MAX_NAMED]))
            more = f" and {len(missing) - MAX_NAMED} others" if len(missing) > MAX_NAMED else ""
            raise RankFailedError(
                EXIT_FAILURE,
                f"waited {timeout.total_seconds() / 60:g} min (distributed.start_timeout_minutes) "
                f"for ranks that did not come: {shown}{more}",
            )
        others = missing
        time.sleep(POLL_SECONDS)


def _inherited_store(size: int, timeout: timedelta) -> distributed.Store:
    """The store of ranks that one launcher started on this host: a file in memory without a name."""
    descriptor = int(os.environ[STORE_FILE_ENV])
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no keyword
    store = distributed.FileStore(f"/proc/self/fd/{descriptor}", size)
    store.set_timeout(timeout)
    return store


def _serve_store(
    size: int, num_nodes: int, secret: bytes, timeout: timedelta
) -> distributed.Store:
    """Rank 0's store on loopback, with a door at MASTER_ADDR for ranks that know the secret."""
    with _listen(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), num_nodes) as outside:
        store = loopback_listener(size)
        host, store_port, *_ = store.getsockname()
        _doors.append(store_door.start_server(outside, host, store_port, secret))
    # The store owns the descriptor from here on.
    return distributed.TCPStore(
        host,
        store_port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=store.detach(),
    )


def _join_store(size: int, secret: bytes, timeout: timedelta) -> distributed.Store:
    """The store of rank 0, through a door of this rank on loopback and rank 0's at MASTER_ADDR."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    with loopback_listener(size) as inside:
        host, own_port, *_ = inside.getsockname()
        door, refusal = store_door.start_client(
            inside, address, port, secret, timeout_seconds=timeout.total_seconds()
        )
    _doors.append(door)
    if refusal:
        raise RankFailedError(
            EXIT_FAILURE,
            f"rank 0 at {address}:{port} did not admit this rank: {refusal}. All nodes need the "
            f"same secret: a file that they share, or {SECRET_ENV} with the same text on each",
        )
    return distributed.TCPStore(
        host, own_port, size, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _listen(address: str, port: int, num_nodes: int) -> socket.socket:
    """Listens at the address of this host that the other ranks were given, and at no other one.

    A host behind a translated address, and one whose own table of hosts calls its name loopback,
    cannot know which of its addresses that is: it listens at all of them.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunFailedError(f"MASTER_ADDR = {address} is no address: {error}") from None
    targets = [(family, target[:2]) for family, _, _, _, target in found]
    if num_nodes > 1:
        targets = [each for each in targets if not ip_address(each[1][0]).is_loopback]
    problem = OSError()
    for family, target in [*targets, (socket.AF_INET, ("", port))]:
        try:
            return socket.create_server(target, family=family, backlog=MAX_WAITING)
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
    raise RunFailedError(
        f"rank 0 cannot listen on port {port} of {address} ({problem.strerror}): "
        "choose another MASTER_PORT"
    )
