"""Bytes that ranks send, by hand. That real updates send them is shown in test_counted.py."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest

from benchmarks.mesh_arithmetic import actions
from parallelisms.pipeline_plan import INTERLEAVED_SCHEDULES, SINGLE_STAGE_SCHEDULES, PipelinePlan, PipelineSchedule
from tests.plan.test_counted_steps import configured
from tests.test_house import ROOT
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.memory.estimator import RankMemory
from trainer.plan.comm_volume import (
    MIN_COUNTED_BYTES,
    CommVolume,
    Phase,
    attention_recompute_fraction,
    comm_volumes,
    sent_bytes,
)
from trainer.plan.fsdp_gathers import weight_gathers_per_stage

E, G, T, V = 128, 384, 256, 264  # widths, a row, the vocabulary
BLOCK = E * (4 * 32) * 2 + E * (2 * 32) * 2 + 3 * E * G + 2 * E
FULL, KEEP = "memory.recompute=full", "memory.recompute=keep_attention"
TP = "parallelism.tp=2"


def of(found: list[CommVolume], channel: str, what: str) -> dict[tuple[str, Phase], tuple[float, float]]:
    """Bytes and calls by kind and phase."""
    mine = [message for message in found if message.channel == channel and message.what == what]
    return {(message.kind, message.phase): (message.bytes, message.calls) for message in mine}


def test_what_is_sent_is_what_a_hand_counts() -> None:
    assert sent_bytes("all_gather", 100, 4) == sent_bytes("reduce_scatter", 100, 4) == 300
    assert sent_bytes("all_reduce", 100, 4) == 150
    assert sent_bytes("all_to_all", 100, 4) == 75
    assert sent_bytes("send", 100, 4) == 100
    assert [sent_bytes(kind, 100, 1) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")] == [
        0
    ] * 4
    with pytest.raises(ValueError, match='kind = "broadcast" is unknown; there are all_gather, reduce_scatter, '):
        sent_bytes("broadcast", 100, 4)


def test_one_rank_sends_nothing() -> None:
    assert comm_volumes(configured(FULL), 1, 0) == []


def test_weights_are_gathered_twice_and_their_gradients_summed_once_for_each_micro_batch() -> None:
    found = comm_volumes(configured("training.dtype=bfloat16 training.global_batch_size=8"), 2, 0)
    assert of(found, "fsdp", "weights of blocks") == {
        ("all_gather", "forward"): (4 * 3 * 2 * BLOCK / 2, 12),
        ("all_gather", "backward"): (4 * 3 * 2 * BLOCK / 2, 12),
    }
    assert of(found, "fsdp", "gradients of blocks") == {("reduce_scatter", "backward"): (4 * 3 * 4 * BLOCK / 2, 12)}
    # The head is last forward and first backward, and the embedding's gradient needs no weight.
    assert of(found, "fsdp", "weights of the head") == {("all_gather", "forward"): (4 * 2 * (V + 1) * E / 2, 4)}
    assert of(found, "fsdp", "weights of the embedding") == {("all_gather", "forward"): (4 * 2 * V * E / 2, 4)}
    kept = comm_volumes(configured("parallelism.reshard_after_forward=false"), 2, 0)
    assert {*of(kept, "fsdp", "weights of blocks")} == {("all_gather", "forward")}


def test_replicas_sum_what_is_left_to_each_shard() -> None:
    # One row on each of four ranks: two replicas of two shards.
    found = comm_volumes(configured("parallelism.dp_replicate=2"), 4, 0)
    assert of(found, "dp_replicate", "gradients of blocks") == {("all_reduce", "backward"): (3 * 4 * BLOCK / 2, 3)}


def test_blocks_that_are_made_again_are_gathered_once_more() -> None:
    found = comm_volumes(configured(f"{KEEP} memory.blocks_per_checkpoint=2"), 2, 0)
    calls = {key: calls for key, (_, calls) in of(found, "fsdp", "weights of blocks").items()}
    # Two micro-batches of three blocks; of the first two, one keeps its input.
    assert calls == {("all_gather", "forward"): 6, ("all_gather", "backward"): 6, ("all_gather", "again"): 2}


def test_a_pipeline_gathers_and_sums_once_in_an_update() -> None:
    config = configured("parallelism.pp=2 model.num_layers=4 training.global_batch_size=8")
    first, last = (comm_volumes(config, 4, place) for place in range(2))
    blocks = [config.pipeline_plan(4).blocks_per_stage[place] for place in range(2)]
    for count, found in zip(blocks, (first, last), strict=True):
        assert of(found, "fsdp", "weights of blocks") == {("all_gather", "update"): (count * 4 * BLOCK / 2, count)}
        assert of(found, "fsdp", "gradients of blocks") == {
            ("reduce_scatter", "update"): (count * 4 * BLOCK / 2, count)
        }
    # Four micro-batches of a row.
    assert of(first, "pp", "the stream") == {("send", "forward"): (4 * 4 * E * T, 4)}
    assert of(last, "pp", "gradients of the stream") == {("send", "backward"): (4 * 4 * E * T, 4)}
    assert of(first, "pp", "gradients of the stream") == of(last, "pp", "the stream") == {}


def test_neighbouring_stages_of_one_rank_send_nothing() -> None:
    config = configured("parallelism.pp=2 model.num_layers=4 parallelism.pp_schedule=ZBVZeroBubble")
    # Stages 0 and 3 are here, 1 and 2 there: out, and back in the other arm.
    calls = [
        {message.phase: message.calls for message in comm_volumes(config, 2, place) if message.channel == "pp"}
        for place in (0, 1)
    ]
    assert calls == [{"forward": 4, "backward": 4}, {"forward": 4, "backward": 4}]


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("keep_attention", 3), ("full", 4)])
def test_tokens_are_exchanged_eight_times_in_a_block_and_again_what_was_not_kept(policy: str, again: int) -> None:
    found = of(comm_volumes(configured(f"{TP} memory.recompute={policy}"), 2, 0), "tp", "tokens")
    one = 4 * E * T / 2  # Half of the tokens of a row.
    calls = {key: count / 12 for key, (_, count) in found.items()}  # Three blocks, four rows.
    expected = {(kind, phase): 2.0 for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}
    more = {("all_gather", "again"): again - 1.0, ("reduce_scatter", "again"): 1.0} if again else {}
    assert calls == expected | more
    assert {key: size / count for key, (size, count) in found.items()} == dict.fromkeys(calls, one)


def test_tiles_are_exchanged_one_by_one_and_blocks_are_made_again_without_attention() -> None:
    # Two micro-batches of two rows of 512 tokens, of which 256 are here. A token takes 4 (500 + 500 + 500 + 500 + 128)
    # bytes in passing, so a tile of 1 MiB has 30 of each rank and row.
    tiled = f"{TP} {KEEP} memory.blocks_per_checkpoint=3 memory.mlp_tile_mib=1 training.seq_len=512 model.ffn_dim=1000"
    found = of(comm_volumes(configured(f"{tiled} training.micro_batch_size=2"), 2, 0), "tp", "tokens")
    assert {key: calls / 2 for key, (_, calls) in found.items()} == {
        ("all_gather", "forward"): 3 * (1 + 9),
        ("all_gather", "backward"): 3 * (1 + 9),
        ("reduce_scatter", "forward"): 3 * 2 * 9,
        ("reduce_scatter", "backward"): 3 * 2 * 9,
        # Of three blocks, two are made again for the one after them.
        ("all_gather", "again"): 3 * (1 + 9) + 2 * 9,
        ("reduce_scatter", "again"): 3 * 9 + 2 * 2 * 9,
    }
    sizes = {key: size / (2 * 4 * E * 512) for key, (size, _) in found.items()}
    assert sizes["all_gather", "again"] == pytest.approx(3 * 2 + 2)
    assert sizes["reduce_scatter", "again"] == pytest.approx(3 + 4)


def test_whole_tokens_are_summed() -> None:
    found = of(comm_volumes(configured(f"{TP} parallelism.sequence_parallel=false {KEEP}"), 2, 0), "tp", "tokens")
    whole = 4 * E * T  # Twice half of it.
    assert {key: size / whole / 12 for key, (size, _) in found.items()} == {
        ("all_reduce", "forward"): 2,
        ("all_reduce", "backward"): 2,
        ("all_reduce", "again"): 1,
    }


def test_a_whole_vocabulary_costs_the_sum_of_its_gradient() -> None:
    found = comm_volumes(configured(f"{TP} parallelism.loss_parallel=false training.seq_len=4096"), 2, 0)
    gradient = of(found, "tp", "gradients of weights that all have")
    assert gradient == {("all_reduce", "backward"): (4 * 4 * V * E, 4)}
    assert of(found, "tp", "losses") == {("all_gather", "forward"): (4 * 4 * 2048, 4)}
    assert of(found, "tp", "tokens of the head") == {}
    tied = comm_volumes(
        configured(f"{TP} parallelism.loss_parallel=false model.tie_embeddings=true training.dtype=bfloat16"), 2, 0
    )
    # Once as embedding, once as head, both in single precision.
    assert of(tied, "tp", "gradients of weights that all have") == {("all_reduce", "backward"): (4 * 2 * 4 * V * E, 8)}


def test_numbers_of_the_loss_are_three_of_each_token() -> None:
    found = of(
        comm_volumes(configured(f"{TP} training.seq_len=4096 memory.loss_chunk_mib=8"), 2, 0), "tp", "sums of the loss"
    )
    assert found == {("all_reduce", "forward"): (4 * 3 * 4 * 4096, 8)}


def test_small_messages_are_left_out() -> None:
    norms = [
        of(comm_volumes(configured(f"{TP} model.dim={width}"), 2, 0), "tp", "gradients of weights that all have")
        for width in (1020, 1024)
    ]
    assert norms == [{}, {("all_reduce", "backward"): (4 * 7 * MIN_COUNTED_BYTES, 28)}]


@pytest.mark.parametrize("method", ["ring", "alltoall", "allgather"])
def test_keys_and_values_reach_all_others_and_their_gradients_come_back_wide(method: str) -> None:
    changes = f"parallelism.cp=4 parallelism.cp_method={method} training.dtype=bfloat16"
    found = comm_volumes(configured(f"{changes} {FULL}"), 4, 0)
    keys = 12 * 3 * 2 * (T / 4) * 2 * 32  # Of three blocks and four rows, to three ranks: keys and values of two heads.
    there, back = {"ring": ("send",) * 2, "alltoall": ("all_to_all",) * 2}.get(method, ("all_gather", "reduce_scatter"))
    hops = 12 if method == "allgather" else 36
    assert of(found, "cp", "keys and values") == {
        (there, phase): (2 * keys, hops) for phase in ("forward", "backward", "again")
    }
    assert of(found, "cp", "gradients of keys and values") == {(back, "backward"): (4 * keys, hops)}
    narrow = comm_volumes(configured(f"{changes} parallelism.cp_reduce_dtype=bfloat16"), 4, 0)
    assert of(narrow, "cp", "gradients of keys and values") == {(back, "backward"): (2 * keys, hops)}
    assert (there, "again") not in of(narrow, "cp", "keys and values")


def test_heads_are_exchanged_among_neighbours_and_repeated_until_they_divide() -> None:
    changes = "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 parallelism.cp_outer_method=ring"
    found = comm_volumes(configured(f"{changes} model.num_kv_heads=1 {KEEP}"), 4, 0)
    queries, keys = (12 * 2 * 4 * (T / 4) * heads * 32 / 2 for heads in (4, 2))  # Half goes to the other rank.
    phases = ("forward", "backward", "again")
    assert of(found, "exchange", "queries and outputs") == {("all_to_all", phase): (queries, 24) for phase in phases}
    assert of(found, "exchange", "keys and values") == {("all_to_all", phase): (keys, 24) for phase in phases}
    twice = comm_volumes(configured(f"{changes} model.num_kv_heads=1 {FULL}"), 4, 0)
    assert of(twice, "exchange", "keys and values")["all_to_all", "again"] == (2 * keys, 48)
    # One head of the keys of a half of the row.
    assert of(found, "rotate", "keys and values") == {
        ("send", phase): (12 * 2 * 4 * (T / 2) * 32, 12) for phase in phases[:2]
    }


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
def test_a_pipeline_gathers_weights_as_often_as_torchs_schedule_asks(schedule: PipelineSchedule) -> None:
    for pp, each, batches in ((2, 2, 4), (3, 4, 1), (2, 4, 4), (4, 3, 8), (4, 4, 10), (3, 5, 9), (2, 6, 2)):
        if schedule not in INTERLEAVED_SCHEDULES:
            each, batches = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2, 8
        plan = PipelinePlan(
            pp=pp, schedule=schedule, num_layers=pp * each, pp_stages_per_rank=each, num_micro_batches=batches
        )
        assert plan.problems() == []
        for rank, done in enumerate(actions(plan)):
            asked = Counter(stage for kind, stage, _ in done if kind == "gather")
            assert weight_gathers_per_stage(plan, rank) == asked, plan
            assert (max(asked.values()) > 1) == (each > 3), plan


def test_attention_without_room_on_the_host_is_computed_again() -> None:
    def share(gib: float) -> float:
        config = configured(f"{KEEP} memory.offload=inputs_and_attention memory.host_budget_gib={gib}")
        return attention_recompute_fraction(RankMemory(config, 1, 0))

    inputs, attended = 3 * 4 * E * T, 4 * (E + 4) * T
    assert [share((inputs + count * attended + 1) / 2**30) for count in (0, 1, 3)] == [1, pytest.approx(2 / 3), 0]


def test_plans_are_made_without_torch_and_fast() -> None:
    code = (
        "import sys, time; from trainer.config.parse import load; from trainer.plan.comm_volume import traffic; "
        "from trainer.plan.flops import work; config = load(['--config', 'llama3_405b_128k']); begin = time.process_time(); "
        "[(traffic(config, 4096, place), work(config, 4096, place)) for place in range(16)]; "
        "spent = (time.process_time() - begin) / 16; sys.exit('torch' in sys.modules or spent > 0.003)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_a_large_pipeline_gathers_weights_several_times_and_one_without_pipeline_far_more() -> None:
    def gathered(config: Config) -> float:
        found = (message for message in comm_volumes(config, 4096, 0) if message.channel == "fsdp")
        return sum(message.bytes for message in found if message.kind == "all_gather")

    cut, whole = (
        load(["--config", "llama3_405b_128k", *changes])
        for changes in ([], ["--parallelism.pp", "1", "--parallelism.dp_shard", "32"])
    )
    assert gathered(whole) / gathered(cut) > 5
