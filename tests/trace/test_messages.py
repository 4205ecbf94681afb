"""Messages that traces of a small model find, against manual counts."""

from __future__ import annotations

import pytest

from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES, sent_bytes
from tests.trace.small_steps import FULL, HALF, KEEP, traced

# hidden and FFN dimension, sequence length, vocabulary
E = 128
G = 384
T = 1024
V = 264
BLOCK = E * (4 * 32) * 2 + E * (2 * 32) * 2 + 3 * E * G + 2 * E
KV = 2 * 2 * 32
"""Numbers of a token's keys and values."""
TWO = "training.global_batch_size=2"
TP = "parallelism.tp=2"
PIPELINE = "parallelism.pp=2 model.num_layers=4 training.global_batch_size=8"
HYBRID = "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 parallelism.cp_outer_method=ring"


def sent(
    changes: str, world_size: int, channel: str, pp_rank: int = 0
) -> dict[tuple[str, str], tuple[float, int]]:
    """(bytes, calls) by (kind, phase)."""
    work = traced(changes, world_size)[pp_rank].whole.work
    return {
        key[1:]: (work.sent_bytes[key], calls)
        for key, calls in work.calls.items()
        if key[0] == channel
    }


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
    assert not traced(FULL)[0].whole.work.calls


def test_recomputed_blocks_are_gathered_once_more() -> None:
    found = sent(f"{KEEP} memory.blocks_per_checkpoint=2 {TWO}", 2, "fsdp")
    # Embedding, head and three blocks; one of the first two saves its input.
    assert found["all_gather", "forward"][1] == 5
    assert found["all_gather", "backward"] == (4 * (3 + 1) * BLOCK / 2, 3 + 1)


@pytest.mark.slow
def test_weights_that_stay_gathered_are_gathered_once() -> None:
    found = sent(f"parallelism.reshard_after_forward=false {TWO}", 2, "fsdp")
    assert {*found} == {("all_gather", "forward"), ("reduce_scatter", "backward")}


def test_replicas_all_reduce_their_gradient_shards() -> None:
    found = sent("parallelism.dp_replicate=2 training.global_batch_size=4", 4, "dp_replicate")
    whole = 3 * BLOCK + 2 * V * E + E
    assert found == {("all_reduce", "backward"): (4 * whole / 2, 5)}


def test_a_pipeline_gathers_and_reduces_once_per_step() -> None:
    for pp_rank, ends in enumerate((V * E, V * E + E)):
        weights = 4 * (2 * BLOCK + ends) / 2
        assert sent(PIPELINE, 4, "fsdp", pp_rank) == {
            ("all_gather", "forward"): (weights, 3),
            ("reduce_scatter", "backward"): (weights, 3),
        }
        # Four micro-batches of one sequence.
        assert sent(PIPELINE, 4, "pp", pp_rank) == {("send", "backward"): (4 * 4 * E * T, 4)}


@pytest.mark.slow
def test_a_pipeline_may_reduce_once_per_micro_batch() -> None:
    found = sent(f"{PIPELINE} parallelism.pp_reduce_gradients=per_micro_batch", 4, "fsdp")
    assert found["all_gather", "forward"][1] == 3
    assert found["reduce_scatter", "backward"] == (4 * 4 * (2 * BLOCK + V * E) / 2, 4 * 3)


@pytest.mark.slow
def test_interleaved_stages_send_to_the_next_and_to_the_previous_one() -> None:
    """Rank 0 has stages 0 and 2, rank 1 has 1 and 3: 12 messages each of four micro-batches."""
    changes = "parallelism.pp=2 model.num_layers=4 parallelism.pp_schedule=Interleaved1F1B training.global_batch_size=4"
    calls = [sum(n for _, n in sent(changes, 2, "pp", rank).values()) for rank in (0, 1)]
    assert calls == [12, 12]


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("keep_attention", 3), ("full", 4)])
def test_tp_communicates_eight_times_per_block_plus_recomputation(policy: str, again: int) -> None:
    found = sent(f"{TP} memory.recompute={policy}", 2, "tp")
    # Embedding and head: one of each kind and direction.
    calls = {
        ("all_gather", "forward"): 3 * 2 + 1,
        ("reduce_scatter", "forward"): 3 * 2 + 1,
        ("all_gather", "backward"): 3 * (2 + max(0, again - 1)) + 1,
        ("reduce_scatter", "backward"): 3 * (2 + min(1, again)) + 1,
    }
    half = 4 * E * T / 2
    # The maximum logit of every token; the sum of its exponentials, and the target's logit.
    reduced = {("all_reduce", "forward"): (3 * 4 * T, 2)}
    assert found == {key: (count * half, count) for key, count in calls.items()} | reduced


