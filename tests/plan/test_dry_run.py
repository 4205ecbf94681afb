"""The dry run against manual counts; tests/trace compares it with traces, and those with real runs."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from benchmarks.dry_run import DryRunResult, dry_run, main
from parallelisms.mesh.collectives import all_reduce, ring_shift_all_to_all
from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES
from tests.trace.small_steps import FOUR, FULL, HALF, KEEP, configured
from trainer.errors import ConfigError
from trainer.trace.operators import OpCounterMode, fake_process_group

TILES = "memory.mlp_tile_mib=1"
OFFLOAD = "memory.offload=inputs_and_attention"
RING, GATHER, ULYSSES = (
    f"parallelism.cp_method={method}" for method in ("ring", "allgather", "ulysses")
)
HYBRID = "parallelism.cp_method=hybrid parallelism.cp_ulysses=2"
LONG = "training.seq_len=16384"
DEEP = "model.num_layers=16 training.global_batch_size=32"


@cache
def dry(changes: str, world_size: int = 1, rank: int = 0) -> DryRunResult:
    return dry_run(configured(changes), world_size, rank=rank)


def test_a_stage_holds_no_residual_stream_of_micro_batches_that_wait() -> None:
    """Neither the input that it received nor the output that it sent, if blocks keep theirs on the
    host.
    """
    changes = f"parallelism.pp=4 parallelism.pp_schedule=GPipe model.num_layers=4 {OFFLOAD} {KEEP}"
    few, many = (
        dry(f"{changes} training.global_batch_size={count}", 4, 1).peak_bytes for count in (8, 16)
    )
    rotation_and_batch = 1024 * (4 * 32 + 4 * 8)
    stream = 1024 * 4 * 128
    assert (many - few) / 8 == pytest.approx(rotation_and_batch, abs=0.1 * stream)


# ---- FLOPs


@pytest.mark.parametrize(
    "changes",
    [
        "",
        KEEP,
        f"{KEEP} memory.blocks_per_checkpoint=2",
        pytest.param(f"model.qk_norm=true {TILES} {FULL}", marks=pytest.mark.slow),
    ],
)
def test_flops_match_the_models_formula(changes: str) -> None:
    config = configured(changes)
    found = dry(changes)
    executed = config.model.build().hardware_flops(
        tokens=1024,
        pairs=1024 * 1025 / 2,
        recompute=config.memory.recompute,
        blocks_per_checkpoint=config.memory.blocks_per_checkpoint,
    )
    assert found.flops == executed
    once = 4 * 3 * 128 * 1024 * 1025 // 2
    again = {"recompute": once} if config.memory.recompute == "full" else {}
    assert found.attention_flops == {"forward": once, "backward": 5 * once // 2} | again


def test_attention_flops_respect_documents() -> None:
    found = dry_run(configured(), 1, documents=[512, 256, 256])
    assert found.attention_flops["forward"] == 4 * 3 * 128 * (512 * 513 + 2 * 256 * 257) // 2
    assert found.matmul_flops == dry("").matmul_flops


@pytest.mark.parametrize(
    "method",
    [RING, *(pytest.param(method, marks=pytest.mark.slow) for method in (GATHER, ULYSSES))],
)
def test_cp_splits_flops_evenly(method: str) -> None:
    alone = dry("")
    shared = dry(f"parallelism.cp=2 {method}", 2)
    assert 2 * sum(shared.attention_flops.values()) == sum(alone.attention_flops.values())
    assert 2 * sum(shared.matmul_flops.values()) == sum(alone.matmul_flops.values())


# ---- bytes sent


def sent(found: DryRunResult) -> dict[tuple[str, str], tuple[float, float]]:
    """(bytes, calls) by (channel, kind), summed over phases."""
    keys = {(message.channel, message.kind) for message in found.messages}
    return {
        key: (sum(one.bytes for one in those), sum(one.calls for one in those))
        for key in keys
        for those in [[one for one in found.messages if (one.channel, one.kind) == key]]
    }


ENDS = 264 * 128
NORM = 128
BLOCK = 128 * (2 * 128 + 2 * 64) + 3 * 128 * 384 + 2 * 128


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once() -> None:
    found = sent(dry(f"training.global_batch_size=2 {HALF}", 2))
    gathered = (
        ENDS + 2 * 3 * BLOCK + ENDS + NORM
        # The loss head stays gathered; the embedding is not needed in backward.
    )
    assert found == {
        ("fsdp", "all_gather"): (gathered / 2 * 2, 8),
        ("fsdp", "reduce_scatter"): ((2 * ENDS + 3 * BLOCK + NORM) / 2 * 4, 5),
    }


def test_tp_gathers_and_scatters_four_times_per_block() -> None:
    stream = 4 * 512 * 128
    found = dry("parallelism.tp=2", 2)
    by_kind = sent(found)
    # Two per direction; loss head, embedding.
    assert by_kind["tp", "all_gather"] == ((3 * 4 + 2) * stream, 14)
    assert by_kind["tp", "reduce_scatter"] == ((3 * 4 + 2) * stream, 14)
    # Maximum logit; sum and target logit.
    assert by_kind["tp", "all_reduce"] == (4 * 1024 + 2 * 4 * 1024, 2)
    assert all(message.bytes == 0 for message in found.small_messages)
    assert {(message.channel, message.kind) for message in found.small_messages} >= {
        ("tp", "all_reduce")
    }


@pytest.mark.slow
def test_a_ring_sends_kv_in_both_directions_and_gradients_backward() -> None:
    found = dry(f"{LONG} parallelism.cp=8 {RING} {HALF} {KEEP}", 8)
    # K and V: tokens, heads, head dimension, bytes.
    kv = 2 * 2048 * 2 * 32 * 2
    by_phase = {
        (one.channel, one.kind, one.phase): (one.bytes, one.calls) for one in found.messages
    }
    assert by_phase["cp", "send", "forward"] == (3 * 7 * kv, 3 * 7)
    # Gradients in float32.
    assert by_phase["cp", "send", "backward"] == (3 * 7 * (kv + 2 * kv), 3 * 14)


def test_ulysses_exchanges_heads_by_all_to_all() -> None:
    by_kind = sent(dry(f"parallelism.cp=2 {ULYSSES}", 2))
    q, k = (4 * 512 * 32 * heads for heads in (4, 2))
    assert by_kind["cp", "all_to_all"] == (3 * 2 * (2 * q + 2 * k) / 2, 3 * 8)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_stages_send_activations_and_gradients(rank: int) -> None:
    assert sent(dry(FOUR, 2, rank))["pp", "send"] == (4 * 4 * 1024 * 128, 4)


# ---- the counter


def test_messages_are_counted_by_channel_and_small_ones_separately() -> None:
    counting = OpCounterMode()
    with fake_process_group(3, 8), counting.enable():
        group = distributed.new_group([1, 3, 5, 7], group_desc="cp 1,3,5,7")
        assert isinstance(group, ProcessGroup)
        all_reduce(group, torch.empty(MIN_COUNTED_BYTES // 4))
        all_reduce(None, torch.empty(MIN_COUNTED_BYTES // 4 - 1))
        ring_shift_all_to_all(torch.empty(MIN_COUNTED_BYTES), group).wait()
    assert counting.work.sent_bytes == {
        ("cp", "all_reduce", "setup"): 1.5 * MIN_COUNTED_BYTES,
        ("cp", "all_to_all", "setup"): 4 * MIN_COUNTED_BYTES,
    }
    assert counting.small_calls == {("world", "all_reduce", "setup"): 1}


def test_unknown_collectives_are_rejected() -> None:
    with (
        fake_process_group(0, 2),
        OpCounterMode().enable(),
        pytest.raises(NotImplementedError, match="broadcast"),
    ):
        distributed.broadcast(torch.empty(8), 0)


def test_a_pending_send_keeps_its_tensor_alive() -> None:
    counting = OpCounterMode()
    with fake_process_group(0, 2), counting.enable():
        work = distributed.isend(torch.empty(1 << 20), 1)
        torch.empty(1)
        held = counting.storages.device_bytes
        del work
        assert (held, counting.storages.device_bytes) == (4 << 20, 0)


def test_storages_are_tracked_until_freed_or_resized() -> None:
    counting = OpCounterMode()
    with counting.enable():
        x = torch.empty(1 << 20)
        view = x.view(1 << 10, 1 << 10)[3:]
        del x
        assert counting.storages.device_bytes == 4 << 20
        view.untyped_storage().resize_(0)
        assert (counting.storages.device_bytes, counting.storages.peak_bytes) == (0, 4 << 20)
        bytes_on_host = torch.empty(1 << 25, dtype=torch.uint8)
        assert (counting.storages.device_bytes, counting.storages.peak_host_bytes) == (
            0,
            bytes_on_host.nbytes,
        )


def test_composite_operations_are_decomposed() -> None:
    from models.attention_op import attention

    counting = OpCounterMode()
    with counting.enable():
        q = torch.empty(2, 64, 4, 8)
        k = torch.empty(2, 64, 2, 8)
        attention(q, k, k, torch.tensor([[0, 64], [0, 64]], dtype=torch.int32))
        with torch.inference_mode():
            torch.empty(3, 4, 5) @ torch.empty(5, 6)
    assert counting.work.attention_flops == {"setup": 2 * 4 * 4 * 8 * 64 * 65 // 2}
    assert counting.work.matmul_flops == {"setup": 2 * 12 * 5 * 6}


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="--rank 4 must be at least 0 and below the world size, 4"
    ):
        dry_run(configured("training.global_batch_size=4"), 4, rank=4)
    with pytest.raises(ConfigError, match='"auto"'):
        dry_run(configured("memory.recompute=auto"), 1)
    with pytest.raises(ConfigError, match="documents have 3 tokens in total"):
        dry_run(configured(), 1, documents=[1, 2])


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--config",
        "debug",
        "--world-size",
        "4",
        "--rank",
        "3",
        "--parallelism.pp",
        "2",
        "--json",
    ]
    status = main([*words, "--model.num_layers", "4"])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["rank"], found["world_size"], found["pp_rank"]) == (0, 3, 4, 1)
    assert found["peak_bytes"] > found["state_bytes"] > 0
    assert {message["channel"] for message in found["messages"]} == {"fsdp", "pp"}
