"""Communication time from group placement and link bandwidths. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from parallelisms.mesh.process_groups import rank_zero_groups
from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec

CALL_OVERHEAD = 10e-6
"""Seconds from the call of a collective to its first byte: launch and rendezvous of the NCCL
kernel. Large PyTorch FSDP jobs show 10 to 20 microseconds.
"""


@dataclass(frozen=True)
class GroupTopology:
    """Placement of a process group over domains of fast links (NVLink, xGMI)."""

    ranks: int
    min_ranks_per_domain: int
    num_domains: int

    @property
    def crosses_domains(self) -> bool:
        return self.num_domains > 1


def group_topologies(
    config: Config, world_size: int, device: DeviceSpec
) -> dict[str, GroupTopology]:
    """The worst-placed group of each channel, with consecutive ranks filling one link domain after
    the other.
    """
    first_groups = first_groups_of(config, world_size)
    domain_size = used_domain_size([*first_groups.values()], world_size, device)
    return {
        name: _worst_placement(ranks, world_size, domain_size)
        for name, ranks in first_groups.items()
    }


def first_groups_of(config: Config, world_size: int) -> dict[str, range]:
    """Rank 0's process group of each channel."""
    degrees = config.parallelism.degrees(world_size)
    plan = config.context_plan()
    return rank_zero_groups(degrees, plan.hybrid_ulysses_degree, config.parallelism.ep)


def used_domain_size(first_groups: Collection[range], world_size: int, device: DeviceSpec) -> int:
    """Devices of each link domain that a job uses: as many whole nodes as no process group
    straddles.

    All of them if the domain is one node, if the job fits into it, or if that would leave more
    than half of it idle.
    """
    domain_size = device.link_domain_size
    node_size = device.devices_per_node
    if device.link_domain_used is not None:
        return device.link_domain_used
    if domain_size <= node_size or world_size <= domain_size:
        return domain_size
    # From all whole nodes of a domain down to half of it.
    whole_nodes = range(domain_size - domain_size % node_size, domain_size // 2 - 1, -node_size)
    aligned = (
        size for size in whole_nodes if all(_is_aligned(group, size) for group in first_groups)
    )
    return next(aligned, domain_size)


def _is_aligned(first_group: range, domain_size: int) -> bool:
    """Whether all translations of `first_group` have equally many ranks in each domain that they
    reach.
    """
    span = first_group.step * len(first_group)
    if domain_size % span == 0:
        return True
    return span % domain_size == 0 and (
        domain_size % first_group.step == 0 or first_group.step % domain_size == 0
    )


@lru_cache(maxsize=4096)
def _worst_placement(first_group: range, world_size: int, domain_size: int) -> GroupTopology:
    """Placement of the worst translation of `first_group`. If sizes do not divide a link domain,
    some groups cross its border.
    """
    span = first_group.step * len(first_group)
    is_aligned = _is_aligned(first_group, domain_size)
    # Placements repeat every lcm(span, domain) ranks: no later group lies otherwise.
    starts = [0] if is_aligned else range(0, min(world_size, lcm(span, domain_size)), span)
    offsets = (
        range(1)
        if is_aligned
        else range(0, first_group.step, max(1, first_group.step // domain_size))
    )
    placements = []
    for start in (base + offset for base in starts for offset in offsets):
        domains = Counter((start + rank) // domain_size for rank in first_group)
        placements.append(GroupTopology(len(first_group), min(domains.values()), len(domains)))
    return max(placements, key=lambda group: (group.num_domains, -group.min_ranks_per_domain))


def bandwidth(kind: str, group: GroupTopology, device: DeviceSpec) -> float:
    """Bytes per second that a rank sends.

    A collective across domains uses the network links of all its ranks together, because data is
    forwarded inside a domain. An all-to-all sends most bytes to other domains, each rank over its
    own link. In a send-recv ring, all ranks wait for the one that crosses the network.
    """
    if not group.crosses_domains:
        return device.link_bandwidth
    if kind == "send":
        return device.network_bandwidth
    if kind == "all_to_all":
        remote_fraction = (group.ranks - group.min_ranks_per_domain) / (group.ranks - 1)
        # Both parts are under way at once, so the slower kind of link decides.
        return 1 / max(
            remote_fraction / device.network_bandwidth,
            (1 - remote_fraction) / device.link_bandwidth,
        )
    return min(device.link_bandwidth, group.min_ranks_per_domain * device.network_bandwidth)


def latency(kind: str, group: GroupTopology, device: DeviceSpec) -> float:
    """Size-independent seconds of a call; collectives use NCCL's ring algorithm."""
    if kind in ("send", "all_to_all"):
        return CALL_OVERHEAD + (
            device.network_latency if group.crosses_domains else device.link_latency
        )
    # A ring all-reduce is a reduce-scatter and an all-gather of `ranks - 1` steps each.
    steps = (2 if kind == "all_reduce" else 1) * (group.ranks - 1)
    # Of the `ranks - 1` hops, `num_domains - 1` lead into another domain.
    remote_steps = steps * (group.num_domains - 1) / max(1, group.ranks - 1)
    return (
        CALL_OVERHEAD
        + remote_steps * device.network_latency
        + (steps - remote_steps) * device.link_latency
    )
