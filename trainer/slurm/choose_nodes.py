"""`python -m trainer.slurm.choose_nodes RUN NODES NODE...`: prints the nodes of a job that train,
separated by commas.

Nodes that did not pass the preflight, or did not end it, are left out. Of the others, those come
last that this run's events accuse: their copies or results differed, or all others waited for
them. Exits with 3 if too few nodes passed. Imports only what Python brings, because it runs
outside of containers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.files import MAX_CONFIG_BYTES, MAX_LINE_BYTES, open_regular, read_regular
from trainer.errors import EXIT_BAD_NODE, EXIT_SUCCESS

ACCUSING = ("unstable_step", "replica_mismatch", "straggler")
"""Events that name hosts."""


def main(argv: Sequence[str]) -> int:
    run = Path(argv[0])
    count = int(argv[1])
    nodes = argv[2:]
    failures = {node: failure for node in nodes if (failure := failure_of(run, node))}
    for node, failure in failures.items():
        sys.stderr.write(f"preflight: {node} is left out: {failure}\n")
    suspects = accused(run)
    # A stable sort: suspects move to the end, all others keep their order.
    good = sorted(
        (node for node in nodes if node not in failures),
        key=lambda node: node.split(".")[0] in suspects,
    )
    for node in good[count:]:
        if node.split(".")[0] in suspects:
            sys.stderr.write(f"preflight: {node} is left out: this run's events accuse it\n")
    if len(good) < count:
        excluded = (
            f'; to leave them out, submit again with slurm.exclude = "{",".join(failures)}"'
            if failures
            else ""
        )
        sys.stderr.write(
            f"preflight: {len(good)} of the {count} nodes that train passed{excluded}\n"
        )
        return EXIT_BAD_NODE
    # In SLURM's order: task 0 runs on the first node, whose name becomes MASTER_ADDR.
    sys.stdout.write(",".join(node for node in nodes if node in good[:count]) + "\n")
    return EXIT_SUCCESS


def failure_of(run: Path, node: str) -> str:
    """Why a node did not pass; empty if it did."""
    path = run / "slurm" / "preflight" / f"{node}.json"
    try:
        found = json.loads(read_regular(path, max_bytes=MAX_CONFIG_BYTES))
        failed = [
            f"{each['name']}: {each['detail']}"
            for each in found["checks"]
            if each["state"] != "passed"
        ]
    except FileNotFoundError:
        return "it did not end the preflight"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return f"{path} cannot be read: {error}"
    return "; ".join(failed)


def accused(run: Path) -> set[str]:
    """Hosts that events of the run name, without their domain."""
    hosts = set[str]()
    with suppress(OSError), open_regular(run / "events.jsonl") as events:
        while line := events.readline(MAX_LINE_BYTES):
            with suppress(ValueError, RecursionError):
                hosts |= {*_hosts(json.loads(line))}
    return hosts


def _hosts(event: Any) -> Iterable[str]:
    if isinstance(event, dict) and event.get("event") in ACCUSING:
        ranks = event.get("ranks")
        for each in [event, *(ranks if isinstance(ranks, list) else ())]:
            if isinstance(each, dict) and isinstance(each.get("host"), str):
                yield each["host"].split(".")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
