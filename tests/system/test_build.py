"""The trainer applies configuration that does not change what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from models.tiling import eager
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling
from parallelisms.mesh.collectives import to_local
from tests.system.in_process import configured, trainer_of
from tests.system.runs import forked, write_run
from trainer.config.parse import load
from trainer.step import build
from trainer.step.process_group import World


@pytest.mark.parametrize(
    ("where", "policy"), [("host", CPUOffloadPolicy), ("device", OffloadPolicy)]
)
def test_optimizer_placement_selects_the_offload_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, policy: type
) -> None:
    found: list[Any] = []
    fully_shard = torch.distributed.fsdp.fully_shard

    def record(module: Any, **options: Any) -> Any:
        found.append(options["offload_policy"])
        return fully_shard(module, **options)

    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", record)
    options = ("--training.dtype=bfloat16", f"--memory.optimizer_placement={where}")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert {
            parameter.device.type for parameter in trainer.optimizer.parameters_by_name.values()
        } == {"cpu"}
    assert {type(found_policy) for found_policy in found} == {policy}


def test_one_rank_offloads_its_optimizer_with_fsdp(tmp_path: Path) -> None:
    options = ("--training.dtype=float64", "--memory.optimizer_placement=host")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert isinstance(trainer.stage_modules[0], torch.distributed.fsdp.FSDPModule)


@pytest.mark.parametrize("where", ["host", "device"])
def test_deferred_updates_apply_at_the_next_use_or_state_dict(tmp_path: Path, where: str) -> None:
    options = ("--training.dtype=bfloat16", f"--memory.optimizer_placement={where}")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        named = trainer.optimizer.parameters_by_name
        before = {name: to_local(weight.detach()).clone() for name, weight in named.items()}
        step_results = trainer.train_steps()
        next(step_results)
        unchanged = [
            name for name, weight in named.items() if torch.equal(to_local(weight), before[name])
        ]
        assert unchanged == ([*named] if where == "host" else [])
        trainer.state_dict()
        assert not any(
            torch.equal(to_local(weight), before[name]) for name, weight in named.items()
        )
        del step_results


@pytest.mark.slow
# The compiler warns about torch internals.
@pytest.mark.filterwarnings("ignore")
def test_deferred_updates_apply_before_compiled_blocks_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    found = []
    for where in ("device", "host"):
        options = (
            "--training.compile=true",
            "--training.dtype=bfloat16",
            f"--memory.optimizer_placement={where}",
        )
        config = configured(run, tmp_path / where, *options)
        with (
            torch.compiler.set_stance("default", force_backend="aot_eager"),
            trainer_of(config) as trainer,
        ):
            step_results = trainer.train_steps()
            losses = [next(step_results).read().loss for _ in range(3)]
            found.append(
                (
                    losses,
                    {
                        name: to_local(tensor).tolist()
                        for name, tensor in trainer.state_dict().items()
                    },
                )
            )
            del step_results
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.ranks
def test_async_tp_needs_peer_access(tmp_path: Path) -> None:
    options = ("--parallelism.tp=2", "--training.compile=true", "--parallelism.async_tp=true")
    done = forked(write_run(tmp_path), tmp_path / "run", *options, processes=2)
    assert 2 in done.statuses
    assert "parallelism.async_tp = true needs several CUDA devices with peer access" in done.said


def test_async_tp_is_enabled_on_the_tp_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr("trainer.step.build.require_peer_access", calls.append)
    monkeypatch.setattr("parallelisms.tensor_parallel.enable_async_tp", calls.append)
    options = ("--parallelism.async_tp=true",)
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert calls == [torch.device("cpu"), trainer.mesh.tp_mesh]


def recompute_of(*options: str) -> RecomputeConfig:
    config = load(["--config", "debug", *options])
    return build.build_recompute_config(config, None, compiled=config.training.compile is True)


def test_recompute_config_follows_the_memory_section() -> None:
    found = recompute_of("--memory.recompute=keep_attention")
    assert (found.policy, found.blocks_per_checkpoint, found.tiling, found.offload_attention) == (
        "keep_attention",
        1,
        Tiling(),
        False,
    )
    found = recompute_of(
        "--memory.recompute=keep_attention",
        "--memory.mlp_tile_mib=3",
        "--memory.head_groups=2",
        "--memory.blocks_per_checkpoint=4",
        "--memory.offload=inputs_and_attention",
    )
    assert (found.blocks_per_checkpoint, found.offload_attention, found.reshard_after_forward) == (
        4,
        True,
        True,
    )
    assert found.tiling == Tiling(head_groups=2, tile_bytes=3 << 20)
    assert not recompute_of("--memory.recompute=full", "--memory.offload=inputs").offload_attention
    assert not recompute_of("--parallelism.reshard_after_forward=false").reshard_after_forward
    assert not recompute_of("--parallelism.pp=2").reshard_after_forward


def test_compile_compiles_the_pieces_of_a_block() -> None:
    assert recompute_of().tiling.compile is eager
    assert recompute_of("--training.compile=true").tiling.compile(eager) is not eager


@pytest.mark.parametrize(("every", "inputs"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_the_host_pool_holds_one_input_per_checkpointed_group(every: int, inputs: int) -> None:
    config = load(
        [
            "--config",
            "debug",
            "--memory.offload=inputs",
            f"--memory.blocks_per_checkpoint={every}",
            "--memory.host_budget_gib=1",
        ]
    )
    world = World(0, 1, torch.device("cpu"))
    assert config.model.build().num_layers == 4
    host = build.build_host_pool(config, world, config.pipeline_plan(1), rank=0)
    assert host is not None
    assert (host._max_inputs, host._budget_bytes) == (inputs, 1 << 30)


def test_the_host_pool_of_a_pipeline_holds_the_inputs_of_all_micro_batches_in_flight() -> None:
    config = load(
        [
            "--config",
            "debug",
            "--memory.offload=inputs",
            "--parallelism.pp=2",
            "--parallelism.pp_layers=1,3",
        ]
    )
    world = World(1, 2, torch.device("cpu"))
    plan = config.pipeline_plan(2)
    host = build.build_host_pool(config, world, plan, rank=1)
    assert host is not None
    assert host._max_inputs == 3 * 4


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_training_alone_pins_memory_for_offloaded_inputs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, torch.device]] = []
    device = torch.device("cuda", 1)

    def reserve_inputs(_: HostActivationPool, nbytes: int, device: torch.device) -> None:
        reserved.append((nbytes, device))

    def as_on_a_gpu(model: build.ParallelModel) -> None:
        cpu = model.device
        model.device = device
        pin_input_memory(model)
        model.device = cpu

    pin_input_memory = build.ParallelModel.pin_input_memory
    monkeypatch.setattr(HostActivationPool, "reserve_inputs", reserve_inputs)
    monkeypatch.setattr(build.ParallelModel, "pin_input_memory", as_on_a_gpu)
    options = ["--memory.recompute=full", "--memory.offload=inputs"]
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        expected = build.residual_bytes(trainer.config)
        if command == "evaluate":
            reserved.clear()
            build.ParallelModel(trainer.config, trainer.world)
    assert reserved == ([(expected, device)] if command == "train" else [])


def test_the_model_has_the_configured_seq_len(tmp_path: Path) -> None:
    with trainer_of(
        configured(write_run(tmp_path), tmp_path / "run", "--training.seq_len=48")
    ) as trainer:
        assert trainer.stage_modules[0].seq_len == 48
