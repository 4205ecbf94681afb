"""Ranks of several nodes meet behind a door: a stranger can stop a start, and neither join nor
change it unseen.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from parallelisms.mesh import collectives
from parallelisms.mesh.values import ValueExchangeError, ValueSeal
from tests.launch.sockets import listening
from tests.other_user import as_nobody
from tests.ranks import run_ranks
from tests.system.runs import PLACES, ROOT, arguments, steps, wait_for, workers, write_run
from trainer.config.run_spec import SECRET_ENV
from trainer.errors import ConfigError
from trainer.hardware.host import cluster_environment, loopback_listener
from trainer.launch.cluster import LaunchWorld
from trainer.launch.secret import SECRET_FILE_ENV, launch_secret, read_or_create
from trainer.step import store_door

SECRET = b"the secret of this launch"
SEVERAL = LaunchWorld(nproc_per_node=2, num_nodes=2)


# ---- doors


@contextmanager
def echo() -> Iterator[int]:
    """A server on loopback that sends back what it is sent, in place of the store."""

    def answer(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while content := peer.recv(4096):
                peer.sendall(content)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    with loopback_listener(16) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def served(secret: bytes = SECRET) -> Iterator[int]:
    """The port of a door before an echo."""
    with echo() as port, loopback_listener(16) as outside:
        door = store_door.start_server(outside, "127.0.0.1", port, secret)
        try:
            yield outside.getsockname()[1]
        finally:
            end(door)


@contextmanager
def joined(port: int, secret: bytes = SECRET, *, seconds: float = 10) -> Iterator[tuple[int, str]]:
    """The port of a door on this side, and why the far one refused it."""
    with loopback_listener(16) as inside:
        door, refusal = store_door.start_client(
            inside, "127.0.0.1", port, secret, timeout_seconds=seconds
        )
        try:
            yield inside.getsockname()[1], refusal
        finally:
            end(door)


def end(door: subprocess.Popen[bytes]) -> None:
    """Ends a door as the end of its parent does."""
    assert door.stdin and door.stdout
    door.stdin.close()
    assert door.wait(20) == 0
    door.stdout.close()


def ask(port: int, content: bytes, *, seconds: float = 10) -> bytes:
    """What comes back from a port until it has as many bytes, or is closed."""
    found = b""
    peer = socket.create_connection(("127.0.0.1", port), timeout=seconds)
    with peer, suppress(OSError):
        threading.Thread(target=peer.sendall, args=[content], daemon=True).start()
        while len(found) < len(content) and (part := peer.recv(4096)):
            found += part
    return found


def test_who_knows_the_secret_is_let_through_unchanged() -> None:
    content = os.urandom(300_000)
    with served() as far, joined(far) as (near, refusal):
        assert refusal == ""
        with ThreadPoolExecutor(4) as clients:
            assert all(found == content for found in clients.map(ask, [near] * 4, [content] * 4))


def test_another_secret_is_refused_on_either_side(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with served() as far, joined(far, b"another secret", seconds=0) as (_, refusal):
        assert refusal == "rank 0 has another secret of this launch"
    assert "127.0.0.1 reached this launch without its secret" in capfd.readouterr().err


def is_known(address: str, family: socket.AddressFamily, server_address: str) -> bool:
    """Whether a door knows the owner of a connection to this address, and none once it is closed."""
    server_family = socket.AF_INET6 if ":" in server_address else socket.AF_INET
    server = socket.create_server((server_address, 0), family=server_family)
    with server, socket.socket(family) as peer:
        peer.connect((address, server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            is_found = store_door._is_of_this_user(connection)
            peer.close()
            return is_found and not store_door._is_of_this_user(connection)


def test_the_owner_of_a_connection_is_known_while_it_is_open() -> None:
    assert is_known("127.0.0.1", socket.AF_INET, "127.0.0.1")
    if socket.has_ipv6:
        assert is_known("::1", socket.AF_INET6, "::1")
        # As torch connects.
        assert is_known("::ffff:127.0.0.1", socket.AF_INET6, "127.0.0.1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_reaches_nothing_through_a_ranks_door(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with served() as far, joined(far) as (near, _):
        assert ask(near, b"1234") == b"1234"
        assert as_nobody(lambda: ask(near, b"1234")) == b""
    assert "another user of this host reached a rank" in capfd.readouterr().err


def impostor(answer: Callable[[bytes], bytes]) -> str:
    """What a door says of a server that answers challenge and proof by `answer` of both."""
    with loopback_listener(16) as server:

        def pretend() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(bytes(store_door.CHALLENGE_BYTES))
                peer.sendall(
                    answer(peer.recv(store_door.CHALLENGE_BYTES + store_door.PROOF_BYTES))
                )

        threading.Thread(target=pretend, daemon=True).start()
        with joined(server.getsockname()[1], seconds=0) as (_, refusal):
            return refusal


def test_a_stranger_that_listens_first_is_not_believed() -> None:
    """Nor one that sends back the proof that it is sent."""
    said = "whoever listens there does not know this launch's secret"
    assert impostor(lambda _: bytes(store_door.PROOF_BYTES)) == said
    assert impostor(lambda sent: sent[-store_door.PROOF_BYTES :]) == said
    assert impostor(lambda sent: sent[: store_door.PROOF_BYTES]) == said


def test_strangers_reach_nothing_and_hold_nobody_up(capfd: pytest.CaptureFixture[str]) -> None:
    """One says nothing, one sends what torch's store expects, one sends an old proof again."""
    with served() as far:
        silent = [socket.create_connection(("127.0.0.1", far)) for _ in range(20)]
        garbage = ask(far, os.urandom(store_door.CHALLENGE_BYTES + store_door.PROOF_BYTES))
        assert len(garbage) == store_door.CHALLENGE_BYTES, "more than its challenge"
        with pytest.raises(distributed.DistError):
            distributed.TCPStore(
                "127.0.0.1", far, is_master=False, timeout=timedelta(seconds=1)
            ).set("key", "value")
        with joined(far) as (near, refusal):
            assert refusal == ""
            assert ask(near, b"hello") == b"hello"
        for each in silent:
            each.close()
        # When the door answers the next one, it has seen that they are gone.
        ask(far, os.urandom(store_door.CHALLENGE_BYTES + store_door.PROOF_BYTES))
    assert 0 < capfd.readouterr().err.count("without its secret") <= store_door.MAX_NOTICES


