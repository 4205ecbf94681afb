"""`python -m trainer.slurm.torchrun_agent`: torchrun's agent on a node of a job; agents find each other by c10d.

    --nodes N --processes N --meet HOST:PORT --id TEXT [--config NAME|PATH] [--section.key VALUE]...

It starts the node's ranks, never a second time, hands signals on to them and leaves as they do. Of a recipe it runs one
stage; the batch script starts it again for the next.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainer.errors import BAD_CONFIGURATION, DONE, FAILED
from trainer.launch.cluster import Cluster, prepare_environment
from trainer.launch.launcher import TRAIN, complaint, examine, nothing_to_start
from trainer.launch.parent_death import LAUNCHER
from trainer.launch.workers import exit_status

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(words: Sequence[str]) -> int:
    asked, argv = parser().parse_known_args(words)
    address, _, port = asked.meet.rpartition(":")
    place = {"NGPU": asked.processes, "NNODES": asked.nodes, "NODE_RANK": "0", "MASTER_ADDR": address}
    config, cluster, problems = examine(argv, place | {"MASTER_PORT": port})
    speaks = os.environ.get("SLURM_NODEID", "0") == "0"
    if problems or cluster is None:
        sys.stderr.write(complaint(problems, argv, cluster) * speaks)
        return BAD_CONFIGURATION
    settled = nothing_to_start(config)
    if settled is not None:
        status, reason = settled
        sys.stderr.write(f"{reason}\n" * speaks)
        return status
    prepare_environment(os.environ, cluster, host_works=config.memory.optimizer_placement == "host")
    logging.disable(logging.ERROR)  # The agent's view of a failed rank; `start` tells it in one line.
    return start(TRAIN, argv, cluster, meet=asked.meet, name=asked.id)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m trainer.slurm.torchrun_agent", allow_abbrev=False)
    found.add_argument("--nodes", required=True)
    found.add_argument("--processes", required=True)
    found.add_argument("--meet", required=True, metavar="HOST:PORT")
    found.add_argument("--id", required=True)
    return found


def start(script: Path, argv: Sequence[str], cluster: Cluster, *, meet: str, name: str) -> int:
    """Runs `script` in this node's processes of the cluster, once; returns the exit status.

    `name` must be new for each start of the cluster: agents that meet under an old one find what it left.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    for number in STOPPING:
        signal.signal(number, _forward)
    os.environ[LAUNCHER] = str(os.getpid())
    options: dict[str, object] = {
        "--nnodes": cluster.nodes,
        "--nproc-per-node": cluster.processes,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": meet,
        "--rdzv-id": name,
        # A restart in place would find addresses of the attempt before; the batch script does better.
        "--max-restarts": 0,
        "--signals-to-handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    written = [f"{option}={value}" for option, value in options.items()]
    config, command, arguments = config_from_args(get_args_parser().parse_args([*written, str(script), *argv]))
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        told = [failure for failure in failures if failure.exitcode != -signal.SIGTERM] or failures
        for failure in told:  # The agent ends the others with SIGTERM.
            how = f"left with {failure.exitcode}" if failure.exitcode > 0 else f"was killed by {failure.signal_name()}"
            sys.stderr.write(f"error: local rank {failure.local_rank} (pid {failure.pid}) {how}\n")
        return exit_status([failure.exitcode for failure in failures])
    except SignalException as error:
        sys.stderr.write(f"error: stopped by {error.sigval.name}\n")
        return FAILED
    return DONE


def _forward(number: int, _: FrameType | None) -> None:
    """A request to stop is the ranks' to answer: torchrun's agent would kill them before a large checkpoint is written."""
    ranks = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    if not ranks:
        raise SystemExit(FAILED)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(FAILED)
