"""A trainer is built as its configuration says, also where what it computes would not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import TileOps, Tiling
from parallelisms.collectives import to_local
from tests.system.in_process import configured, trainer_of
from tests.system.runs import forked, write_run
from trainer import build
from trainer.config.parse import load
from trainer.distributed import World


@pytest.mark.parametrize(("where", "policy"), [("host", CPUOffloadPolicy), ("device", OffloadPolicy)])
def test_state_lies_where_it_is_to_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, policy: type
) -> None:
    found: list[Any] = []
    plain = torch.distributed.fsdp.fully_shard

    def look(module: Any, **options: Any) -> Any:
        found.append(options["offload_policy"])
        return plain(module, **options)

    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", look)
    options = ("--training.dtype=bfloat16", f"--memory.optimizer_placement={where}")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert {parameter.device.type for parameter in trainer.optimizer.parameters_by_name.values()} == {"cpu"}
    assert {type(one) for one in found} == {policy}


def test_one_process_keeps_its_state_on_the_host_too(tmp_path: Path) -> None:
    options = ("--training.dtype=float64", "--memory.optimizer_placement=host")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert isinstance(trainer.stage_modules[0], torch.distributed.fsdp.FSDPModule)


@pytest.mark.parametrize("where", ["host", "device"])
def test_weights_on_the_host_move_when_they_are_next_used_or_asked_for(tmp_path: Path, where: str) -> None:
    options = ("--training.dtype=bfloat16", f"--memory.optimizer_placement={where}")
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        named = trainer.optimizer.parameters_by_name
        before = {name: to_local(weight.detach()).clone() for name, weight in named.items()}
        updates = trainer.train_steps()
        next(updates)
        still = [name for name, weight in named.items() if torch.equal(to_local(weight), before[name])]
        assert still == ([*named] if where == "host" else [])
        trainer.state_dict()
        assert not any(torch.equal(to_local(weight), before[name]) for name, weight in named.items())
        del updates


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # A compiler warns of what torch itself does.
def test_compiled_blocks_on_the_host_are_updated_before_they_run(tmp_path: Path) -> None:
    run, found = write_run(tmp_path), []
    for where in ("device", "host"):
        options = ("--training.compile=true", "--training.dtype=bfloat16", f"--memory.optimizer_placement={where}")
        config = configured(run, tmp_path / where, *options)
        with torch.compiler.set_stance("default", force_backend="aot_eager"), trainer_of(config) as trainer:
            updates = trainer.train_steps()
            losses = [next(updates).read().loss for _ in range(3)]
            found.append((losses, {name: to_local(tensor).tolist() for name, tensor in trainer.state_dict().items()}))
            del updates
    assert found[0] == found[1]


@pytest.mark.ranks
def test_overlapped_exchanges_are_refused_where_devices_do_not_reach_each_other(tmp_path: Path) -> None:
    options = ("--parallelism.tp=2", "--training.compile=true", "--parallelism.async_tp=true")
    done = forked(write_run(tmp_path), tmp_path / "run", *options, processes=2)
    assert 2 in done.statuses
    assert "parallelism.async_tp = true needs several CUDA devices that reach each other" in done.said


def test_exchanges_are_overlapped_where_they_reach_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("trainer.build.require_peer_access", asked.append)
    monkeypatch.setattr("parallelisms.tensor_parallel.enable_async_tp", asked.append)
    options = ("--parallelism.async_tp=true",)
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        assert asked == [torch.device("cpu"), trainer.mesh.tp_mesh]


def recompute_of(*options: str) -> RecomputeConfig:
    config = load(["--config", "debug", *options])
    return build.build_recompute_config(config, None)


def test_blocks_recompute_as_asked() -> None:
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
    assert (found.blocks_per_checkpoint, found.offload_attention, found.reshard_after_forward) == (4, True, True)
    assert found.tiling == Tiling(head_groups=2, tile_bytes=3 << 20)
    assert not recompute_of("--memory.recompute=full", "--memory.offload=inputs").offload_attention
    assert not recompute_of("--parallelism.reshard_after_forward=false").reshard_after_forward
    assert not recompute_of("--parallelism.pp=2").reshard_after_forward


def test_compiled_runs_compile_what_is_computed_of_a_tile() -> None:
    assert recompute_of().tiling.ops == TileOps()
    assert not set(recompute_of("--training.compile=true").tiling.ops) & set(TileOps())


@pytest.mark.parametrize(("every", "inputs"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_the_host_has_room_for_the_inputs_that_are_kept(every: int, inputs: int) -> None:
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


def test_a_model_knows_the_length_of_rows(tmp_path: Path) -> None:
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", "--training.seq_len=48")) as trainer:
        assert trainer.stage_modules[0].seq_len == 48
