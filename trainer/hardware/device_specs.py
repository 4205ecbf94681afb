"""Device specifications: the tables in `specs/`, and user files with the same keys. Imports no
torch.

    extends = "h100-80gb"
    description = "H100 behind slow links"

    [network]
    gbps = { value = 12.5, source = "100 Gb/s Ethernet, ib_write_bw" }

A value is a number, or a number with its source. The suffix of a key is its unit: tflops 1e12
FLOP/s, gbps 1e9 bytes/s per direction, gib 2^30 bytes, us 1e-6 s. Keys without a suffix are counts
or fractions.

A rate is the limit of large sizes, unless the size at which it was measured stands beside it
(`matmul_size`, `tokens`); a share is what a kernel reaches of a rate, 1 where the rate was
measured with such kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trainer.config.job_config import Config
from trainer.config.parse import deep_merge, read_toml, show_path
from trainer.errors import ConfigError
from trainer.hardware.attention_kernels import Rates, nearest_rates
from trainer.hardware.spec_tables import TABLES_DIR, find_table

DEFAULT_DEVICE = "h100-80gb"
"""Device to plan for if there is no known GPU."""
DEFAULT_DEVICE_NOTE = f"no known GPU on this machine: planned for {DEFAULT_DEVICE}; choose with --device or plan.device"
TFLOPS = 1e12
GBPS = 1e9
GIB = float(1 << 30)
MICROSECOND = 1e-6

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Kernel = Literal["flash", "cudnn", "efficient", "plain", "fa3", "fa4"]
Generation = Literal["ampere", "ampere rtx", "ada", "hopper", "blackwell", "blackwell rtx", "cdna"]
WidthKey = Annotated[str, Field(pattern=r"^width_[1-9]\d*$")]


MATMUL_SHARE = 0.88
"""Share of the best measured matmul rate that is sustained: clocks of a power-limited GPU drop
under load on random data. It explains torchtitan's 8B on H100, and an 8B model reaches 650 TFLOP/s
then.
"""
MEMORY_SHARE = 0.8
"""Share of a data sheet's memory bandwidth that elementwise and norm kernels reach."""
MATMUL_HALF_RATE_DIM = 256
"""Matrix dimension at which a matmul runs at half its rate, because of tile (128 or 256) and wave
quantization.
"""
GROUPED_MATMUL_SHARE = 0.84
"""Rate of grouped products over that of single ones: 0.85 with 1,024 rows of 768 numbers to an
expert, 0.83 with 4,096 of 2,880 (kernels of two mixtures on an H200, `benchmarks.gpu`, 2026-11-27).
"""
ATTENTION_HALF_RATE_TOKENS = 700
"""Tokens at which an attention kernel reaches half its rate: 250 to 400 without a mask in the
FlashAttention-3 paper's charts. Estimated at twice that for a causal mask, which wastes half of
each diagonal tile.
"""
FULL_RATE_TOKENS = 16_384
"""Keys from which on an attention kernel runs at the rate of its table, which was measured there:
an H200, limited by its power, was no faster at 32K and 128K.
"""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DeviceSection(Section):
    memory_gib: Positive
    peak_tflops: Positive
    matmul_tflops: Positive
    matmul_share: Fraction = MATMUL_SHARE
    matmul_size: Count | None = None
    memory_gbps: Positive
    memory_share: Fraction = MEMORY_SHARE
    launch_us: Positive
    generation: Generation | None = None

    @model_validator(mode="after")
    def _check_rates(self) -> DeviceSection:
        if self.matmul_tflops > self.peak_tflops:
            raise ValueError(
                f"matmul_tflops = {self.matmul_tflops} must be at most peak_tflops = {self.peak_tflops}"
            )
        return self


class NetworkSection(Section):
    gbps: Positive
    share: Fraction
    latency_us: Positive


class LinkSection(NetworkSection):
    devices: Count
    used: Count | None = None

    @model_validator(mode="after")
    def _check_used(self) -> LinkSection:
        if self.used is not None and self.used > self.devices:
            raise ValueError(f"used = {self.used} must be at most devices = {self.devices}")
        return self


class HostSection(Section):
    devices: Count
    gbps: Positive
    memory_gib: Positive
    memory_gbps: Positive


