"""Communication volumes against manual counts; test_counted_steps.py compares them with real
steps.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES, sent_bytes
from tests.plan.test_counted_steps import configured
from tests.test_house import ROOT
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.plan.comm_volume import (
    CommVolume,
    Phase,
    comm_volumes,
)
from trainer.plan.memory_estimate import rank_memory

# hidden and FFN dimension, sequence length, vocabulary
E = 128
G = 384
T = 256
V = 264
BLOCK = E * (4 * 32) * 2 + E * (2 * 32) * 2 + 3 * E * G + 2 * E
FULL = "memory.recompute=full"
KEEP = "memory.recompute=keep_attention"
TP = "parallelism.tp=2"


def of(
    found: list[CommVolume], channel: str, what: str
) -> dict[tuple[str, Phase], tuple[float, float]]:
    """(bytes, calls) by (kind, phase)."""
    mine = [message for message in found if message.channel == channel and message.what == what]
    return {(message.kind, message.phase): (message.bytes, message.calls) for message in mine}


def test_sent_bytes_of_each_collective() -> None:
    assert sent_bytes("all_gather", 100, 4) == sent_bytes("reduce_scatter", 100, 4) == 300
    assert sent_bytes("all_reduce", 100, 4) == 150
    assert sent_bytes("all_to_all", 100, 4) == 75
    assert sent_bytes("send", 100, 4) == 100
    assert [
        sent_bytes(kind, 100, 1)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    ] == [0] * 4
    with pytest.raises(
        ValueError, match='kind = "broadcast" must be one of all_gather, reduce_scatter, '
    ):
        sent_bytes("broadcast", 100, 4)


def test_one_rank_sends_nothing() -> None:
    assert comm_volumes(rank_memory(configured(FULL), 1, 0)) == []


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once_per_micro_batch() -> None:
    found = comm_volumes(
        rank_memory(configured("training.dtype=bfloat16 training.global_batch_size=8"), 2, 0)
    )
    assert of(found, "fsdp", "weights of blocks") == {
        ("all_gather", "forward"): (4 * 3 * 2 * BLOCK / 2, 12),
        ("all_gather", "backward"): (4 * 3 * 2 * BLOCK / 2, 12),
    }
    assert of(found, "fsdp", "gradients of blocks") == {
        ("reduce_scatter", "backward"): (4 * 3 * 4 * BLOCK / 2, 12)
    }
    # The loss head stays gathered from forward to backward; the embedding's backward needs no
    # weight.
    assert of(found, "fsdp", "weights of loss head") == {
        ("all_gather", "forward"): (4 * 2 * (V + 1) * E / 2, 4)
    }
    assert of(found, "fsdp", "weights of embedding") == {
        ("all_gather", "forward"): (4 * 2 * V * E / 2, 4)
    }
    kept = comm_volumes(rank_memory(configured("parallelism.reshard_after_forward=false"), 2, 0))
    assert {*of(kept, "fsdp", "weights of blocks")} == {("all_gather", "forward")}


def test_replicas_all_reduce_their_gradient_shards() -> None:
    # One sequence per rank; two replicas of two shards.
    found = comm_volumes(rank_memory(configured("parallelism.dp_replicate=2"), 4, 0))
    assert of(found, "dp_replicate", "gradients of blocks") == {
        ("all_reduce", "backward"): (3 * 4 * BLOCK / 2, 3)
    }


def test_recomputed_blocks_are_gathered_once_more() -> None:
    found = comm_volumes(rank_memory(configured(f"{KEEP} memory.blocks_per_checkpoint=2"), 2, 0))
    calls = {key: calls for key, (_, calls) in of(found, "fsdp", "weights of blocks").items()}
    # Two micro-batches of three blocks; one of the first two saves its input.
    assert calls == {
        ("all_gather", "forward"): 6,
        ("all_gather", "backward"): 6,
        ("all_gather", "recompute"): 2,
    }


def test_a_pipeline_gathers_and_reduces_once_per_step() -> None:
    config = configured("parallelism.pp=2 model.num_layers=4 training.global_batch_size=8")
    first, last = (comm_volumes(rank_memory(config, 4, place)) for place in range(2))
    blocks = [config.pipeline_plan(4).blocks_per_stage[place] for place in range(2)]
    for count, found in zip(blocks, (first, last), strict=True):
        assert of(found, "fsdp", "weights of blocks") == {
            ("all_gather", "step"): (count * 4 * BLOCK / 2, count)
        }
        assert of(found, "fsdp", "gradients of blocks") == {
            ("reduce_scatter", "step"): (count * 4 * BLOCK / 2, count)
        }
    # Four micro-batches of one sequence.
    assert of(first, "pp", "residual stream") == {("send", "forward"): (4 * 4 * E * T, 4)}
    assert of(last, "pp", "gradients of the residual stream") == {
        ("send", "backward"): (4 * 4 * E * T, 4)
    }
    assert (
        of(first, "pp", "gradients of the residual stream")
        == of(last, "pp", "residual stream")
        == {}
    )


def test_a_pipeline_may_reduce_once_per_micro_batch() -> None:
    changes = "parallelism.pp=2 parallelism.pp_reduce_gradients=per_micro_batch model.num_layers=4 training.global_batch_size=8"
    rank = rank_memory(configured(changes), 4, 0)
    (count,), found = rank.blocks_by_stage.values(), comm_volumes(rank)
    assert of(found, "fsdp", "weights of blocks") == {
        ("all_gather", "step"): (count * 4 * BLOCK / 2, count)
    }
    reduced = (4 * count * 4 * BLOCK / 2, 4 * count)  # Four micro-batches.
    assert of(found, "fsdp", "gradients of blocks") == {("reduce_scatter", "backward"): reduced}


def test_interleaved_stages_send_to_the_next_and_to_the_previous_one() -> None:
    config = configured(
        "parallelism.pp=2 model.num_layers=4 parallelism.pp_schedule=Interleaved1F1B"
    )
    # Four micro-batches. Rank 0 has stages 0 and 2, rank 1 has 1 and 3.
    calls = [
        {
            message.phase: message.calls
            for message in comm_volumes(rank_memory(config, 2, place))
            if message.channel == "pp"
        }
        for place in (0, 1)
    ]
    assert calls == [{"forward": 8, "backward": 4}, {"forward": 4, "backward": 8}]


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("keep_attention", 3), ("full", 4)])
def test_tp_communicates_eight_times_per_block_plus_recomputation(policy: str, again: int) -> None:
    found = of(
        comm_volumes(rank_memory(configured(f"{TP} memory.recompute={policy}"), 2, 0)),
        "tp",
        "hidden states",
    )
    one = 4 * E * T / 2  # Half of a sequence.
    calls = {key: count / 12 for key, (_, count) in found.items()}  # Three blocks, four sequences.
    expected = {
        (kind, phase): 2.0
        for kind in ("all_gather", "reduce_scatter")
        for phase in ("forward", "backward")
    }
    more = (
        {("all_gather", "recompute"): again - 1.0, ("reduce_scatter", "recompute"): 1.0}
        if again
        else {}
    )
    assert calls == expected | more
    assert {key: size / count for key, (size, count) in found.items()} == dict.fromkeys(calls, one)


def test_tp_communicates_per_tile_and_recomputed_blocks_skip_attention() -> None:
    # Two micro-batches of two sequences of 512 tokens, 256 of them per rank. A token needs 4 (500
    # + 500 + 500 + 500 + 128) transient bytes, so a tile of 1 MiB has 30 tokens per rank and
    # sequence.
    tiled = f"{TP} {KEEP} memory.blocks_per_checkpoint=3 memory.mlp_tile_mib=1 training.seq_len=512 model.ffn_dim=1000"
    found = of(
        comm_volumes(rank_memory(configured(f"{tiled} training.micro_batch_size=2"), 2, 0)),
        "tp",
        "hidden states",
    )
    assert {key: calls / 2 for key, (_, calls) in found.items()} == {
        ("all_gather", "forward"): 3 * (1 + 9),
        ("all_gather", "backward"): 3 * (1 + 9),
        ("reduce_scatter", "forward"): 3 * 2 * 9,
        ("reduce_scatter", "backward"): 3 * 2 * 9,
        # Two of three blocks are recomputed as input of the next.
        ("all_gather", "recompute"): 3 * (1 + 9) + 2 * 9,
        ("reduce_scatter", "recompute"): 3 * 9 + 2 * 2 * 9,
    }
    sizes = {key: size / (2 * 4 * E * 512) for key, (size, _) in found.items()}
    assert sizes["all_gather", "recompute"] == pytest.approx(3 * 2 + 2)
    assert sizes["reduce_scatter", "recompute"] == pytest.approx(3 + 4)


def test_tp_without_sequence_parallelism_all_reduces() -> None:
    found = of(
        comm_volumes(
            rank_memory(configured(f"{TP} parallelism.sequence_parallel=false {KEEP}"), 2, 0)
        ),
        "tp",
        "hidden states",
    )
    # Reduce and broadcast of half of it each.
    whole = 4 * E * T
    assert {key: size / whole / 12 for key, (size, _) in found.items()} == {
        ("all_reduce", "forward"): 2,
        ("all_reduce", "backward"): 2,
        ("all_reduce", "recompute"): 1,
    }


def test_a_replicated_loss_head_all_reduces_its_gradient() -> None:
    found = comm_volumes(
        rank_memory(
            configured(f"{TP} parallelism.loss_parallel=false training.seq_len=4096"), 2, 0
        )
    )
    gradient = of(found, "tp", "gradients of replicated weights")
    assert gradient == {("all_reduce", "backward"): (4 * 4 * V * E, 4)}
    assert of(found, "tp", "losses") == {("all_gather", "forward"): (4 * 4 * 2048, 4)}
    assert of(found, "tp", "hidden states of the loss head") == {}
    tied = comm_volumes(
        rank_memory(
            configured(
                f"{TP} parallelism.loss_parallel=false model.tie_embeddings=true training.dtype=bfloat16"
            ),
            2,
            0,
        )
    )
    # Once as embedding and once as loss head, both in float32.
    assert of(tied, "tp", "gradients of replicated weights") == {
        ("all_reduce", "backward"): (4 * 2 * 4 * V * E, 8)
    }


def test_loss_parallel_reduces_three_numbers_per_token() -> None:
    found = of(
        comm_volumes(
            rank_memory(configured(f"{TP} training.seq_len=4096 memory.loss_chunk_mib=8"), 2, 0)
        ),
        "tp",
        "loss reductions",
    )
    assert found == {("all_reduce", "forward"): (4 * 3 * 4 * 4096, 8)}


def test_small_messages_are_not_counted() -> None:
    norms = [
        of(
            comm_volumes(rank_memory(configured(f"{TP} model.dim={width}"), 2, 0)),
            "tp",
            "gradients of replicated weights",
        )
        for width in (1020, 1024)
    ]
    assert norms == [{}, {("all_reduce", "backward"): (4 * 7 * MIN_COUNTED_BYTES, 28)}]


@pytest.mark.parametrize("method", ["ring", "alltoall", "allgather"])
def test_a_ring_distributes_kv_and_reduces_kv_gradients_in_float32(method: str) -> None:
    changes = f"parallelism.cp=4 parallelism.cp_method={method} training.dtype=bfloat16"
    found = comm_volumes(rank_memory(configured(f"{changes} {FULL}"), 4, 0))
    # Three blocks, four sequences, three destinations, K and V of two heads.
    keys = 12 * 3 * 2 * (T / 4) * 2 * 32
    there, back = {"ring": ("send",) * 2, "alltoall": ("all_to_all",) * 2}.get(
        method, ("all_gather", "reduce_scatter")
    )
    hops = 12 if method == "allgather" else 36
    assert of(found, "cp", "KV") == {
        (there, phase): (2 * keys, hops) for phase in ("forward", "backward", "recompute")
    }
    assert of(found, "cp", "gradients of KV") == {(back, "backward"): (4 * keys, hops)}
    narrow = comm_volumes(
        rank_memory(configured(f"{changes} parallelism.cp_reduce_dtype=bfloat16"), 4, 0)
    )
    assert of(narrow, "cp", "gradients of KV") == {(back, "backward"): (2 * keys, hops)}
    assert (there, "recompute") not in of(narrow, "cp", "KV")


def test_hybrid_exchanges_heads_and_repeats_kv_heads_until_they_divide() -> None:
    changes = "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 parallelism.cp_outer_method=ring"
    found = comm_volumes(rank_memory(configured(f"{changes} model.num_kv_heads=1 {KEEP}"), 4, 0))
    # Half goes to the other rank.
    queries, keys = (12 * 2 * 4 * (T / 4) * heads * 32 / 2 for heads in (4, 2))
    phases = ("forward", "backward", "recompute")
    assert of(found, "exchange", "queries and outputs") == {
        ("all_to_all", phase): (queries, 24) for phase in phases
    }
    assert of(found, "exchange", "KV") == {("all_to_all", phase): (keys, 24) for phase in phases}
    twice = comm_volumes(rank_memory(configured(f"{changes} model.num_kv_heads=1 {FULL}"), 4, 0))
    assert of(twice, "exchange", "KV")["all_to_all", "recompute"] == (2 * keys, 48)
    # One KV head of half of the sequence.
    assert of(found, "rotate", "KV") == {
        ("send", phase): (12 * 2 * 4 * (T / 2) * 32, 12) for phase in phases[:2]
    }


def test_attention_beyond_the_host_budget_is_recomputed() -> None:
    def share(gib: float) -> float:
        config = configured(
            f"{KEEP} memory.offload=inputs_and_attention memory.host_budget_gib={gib}"
        )
        return rank_memory(config, 1, 0).attention_recompute_fraction

    inputs = 3 * 4 * E * T
    attended = 4 * (E + 4) * T
    assert [share((inputs + count * attended + 1) / 2**30) for count in (0, 1, 3)] == [
        1,
        pytest.approx(2 / 3),
        0,
    ]


COUNTED_FORMULAS = """
import sys

