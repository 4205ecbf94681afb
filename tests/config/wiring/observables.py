"""What a configuration changes, measured at the code that uses the value; each runs on every rank
of a process group.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import kernel_check
from models.hf_config_write import model_config_to_hf
from models.norm import RMSNorm
from models.tiling import eager
from tests.config.wiring import runs
from tests.config.wiring.cases import Task
from tests.plan.counted_steps import OPERATORS
from tests.plan.made_up_traces import made_up_rank_steps
from trainer.config import extension
from trainer.config.checks import problems
from trainer.config.data import DEFAULT_SOURCE
from trainer.config.job_config import Config
from trainer.config.run_spec import RunSpec
from trainer.config.source import corpus_spec
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.data.datasets import build_train_dataset, build_validation_sets
from trainer.data.prepare import prepare_datasets
from trainer.data.remote_corpus import cache_bytes
from trainer.errors import START_TIME_ENV, ConfigError, RunError
from trainer.hardware.device import choose_attention_kernel
from trainer.hardware.host import boot_id
from trainer.launch.cluster import LaunchWorld
from trainer.launch.initial_checks import validate_initial_weights
from trainer.launch.restarts import run_with_restarts
from trainer.launch.workers import Workers
from trainer.metrics.profiler import Profilers
from trainer.metrics.trackers import wanted
from trainer.plan.__main__ import main as plan_main
from trainer.resilience.anomalies import LossSpikeError
from trainer.resilience.preemption import job_deadline
from trainer.run import train_loop
from trainer.run.metrics_processor import MetricsProcessor
from trainer.run.validation import Validator
from trainer.slurm.script import render
from trainer.step.process_group import World, resolve_auto_memory
from trainer.step.rerun import reruns_suspicious_steps
from trainer.step.trainer import Trainer
from trainer.storage.run_dir import RunDir
from trainer.storage.uploads import uploads_of

CPU = torch.device("cpu")


def observe_all(tasks: list[Task], folder: Path) -> list[Any]:
    """(problems, observation) of each task on this rank."""
    runs.finished.cache_clear()
    os.chdir(folder)
    os.fsync = int  # type: ignore[assignment]
    with (
        (folder.parent / f"{folder.name}.log").open("a") as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        return [observe(task) for task in tasks]


def observe(task: Task) -> tuple[list[str], Any]:
    recipe = Recipe.model_validate(task.values)
    extension._installed.clear()  # Of another task.
    extension.install(recipe.job.extension)
    if found := problems(recipe, task.world_size):
        return found, None
    try:
        return [], task.observable(recipe)
    except RunError as error:
        return [], str(error)
    except Exception as error:
        error.add_note(str(task))
        raise


def exported_model_type(recipe: Recipe) -> str:
    """What `hf export` writes."""
    return str(
        model_config_to_hf(recipe.model.build(), max_length=64, dtype="float32")["model_type"]
    )


def build_trainer(recipe: Recipe) -> Trainer:
    stage = recipe.training_stages[0]
    dataset = build_train_dataset(stage.config, prepare_datasets(recipe))
    world = World(distributed.get_rank(), distributed.get_world_size(), CPU)
    return Trainer(stage.config, world, dataset, stage=stage)


def initial_problem(recipe: Recipe) -> str:
    """Why a folder without weights, whose config.json has an unknown key, cannot be started
    from.
    """
    values = model_config_to_hf(recipe.model.build(), max_length=64, dtype="float32") | {
        "house_key": 1
    }
    Path("hub").mkdir(exist_ok=True)
    Path("hub/config.json").write_text(json.dumps(values))
    try:
        validate_initial_weights(recipe)
    except ConfigError as error:
        return str(error)
    return ""


# ---- a step


def losses(recipe: Recipe) -> list[float]:
    """The loss of each step of the first stage.

    Raises ValueError if one is not finite: it would differ from itself.
    """
    found = [result.read().loss for result in build_trainer(recipe).train_steps()]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"losses are not finite: {found}")
    return found


def inputs(recipe: Recipe) -> list[Any]:
    """Tokens, positions and document boundaries of this rank's micro-batches of the first step."""
    with closing(build_trainer(recipe).loader.steps(start_sequence=0)) as batches:
        return [(batch.tokens.tolist(), batch.boundaries.tolist()) for batch in next(batches)]


