"""One rank of a self-check: runs a launch and compares its metrics and tensors with those of the
reference.
"""

from __future__ import annotations

import gc
import math
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from models.config import ModelConfig
from parallelisms.init_weights import local_ranges
from parallelisms.mesh.collectives import full_tensor, to_local
from trainer.checkpoint.load import MODEL_PREFIX
from trainer.checkpoint.manager import CheckpointManager
from trainer.config import extension
from trainer.data.datasets import build_train_dataset, build_validation_sets
from trainer.data.prepare import prepare_datasets
from trainer.errors import RunFailedError
from trainer.launch.initial_checks import validate_initial_weights
from trainer.launch.initial_tokenizer import validate_initial_tokenizer
from trainer.run.validation import Validator
from trainer.selfcheck.comparison import StepDifference
from trainer.selfcheck.finish import finish, round_experts
from trainer.selfcheck.launches import Launch, state_path
from trainer.step.added_parts import require_sound_parts
from trainer.step.process_group import World, destroy_process_group, init_single_host
from trainer.step.routers import router_metrics
from trainer.step.trainer import StepResult, Trainer
from trainer.storage.run_dir import RunDir

NamedTensors = dict[str, Tensor]
ROUNDED = 1e-5
"""Fraction of the largest value of a kind: the scale on which smaller tensors are compared."""


def run_task(
    rank: int, launch: Launch, store: Path, reference: Path, device_type: str
) -> list[StepDifference]:
    """`run_and_compare` in a process group that meets in the file `store`. `clean_up` follows."""
    sections = launch.config.distributed
    world = init_single_host(
        sections, rank=rank, size=launch.world_size, store=store, device_type=device_type
    )
    return run_and_compare(launch, world, reference=reference)


def clear_mesh_caches() -> None:
    """Clears DTensor's caches: they hold meshes, and so their groups with all threads, and later
    groups find them.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    # Not in torch 2.11.
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def clean_up() -> None:
    """Frees what a launch left in this process."""
    destroy_process_group()
    clear_mesh_caches()
    if counters:  # Something was compiled.
        torch.compiler.reset()
        counters.clear()
    torch.use_deterministic_algorithms(mode=False)
    gc.collect()


def run_and_compare(launch: Launch, world: World, *, reference: Path) -> list[StepDifference]:
    """Runs the launch on this rank; compares its tensors with those that the reference wrote to
    the folder `reference`.
    """
    # Ranks share the cores: more threads would only compete.
    torch.set_num_threads(1)
    extension.install(launch.config.job.extension)
    # aot_eager still checks for graph breaks; generating kernels takes a C++ compiler and a
    # minute.
    torch.compiler.set_stance("default", force_backend="aot_eager")
    folders = prepare_datasets(launch.config)
    stage = launch.config.training_stages[launch.stage]
    if world.rank == 0:
        for validate in (validate_initial_weights, validate_initial_tokenizer):
            # The launcher's checks, which this launch does not pass through.
            validate(launch.config)
    require_sound_parts(stage.config, world.device, is_sharded=world.size > 1)
    trainer = Trainer(
        stage.config,
        world,
        build_train_dataset(stage.config, folders, stage=stage.index),
        stage=stage,
    )
    with CheckpointManager(launch.config, RunDir(launch.config.output_dir), world) as checkpoints:
        checkpoints.resume(trainer)
        if launch.weights is not None:
            take_weights(trainer, launch.weights, takes_loads=launch.takes_loads)
        steps = train(launch, trainer, checkpoints, reference)
        if (saved := checkpoints.wait()) is not None and saved.problem:
            raise RunFailedError(saved.problem)
    for validated in Validator(trainer, build_validation_sets(launch.config, folders)).validate():
        for length, found in validated.metrics_by_length.items():
            scores = {"targets": found.targets} | (
                {"loss": found.loss, "accuracy": found.accuracy} if found.targets else {}
            )
            steps[-1].values.update(
                {f"validation {validated.name} {length} {key}": scores[key] for key in scores}
            )
    steps[-1].values.update(finish(launch, trainer))
    return steps


def train(
    launch: Launch, trainer: Trainer, checkpoints: CheckpointManager, reference: Path
) -> list[StepDifference]:
    """Every step up to the last of the launch, after which it saves a checkpoint, if it has
    any.
    """
    steps = list[StepDifference]()
    checkpoint = launch.config.checkpoint
    model = trainer.config.model.build()
    with closing(trainer.train_steps()) as results:
        for result in results:
            if result.step > launch.last_step:
                break
            steps.append(StepDifference(values=metric_values(result, model), tensor_errors={}))
            if launch.finish == "export MXFP4":
                round_experts(trainer)
            if result.step in launch.compared_steps:
                record_state = save_state if launch.is_reference else compare_state
                steps[-1].tensor_errors.update(
                    record_state(trainer, state_path(reference, result.step))
                )
            if result.step == launch.last_step:
                if checkpoint.enabled:
                    checkpoints.save(trainer)
                # Else one more step meanwhile, if the run has one.
                if not checkpoint.asynchronous:
                    break
    return steps


def metric_values(result: StepResult, model: ModelConfig) -> dict[str, float]:
    metrics = result.read()
    values = {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": result.lr}
    values |= {"tokens": metrics.tokens_seen, "attended pairs": metrics.attended_pairs}
    values |= {"skipped": float(metrics.skipped)}
    routers = router_metrics(model, metrics.router_sums, metrics.targets)
    return values | {name: value for name, value in routers.items() if isinstance(value, float)}


def rank_state(trainer: Trainer) -> NamedTensors:
    """The weights and moments of this rank's pipeline stages, sharded as they are."""
    # Otherwise the next forward pass would still change offloaded weights.
    trainer.optimizer.flush_deferred_updates()
    return trainer.state_dict()


