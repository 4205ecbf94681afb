"""A SLURM cluster on this machine: each node has its network namespace, host name, veth cable and
shared memory.

Namespaces and the folder are named after this process. Several clusters can coexist, and those of
killed processes are found and removed. Only processes in these namespaces and pid files are
killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.slurm.scheduler import JobState

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge iproute2"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "unshare", "ip")
CONTROLLER = "10.99.0.1"
# Concurrent jobs of two ranks on each of two nodes.
JOBS = 4
CPUS = 2 * JOBS  # Per node.
PREFIX = "longhaul"

# `cred_expire`: otherwise a requeued job waits two minutes. `config_overrides`: nodes may claim
# more CPUs than exist.
CONFIGURATION = """\
ClusterName=longhaul
SlurmctldHost=ctl(10.99.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/run/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
OverTimeLimit=0
InactiveLimit=0
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=15
MessageTimeout=10
NodeName=n[1-{nodes}] CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; mount -t tmpfs -o mode=1777 shm /dev/shm; shift; exec "$@"'
GRACE = 60  # seconds for a preempted job to exit


def missing() -> str | None:
    """Why no cluster can run on this machine; None if one can."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(absent)} not found: {INSTALL}"
    if " /sys/fs/cgroup" not in Path("/proc/mounts").read_text():
        return "/sys/fs/cgroup is not mounted, and slurmd needs it"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"cannot create a network namespace: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    made = subprocess.run(
        ["unshare", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return (
        f"cannot create a UTS and mount namespace: {made.stderr.strip()}"
        if made.returncode
        else None
    )


class CommandError(Exception):
    """A command failed; has its output."""


class Cluster:
    """A context manager. The folder is not below pytest's, whose permissions munged rejects."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.name = f"{PREFIX}-{os.getpid()}" + "-many" * (num_nodes > 2)
        self.addresses = {
            f"n{index}": f"10.99.0.{10 + index}" for index in range(1, num_nodes + 1)
        }
        self.folder = Path(tempfile.gettempdir()) / self.name
        self.small_disk = self.folder / "disk"
        """A file system of its own that all nodes share."""

    def __enter__(self) -> Cluster:
        sweep()
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.folder)

    def _up(self) -> None:
        for name in ("", "state", "log", "run", "munge", "disk"):
            (self.folder / name).mkdir(mode=0o755)
        _run("mount", "-t", "tmpfs", "-o", "size=48m", self.name, str(self.small_disk))
        hosts = "".join(
            f"{address} {name}\n"
            for name, address in [("ctl", CONTROLLER), *self.addresses.items()]
        )
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        configuration = CONFIGURATION.format(
            folder=self.folder, nodes=len(self.addresses), cpus=CPUS, grace=GRACE
        )
        (self.folder / "slurm.conf").write_text(configuration)
        self._wire()
        self._start_munge()
        self._enter("ctl", "slurmctld", "-c")
        for name in self.addresses:
            self.start_node(name)
        self.wait_for(self.is_idle, 20, "idle nodes")

    def _wire(self) -> None:
        """Connects the network of each node to a bridge in the controller's namespace."""
        control = f"{self.name}-ctl"
        _run("ip", "netns", "add", control)
        _run("ip", "-n", control, "link", "set", "lo", "up")
        _run("ip", "-n", control, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", control, "addr", "add", f"{CONTROLLER}/24", "dev", "bridge")
        _run("ip", "-n", control, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            space = f"{self.name}-{name}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                name,
                "netns",
                control,
            )
            _run("ip", "-n", control, "link", "set", name, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            self.plug(name)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        places = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        _run("munged", *(f"--{option}={folder / name}" for option, name in places.items()))

    def _enter(self, name: str, *command: str) -> str:
        """Runs a command on a node, or on the controller."""
        hosts = str(self.folder / "hosts")
        enter = [
            "nsenter",
            f"--net=/run/netns/{self.name}-{name}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            ENTER,
        ]
        return _run(*enter, name, hosts, *command, environment=self.environment)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "PYTEST_"))
        }
        # One thread, as in all tests: results are compared bit for bit.
        return inherited | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    # ---- faults

    def start_node(self, name: str) -> None:
        self._enter(name, "slurmd", "-N", name, "-c")

    def unplug(self, name: str) -> None:
        _run("ip", "-n", f"{self.name}-{name}", "link", "set", "eth0", "down")

    def plug(self, name: str) -> None:
        _run("ip", "-n", f"{self.name}-{name}", "link", "set", "eth0", "up")

    def preempt(self, *, seconds: int) -> str:
        """Submits a job of higher priority that takes all nodes; returns its id."""
        size = (
            "--partition=high",
            f"--nodes={len(self.addresses)}",
            f"--ntasks-per-node={CPUS}",
            f"--output={self.folder}/log/high.log",
        )
        return self.command("sbatch", "--parsable", *size, f"--wrap=sleep {seconds}").strip()

    def kill_node(self, name: str) -> None:
        """Simulates a power failure."""
        _kill_all(f"{self.name}-{name}")

    def processes(self, name: str) -> list[int]:
        """The processes of a node."""
        return _pids(f"{self.name}-{name}")

    # ---- commands and queries

    def command(self, *command: str) -> str:
        """Runs a command on the controller; returns its output. Raises `CommandError`."""
        return self._enter("ctl", *command)

    def state(self, job: str) -> JobState:
        output = self.command("scontrol", "--oneliner", "show", "job", job)
        return JobState(job, output)

    def wait_state(self, job: str, *states: str, seconds: float) -> JobState:
        """Waits until the job is in one of these states."""
        self.wait_for(
            lambda: self.state(job).state in states,
            seconds,
            f"job {job} to be {' or '.join(states)}",
        )
        return self.state(job)

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for {what}\n{self.describe()}")
            time.sleep(0.05)

    def describe(self) -> str:
        """The scheduler's state, for the message of a failed test."""
        return (
            self.command("squeue")
            + self.command("sinfo")
            + (self.folder / "log" / "slurmctld.log").read_text()[-3000:]
        )

    def clear(self) -> None:
        """Kills all jobs and waits for idle nodes."""
        self.command("scancel", "--user=root")
        self.command("scancel", "--user=root", "--signal=KILL")
        self.wait_for(self.is_idle, 60, "idle nodes")

    def is_idle(self) -> bool:
        return (
            self.command("sinfo", "-h", "-p", "main", "-o", "%T %D")
            == f"idle {len(self.addresses)}\n"
        )


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    if done.returncode:
        raise CommandError(
            f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    while pids := _pids(namespace):
        for pid in pids:
            _kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _remove(folder: Path) -> None:
    """Kills the processes of a cluster and removes it, even if it is incomplete."""
    for space in Path("/run/netns").glob(f"{folder.name}-*"):
        _kill_all(space.name)
        _run("ip", "netns", "del", space.name)
    with suppress(OSError):
        pid = int((folder / "munge" / "pid").read_text())
        # Otherwise the pid was reused.
        if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            _kill(pid, signal.SIGTERM)
    while os.path.ismount(folder / "disk"):
        _run("umount", "-l", str(folder / "disk"))
    # Processes that end may write once more.
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def sweep() -> None:
    """Removes the clusters of processes that no longer exist."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        owner = folder.name.removeprefix(f"{PREFIX}-").removesuffix("-many")
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(folder)
