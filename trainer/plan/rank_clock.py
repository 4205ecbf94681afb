"""The time of one rank's step on a device: its kernels and messages one after the other, as they
were traced.

Kernels run in order on one stream, and the messages of a group beside them, from where the code
starts them to where it waits for them. FSDP has streams of its own, whose waits no trace shows: it
gathers the weights of a piece while the one before runs, and reduces gradients until the next ones
are to be reduced. Groups share the links of a kind: what kernels wait for has half of the rate
beside FSDP's messages, which wait for each other. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from models.kernel_choice import FLASH_VERSIONS
from trainer.config.job_config import Config
from trainer.hardware.device_specs import (
    GROUPED_MATMUL_SHARE,
    DeviceSpec,
    attention_slowdown,
    matmul_slowdown,
)
from trainer.plan import interconnect
from trainer.plan.interconnect import GroupTopology
from trainer.plan.step_time import (
    ASYNC_TP_OVERLAP,
    DTYPE_RATE_FACTOR,
    HOST_MEMORY_EFFICIENCY,
    OPTIMIZER_MEMORY_SHARE,
    RankStepTime,
)
from trainer.trace.pieces import GRADIENTS, HOST, WEIGHTS, Arrival, Departure, Piece, Work
from trainer.trace.rank_step import RankStep

FSDP_CHANNELS = ("fsdp", "efsdp", "dp_replicate")
UNTIMED_CHANNELS = ("pp", "world")
"""Messages between stages are part of the pipeline's bubble; those of all ranks are a few
numbers.
"""


@dataclass(frozen=True)
class Compute:
    """Kernels between two messages."""

    seconds: Mapping[str, float]
    """Seconds by kind on the device."""
    launch: float
    """Seconds that the host takes to launch them."""


class Transfer(NamedTuple):
    """A message or a copy between host and device."""

    sending: float
    """Seconds in which it has its link for itself."""
    latency: float
    """Seconds besides, in which the link is free for others."""
    channel: str
    link: str
    """The kind of link that it takes."""
    kind: str
    """GATHER, REDUCE, WEIGHTS, GRADIENTS or EXCHANGE."""
    number: int

    @property
    def seconds(self) -> float:
        return self.sending + self.latency


GATHER = "gather"
"""FSDP gathers weights."""
REDUCE = "reduce"
"""FSDP reduces gradients."""
EXCHANGE = "exchange"
"""Any other message or copy."""
FIRST = (WEIGHTS, GATHER)
"""Started while the piece before runs."""
Moment = Compute | Transfer | Arrival


class Gathered(NamedTuple):
    """The end of a gather."""

    arrival: float
    channel: str
    """Its own, or the host if it waited for that."""


class DeviceRates:
    """Seconds of kernels and messages on a device."""

    def __init__(
        self, config: Config, device: DeviceSpec, groups: Mapping[str, GroupTopology]
    ) -> None:
        self._config = config
        self._device = device
        self._groups = groups
        self._dtype_factor = DTYPE_RATE_FACTOR[config.training.dtype]

    def compute(self, work: Work) -> Compute:
        seconds = defaultdict[str, float](float)
        for product, flops in work.products.items():
            kind = "loss head" if product.phase == "head" else f"matmul {product.phase}"
            share = GROUPED_MATMUL_SHARE if product.is_grouped else 1
            rate = share * self._matmul_flops / matmul_slowdown(product.narrowest)
            seconds[kind] += flops / rate
        for key, flops in work.attention.items():
            forward, backward = self._attention_rates(key.kernel, key.head_dim)
            rate = backward if key.phase == "backward" else forward
            kind = "recompute" if key.phase == "recompute" else "attention"
            seconds[kind] += flops * attention_slowdown(key.keys) / rate
        for phase, size in work.moved_bytes.items():
            seconds["loss head" if phase == "head" else "memory-bound"] += (
                size / self._device.hbm_bandwidth
            )
        return Compute(seconds, work.kernels.total() * self._device.launch_latency)

    @property
    def _matmul_flops(self) -> float:
        return self._dtype_factor * self._device.matmul_share * self._device.matmul_flops

    def _attention_rates(self, kernel: str, head_dim: int) -> tuple[float, float]:
        configured = self._config.training.attention
        if kernel == "flash" and configured in FLASH_VERSIONS:  # A trace runs all versions as one.
            kernel = configured
        # DTYPE_RATE_FACTOR is relative to it: tables are of bfloat16.
        if self._config.training.dtype != "bfloat16":
            kernel = "flash"
        forward, backward = self._device.attention_rates(kernel, head_dim)
        return self._dtype_factor * forward, self._dtype_factor * backward

    def _message_seconds(self, message: Departure) -> tuple[float, float]:
        """(in which it has its link for itself, of latency)."""
        channel, kind, _ = message.key
        if channel == HOST:
            return message.size / self._device.host_link_bandwidth, 0.0
        group = self._groups[channel]
        latency = message.calls * interconnect.latency(kind, group, self._device)
        return message.size / interconnect.bandwidth(kind, group, self._device), latency

    def transfer(self, message: Departure) -> Transfer:
        channel, collective, _ = message.key
        kind = EXCHANGE
        if channel in FSDP_CHANNELS:
            kind = REDUCE
            if collective == "all_gather":
                kind = GATHER
        link = "link"
        if channel == HOST:
            link = HOST
            if collective in {WEIGHTS, GRADIENTS}:
                kind = collective
            # Gradients go the other way than what kernels wait for.
            if collective == GRADIENTS:
                link = "to the host"
        elif self._groups[channel].crosses_domains:
            link = "network"
        return Transfer(*self._message_seconds(message), channel, link, kind, message.number)


@dataclass
class Clock:
    """Progress of a rank and of its links at a moment of the step."""

    now: float = 0
    compute: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by kind."""
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which kernels wait, by channel."""
    sending: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of messages, by channel."""
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When each kind of link has sent what it was given so far."""
    arrived: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    """When the latest message of a channel on a link arrives."""

    def run(self, compute: Compute) -> None:
        for kind, seconds in compute.seconds.items():
            self.compute[kind] += seconds
            self.now += seconds

    def send(self, transfer: Transfer, *, after: float = 0) -> float:
        """Starts it behind those of its channel, `after` a moment; when it arrives."""
        link = transfer.link
        stream = transfer.channel, link
        start = max(self.now, self.arrived[stream], after)
        others = max(0.0, self.free[link] - start)
        self.free[link] = start + others + transfer.sending
        # Half of the rate, as long as others send.
        waits = min(others, transfer.sending) if transfer.kind == EXCHANGE else others
        self.arrived[stream] = start + waits + transfer.seconds
        self.sending[transfer.channel] += transfer.seconds
        return self.arrived[stream]

    def wait(self, arrival: float, channel: str) -> None:
        self.exposed[channel] += max(0.0, arrival - self.now)
        self.now = max(self.now, arrival)


class RankClock:
    """Forward and backward passes of one rank."""

    def __init__(
        self,
        config: Config,
        step: RankStep,
        device: DeviceSpec,
        groups: Mapping[str, GroupTopology],
    ) -> None:
        self.config = config
        self.step = step
        self.device = device
        self.rates = DeviceRates(config, device, groups)
        self._moments = [[*self._timed(piece)] for piece in step.pieces]
        self._gathers = [
            [each for each in moments if isinstance(each, Transfer) and each.kind in FIRST]
            for moments in self._moments
        ]
        self._awaited = {
            each.number
            for piece in step.pieces
            for each in piece.timeline
            if isinstance(each, Arrival)
        }
        self._in_flight: dict[int, tuple[float, str]] = {}
        """When messages arrive, and over which channel."""
        self._reduced = 0.0
        """When the latest gradients are reduced."""
        self._returned = 0.0
        """When the latest gradients are on the host."""

    def _timed(self, piece: Piece) -> Iterator[Moment]:
        for each in piece.timeline:
            if isinstance(each, Work):
                yield self.rates.compute(each)
            elif isinstance(each, Arrival):
                yield each
            elif each.channel not in UNTIMED_CHANNELS:
                yield self.rates.transfer(each)

    @cached_property
    def clock(self) -> Clock:
        """The clock after the last backward pass."""
        clock = Clock()
        # The last piece is the optimizer, which is timed by itself.
        order = self.step.order[:-1]
        gathered = self._gather(clock, order[0])
        for index, following in zip(order, (*order[1:], None), strict=True):
            # FSDP prefetches: it gathers the weights of the next piece before this one runs.
            following_gathered = [] if following is None else self._gather(clock, following)
            self._run(clock, index, iter(gathered))
            gathered = following_gathered
        # The optimizer needs the last reduced gradients, which nothing hides.
        clock.wait(self._reduced, FSDP_CHANNELS[0])
        clock.wait(self._returned, HOST)
        return clock

    def _gather(self, clock: Clock, index: int) -> list[Gathered]:
        """Starts to gather the weights of a piece, from the host if they are there."""
        gathered = []
        copied = 0.0
        for each in self._gathers[index]:
            if each.kind == WEIGHTS:
                copied = clock.send(each)
            else:
                waits_for_host = copied > max(clock.now, clock.free[each.link])
                arrival = clock.send(each, after=copied)
                gathered.append(Gathered(arrival, HOST if waits_for_host else each.channel))
        return gathered

    def _run(self, clock: Clock, index: int, gathered: Iterator[Gathered]) -> None:
        begin = clock.now
        launch = 0.0
        for moment in self._moments[index]:
            if isinstance(moment, Compute):
                clock.run(moment)
                launch += moment.launch
            elif isinstance(moment, Arrival):
                self._await(clock, moment.number)
            elif moment.kind == GATHER:
                clock.wait(*next(gathered))
            elif moment.kind == REDUCE:
                self._reduce(clock, moment)
            elif moment.kind == GRADIENTS:
                self._returned = clock.send(moment, after=self._reduced)
            elif moment.kind == EXCHANGE:
                self._exchange(clock, moment)
            # Weights are copied while the piece before runs.
        # The host launches ahead of the device: only what exceeds the kernels of a piece is a gap.
        gap = max(0.0, launch - (clock.now - begin))
        clock.run(Compute({"launch overhead": gap}, 0))

    def _reduce(self, clock: Clock, transfer: Transfer) -> None:
        """Replicas reduce what their shards have reduced; nothing waits for that before the
        end.
        """
        if transfer.channel != "dp_replicate":
            clock.wait(self._reduced, transfer.channel)
        self._reduced = clock.send(transfer)

    def _exchange(self, clock: Clock, transfer: Transfer) -> None:
        arrival = clock.send(transfer)
        if transfer.number in self._awaited:
            self._in_flight[transfer.number] = arrival, transfer.channel
        elif transfer.channel == "tp" and self.config.parallelism.async_tp:
            clock.wait(arrival - ASYNC_TP_OVERLAP * transfer.seconds, transfer.channel)
        # Nothing waits for copies to the host, and copies back are awaited by number.
        elif transfer.channel != HOST:
            clock.wait(arrival, transfer.channel)

    def _await(self, clock: Clock, number: int) -> None:
        if number in self._in_flight:
            clock.wait(*self._in_flight.pop(number))

    @cached_property
    def step_time(self) -> RankStepTime:
        clock = self.clock
        overlapped = {
            channel: seconds - clock.exposed[channel] for channel, seconds in clock.sending.items()
        }
        return RankStepTime(
            pp_rank=self.step.memory.pp_rank,
            compute=_by_kind(clock.compute),
            exposed={
                channel: seconds for channel, seconds in clock.exposed.items() if seconds > 0
            },
            overlapped={
                channel: seconds for channel, seconds in overlapped.items() if seconds > 0
            },
        )

    @cached_property
    def chunk_seconds(self) -> float:
        """Forward and backward of one micro-batch in one stage, on average."""
        return self.step_time.busy / self.config.pipeline_plan(self.step.world_size).num_chunks

    @cached_property
    def work(self) -> Work:
        """Work of the whole step."""
        total = Work()
        works = [piece.work for piece in self.step.pieces]
        for index, count in Counter(self.step.order).items():
            total.add(works[index], count)
        return total

    @property
    def executed_flops(self) -> float:
        return self.work.matmul_flops.total() + self.work.attention_flops.total()

    @property
    def p2p_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""
        sent = [
            each
            for piece in self.step.pieces
            for each in piece.timeline
            if isinstance(each, Departure)
        ]
        return max(
            (self.rates.transfer(each).seconds for each in sent if each.channel == "pp"),
            default=0.0,
        )

    @cached_property
    def optimizer_seconds(self) -> float:
        optimizer = self.step.pieces[self.step.order[-1]].work
        # The recorded model has fewer blocks, and its optimizer moves fewer bytes.
        moved = self.step.state_ratio * optimizer.moved_bytes.total()
        if self.config.memory.optimizer_placement == "device":
            return moved / (OPTIMIZER_MEMORY_SHARE * self.device.hbm_bandwidth)
        ranks = min(self.step.world_size, self.device.devices_per_node)
        seconds = ranks * moved / (HOST_MEMORY_EFFICIENCY * self.device.host_bandwidth)
        # Without a pipeline, the host optimizer overlaps with the next step's first forward pass,
        # block by block.
        return max(
            0.0, seconds - (self._first_forward_seconds if self.config.parallelism.pp == 1 else 0)
        )

    @property
    def _first_forward_seconds(self) -> float:
        """Seconds of one micro-batch's forward pass on the device."""
        places = (self.step.pieces[index].place for index in self.step.order)
        is_first = (place.action == "forward" and place.micro_batch == 0 for place in places)
        first = compress(self.step.order, is_first)
        computed = (
            each for index in first for each in self._moments[index] if isinstance(each, Compute)
        )
        return sum(sum(each.seconds.values()) for each in computed)


