"""A plan: what a configuration needs and how long it takes on so many devices, what limits it, and what would help.

    plan = plan_of(config, 32, load_device("h100-80gb"))
    plan.fits, plan.misfits, plan.mfu, plan.days, plan.limits, plan.changes

Without torch, and in some milliseconds; a search makes thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.device_specs import Device
from trainer.memory import auto
from trainer.memory.estimator import BYTES, GIB, KEPT, Ledger, ledgers
from trainer.plan.critical_path import Times, times
from trainer.plan.suggestions import Candidate, freeing, hastening

RESERVE = 1 - auto.DEVICE
"""Of a device's memory, for what the ledger does not count: holes in the allocator, workspaces of kernels and of NCCL, the
driver's own. The same that `memory.recompute = "auto"` leaves."""
HOST_RESERVE = 0.1
"""Of a node's memory, for the operating system and what it caches of the data."""
PROCESS = 5 * GIB
"""Host memory of a rank beside the ledger's: torch, CUDA's context, buffers of NCCL, workers that read data."""
DAY = 86_400
TOLD = 0.05
"""Of the time of an update, from which on its cause is a limit worth telling."""

WORTH = 0.005
"""Of the time of an update, which a change must save to be told."""


@dataclass(frozen=True)
class Change:
    """A change of a key or, of degrees, of two that belong together."""

    text: str
    plan: Plan
    frees: float
    """Bytes of a device."""
    saves: float
    """Seconds of an update."""
    helps: float
    """By which it is compared with others."""


@dataclass(frozen=True)
class Plan:
    """Of a run, or of one of its stages."""

    config: Config
    """With `memory.recompute = "auto"` made into what it takes on this device."""
    world_size: int
    device: Device
    name: str = ""
    """The stage's."""
    notes: tuple[str, ...] = field(default=())

    # ---- memory

    @cached_property
    def ledgers(self) -> list[Ledger]:
        """Of a rank at each place of the pipeline, by kind."""
        return ledgers(self.config, self.world_size)

    @cached_property
    def fullest(self) -> Ledger:
        return max(self.ledgers, key=lambda found: found.device)

    @property
    def device_room(self) -> float:
        """Bytes of a device that may be filled."""
        return self.device.memory * (1 - RESERVE)

    @property
    def reserve(self) -> float:
        """Bytes of a device that are left to what nobody counts."""
        return self.device.memory - self.device_room

    @property
    def node_ranks(self) -> int:
        """Ranks that share a host."""
        return min(self.world_size, self.device.node)

    @cached_property
    def host(self) -> dict[str, float]:
        """Bytes of a node's memory, by kind, where most is needed."""
        most = max(self.ledgers, key=lambda found: found.host)
        kinds = {line.name: line.host for line in most.lines if line.host}
        if KEPT in kinds:
            kinds[KEPT] *= auto.ROUNDED
        kinds["processes"] = PROCESS
        return {kind: self.node_ranks * size for kind, size in kinds.items()}

    @property
    def host_needed(self) -> float:
        return sum(self.host.values())

    @property
    def host_room(self) -> float:
        return self.device.host_memory * (1 - HOST_RESERVE)

    @cached_property
    def misfits(self) -> list[str]:
        """What does not suffice, in words."""
        found = [*self.notes]
        if self.fullest.device > self.device_room:
            where = f", rank {self.fullest.place} of the pipeline" if self.fullest.pp > 1 else ""
            found.append(
                f"a device needs {_gib(self.fullest.device)} GiB {self.fullest.moment}{where}, and has "
                f"{_gib(self.device_room)} of {_gib(self.device.memory)} to fill: {_most(self.fullest)}"
            )
        if self.host_needed > self.host_room:
            kinds = sorted(self.host.items(), key=lambda item: -item[1])[:3]
            told = ", ".join(f"{kind} {_gib(size)}" for kind, size in kinds)
            found.append(
                f"a node of {self.node_ranks} ranks needs {_gib(self.host_needed)} GiB of host memory, and has "
                f"{_gib(self.host_room)} of {_gib(self.device.host_memory)} to fill: {told}"
            )
        return found

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def overfull(self) -> float:
        """What is needed over what there is, of devices or of nodes, whichever is worse."""
        return max(self.fullest.device / self.device_room, self.host_needed / self.host_room)

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint on disk: weights and both moments."""
        stored = max(4, BYTES[self.config.training.dtype])
        moment = 2 if self.config.memory.optimizer_dtype == "bfloat16" else stored
        return (stored + 2 * moment) * self.config.model.build().num_parameters

    # ---- time

    @cached_property
    def times(self) -> Times:
        return times(self.config, self.world_size, self.device)

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.times.update

    @property
    def model_flops(self) -> float:
        """Of an update."""
        return self.config.model.build().flops(tokens=self.times.tokens, pairs=self.times.pairs)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what all devices could do at their dense bfloat16 peak; nothing that is computed again counts."""
        return self.model_flops / (self.seconds * self.world_size * self.device.peak)

    @property
    def hfu(self) -> float:
        """The same of FLOPs that are carried out."""
        return self.times.executed / (self.seconds * self.world_size * self.device.peak)

    @property
    def tokens_per_second(self) -> float:
        return self.times.tokens / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def tokens(self) -> float:
        """Of all updates."""
        return self.times.tokens * self.config.training.steps

    @property
    def days(self) -> float:
        """Of all updates; evaluation, checkpoints that are not written beside them and failures come on top."""
        return self.seconds * self.config.training.steps / DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.world_size

    # ---- what limits it

    @cached_property
    def limits(self) -> list[str]:
        """What bounds it, in words: memory that does not suffice, then what takes most of an update's time."""
        busiest = self.times.busiest
        shares = sorted(((seconds / self.seconds, name) for name, seconds in busiest.parts().items()), reverse=True)
        found = [*self.misfits]
        for share, name in shares:
            if share >= TOLD:
                found.append(f"{share:.0%} of the time: {name}{self._rate(name)}")
        return found

    @property
    def assumptions(self) -> list[str]:
        """What these figures take for granted, in words."""
        found, training = [], self.config.training
        if self.config.context_plan().packed:
            found.append("each row is one document: packed rows attend to less, and take less time")
        if training.attention != "auto" and self.device.kernel(training.attention) != training.attention:
            found.append(f'no rates of training.attention = "{training.attention}" are known here: counted as flash')
        if training.dtype != "bfloat16":
            found.append(f"rates are those of bfloat16, a sixteenth for {training.dtype}: a rough guess")
        return found

    def _rate(self, name: str) -> str:
        if name != "attention":
            return ""
        kernel, width = self.config.training.attention, self.config.model.build().head_dim
        forward, backward = self.device.attention_rates(kernel, width)
        return (
            f", {self.device.kernel(kernel)} at {forward / 1e12:.0f} TFLOP/s forward and {backward / 1e12:.0f} backward"
        )

    @cached_property
    def changes(self) -> list[Change]:
        """The three keys whose change helps most: frees most where it does not fit, else saves most time and still fits."""
        found: dict[str, Change] = {}
        candidates = freeing if self.misfits else hastening
        for candidate in candidates(self.config, self.world_size, self.device):
            change = self._change(candidate)
            known = found.get(candidate.key)
            if change is not None and (known is None or change.helps > known.helps):
                found[candidate.key] = change
        return sorted(found.values(), key=lambda change: -change.helps)[:3]

    def _change(self, candidate: Candidate) -> Change | None:
        """None where it does not help."""
        other = Plan(candidate.config, candidate.world_size, self.device)
        frees = self.fullest.device - other.fullest.device
        if self.misfits:
            relieved = self.overfull - other.overfull
            return Change(candidate.text, other, frees, 0, relieved) if relieved > 0 else None
        if not other.fits or self.seconds - other.seconds < WORTH * self.seconds:
            return None
        saves = self.seconds - other.seconds
        return Change(candidate.text, other, frees, saves, saves)


