"""The process that plans a run, `trainer.launch.predict`: a child, because training processes
import no planner, and a trace needs no device. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

from trainer.config.job_config import Config
from trainer.hardware.host import child_environment

log = logging.getLogger("trainer")


def ask_planner(
    config: Config, world_size: int, *, prediction_path: Path, **limits: Any
) -> dict[str, Any]:
    """The planner's answer; its process lives on beside the run, to trace advice.

    `limits`: ranks_per_node, device_bytes, host_bytes and on_cpu.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading) as answers:
        path = str(prediction_path)
        _start(config, world_size, stdout=writing, prediction_path=path, **limits)
        os.close(writing)
        line = answers.readline()
    if line:
        answer: dict[str, Any] = json.loads(line)
        return answer
    failure = "the planner failed"
    if config.memory.recompute == "auto":
        return {"problems": [f'memory options that are "auto": {failure}']}
    log.warning("nothing is predicted: %s", failure)
    memory = with_smallest_chunk(config).memory.model_dump()
    return {"memory": memory, "choice": "", "problems": []}


def trace_early(config: Config, world_size: int, **limits: Any) -> None:
    """Starts to trace what rank 0 will ask for, while the ranks import torch.

    `limits`: those of `ask_planner`, as far as they are known.
    """
    _start(config, world_size, stdout=subprocess.DEVNULL, **limits)


def _start(config: Config, world_size: int, *, stdout: int, **request: Any) -> None:
    """Starts the planner with a request."""
    request["config"] = config.model_dump_json(by_alias=True, exclude_unset=True)
    request["world_size"] = world_size
    environment = child_environment(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with TemporaryFile("w+") as file:
        json.dump(request, file)
        file.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.launch.predict"],
            env=environment,
            stdin=file,
            stdout=stdout,
        )
    # It is collected whenever it ends.
    Thread(target=child.wait, name="planner", daemon=True).start()


def with_smallest_chunk(config: Config) -> Config:
    chunk = {"loss_chunk_mib": config.memory.loss_chunk_bytes >> 20}
    return config.model_copy(update={"memory": config.memory.model_copy(update=chunk)})