@pytest.mark.parametrize("descriptors", [pytest.param(40, marks=pytest.mark.slow), 4096])
def test_silent_connections_leave_room_for_a_rank_and_for_the_log(
    descriptors: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """More of them than the door may have descriptors, and more than it lets wait."""
    count = min(descriptors, store_door.MAX_PENDING) + 100
    with ExitStack() as stack:
        port = stack.enter_context(echo())
        outside = stack.enter_context(loopback_listener(count))
        far = outside.getsockname()[1]
        door = store_door.start_server(outside, "127.0.0.1", port, SECRET)
        stack.callback(end, door)
        # It raises its own limit to what it may have before it accepts anybody.
        assert ask(far, bytes(store_door.CHALLENGE_BYTES))
        resource.prlimit(door.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", far)))
        near, refusal = stack.enter_context(joined(far, seconds=60))
        assert refusal == ""
        assert wait_for(lambda: ask(near, b"hello") == b"hello")
        held = len(os.listdir(f"/proc/{door.pid}/fd"))  # noqa: PTH208
    assert held <= store_door.MAX_PENDING + 32
    said = capfd.readouterr().err.splitlines()
    assert 0 < len(said) <= store_door.MAX_NOTICES
    assert all("without its secret" in line for line in said)


def test_the_secret_is_in_no_command_line_and_no_environment() -> None:
    with served() as far, joined(far):
        doors = [
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))  # noqa: PTH208
            if b"store_door" in read(f"/proc/{pid}/cmdline")
        ]
        assert len(doors) >= 2
        for pid in doors:
            for place in ("cmdline", "environ"):
                assert SECRET.hex().encode() not in read(f"/proc/{pid}/{place}")
                assert SECRET not in read(f"/proc/{pid}/{place}")


def read(path: str) -> bytes:
    with suppress(OSError):
        return Path(path).read_bytes()
    return b""


PARENT = """
import os, signal, sys
from trainer.hardware.host import loopback_listener
from trainer.step import store_door
door = store_door.start_server(loopback_listener(1), "127.0.0.1", 1, b"secret")
print(door.pid, flush=True)
os.kill(door.pid, signal.SIGTERM)
signal.pause()
"""


