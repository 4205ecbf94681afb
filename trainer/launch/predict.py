"""Predicted memory and step time: `prediction.json`, written before training so that training
needs no planner.

`python -m trainer.launch.predict` chooses the memory options that are "auto": rank 0 starts it
once devices are known, sends a request as JSON on standard input and reads the answer from
standard output. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer.config import extension
from trainer.config.job_config import Config
from trainer.config.summary import parallelism_summary, topology, warnings
from trainer.errors import ConfigError
from trainer.hardware.device_specs import select_device
from trainer.metrics.prediction import Prediction, write_prediction
from trainer.plan.critical_path import predict_step_time, sequence_cost
from trainer.plan.memory_advice import memory_summary, out_of_memory_advice
from trainer.plan.memory_estimate import estimate_memory
from trainer.plan.memory_options import choose_memory_options, describe_choice


def predict(config: Config, world_size: int, *, num_nodes: int) -> Prediction:
    """Step time is absent where no device is known, memory while `recompute = "auto"` is open."""
    described: dict[str, Any] = {
        "summary": parallelism_summary(config, world_size),
        "warnings": [
            *warnings(config, world_size),
            *topology(config, world_size, nodes=num_nodes).warnings(),
        ],
    }
    if config.memory.recompute == "auto":
        return Prediction.model_validate(described, strict=False)
    device = select_device(config)
    memory = estimate_memory(config, world_size)
    if device is not None:
        step = predict_step_time(config, world_size, device)
        per_token, per_pair = sequence_cost(config, world_size, step)
        described |= {"device": device.name, "step_seconds": step.seconds}
        described |= {"seconds_per_token": per_token, "seconds_per_pair": per_pair}
    described |= {
        "device_bytes": memory.device_bytes,
        "memory_summary": memory_summary(config, memory),
    }
    described |= {"out_of_memory_advice": out_of_memory_advice(config, world_size)}
    return Prediction.model_validate(described, strict=False)


def main() -> int:
    request = json.load(sys.stdin)
    config = Config.model_validate_json(request["config"])
    world_size = request["world_size"]
    extension.install(config.job.extension)
    limits = {key: request[key] for key in ("ranks_per_node", "device_bytes", "host_bytes")}
    answer: dict[str, Any]
    try:
        choice = choose_memory_options(config, world_size, **limits)
    except ConfigError as error:
        answer = {"problems": error.problems}
    else:
        resolved = choice.config
        num_nodes = world_size // request["ranks_per_node"]
        write_prediction(
            Path(request["prediction_path"]), predict(resolved, world_size, num_nodes=num_nodes)
        )
        answer = {
            "memory": resolved.memory.model_dump(),
            "choice": describe_choice(config, choice),
            "problems": [],
        }
    # Standard output is the answer, so nothing else may be printed in this process.
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