def reading_processes(recipe: Recipe) -> int:
    """The number that the loader starts; a rank of this test may start none."""
    return build_trainer(recipe).loader.num_workers


def initial_weights(recipe: Recipe) -> dict[str, Any]:
    """Local shape and sum of every parameter of this rank."""
    named = build_trainer(recipe).optimizer.parameters_by_name.items()
    local = {name: getattr(weight, "_local_tensor", weight).detach() for name, weight in named}
    return {
        name: (tuple(weight.shape), float(weight.double().sum())) for name, weight in local.items()
    }


def weight_shapes(recipe: Recipe) -> dict[str, Any]:
    return {name: shape for name, (shape, _) in initial_weights(recipe).items()}


def state_dtypes(recipe: Recipe) -> dict[str, str]:
    """Type of every tensor of a checkpoint."""
    return {name: str(tensor.dtype) for name, tensor in build_trainer(recipe).state_dict().items()}


def normed(recipe: Recipe) -> Any:
    """What every norm of the model makes of small values."""
    (model,) = build_trainer(recipe).stage_modules.values()
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    (value,) = {norm(torch.full((1, 1, norm.weight.numel()), 1e-3)).max().item() for norm in norms}
    return value


class Recorder(TorchDispatchMode):
    """Records the name, type and shape of the first tensor of every operation, also inside custom
    operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in OPERATORS:
            with self:
                return OPERATORS[function](*args, **(kwargs or {}))
        first = next(
            (x for x in tree_leaves(args) if isinstance(x, Tensor)), torch.empty(0, device="meta")
        )
        self.calls.append((function._schema.name, str(first.dtype), tuple(first.shape)))
        return function(*args, **(kwargs or {}))


def _record(recipe: Recipe) -> list[tuple[str, str, tuple[int, ...]]]:
    trainer = build_trainer(recipe)
    recorder = Recorder()
    with closing(trainer.loader.steps(start_sequence=0)) as batches, recorder:
        trainer.train_step(next(batches), 1e-3)
    return recorder.calls


HEAVY = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_fused_adamw_",
    "aten::_scaled_dot_product",
)


def kernel_calls(recipe: Recipe) -> dict[Any, int]:
    """How often the first step runs matrix products, attention kernels and AdamW, by shape.

    Not all operations: caches that the process fills only once would differ, too.
    """
    return Counter(call for call in _record(recipe) if call[0].startswith(HEAVY))


def collectives(recipe: Recipe) -> list[Any]:
    """The communication of the first step, in order, with types and shapes."""
    return [
        call for call in _record(recipe) if call[0].startswith(("c10d::", "_c10d_functional::"))
    ]


def host_copies(recipe: Recipe) -> tuple[int, int]:
    """Bytes of block inputs and attention outputs in host memory before the loss head of the first
    step.
    """
    trainer = build_trainer(recipe)
    model: Any = trainer.stage_modules[0]
    (pool,) = {block.forward_fn._config.host_pool for block in model.transformer_blocks()}
    used: list[tuple[int, int]] = []
    model.head.register_forward_pre_hook(
        lambda *_: used.append(
            (0, 0) if pool is None else (pool.used_bytes["inputs"], pool.used_bytes["attention"])
        )
    )
    with closing(trainer.loader.steps(start_sequence=0)) as batches:
        trainer.accumulate_gradients(next(batches))
    return used[0]


def compiled(recipe: Recipe) -> list[tuple[bool, bool]]:
    """Whether each block, or its tile operations, are compiled."""
    blocks = build_trainer(recipe).stage_modules[0].transformer_blocks()
    ops = [getattr(block.forward_fn, "_config", None) for block in blocks]
    return [
        (
            block._compiled_call_impl is not None,
            config is not None and config.tiling.compile is not eager,
        )
        for block, config in zip(blocks, ops, strict=True)
    ]


def deterministic(recipe: Recipe) -> bool:
    """Whether torch refuses kernels that are not reproducible."""
    try:
        build_trainer(recipe)
        return torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


def garbage_collections(recipe: Recipe) -> list[int]:
    """The steps after which Python's young generations are collected."""
    trainer = build_trainer(recipe)
    steps: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1 and not gc.isenabled():
            steps.append(trainer.step)

    gc.callbacks.append(record)
    try:
        for _ in trainer.train_steps():
            pass
    finally:
        gc.callbacks.remove(record)
    return steps


