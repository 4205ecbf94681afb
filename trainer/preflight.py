"""`longhaul preflight`: checks this node before a run trains on it.

The checks run in a process of their own, so that one that hangs is named and the command still
ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from threading import Thread
from typing import Any

from trainer.command_table import typed
from trainer.commands import CommandParser, integer, number, run_command
from trainer.errors import EXIT_BAD_NODE, EXIT_SUCCESS, ConfigError
from trainer.hardware.host import child_environment

HUNG = "hung"
FAILED = "failed"
PASSED = "passed"
Result = dict[str, Any]
"""Result of a check: name, state, detail and seconds."""


def build_parser() -> CommandParser:
    description = f"""\
Checks this node in seconds: visible devices and their free memory, exact products, attention against float64, copies to and
between devices, the clock, the disk of the run and shared memory. Exit code {EXIT_BAD_NODE}: the node fails."""
    parser = CommandParser(typed("preflight"), description, run=check_node)
    add = parser.add_argument
    add(
        "--path",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="on the disk that the run uses; default: here",
    )
    add(
        "--devices",
        type=integer(minimum=0),
        metavar="N",
        help="GPUs that the node must have; default: as many as it lists",
    )
    add(
        "--seconds",
        type=number(),
        default=60.0,
        metavar="S",
        help="in which all checks must end (60)",
    )
    add("--json", type=Path, metavar="FOLDER", help="also write the results to FOLDER/HOST.json")
    return parser


def check_node(options: Namespace, overrides: list[str]) -> int:
    """Prints a line for each check."""
    del overrides
    if not options.path.is_dir():
        raise ConfigError([f"--path {options.path} is not a folder"])
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    results = run_checks(options)
    for result in results:
        sys.stdout.write(
            f"{host}: {result['name']}: {result['state']}, {result['detail']} ({result['seconds']:.1f} s)\n"
        )
    is_good = all(result["state"] == PASSED for result in results)
    sys.stdout.write(f"{host}: {'good' if is_good else 'BAD'}\n")
    if options.json is not None:
        try:
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"{host}.json").write_text(
                json.dumps({"host": host, "good": is_good, "checks": results})
            )
        except OSError as error:
            raise ConfigError(
                [f"--json {options.json} cannot be written: {error.strerror}"]
            ) from None
    return EXIT_SUCCESS if is_good else EXIT_BAD_NODE


def run_checks(options: Namespace) -> list[Result]:
    """The results of all checks that ended in time, and of the one that did not."""
    started = time.monotonic()
    asked = json.dumps({"path": str(options.path), "devices": options.devices})
    command = [sys.executable, "-P", "-m", "trainer.hardware.check_node", asked]
    worker = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(os.environ),
    )
    begun = ["start"]
    results = list[Result]()
    others = list[str]()

    def read() -> None:
        for line in worker.stdout or ():
            try:
                values = json.loads(line)
            except ValueError:
                others.append(line.strip())
            else:
                results.append(values) if "state" in values else begun.append(values["name"])

    # A thread reads, because a pipe has no read with a time limit.
    reader = Thread(target=read, daemon=True)
    reader.start()
    reader.join(options.seconds)
    if reader.is_alive():
        worker.kill()
        reader.join()
        ending = {"state": HUNG, "detail": f"did not end within {options.seconds:g} s"}
    else:
        ending = {
            "state": FAILED,
            "detail": f"its process ended with {worker.wait()}: {' '.join(others[-3:])[-300:]}",
        }
    # A check names itself before it begins: one more begun than ended is the one that hung or
    # died.
    if len(results) < len(begun) - 1 or not results:
        results.append({"name": begun[-1], **ending, "seconds": time.monotonic() - started})
    return results


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], build_parser()))
