"""Predicted memory and step time: `prediction.json`, so that training needs no planner.

The launcher writes what it knows at once. `python -m trainer.launch.predict` plans the run: rank 0
starts it once devices are known, sends a request as JSON on standard input and reads the answer, the
memory options that were "auto", as a line of standard output. After that, changes that would help if
memory runs out are traced beside the run. The launcher starts one before there are ranks, to which
nobody listens: what rank 0 asks is known then, or being traced. Imports no torch but for traces that
are not known.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from trainer.config import extension
from trainer.config.job_config import Config
from trainer.config.summary import parallelism_summary, topology, warnings
from trainer.errors import ConfigError, RunError
from trainer.hardware.device_specs import DEFAULT_DEVICE, DeviceSpec, load_device, select_device
from trainer.hardware.host import GIB
from trainer.metrics.prediction import Prediction, write_prediction
from trainer.plan.memory_options import Choice, choose_memory_options
from trainer.plan.plan import TrainingPlan
from trainer.plan.reserves import HOST_BYTES_PER_PROCESS
from trainer.plan.rough import RoughPlan
from trainer.plan.step_time import sequence_cost
from trainer.plan.suggestions import likely_changes, suggestions
from trainer.plan.traced_forms import Form, Traces
from trainer.plan.tracing import end_with
from trainer.storage.durable_io import format_bytes
from trainer.trace.errors import UntraceableError

MAX_NICE = 19


def predict(config: Config, world_size: int, *, num_nodes: int) -> Prediction:
    """Everything that is known without a trace; changes that may help if memory runs out come
    without numbers.
    """
    mesh = topology(config, world_size, nodes=num_nodes)
    estimate = RoughPlan(config, world_size, load_device(DEFAULT_DEVICE))
    form = Form(config, frozenset(), estimate)
    changes = likely_changes(form, Traces(), "device memory")
    return Prediction(
        summary=tuple(parallelism_summary(config, world_size)),
        warnings=(*warnings(config, world_size), *mesh.warnings()),
        out_of_memory_advice=tuple(f"{change.text} may free memory" for change in changes),
    )


def planned_device(
    config: Config, *, ranks_per_node: int, host_bytes: float, device_bytes: float | None = None
) -> DeviceSpec:
    """The device of a run on nodes of this kind, by its table, or by the default.

    `device_bytes`: its memory, if that was measured.
    """
    device = select_device(config) or load_device(DEFAULT_DEVICE)
    return replace(
        device,
        memory=device_bytes or device.memory,
        host_memory=host_bytes,
        devices_per_node=ranks_per_node,
    )


def with_plan(prediction: Prediction, config: Config, plan: TrainingPlan) -> Prediction:
    """The prediction with the memory of a plan and, where a device is known, its seconds."""
    found: dict[str, Any] = {
        "device_bytes": plan.peak_memory.device_bytes,
        "memory_summary": memory_summary(plan),
    }
    device = select_device(config)
    if device is not None:
        per_token, per_pair = sequence_cost(plan.config, plan.world_size, plan.step_time)
        found |= {"device": device.name, "step_seconds": plan.step_seconds}
        found |= {"seconds_per_token": per_token, "seconds_per_pair": per_pair}
    return prediction.model_copy(update=found)


def memory_summary(plan: TrainingPlan) -> str:
    peak = plan.peak_memory
    largest = ", ".join(
        f"{item.name} {_format_size(item.device_bytes)}" for item in peak.largest_items
    )
    host = plan.peak_host_memory.host_bytes
    on_host = f"; host {_format_size(host)}" if host else ""
    return (
        f"predicted peak memory per rank: {_format_size(peak.device_bytes)} ({largest}){on_host}"
    )


def _format_size(size: float) -> str:
    if size < GIB:
        return format_bytes(size)
    gib = size / GIB
    return f"{gib:.2f} GiB" if gib < 100 else f"{gib:.0f} GiB"


def out_of_memory_advice(plan: TrainingPlan) -> list[str]:
    """The plan's memory, then the changes that free most, one per line, by their traces."""
    advice = [
        f"{each.change.text} would free {_format_size(each.freed_bytes)}"
        for each in suggestions(plan, goal="device memory")
    ]
    fallback = ["no single change frees memory: use more ranks or a smaller model"]
    return [memory_summary(plan), *(advice or fallback)]


def main() -> int:
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    # An interrupt is the run's, which ends this process with itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.load(sys.stdin)
    config = Config.model_validate_json(request["config"])
    world_size = request["world_size"]
    ranks_per_node = request["ranks_per_node"]
    extension.install(config.job.extension)
    prediction = predict(config, world_size, num_nodes=world_size // ranks_per_node)
    host_bytes = request["host_bytes"]
    if request["on_cpu"]:
        # What a plan sets aside for the processes of GPUs comes on top.
        host_bytes += ranks_per_node * HOST_BYTES_PER_PROCESS
    device = planned_device(
        config,
        ranks_per_node=ranks_per_node,
        device_bytes=request.get("device_bytes"),
        host_bytes=host_bytes,
    )
    if "prediction_path" not in request:
        # Nobody listens; the traces stay known.
        with suppress(RunError):
            choice = choose_memory_options(config, world_size, device)
            _ = choice.plan.rank_steps
        return 0
    path = Path(request["prediction_path"])
    try:
        choice = choose_memory_options(config, world_size, device)
        planned = with_plan(prediction, config, choice.plan)
    except UntraceableError as error:
        problems = [f"nothing is predicted: {problem}" for problem in error.problems]
        unplanned = {"warnings": (*prediction.warnings, *problems)}
        write_prediction(path, prediction.model_copy(update=unplanned))
        _answer({"memory": config.memory.model_dump(), "choice": "", "problems": []})
        return 0
    except ConfigError as error:
        _answer({"problems": error.problems})
        return 0
    write_prediction(path, planned)
    _answer(
        {
            "memory": choice.config.memory.model_dump(),
            "choice": choice.description,
            "problems": [],
        }
    )
    _trace_advice(choice, planned, path)
    return 0


def _answer(answer: dict[str, Any]) -> None:
    # Standard output is the answer, so nothing else may be printed in this process.
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _trace_advice(choice: Choice, prediction: Prediction, path: Path) -> None:
    """Beside the run, which comes first."""
    os.nice(MAX_NICE)
    advice = tuple(out_of_memory_advice(choice.plan))
    write_prediction(path, prediction.model_copy(update={"out_of_memory_advice": advice}))


if __name__ == "__main__":
    sys.exit(main())