def kernel(recipe: Recipe) -> str:
    """The attention kernel chosen for a CUDA device, as far as a machine without one can tell."""
    config = recipe.training_stages[0].config
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        for name in ("verify_kernel", "verify_wide"):
            patch.setattr(kernel_check, name, lambda *_, **__: None)
        return choose_attention_kernel(config, torch.device("cuda", 0))


def refusal(recipe: Recipe) -> str:
    """Why the model cannot be built on this machine; empty if it can."""
    build_trainer(recipe)
    return ""


def group_timeouts(recipe: Recipe) -> list[str]:
    """Timeout of the mesh's collectives before and after the first step."""
    trainer = build_trainer(recipe)
    backend = trainer.mesh.dp_cp_group._get_backend(CPU)
    timeouts = [str(backend.options._timeout)]
    for _ in trainer.train_steps():
        pass
    return [*timeouts, str(backend.options._timeout)]


# ---- between steps


def validation(recipe: Recipe) -> list[Any]:
    """Loss and number of targets by length of every validation set."""
    validator = Validator(
        build_trainer(recipe), build_validation_sets(recipe, prepare_datasets(recipe))
    )
    return [
        (length, metrics.loss, metrics.targets)
        for result in validator.validate()
        for length, metrics in result.metrics_by_length.items()
    ]


def validated_steps(recipe: Recipe) -> list[int]:
    validator = Validator(build_trainer(recipe), ())
    return [
        step for step in range(1, recipe.training.steps + 1) if validator.should_validate(step)
    ]


@contextmanager
def metrics_processor(recipe: Recipe) -> Iterator[tuple[MetricsProcessor, Trainer]]:
    trainer = build_trainer(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder) / "run")
        run_dir.create()
        with closing(MetricsProcessor(recipe, run_dir, trainer)) as processor:
            yield processor, trainer


def spikes(recipe: Recipe) -> list[bool]:
    """Which losses count as spikes: 3 to 9 standard deviations above the mean."""
    base = [1.0, 3.0] * 20
    found = []
    for sigmas in range(3, 10):
        detector = build_trainer(recipe).loss_spikes
        detector.load_state_dict({"losses": base, "consecutive_skips": 0})
        found.append(detector.observe(2.0 + sigmas, skipped=False) is not None)
    return found


def skips_until_failure(recipe: Recipe) -> int:
    """Consecutive skipped steps after which the run fails."""
    detector = build_trainer(recipe).loss_spikes
    return next(
        count
        for count in range(1, 100)
        if (detector.observe(1.0, skipped=True), detector.has_diverged)[1]
    )


def spike_reaction(recipe: Recipe) -> str:
    """What follows a step whose loss is a spike."""
    with metrics_processor(recipe) as (processor, trainer):
        trainer.loss_spikes.load_state_dict({"losses": [0.1, 0.2] * 20, "consecutive_skips": 0})
        (result,) = trainer.train_steps()
        try:
            processor.record_step(result)
        except LossSpikeError:
            return "roll back"
    return "continue"


def collapses(recipe: Recipe) -> list[bool]:
    """Whether a layer counts as collapsed of whose eight experts 2, 5 or 7 have no tokens."""
    with metrics_processor(recipe) as (processor, _):
        found = []
        for dead in (2, 5, 7):
            processor.expert_collapse.observe([[1.0] * 8])
            found.append(
                any(
                    processor.expert_collapse.observe([[0.0] * dead + [1.0] * (8 - dead)])
                    for _ in range(10)
                )
            )
        return found


def stragglers(recipe: Recipe) -> list[bool]:
    """Whether a rank counts as a straggler that takes 1.2 to 2 times as long as the others."""
    found = []
    with metrics_processor(recipe) as (processor, _):
        for slowest in (1.2, 1.5, 2.0):
            ranks = [("host", 0.0, seconds) for seconds in (1.0, 1.0, slowest)]
            reports = [processor.straggler_detector.observe(ranks, 10.0) for _ in range(3)]
            found.append(any(reports))
    return found