class AttentionRates(Section):
    forward: Positive
    backward: Positive
    tokens: Count | None = None
    source: str = ""

    @property
    def flops(self) -> tuple[float, float]:
        """(forward, backward) FLOP/s for long sequences."""
        factor = TFLOPS * attention_slowdown(self.tokens or FULL_RATE_TOKENS)
        return factor * self.forward, factor * self.backward


class DeviceTable(Section):
    """A device file, merged with the one that it extends, without the sources of its numbers."""

    extends: str | None = None
    description: str = ""
    names: list[str] = []
    device: DeviceSection
    link: LinkSection
    network: NetworkSection
    host: HostSection
    attention: dict[Kernel, dict[WidthKey, AttentionRates]]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device, its links and its host, in FLOP/s, bytes, bytes per second and direction, and
    seconds.
    """

    name: str
    description: str
    generation: str | None
    """NVIDIA's architecture, or "cdna"; None if unknown."""
    memory: float
    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    matmul_flops: float
    """Rate in the limit of large matmuls."""
    matmul_share: float
    """Share of `matmul_flops` that the device sustains."""
    attention_flops: Rates
    """(forward, backward) rates of executed FLOPs of long sequences under a causal mask, by kernel
    and head dimension.
    """
    hbm_bandwidth: float
    """Memory bandwidth that elementwise and norm kernels reach."""
    launch_latency: float
    """Interval between the starts of two empty kernels."""
    link_domain_size: int
    """Devices connected by fast links (NVLink, xGMI)."""
    link_domain_used: int | None
    """Devices of the domain that a job uses; None: as many as no process group straddles."""
    link_bandwidth: float
    link_latency: float
    """Latency of a link per step of a collective."""
    network_bandwidth: float
    """Network bandwidth per device."""
    network_latency: float
    devices_per_node: int
    host_link_bandwidth: float
    """Bandwidth between a device and its host, with all devices copying."""
    host_memory: float
    host_bandwidth: float
    """Host memory bandwidth, shared by all devices."""

    def rated_kernel(self, kernel: str) -> str:
        """The kernel whose rates represent this one."""
        if kernel in self.attention_flops:
            return kernel
        return "flash" if "flash" in self.attention_flops else next(iter(self.attention_flops))

    def attention_rates(self, kernel: str, head_dim: int) -> tuple[float, float]:
        """(forward, backward) FLOP/s at the nearest measured head dimension."""
        return nearest_rates(self.attention_flops, self.rated_kernel(kernel), head_dim)


def load_device(name: str) -> DeviceSpec:
    """The shipped table of that name, or the file at that path.

    Raises ConfigError with all problems of the file.
    """
    path = _resolve_path(name)
    table = _read_table(path, (path,))
    device = table.device
    link = table.link
    network = table.network
    host = table.host
    if link.used is not None and link.used > host.devices and link.used % host.devices:
        rule = f"must be a multiple of the {host.devices} devices of a node"
        raise ConfigError([f"{show_path(path)}: [link] used = {link.used} {rule}"])
    return DeviceSpec(
        name=path.stem,
        description=table.description or path.stem,
        generation=device.generation,
        memory=device.memory_gib * GIB,
        peak_flops=device.peak_tflops * TFLOPS,
        matmul_flops=device.matmul_tflops
        * TFLOPS
        * (matmul_slowdown(device.matmul_size) if device.matmul_size else 1),
        matmul_share=device.matmul_share,
        attention_flops={
            kernel: {
                int(width.removeprefix("width_")): rates.flops for width, rates in widths.items()
            }
            for kernel, widths in table.attention.items()
        },
        hbm_bandwidth=device.memory_gbps * device.memory_share * GBPS,
        launch_latency=device.launch_us * MICROSECOND,
        link_domain_size=link.devices,
        link_domain_used=link.used,
        link_bandwidth=link.gbps * GBPS * link.share,
        link_latency=link.latency_us * MICROSECOND,
        network_bandwidth=network.gbps * GBPS * network.share,
        network_latency=network.latency_us * MICROSECOND,
        devices_per_node=host.devices,
        host_link_bandwidth=host.gbps * GBPS,
        host_memory=host.memory_gib * GIB,
        host_bandwidth=host.memory_gbps * GBPS,
    )


def matmul_slowdown(narrowest: float) -> float:
    """Time of a product over that of a wide one, by the smallest of its dimensions."""
    return 1 + MATMUL_HALF_RATE_DIM / narrowest