def test_tp_without_sequence_parallelism_all_reduces() -> None:
    found = sent(f"{TP} parallelism.sequence_parallel=false {KEEP}", 2, "tp")
    whole = 4 * E * T
    # Two in a block, and the embedding's; the head's maximum, and its sum with the target's logit.
    assert found["all_reduce", "forward"] == (whole * (3 * 2 + 1) + 3 * 4 * T, 3 * 2 + 1 + 2)
    assert found["all_reduce", "backward"] == (whole * (3 * (2 + 1) + 1), 3 * (2 + 1) + 1)
    assert {kind for kind, _ in found} == {"all_reduce"}


def test_a_replicated_loss_head_all_reduces_its_gradient() -> None:
    alone = f"{TP} parallelism.loss_parallel=false"
    assert sent(alone, 2, "tp")["all_reduce", "backward"] == (4 * V * E, 1)
    # Once as embedding and once as loss head, both in float32.
    tied = sent(f"{alone} model.tie_embeddings=true {HALF}", 2, "tp")
    assert tied["all_reduce", "backward"] == (2 * 4 * V * E, 2)


def test_small_messages_are_not_counted() -> None:
    """Gradients of seven norms."""
    small, large = (sent(f"{TP} model.dim={width}", 2, "tp") for width in (1020, 1024))
    assert ("all_reduce", "backward") not in small
    assert large["all_reduce", "backward"] == (7 * MIN_COUNTED_BYTES, 7)


@pytest.mark.parametrize(
    "method",
    ["ring", *(pytest.param(each, marks=pytest.mark.slow) for each in ("alltoall", "allgather"))],
)
def test_a_ring_distributes_kv_and_reduces_kv_gradients_in_float32(method: str) -> None:
    changes = f"parallelism.cp=4 parallelism.cp_method={method} {HALF} {FULL}"
    found = sent(changes, 4, "cp")
    # Three blocks to three other ranks.
    numbers = 3 * 3 * (T / 4) * KV
    backward = sum(size for (_, phase), (size, _) in found.items() if phase == "backward")
    assert sum(size for size, _ in found.values()) == 2 * numbers + backward
    # Keys and values once for recomputation and once for the backward pass.
    assert backward == 2 * 2 * numbers + 4 * numbers
    narrow = sent(f"{changes} parallelism.cp_reduce_dtype=bfloat16", 4, "cp")
    assert sum(size for size, _ in narrow.values()) == 4 * 2 * numbers


@pytest.mark.slow
def test_hybrid_exchanges_heads_and_repeats_kv_heads_until_they_divide() -> None:
    """The one KV head becomes two, one for each of two ranks."""
    changes = f"{HYBRID} model.num_kv_heads=1 {KEEP}"
    # Half goes to the other rank: queries, outputs, keys and values of a quarter of the tokens.
    numbers = 3 * (T / 4) * 32 * (2 * 4 + 2 * 2) / 2
    found = sent(changes, 4, "exchange")
    assert found["all_to_all", "forward"] == (4 * numbers, 3 * 4)
    # One KV head of half of the sequence.
    rotated = sent(changes, 4, "rotate")
    assert rotated["send", "forward"] == (4 * 3 * (T / 2) * 2 * 32, 3)


@pytest.mark.parametrize(
    "method",
    ["allgather", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ring", "alltoall"))],
)
def test_layers_with_a_window_send_a_halo_and_the_others_all_kv(method: str) -> None:
    changes = f"parallelism.cp=4 parallelism.cp_method={method} parallelism.cp_layout=contiguous"
    windowed = sent(f"{changes} model.window=40", 4, "cp")
    # Keys and values of 39 tokens go to the next rank, again in the backward pass, which sends back
    # the gradients of as many. The first rank, which has none before it, is not the busiest.
    halo = 3 * 4 * 39 * KV
    assert sum(size for size, _ in windowed.values()) == pytest.approx(3 * halo)
    full = sent(changes, 4, "cp")
    assert sum(size for size, _ in full.values()) == 3 * 3 * 4 * 3 * (T / 4) * KV


@pytest.mark.parametrize(("tokens", "fits"), [(2 * T // 4 + 1, True), (2 * T // 4 + 2, False)])
def test_a_ring_rotates_kv_where_the_halo_of_a_window_does_not_fit(
    tokens: int,
    fits: bool,  # noqa: FBT001
) -> None:
    changes = "parallelism.cp=4 parallelism.cp_method=ring parallelism.cp_layout=contiguous"
    found = sent(f"{changes} model.window={tokens}", 4, "cp")
    assert {kind for kind, _ in found} == {"all_to_all" if fits else "send"}