def trace_files(recipe: Recipe) -> dict[str, list[str]]:
    """Traced steps by file."""
    config = recipe.training_stages[0].config
    with tempfile.TemporaryDirectory() as folder:
        profilers = Profilers(config.profiler, Path(folder), rank=0, device=CPU)
        profilers.step(0)
        for step in range(1, config.training.steps + 1):
            with record_function(f"step {step}"):
                torch.ones(1)
            profilers.step(step)
        traces = {
            path.name: json.loads(path.read_text())["traceEvents"]
            for path in Path(folder).iterdir()
        }
    return {
        name: sorted(
            {event["name"] for event in events if event.get("name", "").startswith("step ")}
        )
        for name, events in traces.items()
    }


def memory_windows(recipe: Recipe) -> list[tuple[str, list[int]]]:
    """File and steps of the recordings of CUDA memory, which a CPU cannot make."""
    profilers = Profilers(
        recipe.training_stages[0].config.profiler,
        Path("logs"),
        rank=0,
        device=torch.device("cuda"),
    )
    return [(str(vars(window.recorder)["path"]), [*window.steps]) for window in profilers.windows]


# ---- around the training processes


def script(recipe: Recipe) -> str:
    """The batch script of the run."""
    return render(
        recipe,
        ["--config", "run.toml"],
        working_dir=Path("/work"),
        current_python="python",
        code_version="v",
    )


def uploads(recipe: Recipe) -> bool:
    return uploads_of(recipe, RunDir(recipe.output_dir)) is not None


def deadline(recipe: Recipe) -> float | None:
    return job_deadline(recipe, {START_TIME_ENV: f"{boot_id()} 0"})


def compares_replicas(recipe: Recipe) -> bool:
    return train_loop.compares_replicas_before_saves(recipe, {"dp_replicate": 2, "tp": 1})


def trackers(recipe: Recipe) -> list[str]:
    """Names of what metrics go to."""
    return wanted(recipe.metrics)


def reruns(recipe: Recipe) -> bool:
    return reruns_suspicious_steps(recipe)


def restart_delays(recipe: Recipe) -> list[float]:
    """Seconds before each restart of workers that always fail."""
    delays: list[float] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        config = recipe.model_copy(
            update={"job": recipe.job.model_copy(update={"output_dir": Path(folder)})}
        )
        patch.setattr(Workers, "run", lambda *_: 1)
        patch.setattr(Workers, "interruptible_sleep", lambda _, seconds: delays.append(seconds))
        spec = RunSpec(config=config, datasets={})
        world = LaunchWorld(nproc_per_node=1)
        run_with_restarts(
            spec, world, Path("unused"), reload=lambda: config, prepare=lambda *_: spec
        )
    return delays


def prepared_folders(recipe: Recipe) -> list[str]:
    """Folders of the tokenized corpora."""
    return [str(folder.parent) for folder in prepare_datasets(recipe).values()]


def cache_size(recipe: Recipe) -> int:
    """Bytes of the cache of a corpus at a URL."""
    return cache_bytes(corpus_spec(recipe.data, DEFAULT_SOURCE))


def auto_memory(recipe: Recipe) -> dict[str, Any]:
    """The memory options that `recompute = "auto"` chooses."""
    world = World(distributed.get_rank(), distributed.get_world_size(), CPU)
    config: Config = recipe.training_stages[0].config
    with tempfile.TemporaryDirectory() as folder:
        return resolve_auto_memory(
            config, world, Path(folder) / "prediction.json"
        ).memory.model_dump()


def planned_device(recipe: Recipe) -> str:
    """The device that `python -m trainer.plan` plans for."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as output:
        (Path(folder) / "run.toml").write_text(to_toml(recipe))
        # No step is traced in a process that has ranks.
        with patch("trainer.plan.plan.traced_rank_steps", made_up_rank_steps):
            plan_main(["--config", f"{folder}/run.toml"])
    return next(line for line in output.getvalue().splitlines() if "device" in line)
