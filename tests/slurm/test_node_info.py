"""The line about each node in the job log."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainer.slurm.node_info import gpu_summary, node_summary

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for number, model in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    (tmp_path / "version").write_text(VERSION)
    return tmp_path


def test_gpus_are_counted_by_model_with_their_driver(driver: Path) -> None:
    assert gpu_summary(driver) == "2 x NVIDIA H200 and 1 x NVIDIA L4 (driver 570.86.15)"
    (driver / "version").unlink()
    assert gpu_summary(driver).endswith(" (driver of unknown version)")


def test_a_node_summary_is_one_line(tmp_path: Path) -> None:
    line = node_summary(tmp_path)
    assert line.startswith(f"{socket.gethostname()}: no GPUs, ")
    assert ", torch 2." in line
    assert "\n" not in line
