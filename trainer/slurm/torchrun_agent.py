"""`python -m trainer.slurm.torchrun_agent`: torchrun's agent on a node of a job, with c10d
rendezvous.

    --nodes N --processes N --meet HOST:PORT --id TEXT [--config NAME|PATH] [--section.key VALUE]...

Starts the node's ranks once, forwards signals to them and exits with their status. Of a recipe it
runs one stage; the batch script starts it again for the next.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainer.commands import CommandParser, overrides_help, run_command
from trainer.config.run_spec import RunSpec
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_SUCCESS
from trainer.launch.cluster import LaunchWorld, set_worker_environment
from trainer.launch.launcher import TRAIN_SCRIPT, format_problems, load_and_validate, prepare_run
from trainer.launch.workers import exit_status, report_failed_rank
from trainer.metrics import loggers
from trainer.resilience.signals import LAUNCHER_PID_ENV, SignalHandler

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(args: Sequence[str]) -> int:
    parser = CommandParser(
        "python -m trainer.slurm.torchrun_agent",
        "Starts the ranks of a node.",
        run=run,
        overrides=overrides_help(),
    )
    parser.add_config()
    for option, metavar in (
        ("--nodes", "N"),
        ("--processes", "N"),
        ("--meet", "HOST:PORT"),
        ("--id", "TEXT"),
    ):
        parser.add_argument(option, required=True, metavar=metavar)
    return run_command(args, parser)


def run(options: Namespace, overrides: Sequence[str]) -> int:
    address, _, port = options.meet.rpartition(":")
    environment = {
        "NGPU": options.processes,
        "NNODES": options.nodes,
        "NODE_RANK": os.environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    config, cluster, problems = load_and_validate(overrides, environment, fetching=True)
    is_first_node = environment["NODE_RANK"] == "0"
    if problems or cluster is None:
        if is_first_node:
            sys.stderr.write(format_problems(problems, overrides, cluster))
        return EXIT_BAD_CONFIG
    loggers.configure_logging(cluster.node_rank)
    with SignalHandler().raising_alone():
        spec = prepare_run(config, cluster)
    if not isinstance(spec, RunSpec):
        return spec
    set_worker_environment(
        os.environ, cluster, cpu_optimizer=config.memory.optimizer_placement == "host"
    )
    # torchrun's report of a failed rank; `launch_agent` prints one line instead.
    logging.disable(logging.ERROR)
    return launch_agent(
        TRAIN_SCRIPT, [spec.to_json()], cluster, rdzv_endpoint=options.meet, rdzv_id=options.id
    )


def launch_agent(
    script: Path, argv: Sequence[str], cluster: LaunchWorld, *, rdzv_endpoint: str, rdzv_id: str
) -> int:
    """Runs `script` once on this node's ranks; returns the exit status.

    `rdzv_id` must be new for each launch: agents with a reused id would join the previous
    rendezvous.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    for number in STOP_SIGNALS:
        signal.signal(number, _forward_signal)
    os.environ[LAUNCHER_PID_ENV] = str(os.getpid())
    options: dict[str, object] = {
        "--nnodes": cluster.num_nodes,
        "--nproc-per-node": cluster.nproc_per_node,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": rdzv_endpoint,
        "--rdzv-id": rdzv_id,
        # A restart in place would reuse the previous attempt's addresses; the batch script
        # restarts instead.
        "--max-restarts": 0,
        "--signals-to-handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    torchrun_args = [f"{option}={value}" for option, value in options.items()]
    config, command, arguments = config_from_args(
        get_args_parser().parse_args([*torchrun_args, str(script), *argv])
    )
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        reported = [
            failure for failure in failures if failure.exitcode != -signal.SIGTERM
        ] or failures
        # The agent kills the peers with SIGTERM.
        for failure in reported:
            report_failed_rank(failure.local_rank, failure.pid, failure.exitcode)
        return exit_status([failure.exitcode for failure in failures])
    except SignalException as error:
        sys.stderr.write(f"error: stopped by {error.sigval.name}\n")
        return EXIT_FAILURE
    return EXIT_SUCCESS


def _forward_signal(number: int, _: FrameType | None) -> None:
    """Forwards a stop signal to the ranks; torchrun's own handler would kill ranks that are still
    saving.
    """
    rank_pids = [
        pid
        # The agent tells nobody its children; Linux lists them per thread.
        for task in Path("/proc/self/task").glob("*/children")
        for pid in task.read_text().split()
    ]
    if not rank_pids:
        raise SystemExit(EXIT_FAILURE)
    for pid in rank_pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
