"""`python -m trainer.slurm.node_info`: what a node is, in one line of the job's log. Imports no torch."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


def line(driver: Path = DRIVER) -> str:
    facts = [
        gpus(driver),
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        f"python {platform.python_version()} at {sys.executable}",
        f"torch {torch_version()}",
    ]
    return f"{socket.gethostname()}: {', '.join(facts)}"


def gpus(driver: Path) -> str:
    """The GPUs of a node and their driver, as the driver's folder tells them."""
    models = Counter(_model(path) for path in sorted((driver / "gpus").glob("*/information")))
    if not models:
        return "no GPUs"
    told = " and ".join(f"{count} x {model}" for model, count in models.items())
    try:
        words = (driver / "version").read_text().partition("\n")[0].split()
    except OSError:
        words = []
    number = next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")
    return f"{told} (driver {number})"


def torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "is not installed"


def _model(path: Path) -> str:
    for text in path.read_text().splitlines():
        key, _, value = text.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return "GPU"


if __name__ == "__main__":
    sys.stdout.write(line() + "\n")
