"""The passes of one rank through an update: what it computes, what it sends, and what of that hides behind what.

    a pass = compute + what is waited for + what finds nothing to hide behind

Seconds of a whole update, all micro-batches together. What is assumed beside formulas are the constants below. Without
torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trainer.config.job_config import Config
from trainer.hardware.device_specs import Device
from trainer.memory.estimator import Rank
from trainer.plan import interconnect
from trainer.plan.comm_volume import Message, messages
from trainer.plan.flops import Work, work_of
from trainer.plan.interconnect import Group
from trainer.plan.pipeline_bubble import Chunk

SUSTAINED = 0.88
"""Of what matrix products were seen to reach at their best shape: under load, with numbers that are not all alike, clocks
are lower. It is chosen such that 8B's run at 650 TFLOP/s on H100, which explains published updates of several systems."""
NARROW = 256
"""Rows or columns at which a product of matrices takes twice as long as its FLOPs: a GPU computes it in tiles of 128 or
256, and those at the end of a wave leave processors idle."""
SHORT = 700
"""Tokens at which a kernel of attention reaches half its rate. Without a mask these are 250 to 400 in the FlashAttention-3
paper's charts; under a causal one, which wastes half of each tile on the diagonal, about twice as many: estimated."""
OTHER_TYPES = {"bfloat16": 1.0, "float32": 1 / 16, "float64": 1 / 16}
"""Of bfloat16's rates: A100 and H100 have 1/16 to 1/15 of them in single and in double precision."""
REACHED = 0.8
"""Of the bandwidth of a device's memory, by kernels that read and write long rows."""
KERNELS = {"forward": 28, "backward": 60, "again": 24}
"""Kernels that a block launches, not compiled, for each micro-batch, tile and group of heads: estimated from what it calls."""
COMPILED = 0.4
"""Of them, where the compiler joins those between matrix products."""
ENDS = 2
"""Units of FSDP at each end of a pass that find nothing to hide behind: the first that is gathered, the embedding, and
the first block; behind the last, the sums of the gradients of both."""
ASYNC_TP = 0.3
"""Of tp's exchanges that products hide with `async_tp`: it makes of torchtitan's 829 tokens/s, 70B on 256 H100, its 876."""
CROWDED = 0.1
"""Of hidden communication that is paid all the same: its kernels take processors and bandwidth from the others."""
HOST_REACHED = 0.7
"""Of the bandwidth of a host's memory, by AdamW on all cores."""
UPDATE = 0.01
"""Seconds around an update in which the device waits for Python: a batch, the norm of gradients, the schedule."""

HOST = "host"
"""The channel of copies between a device and its host."""


TOLD = {
    "pp": "stages",
    "dp_replicate": "replicas",
    "fsdp": "weights (fsdp)",
    "tp": "matrices (tp)",
    "cp": "attention (cp)",
    "rotate": "keys and values (cp)",
    "exchange": "heads (cp)",
    HOST: "copies to the host",
}


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a rank in an update. All but `hidden` add up to the time of the update."""

    place: int
    matmul: float = 0
    """Products of matrices, without what is computed again."""
    attention: float = 0
    again: float = 0
    """All that is computed again."""
    memory: float = 0
    """What waits for memory: norms, rotations, sums."""
    head: float = 0
    launch: float = 0
    """Kernels that are over before the next one is launched."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Communication that is waited for, by channel, and `host`."""
    crowded: float = 0
    """What hidden communication takes from the rest."""
    optimizer: float = 0
    bubble: float = 0
    """Waiting for other ranks of the pipeline."""
    update: float = UPDATE
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.again + self.memory + self.head + self.launch

    @property
    def busy(self) -> float:
        """In the passes."""
        return self.compute + sum(self.exposed.values()) + self.crowded

    @property
    def total(self) -> float:
        return self.busy + self.optimizer + self.bubble + self.update

    def parts(self) -> dict[str, float]:
        """By kind, in words; they add up to `total`."""
        found = {
            "matrix products": self.matmul,
            "attention": self.attention,
            "computed again": self.again,
            "memory-bound": self.memory,
            "the head": self.head,
            "launches": self.launch,
            **{f"waiting for {TOLD.get(channel, channel)}": exposed for channel, exposed in self.exposed.items()},
            "crowded out": self.crowded,
            "the optimizer": self.optimizer,
            "the pipeline's bubble": self.bubble,
            "around the update": self.update,
        }
        return {name: seconds for name, seconds in found.items() if seconds > 0}