def attention_slowdown(keys: float) -> float:
    """Time of an attention kernel over that at its full rate, by the keys that a query sees."""
    at_keys = 1 + ATTENTION_HALF_RATE_TOKENS / keys
    return max(1.0, at_keys / (1 + ATTENTION_HALF_RATE_TOKENS / FULL_RATE_TOKENS))


def device_names() -> list[str]:
    return sorted(path.stem for path in TABLES_DIR.glob("*.toml"))


@cache
def match_device(name: str) -> DeviceSpec | None:
    """The device that `torch.cuda.get_device_name()` calls so; None if unknown or a MIG slice."""
    table = find_table(name)
    return None if table is None else load_device(table)


def detect_device(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> DeviceSpec | None:
    """The first GPU of this machine according to its driver; None if absent or unknown."""
    for path in sorted(drivers.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        return match_device(model[1]) if model else None
    return None


def select_device(config: Config) -> DeviceSpec | None:
    """`plan.device`, else the detected device."""
    return load_device(config.plan.device) if config.plan.device is not None else detect_device()


# ---- files


def _resolve_path(name: str, relative_to: Path | None = None) -> Path:
    """A shipped table, or a file relative to the working directory or to the extending file."""
    candidates = [TABLES_DIR / f"{name}.toml", Path(name)]
    if relative_to is not None:
        candidates.append(relative_to.parent / name)
    if path := next(filter(Path.is_file, candidates), None):
        return path
    tables = device_names()
    close = [table for table in tables if table.startswith(name)] or get_close_matches(
        name, tables, n=1
    )
    suggestion = f"did you mean {close[0]}? " if close else ""
    if name == "cpu":
        suggestion = "a plan is of the GPUs that a run will use; "
    raise ConfigError(
        [f'device "{name}" is neither a table nor a file; {suggestion}tables: {", ".join(tables)}']
    )


def _read_table(path: Path, chain: tuple[Path, ...]) -> DeviceTable:
    values = _without_sources(read_toml(path))
    base = values.get("extends")
    if isinstance(base, str):
        base_path = _resolve_path(base, path)
        if base_path in chain:
            raise ConfigError([f'{show_path(path)}: extends = "{base}" is circular'])
        # Only stated values are inherited: defaults apply once, to the merged table.
        inherited = _read_table(base_path, (*chain, base_path)).model_dump(exclude_unset=True)
        # Attention rates are replaced in pairs.
        own_kernels = values.get("attention", {})
        for kernel, widths in own_kernels.items() if isinstance(own_kernels, dict) else ():
            for width in widths if isinstance(widths, dict) else ():
                inherited["attention"].get(kernel, {}).pop(width, None)
        values = deep_merge(inherited, values)
    try:
        return DeviceTable.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            [f"{show_path(path)}: {_format_error(each)}" for each in error.errors()]
        ) from error


def _without_sources(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces `{ value, source }` by the value."""
    return {
        section: {
            key: each.get("value") if isinstance(each, dict) else each
            for key, each in entries.items()
        }
        if section != "attention" and isinstance(entries, dict)
        else entries
        for section, entries in values.items()
    }


def _format_error(error: ErrorDetails) -> str:
    """Section, key, value and rule of a pydantic error."""
    *section, key = (str(part) for part in error["loc"] if part != "[key]")
    name = f"[{'.'.join(section)}] {key}" if section else key
    if error["type"] == "extra_forbidden":
        model: Any = (
            DeviceTable.model_fields[section[0]].annotation
            if section[:1] in _SECTION_PATHS
            else DeviceTable
        )
        return f"{name} is not a {'key' if section else 'section or key'}; {_suggest(key, [*model.model_fields])}"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "value_error":
        return f"[{key}] {error['msg'].removeprefix('Value error, ')}"
    if error["type"] in ("model_type", "dict_type"):
        return f"{name} = {error['input']} must be a section"
    rule = re.sub(
        r"^(Input|String) should (be )?",
        lambda match: "must be " if match[2] else "must ",
        error["msg"],
    )
    if error["loc"][-1] == "[key]":
        return f"{name} {rule}"
    return f"{name} = {error['input']} {rule}"


_SECTION_PATHS = [[name] for name in ("device", "link", "network", "host")]


def _suggest(key: str, known: list[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"valid names: {', '.join(known)}"
