"""`python -m trainer.slurm.agent`: torchrun's agent on a node of a job; agents find each other by c10d.

    --nodes N --processes N --meet HOST:PORT --id TEXT [--config NAME|PATH] [--section.key VALUE]...

It starts the node's ranks, never a second time, hands signals on to them and leaves as they do. Of a recipe it runs one
stage; the batch script starts it again for the next.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from trainer.launch import TRAIN, Cluster, complaint, examine, nothing_to_start, prepare_environment, start
from trainer.status import BAD_CONFIGURATION, FAILED


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
    # Of a single node, too, the place to meet is the job's.
    cluster = Cluster(processes=cluster.processes, nodes=cluster.nodes, master=asked.meet, rendezvous=asked.id)
    prepare_environment(os.environ, cluster, host_works=config.memory.optimizer_placement == "host")
    logging.disable(logging.ERROR)  # The agent's view of a failed worker; `start` tells it in one line.
    return start(TRAIN, argv, cluster)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m trainer.slurm.agent", allow_abbrev=False)
    found.add_argument("--nodes", required=True)
    found.add_argument("--processes", required=True)
    found.add_argument("--meet", required=True, metavar="HOST:PORT")
    found.add_argument("--id", required=True)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(FAILED)