from trainer.config.parse import load
from trainer.plan.comm_volume import comm_volumes
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import rank_workload

config = load(["--config", "llama3_405b_128k"])
calls = 0


def count(frame, event, argument):
    global calls
    calls += event == "call"


sys.setprofile(count)
for rank in range(16):
    memory = rank_memory(config, 4096, rank)
    comm_volumes(memory)
    rank_workload(memory)
sys.setprofile(None)
print(calls // 16, "torch" in sys.modules)
"""


def test_formulas_take_few_calls_per_rank_and_import_no_torch() -> None:
    command = [sys.executable, "-c", COUNTED_FORMULAS]
    calls, imported = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout.split()
    # 4,400 in November 2026; counted, because seconds depend on what else the machine does.
    assert int(calls) < 8_000
    assert imported == "False"


def test_a_pipeline_gathers_fewer_weights_than_fsdp_alone() -> None:
    def gathered(config: Config) -> float:
        found = (
            message
            for message in comm_volumes(rank_memory(config, 4096, 0))
            if message.channel == "fsdp"
        )
        return sum(message.bytes for message in found if message.kind == "all_gather")

    pipelined, fsdp_only = (
        load(["--config", "llama3_405b_128k", *changes])
        for changes in ([], ["--parallelism.pp", "1", "--parallelism.dp_shard", "32"])
    )
    assert gathered(fsdp_only) / gathered(pipelined) > 5