def test_a_door_outlives_signals_and_not_its_rank() -> None:
    """A scheduler signals all processes of a task, and the ranks still save then."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout
        door = int(parent.stdout.readline())
        time.sleep(0.3)
        outlived = b"store_door" in read(f"/proc/{door}/cmdline")
        parent.kill()
        parent.wait()
        assert outlived
        assert wait_for(lambda: b"store_door" not in read(f"/proc/{door}/cmdline"))


# ---- the secret


def test_a_launcher_of_all_ranks_makes_a_new_secret_each_time(tmp_path: Path) -> None:
    single = LaunchWorld(nproc_per_node=4)
    first = launch_secret({}, single)
    assert first and launch_secret({}, single) not in (first, None)
    assert launch_secret({SECRET_ENV: "x" * 16}, single) == "x" * 16
    assert launch_secret({"TORCHELASTIC_RUN_ID": "1"}, SEVERAL) is None
    srun = LaunchWorld(nproc_per_node=2, rank=1)
    places = {SECRET_FILE_ENV: str(tmp_path / "secret")}
    assert launch_secret(places, srun) == launch_secret(places, SEVERAL)


def test_nodes_that_create_the_file_at_the_same_moment_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    with ThreadPoolExecutor(8) as nodes:
        # Threads share a process id, and each node writes its own file first.
        (found,) = {*nodes.map(lambda _: created(path), range(8))}
    assert found == read_or_create(path)
    assert len(found) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


def created(path: Path) -> str:
    code = "import sys; from pathlib import Path; from trainer.launch.secret import read_or_create; print(read_or_create(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def test_a_secret_that_others_know_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 32)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="may be read or written by others: chmod 600"):
        read_or_create(path)
    path.chmod(0o600)
    assert read_or_create(path) == "x" * 32
    path.write_text("short")
    with pytest.raises(ConfigError, match="must have 16 to 4,095 characters, not 5"):
        read_or_create(path)
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match=SECRET_FILE_ENV):
        read_or_create(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_or_create(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        read_or_create(path)
    with pytest.raises(ConfigError, match=f"{SECRET_ENV} must have 16"):
        launch_secret({SECRET_ENV: "x"}, SEVERAL)
    with pytest.raises(ConfigError, match=f"{SECRET_ENV} must be UTF-8"):
        launch_secret({SECRET_ENV: "\udcff" * 16}, SEVERAL)
    with pytest.raises(ConfigError, match="this user has no home folder"):
        launch_secret({SECRET_FILE_ENV: "~no-such-user/secret"}, SEVERAL)


# ---- values


def test_a_value_fits_its_rank_its_exchange_and_its_launch_alone() -> None:
    seal = ValueSeal(SECRET, ["a", "b"])
    purpose = seal.next_purpose("group")
    sealed = seal.seal(b"1", purpose, 1)
    assert seal.open(sealed, purpose, 1) == b"1"
    wrong = [
        (seal, sealed, purpose, 0),
        (seal, sealed, seal.next_purpose("group"), 1),
        (seal, sealed, seal.next_purpose("other"), 1),
        (seal, b"2" + sealed[1:], purpose, 1),
        (seal, b"1", purpose, 1),
        (ValueSeal(b"another secret", ["a", "b"]), sealed, purpose, 1),
        (ValueSeal(SECRET, ["a", "c"]), sealed, purpose, 1),
    ]
    for seal_of, content, for_purpose, rank in wrong:
        with pytest.raises(ValueExchangeError, match=f"came as rank {rank}'s was not sent by"):
            seal_of.open(content, for_purpose, rank)


def meet_a_stranger(secret: bytes) -> list[str]:
    """What this rank says when rank 1 has this secret, and sends its values."""
    rank = distributed.get_rank()
    collectives.authenticate_values(SECRET if rank == 0 else secret)
    said = []
    for value in ("first", "second"):
        try:
            said += collectives.all_gather_values(f"{value} of {rank}")
        except ValueExchangeError as error:
            said.append(str(error))
    collectives.authenticate_values(b"")
    return said


def test_ranks_believe_each_other_and_no_stranger() -> None:
    for said in run_ranks(meet_a_stranger, 2, SECRET):
        assert said == ["first of 0", "first of 1", "second of 0", "second of 1"]
    alone, _ = run_ranks(meet_a_stranger, 2, b"guessed")
    assert len(alone) == 2
    assert all("came as rank 1's was not sent by that rank" in each for each in alone)


# ---- two nodes, and a stranger beside them


def test_gloo_listens_on_the_interface_by_which_rank_zero_is_reached() -> None:
    assert cluster_environment({"GLOO_SOCKET_IFNAME": "eth1"}, "127.0.0.1") == {}
    assert cluster_environment({}, "127.0.0.1") == {}, "of several nodes, none is at loopback"


ADDRESSES = {"a": "10.99.0.1", "b": "10.99.0.2", "c": "10.99.0.3"}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[str]:
    """Three namespaces on a bridge, as three hosts are on a switch; gives what their names begin
    with.
    """
    name = f"lh{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, by ip of iproute2")
    hub = f"{name}-hub"
    if subprocess.run(["ip", "netns", "add", hub], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    try:
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for host, address in ADDRESSES.items():
            space = f"{name}-{host}"
            run("ip", "netns", "add", space)
            link = f"link add eth0 netns {space} type veth peer name port-{host} netns {hub}"
            run("ip", *link.split())
            run("ip", "-n", hub, "link", "set", f"port-{host}", "master", "bridge", "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", interface, "up")
        yield name
    finally:
        for host in ("hub", *ADDRESSES):
            subprocess.run(
                ["ip", "netns", "del", f"{name}-{host}"], capture_output=True, check=False
            )


def start_node(
    network: str, number: int, config: Path, folder: Path, secret: Path
) -> subprocess.Popen[str]:
    host = "ab"[number]
    environment = {key: value for key, value in os.environ.items() if key not in PLACES}
    environment |= {
        "NNODES": "2",
        "NODE_RANK": str(number),
        "MASTER_ADDR": ADDRESSES["a"],
        "MASTER_PORT": "29500",
        "NGPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        SECRET_FILE_ENV: str(secret),
    }
    options = arguments(
        config, folder, "--training.steps", "100000", "--checkpoint.interval=50000"
    )
    command = ["ip", "netns", "exec", f"{network}-{host}", sys.executable, "-P", "-m"]
    with folder.with_suffix(f".{host}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "trainer.launch", *options],
            cwd=config.parent,
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )


def listening_places(pid: int) -> set[tuple[str, int]]:
    """Address and port of every socket that listens in a process' network."""
    return {(each.address, each.port) for each in listening(pid)}