def take_weights(trainer: Trainer, path: Path, *, takes_loads: bool) -> None:
    """Reads the state that one process wrote, in one process."""
    saved: NamedTensors = torch.load(path, weights_only=True)
    loads = {
        name for name, each in trainer.config.model.build().buffers.items() if not each.hf_name
    }
    for name, tensor in trainer.state_dict().items():
        if name.startswith(MODEL_PREFIX) and (
            takes_loads or name.removeprefix(MODEL_PREFIX) not in loads
        ):
            to_local(tensor).copy_(saved[name])


def save_state(trainer: Trainer, path: Path) -> dict[str, float]:
    """Writes weights and moments of one process. Returns an error of 0 for each tensor."""
    state = {name: full_tensor(tensor) for name, tensor in rank_state(trainer).items()}
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    return dict.fromkeys(state, 0.0)


def compare_state(trainer: Trainer, path: Path) -> dict[str, float]:
    """Returns the error of this rank's shard of each weight and moment."""
    # Mapped: all ranks share its pages and read only their shards.
    expected: NamedTensors = torch.load(path, weights_only=True, mmap=True)
    least = least_scales(expected)
    return {
        name: max_relative_error(
            tensor, expected.get(name), least=least.get(kind_of_state(name), 0.0)
        )
        for name, tensor in rank_state(trainer).items()
    }


def kind_of_state(name: str) -> str:
    """The kind of a tensor: weights, or one of the optimizer's moments. Values of one kind have
    similar sizes.
    """
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first


def least_scales(state: NamedTensors) -> dict[str, float]:
    """Smallest scale of comparison per kind of tensor: `ROUNDED` of the kind's largest value.

    A moment that vanishes has rounding errors, which no mesh repeats.
    """
    largest: dict[str, float] = {}
    for name, tensor in state.items():
        kind = kind_of_state(name)
        largest[kind] = max(largest.get(kind, 0.0), float(tensor.abs().max()))
    return {kind: ROUNDED * number for kind, number in largest.items()}


def max_relative_error(actual: Tensor, expected: Tensor | None, *, least: float = 0.0) -> float:
    """The largest difference of this rank's shard, over the largest value of the whole `expected`,
    `least` at least.

    Infinite if not finite or not comparable, and for any difference from a scale of zero.
    """
    if expected is None or actual.shape != expected.shape:
        return math.inf
    shard = to_local(actual)
    expected_shard = expected[
        tuple(slice(part.start, part.stop) for part in local_ranges(actual))
    ].to(shard.device)
    # Equal first: an empty shard has no maximum, and 0 over 0 is NaN.
    if torch.equal(shard, expected_shard) and shard.isfinite().all():
        return 0.0
    if shard.shape != expected_shard.shape:
        return math.inf
    error = float(
        (shard - expected_shard).abs().max().cpu() / expected.abs().max().clamp(min=least)
    )
    return error if math.isfinite(error) else math.inf
