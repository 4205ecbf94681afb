"""`python -m trainer.slurm.node_info`: prints one line about a node for the job log. Imports no torch."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NVIDIA_PROC_DIR = Path("/proc/driver/nvidia")


def node_summary(driver_dir: Path = NVIDIA_PROC_DIR) -> str:
    fields = [
        gpu_summary(driver_dir),
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        f"python {platform.python_version()} at {sys.executable}",
        f"torch {torch_version()}",
    ]
    return f"{socket.gethostname()}: {', '.join(fields)}"


def gpu_summary(driver_dir: Path) -> str:
    """The GPUs of a node and their driver, read from the driver's /proc folder."""
    models = Counter(_gpu_model(path) for path in sorted((driver_dir / "gpus").glob("*/information")))
    if not models:
        return "no GPUs"
    counts = " and ".join(f"{count} x {model}" for model, count in models.items())
    try:
        words = (driver_dir / "version").read_text().partition("\n")[0].split()
    except OSError:
        words = []
    driver_version = next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")
    return f"{counts} (driver {driver_version})"


def torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "is not installed"


def _gpu_model(path: Path) -> str:
    for text in path.read_text().splitlines():
        key, _, value = text.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return "GPU"


if __name__ == "__main__":
    sys.stdout.write(node_summary() + "\n")