STRANGER = """
import datetime, json, os, signal, socket, sys
from torch import distributed

def try_to_join(address, port):
    child = os.fork()
    if not child:
        signal.alarm(4)  # gloo answers nothing, and torch waits for an answer.
        limit = datetime.timedelta(seconds=2)
        try:
            store = distributed.TCPStore(address, port, is_master=False, timeout=limit)
            store.set("longhaul/present/1", "me")
        except distributed.DistError:
            os._exit(1)
        os._exit(0)
    return child

opened = []
for address, port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection((address, port), timeout=2) as peer:
            opened.append([address, port])
            peer.sendall(os.urandom(64))
    except OSError:
        pass
children = [try_to_join(*place) for place in opened]
joined = [place for place, child in zip(opened, children) if os.waitpid(child, 0)[1] == 0]
print(json.dumps([opened, joined]))
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_stranger_on_the_network_joins_nothing_and_is_noticed(
    tmp_path: Path, network: str
) -> None:
    """Before the second node comes, and while both train. Loopback alone has the store."""
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    secret = tmp_path / "secret"
    first = start_node(network, 0, config, folder, secret)
    second = None
    try:
        assert wait_for(
            lambda: (
                workers(first.pid)
                and (ADDRESSES["a"], 29500) in listening_places(workers(first.pid)[0])
            )
        )
        early = meet(network, first)
        second = start_node(network, 1, config, folder, secret)
        assert wait_for(lambda: (folder / "metrics.jsonl").exists() and steps(folder))
        late = meet(network, first, second)
        trained = len(steps(folder))
        assert wait_for(lambda: len(steps(folder)) > trained + 2), "the run has stopped"
    finally:
        for each in (first, second):
            if each is not None:
                for pid in (*workers(each.pid), each.pid):
                    os.kill(pid, signal.SIGKILL)
                each.wait()
    for opened, joined_at in (early, late):
        assert joined_at == []
        assert [ADDRESSES["a"], 29500] in opened
        assert all(address in ADDRESSES.values() for address, _ in opened)
    said = folder.with_suffix(".a.log").read_text()
    assert f"{ADDRESSES['c']} reached this launch without its secret and was refused" in said


def meet(network: str, *nodes: subprocess.Popen[str]) -> tuple[list[list[object]], list[object]]:
    """What a stranger reaches, and which store it joins, of all that the nodes listen on."""
    places = set()
    for host, node in zip("ab", nodes, strict=False):
        found = listening_places(workers(node.pid)[0])
        assert {address for address, _ in found} <= {"127.0.0.1", ADDRESSES[host]}, "every address"
        places |= {(ADDRESSES[host], port) for _, port in found}
    command = ["ip", "netns", "exec", f"{network}-c", sys.executable, "-c", STRANGER]
    places_given = json.dumps(sorted(places))
    done = subprocess.run(
        [*command, places_given], check=True, capture_output=True, text=True, timeout=120
    )
    opened, joined_at = json.loads(done.stdout)
    return opened, joined_at
