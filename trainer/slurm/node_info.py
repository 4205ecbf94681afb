"""`python -m trainer.slurm.node_info`: prints one line about a node for the job log.

Imports no torch.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def node_summary() -> str:
    try:
        # From the package's metadata: importing torch on every node would take longer than the
        # report.
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "is not installed"
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    python = f"python {platform.python_version()} at {sys.executable}"
    return f"{socket.gethostname()}: {gpu_summary()}, {cores}, {python}, torch {torch_version}"


def gpu_summary() -> str:
    """The GPUs of a node with their driver, or what nvidia-smi says instead."""
    try:
        lines = subprocess.run(
            GPU_QUERY, capture_output=True, text=True, check=False
        ).stdout.splitlines()
    except OSError:
        lines = []
    return " and ".join(f"{count} x {gpu}" for gpu, count in Counter(lines).items()) or "no GPUs"


if __name__ == "__main__":
    sys.stdout.write(node_summary() + "\n")