@dataclass(frozen=True)
class RunPlan:
    """Of all stages of a run, one after the other."""

    stages: tuple[Plan, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def misfits(self) -> list[str]:
        return [f"{_stage(stage)}{problem}" for stage in self.stages for problem in stage.misfits]

    @property
    def days(self) -> float:
        return sum(stage.days for stage in self.stages)

    @property
    def device_hours(self) -> float:
        return sum(stage.device_hours for stage in self.stages)

    @property
    def tokens(self) -> float:
        return sum(stage.tokens for stage in self.stages)


def plan_of(config: Config, world_size: int, device: Device, *, name: str = "") -> Plan:
    """Of a single stage. The configuration must have no problems."""
    notes: tuple[str, ...] = ()
    try:
        config = auto.fitted(config, world_size, ranks=min(world_size, device.node), **_memory(device))
    except ConfigError as error:
        notes = tuple(error.problems)
        levers = {"recompute": "full", "device_gib": None}
        config = config.model_copy(update={"memory": config.memory.model_copy(update=levers)})
    return Plan(config, world_size, device, name, notes)


def run_plan(config: Config, world_size: int, device: Device) -> RunPlan:
    """Of a configuration with all its stages."""
    return RunPlan(tuple(plan_of(stage.config, world_size, device, name=stage.name) for stage in config.stages))


def _memory(device: Device) -> dict[str, float]:
    return {"device": device.memory, "host": device.host_memory}


def _most(found: Ledger) -> str:
    lines: Sequence[tuple[str, float]] = sorted(((line.name, line.device) for line in found.lines), key=lambda x: -x[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in lines[:3])


def _stage(plan: Plan) -> str:
    return f'stage "{plan.name}": ' if plan.name else ""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:,.0f}"
