"""How long messages take: which ranks of a group share a node, and what their links carry. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from parallelisms.process_groups import first_groups
from trainer.config.job_config import Config
from trainer.hardware.device_specs import Device
from trainer.plan.comm_volume import Message

CALL = 10e-6
"""Seconds between the call of a collective and its first byte, whatever the links: a kernel of NCCL's, and its ranks
meeting. Large jobs of PyTorch's FSDP show 10 to 20 microseconds."""


@dataclass(frozen=True)
class Group:
    """The ranks of a channel: all of them, those that fast links join, and the islands of such."""

    ranks: int
    near: int
    islands: int

    @property
    def crosses(self) -> bool:
        return self.islands > 1


def groups_of(config: Config, world_size: int, device: Device) -> dict[str, Group]:
    """By channel, the group that is worst off. Neighbouring ranks fill one island of fast links after the other."""
    plan = config.context_plan()
    degrees = config.parallelism.degrees(world_size)
    first = first_groups(degrees, plan.ulysses if plan.chosen == "hybrid" else None)
    return {name: _worst(ranks, world_size, device.linked) for name, ranks in first.items()}


def _worst(first: range, world_size: int, linked: int) -> Group:
    """Of the groups that lie as `first` does, from rank 0 on; where sizes do not divide an island, some cross its border."""
    span = first.step * len(first)
    even = linked % span == 0 or (span % linked == 0 and (linked % first.step == 0 or first.step % linked == 0))
    bases = [0] if even else range(0, min(world_size, lcm(span, linked)), span)
    offsets = range(1) if even else range(0, first.step, max(1, first.step // linked))
    found = []
    for start in (base + offset for base in bases for offset in offsets):
        islands = Counter((start + rank) // linked for rank in first)
        found.append(Group(len(first), min(islands.values()), len(islands)))
    return max(found, key=lambda group: (group.islands, -group.near))


def rate(kind: str, group: Group, device: Device) -> float:
    """Bytes that a rank sends in a second.

    A collective over several islands goes through all links that its ranks have to the network together, since what one
    of them receives it passes on inside. An exchange sends most bytes to other islands, each rank over its own link; and
    of ranks that pass something round, one sends to the next island, for which the others wait.
    """
    if not group.crosses:
        return device.link
    if kind == "send":
        return device.network
    if kind == "all_to_all":
        far = (group.ranks - group.near) / (group.ranks - 1)
        return 1 / max(far / device.network, (1 - far) / device.link)
    return min(device.link, group.near * device.network)


def latency(kind: str, group: Group, device: Device) -> float:
    """Seconds of a call that do not depend on what is sent. Collectives go round a ring of their ranks."""
    if kind in ("send", "all_to_all"):
        return CALL + (device.network_latency if group.crosses else device.link_latency)
    steps = (2 if kind == "all_reduce" else 1) * (group.ranks - 1)
    far = steps * (group.islands - 1) / max(1, group.ranks - 1)
    return CALL + far * device.network_latency + (steps - far) * device.link_latency


def seconds(message: Message, groups: Mapping[str, Group], device: Device) -> float:
    """Of all calls of a kind in an update, one after the other."""
    group = groups[message.channel]
    each = latency(message.kind, group, device)
    return message.bytes / rate(message.kind, group, device) + message.calls * each
