"""The line about each node in the job log."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trainer.slurm.node_info import gpu_summary, node_summary

GPUS = "NVIDIA H200, 570.86.15\\nNVIDIA H200, 570.86.15\\nNVIDIA L4, 570.86.15\\n"


def test_gpus_are_counted_by_model_with_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text(
        f'#!/bin/sh\n[ "$*" = "--query-gpu=name,driver_version --format=csv,noheader" ] && printf "{GPUS}"\n'
    )
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_summary() == "2 x NVIDIA H200, 570.86.15 and 1 x NVIDIA L4, 570.86.15"


def test_a_node_summary_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    line = node_summary()
    assert line.startswith(f"{socket.gethostname()}: no GPUs, ")
    assert ", torch 2." in line
    assert "\n" not in line