class Spent(defaultdict[str, float]):
    """Seconds by channel."""

    def __init__(self) -> None:
        super().__init__(float)

    def take(self, other: Spent) -> None:
        for channel, seconds in other.items():
            self[channel] += seconds


@dataclass(frozen=True)
class Piece:
    """Communication of one kind in a pass: what is waited for, and what may be hidden, behind attention or anything."""

    channel: str
    exposed: float
    hideable: float = 0
    behind: str = "compute"


class Passes:
    """A rank at a place of the pipeline."""

    def __init__(
        self, config: Config, world_size: int, place: int, device: Device, groups: Mapping[str, Group]
    ) -> None:
        self.config, self.device, self.groups = config, device, groups
        self.rank = Rank(config, world_size, place)
        self.work: Work = work_of(self.rank)
        self.context = self.rank.block.context
        self._messages = messages(self.rank)
        self._beside = min(world_size, device.node)
        self._scale = OTHER_TYPES[config.training.dtype]

    # ---- computing

    @property
    def executed(self) -> float:
        return sum(self.work.matmul.values()) + sum(self.work.attention.values())

    @cached_property
    def product_rate(self) -> float:
        """FLOP/s of a block's matrix products."""
        tokens = self.rank.block.tiles()[1] if self.config.memory.recompute != "none" else self.rank.tokens
        shapes = self.rank.block_shapes()[:7]
        flops = sum(rows * columns for rows, columns in shapes)
        taken = sum(rows * columns * (1 + NARROW / min(rows, columns, tokens)) for rows, columns in shapes)
        return self._scale * SUSTAINED * self.device.matmul * flops / taken

    @cached_property
    def head_rate(self) -> float:
        rows, columns = self.rank.head_shapes()[0]
        chunk = (self.config.memory.head_chunk_mib << 20) // (self.rank.stored * rows)
        least = max(1, min(rows, columns, chunk, self.rank.tokens))
        return self._scale * SUSTAINED * self.device.matmul / (1 + NARROW / least)

    @cached_property
    def attention_rates(self) -> dict[str, float]:
        """FLOP/s by phase."""
        forward, backward = self.device.attention_rates(self.config.training.attention, self.rank.model.head_dim)
        ring = 1 if self.context is None else self.context.ring
        tokens = self.rank.tokens * (1 if self.context is None else self.context.ulysses)
        rows = self.config.training.micro_batch_size
        # Around a ring queries meet one rank's keys at a time, on average half of them.
        piece = tokens / rows / (2 if ring > 1 and self._rotates else 1)
        reached = self._scale * piece / (piece + SHORT)
        return {"forward": forward * reached, "again": forward * reached, "backward": backward * reached}

    @property
    def _rotates(self) -> bool:
        return self.context is not None and self.context.rotation in ("ring", "alltoall")

    def attention(self, phase: str) -> float:
        return self.work.attention.get(phase, 0) / self.attention_rates[phase]

    def products(self, phase: str) -> float:
        return self.work.matmul.get(phase, 0) / (self.head_rate if phase == "head" else self.product_rate)

    def memory(self, phase: str) -> float:
        return self.work.moved.get(phase, 0) / (REACHED * self.device.hbm)

    def compute(self, phase: str) -> float:
        if phase == "head":
            return self.products(phase) + self.memory(phase)
        return self.products(phase) + self.memory(phase) + self.attention(phase) + self.launches(phase)

    @cached_property
    def _launched(self) -> dict[str, float]:
        """Seconds that a phase lasts at least, because so many kernels are launched."""
        tiles = self.rank.block.tiles()[0] if self.config.memory.recompute != "none" else 1
        again = self.config.memory.recompute != "none"
        parts = tiles + self.config.memory.head_groups - 1
        joined = COMPILED if self.config.training.compile else 1
        each = self.rank.blocks * self.rank.micro_batches * parts * joined * self.device.launch
        return {phase: each * count * (again or phase != "again") for phase, count in KERNELS.items()}

    def launches(self, phase: str) -> float:
        working = self.products(phase) + self.memory(phase) + self.attention(phase)
        return max(0.0, self._launched[phase] - working)

    # ---- sending

    def pieces(self, way: str) -> Iterator[Piece]:
        """Communication of the forward or of the backward pass, with what is computed again in it."""
        phases = ("forward",) if way == "forward" else ("backward", "again")
        for message in self._messages:
            if message.phase in phases and message.channel != "pp":
                yield self._piece(message, interconnect.seconds(message, self.groups, self.device))
        copied = self.work.offloaded / self.device.host_link
        late = self._late() if way == "backward" else 0
        yield Piece(HOST, copied * late, copied * (1 - late))
        yield Piece(HOST, 0, self._states_copied(way))

    def _piece(self, message: Message, seconds: float) -> Piece:
        if message.channel == "tp":
            hidden = ASYNC_TP if self.config.parallelism.async_tp else 0
            return Piece("tp", seconds * (1 - hidden), seconds * hidden)
        if message.channel in ("cp", "rotate", "exchange"):
            share = self._of_attention(message)
            return Piece(message.channel, seconds * (1 - share), seconds * share, behind="attention")
        if message.phase == "again":  # Made when it is needed, which is at once.
            return Piece(message.channel, seconds)
        ends = min(1.0, ENDS / (self.rank.blocks + ENDS)) * (not message.what.endswith("the head"))
        return Piece(message.channel, seconds * ends, seconds * (1 - ends))

    def _of_attention(self, message: Message) -> float:
        """The share of a message that attention of the same pass may hide."""
        groups = self.config.memory.head_groups
        if message.channel == "exchange" or self.context is None or self.context.rotation is None:
            # The next group's way to its heads; not that of results, nor of their gradients.
            there = 0.0 if message.phase == "backward" else 1 if message.what == "keys and values" else 0.5
            return there * (groups - 1) / groups
        ring = self.context.ring
        if not message.what.startswith("gradients"):
            return 1
        # The last hop of gradients comes when all is computed, and so does their only one of a reduce-scatter.
        return (ring - 2) / (ring - 1) if self._rotates else 0

    def _room(self, phase: str) -> float:
        """Seconds of attention behind which keys of other ranks can come."""
        if self.context is None:
            return 0
        groups, ring = self.config.memory.head_groups, self.context.ring
        # Of an all-gather's, behind attention to a rank's own keys; in groups of heads, also to all of the group before.
        share = (ring - 1) / ring if self._rotates else 1 / ring / groups
        return self.attention(phase) * max(share, (groups - 1 + share) / groups if groups > 1 else 0)

    def _late(self) -> float:
        """The share of what comes back from the host for which the device waits: attention's, in groups of heads."""
        memory, block = self.config.memory, self.rank.block
        if memory.head_groups == 1 or memory.offload != "inputs_and_attention":
            return 0
        return block.attended / (block.attended + block.stream / memory.input_every)

    def _states_copied(self, way: str) -> float:
        """Of states on the host: weights to the device in either pass, gradients back."""
        fetched, returned = self.work.fetched / 2, self.work.returned * (way == "backward")
        return (fetched + returned) / self.device.host_link

    # ---- both

    @cached_property
    def seconds(self) -> Seconds:
        exposed, hidden = Spent(), Spent()
        for way in ("forward", "backward"):
            shown, covered = self._passes[way]
            exposed.take(shown)
            hidden.take(covered)
        if self.rank.pipeline.pp > 1:
            shown, covered = self._around()
            exposed.take(shown)
            hidden.take(covered)
        both, all_three = ("forward", "backward"), ("forward", "backward", "again")
        return Seconds(
            place=self.rank.place,
            matmul=sum(map(self.products, both)),
            attention=sum(map(self.attention, both)),
            again=self.products("again") + self.attention("again") + self.memory("again"),
            memory=sum(map(self.memory, both)),
            head=self.compute("head"),
            launch=sum(map(self.launches, all_three)),
            exposed={name: seconds for name, seconds in exposed.items() if seconds > 0},
            hidden={name: seconds for name, seconds in hidden.items() if seconds > 0},
            crowded=CROWDED * sum(seconds for name, seconds in hidden.items() if name != HOST),
        )

    @cached_property
    def _passes(self) -> dict[str, tuple[Spent, Spent]]:
        return {way: self._pass(way) for way in ("forward", "backward")}

    def _pass(self, way: str) -> tuple[Spent, Spent]:
        """Seconds of communication that are waited for, and that are hidden, by channel."""
        pieces = [*self.pieces(way)]
        exposed, hidden = Spent(), Spent()
        for piece in pieces:
            exposed[piece.channel] += piece.exposed
        room = self._room("forward") if way == "forward" else self._room("backward") + self._room("again")
        for piece in (piece for piece in pieces if piece.behind == "attention"):
            covered = min(room, piece.hideable)
            room -= covered
            hidden[piece.channel] += covered
            exposed[piece.channel] += piece.hideable - covered
        compute = self.compute("forward") if way == "forward" else self.compute("backward") + self.compute("again")
        for piece in (piece for piece in pieces if piece.behind == "compute"):
            link = self._link(piece.channel)
            # A link is free while others are waited for, and taken by what is hidden on it already.
            room = compute + sum(seconds for name, seconds in exposed.items() if self._link(name) != link)
            room -= sum(seconds for name, seconds in hidden.items() if self._link(name) == link)
            covered = min(max(0.0, room), piece.hideable)
            hidden[piece.channel] += covered
            exposed[piece.channel] += piece.hideable - covered
        return exposed, hidden

    def _link(self, channel: str) -> str:
        return HOST if channel == HOST else "network" if self.groups[channel].crosses else "link"

    def _around(self) -> tuple[Spent, Spent]:
        """Of a pipeline's weights: gathers hide behind the first micro-batches, sums of gradients come when all is done."""
        exposed, hidden = Spent(), Spent()
        room = self.compute("forward") / self.rank.micro_batches
        for message in self._messages:
            if message.phase != "update":
                continue
            seconds = interconnect.seconds(message, self.groups, self.device)
            covered = min(room, seconds) if message.kind == "all_gather" else 0
            room -= covered
            hidden[message.channel] += covered
            exposed[message.channel] += seconds - covered
        return exposed, hidden

    @cached_property
    def chunk(self) -> Chunk:
        """The mean one of this rank."""
        count = self.rank.micro_batches * self.rank.pipeline.stages_per_rank
        weights = self.products("backward") / 2
        forward = self.compute("forward") + sum(self._passes["forward"][0].values()) + self.compute("head") / 2
        back = self.compute("backward") + self.compute("again") + sum(self._passes["backward"][0].values())
        back += self.compute("head") / 2
        return Chunk(forward=forward / count, inputs=(back - weights) / count, weights=weights / count)

    @property
    def hop(self) -> float:
        """Seconds in which the stream goes to the next stage."""
        taken = (self.groups["pp"], self.device)
        return self.rank.block.stream / interconnect.rate("send", *taken) + interconnect.latency("send", *taken)

    @cached_property
    def optimizer(self) -> float:
        if not self.work.on_host:
            return self.work.optimizer / (REACHED * self.device.hbm)
        updating = self.work.optimizer * self._beside / (HOST_REACHED * self.device.host_bandwidth)
        # Without a pipeline a block is updated while the one before it runs, in the next update's first micro-batch.
        behind = self.compute("forward") / self.rank.micro_batches if self.rank.pipeline.pp == 1 else 0
        return max(0.0, updating - behind)