def rank_clocks(
    config: Config,
    steps: Sequence[RankStep],
    device: DeviceSpec,
    groups: Mapping[str, GroupTopology],
) -> list[RankClock]:
    """Clocks of the pipeline ranks.

    Ranks that run the same timelines equally often share one: their warm-up differs, which moves
    what waits for gathered weights by less than 0.1 % of the step.
    """
    clocks = dict[tuple[frozenset[tuple[int, int]], float], RankClock]()
    found = []
    for step in steps:
        timelines = (step.pieces[index].timeline for index in step.order)
        times = Counter(map(id, timelines))
        key = frozenset(times.items()), step.state_ratio
        if key not in clocks:
            clocks[key] = RankClock(config, step, device, groups)
        found.append(clocks[key])
    return found


def _by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Every product has two gradients; what the backward pass multiplies beyond them is
    recomputed.
    """
    forward, backward = (seconds.get(f"matmul {phase}", 0.0) for phase in ("forward", "backward"))
    # A product has two gradients of its own size, so anything beyond twice the forward is
    # recomputation.
    gradients = min(backward, 2 * forward)
    return {
        "matmul": forward + gradients,
        "attention": seconds.get("attention", 0.0),
        "recompute": seconds.get("recompute", 0.0) + backward - gradients,
        **{
            kind: seconds.get(kind, 0.0)
            for kind in ("memory-bound", "loss head", "launch overhead")
        },
    }
