"""Communication time on eight-device nodes with 450 and 50 GB/s, of which 0.8 and 0.9 are
reached.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config.job_config import Config
from trainer.hardware.device_specs import load_device
from trainer.plan.interconnect import (
    CALL_OVERHEAD,
    GroupTopology,
    bandwidth,
    group_topologies,
    latency,
    used_domain_size,
)
from trainer.plan.plan import TrainingPlan
from trainer.plan.rank_clock import DeviceRates
from trainer.trace.pieces import Departure

H100 = load_device("h100-80gb")
GB200 = load_device("gb200")
INSIDE = 360e9
BETWEEN = 45e9


def mesh(**parallelism: object) -> Config:
    return Config.model_validate(
        {"parallelism": parallelism, "model": {"family": "llama3", "size": "8b"}}
    )


def test_groups_are_placed_on_nodes_by_rank_order() -> None:
    config = mesh(dp_shard=2, cp=4, tp=4, pp=2, cp_method="hybrid", cp_ulysses=2)
    found = group_topologies(config, 64, H100)
    assert found["tp"] == GroupTopology(ranks=4, min_ranks_per_domain=4, num_domains=1)
    assert found["exchange"] == GroupTopology(ranks=2, min_ranks_per_domain=2, num_domains=1)
    assert found["rotate"] == GroupTopology(ranks=2, min_ranks_per_domain=1, num_domains=2)
    assert found["fsdp"] == GroupTopology(ranks=8, min_ranks_per_domain=2, num_domains=4)
    assert found["pp"] == GroupTopology(ranks=2, min_ranks_per_domain=1, num_domains=2)


def test_a_rack_with_nvlink_is_one_link_domain() -> None:
    config = mesh(dp_shard=8, cp=8, cp_method="ring")
    assert group_topologies(config, 64, H100)["fsdp"].num_domains == 8
    assert group_topologies(config, 64, GB200)["fsdp"].num_domains == 1


def test_no_group_straddles_a_rack() -> None:
    found = group_topologies(mesh(dp_shard=32, pp=8), 256, GB200)
    assert found["fsdp"] == GroupTopology(ranks=32, min_ranks_per_domain=32, num_domains=1)
    full_racks = group_topologies(
        mesh(dp_shard=32, pp=8), 256, replace(GB200, link_domain_used=72)
    )
    assert full_racks["fsdp"] == GroupTopology(ranks=32, min_ranks_per_domain=8, num_domains=2)


@pytest.mark.parametrize(
    ("groups", "world_size", "size"),
    [
        ([range(256), range(32)], 256, 64),
        ([range(144), range(8)], 144, 72),
        ([range(192), range(3)], 192, 48),
        ([range(80), range(5)], 80, 40),
        ([range(64)], 64, 72),  # One rack has room for the job.
        # Whole nodes that no group straddles would leave most of each rack idle.
        ([range(76)], 76, 72),
    ],
)
def test_racks_are_used_to_the_largest_number_of_whole_nodes_that_no_group_straddles(
    groups: list[range], world_size: int, size: int
) -> None:
    assert used_domain_size(groups, world_size, GB200) == size


def test_the_domain_of_a_single_node_is_used_whole() -> None:
    assert used_domain_size([range(24), range(3)], 24, H100) == 8


def test_a_plan_says_how_much_of_a_rack_it_uses() -> None:
    config = mesh(dp_shard=32, pp=8)
    note = "uses 64 of the 72 GPUs of each NVLink domain, so that no process group straddles one"
    assert note in TrainingPlan(config, 256, GB200).assumptions
    stated = TrainingPlan(config, 256, replace(GB200, link_domain_used=36)).assumptions
    assert "uses 36 of the 72 GPUs of each NVLink domain, as [link] used states" in stated
    few = TrainingPlan(mesh(dp_shard=8), 8, GB200)
    assert not any("NVLink" in note for note in few.assumptions)


def test_every_channel_has_a_topology() -> None:
    config = mesh(dp_shard=2, dp_replicate=2, cp=2, tp=2, pp=2, cp_method="ring")
    assert {*group_topologies(config, 32, H100)} == {
        "pp",
        "dp_replicate",
        "fsdp",
        "tp",
        "dp_cp",
        "metrics",
        "cp",
    }


def test_a_group_within_a_node_uses_its_fast_links() -> None:
    group = GroupTopology(ranks=8, min_ranks_per_domain=8, num_domains=1)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        assert bandwidth(kind, group, H100) == pytest.approx(INSIDE)


def test_collectives_across_nodes_use_all_network_links_of_their_ranks() -> None:
    assert bandwidth("all_gather", GroupTopology(32, 8, 4), H100) == pytest.approx(
        min(INSIDE, 8 * BETWEEN)
    )
    assert bandwidth("reduce_scatter", GroupTopology(8, 2, 4), H100) == pytest.approx(2 * BETWEEN)
    assert bandwidth("all_reduce", GroupTopology(4, 1, 4), H100) == pytest.approx(BETWEEN)
    wide = replace(H100, network_bandwidth=1e12)
    assert bandwidth("all_gather", GroupTopology(32, 8, 4), wide) == pytest.approx(INSIDE)


def test_send_recv_is_bound_by_the_rank_that_crosses_nodes() -> None:
    assert bandwidth("send", GroupTopology(16, 8, 2), H100) == pytest.approx(BETWEEN)


def test_all_to_all_is_bound_by_the_share_that_crosses_nodes() -> None:
    # 16 ranks on two nodes: 8 of 15 parts cross, 7 stay.
    assert bandwidth("all_to_all", GroupTopology(16, 8, 2), H100) == pytest.approx(
        BETWEEN * 15 / 8
    )


def test_ring_latency_counts_one_network_step_per_further_node() -> None:
    inside = H100.link_latency
    between = H100.network_latency
    assert latency("all_gather", GroupTopology(8, 8, 1), H100) == pytest.approx(
        CALL_OVERHEAD + 7 * inside
    )
    assert latency("all_gather", GroupTopology(32, 8, 4), H100) == pytest.approx(
        CALL_OVERHEAD + 28 * inside + 3 * between
    )
    assert latency("all_reduce", GroupTopology(32, 8, 4), H100) == pytest.approx(
        CALL_OVERHEAD + 56 * inside + 6 * between
    )
    assert latency("send", GroupTopology(32, 8, 4), H100) == pytest.approx(CALL_OVERHEAD + between)


def test_message_time_is_volume_plus_latency() -> None:
    rates = DeviceRates(mesh(tp=2), H100, {"tp": GroupTopology(2, 2, 1)})
    message = Departure(("tp", "all_gather", "forward"), 36e9, number=1, calls=100)
    assert rates.transfer(message).seconds == pytest.approx(
        0.1 + 100 * (CALL_OVERHEAD + H100.link_latency)
    )
