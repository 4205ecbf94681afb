"""Devices and their links, as data: the tables in `devices/`, and files of one's own with the same keys. Without torch.

    extends = "h100-80gb"
    description = "H100 behind slow links"

    [network]
    gbps = { value = 12.5, source = "100 Gb/s Ethernet, ib_write_bw" }

A figure is a number, or has a source beside it. Rates and sizes are in the unit that ends a key's name, each way where
something is sent: tflops 1e12 FLOP/s, gbps 1e9 bytes/s, gib 2^30 bytes, us 1e-6 s. Without one it is a count or a share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from math import inf, log
from pathlib import Path
from typing import Any

from trainer.config.job_config import Config
from trainer.config.parse import read_toml, show_path
from trainer.errors import ConfigError

TABLES_DIR = Path(__file__).parent / "specs"
DEFAULT_DEVICE = "h100-80gb"
"""What is planned for where no GPU is."""
DEFAULT_DEVICE_NOTE = (
    f"no GPU that a table knows is here: planned for {DEFAULT_DEVICE}; --device or plan.device names another"
)
NUMERIC_KEYS = {
    "device": ("memory_gib", "peak_tflops", "matmul_tflops", "memory_gbps", "launch_us"),
    "link": ("devices", "gbps", "share", "latency_us"),
    "network": ("gbps", "share", "latency_us"),
    "host": ("devices", "gbps", "memory_gib", "memory_gbps"),
}
"""Keys of each section, beside those of [attention.KERNEL]: `width_128`, `width_64`, ..."""
ATTENTION_KERNELS = ("flash", "cudnn", "efficient", "plain", "fa3", "fa4")
TEXT_KEYS = ("extends", "description", "names")
UNITS = {"tflops": 1e12, "gbps": 1e9, "gib": float(1 << 30), "us": 1e-6}


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device, its links and its host: FLOP/s, bytes, bytes per second each way, seconds."""

    name: str
    description: str
    torch_names: tuple[str, ...]
    """Parts of what torch calls it."""
    memory: float
    peak_flops: float
    """Dense, bfloat16."""
    matmul_flops: float
    """The most that large matrix products were seen to reach."""
    attention_flops: Mapping[str, Mapping[int, tuple[float, float]]]
    """Forward and backward, by kernel and width of a head; causal, FLOPs as the kernel carries them out."""
    hbm_bandwidth: float
    launch_latency: float
    """Between the beginnings of two kernels that have nothing to do."""
    link_domain_size: int
    """Devices that fast links join."""
    link_bandwidth: float
    link_latency: float
    """Of each step of a collective."""
    network_bandwidth: float
    """Of each device's share of its node's."""
    network_latency: float
    devices_per_node: int
    """Devices of a host."""
    host_link_bandwidth: float
    """Between a device and its host, of all copying at once."""
    host_memory: float
    host_bandwidth: float
    """Of a host's memory, for all its devices together."""
    sources: Mapping[str, str]

    def attention_kernel(self, requested: str) -> str:
        """The kernel whose rates stand for what `training.attention` asks for."""
        if requested in self.attention_flops:
            return requested
        return "flash" if "flash" in self.attention_flops else next(iter(self.attention_flops))

    def attention_rates(self, requested: str, head_dim: int) -> tuple[float, float]:
        """FLOP/s forward and backward, of the width nearest to that of a head."""
        rates = self.attention_flops[self.attention_kernel(requested)]
        return rates[min(rates, key=lambda measured: abs(log(measured / head_dim)))]


def load_device(name: str) -> DeviceSpec:
    """One of the tables by its name, or a file by its path. Raises ConfigError with everything that is wrong with it."""
    path = _resolve_path(name)
    table = DeviceTable()
    table.read(path, (path,))
    shown_path = show_path(path)
    problems = table.problems or [
        f"{shown_path}: [{section}] {key} is missing"
        for section, keys in NUMERIC_KEYS.items()
        for key in keys
        if f"{section}.{key}" not in table.numbers
    ]
    if not problems and table.numbers.get("device.matmul_tflops", 0) > table.numbers.get("device.peak_tflops", inf):
        problems.append(f"{shown_path}: [device] matmul_tflops must be at most peak_tflops")
    if not table.problems and not table.attention:
        problems.append(f"{shown_path}: [attention.flash] is missing, or that of another kernel")
    if problems:
        raise ConfigError(problems)
    values = {key: value * UNITS.get(re.split("[._]", key)[-1], 1) for key, value in table.numbers.items()}
    return DeviceSpec(
        name=path.stem,
        description=table.texts.get("description", path.stem),
        torch_names=tuple(table.texts.get("names", ())),
        memory=values["device.memory_gib"],
        peak_flops=values["device.peak_tflops"],
        matmul_flops=values["device.matmul_tflops"],
        attention_flops=table.attention,
        hbm_bandwidth=values["device.memory_gbps"],
        launch_latency=values["device.launch_us"],
        link_domain_size=int(values["link.devices"]),
        link_bandwidth=values["link.gbps"] * values["link.share"],
        link_latency=values["link.latency_us"],
        network_bandwidth=values["network.gbps"] * values["network.share"],
        network_latency=values["network.latency_us"],
        devices_per_node=int(values["host.devices"]),
        host_link_bandwidth=values["host.gbps"],
        host_memory=values["host.memory_gib"],
        host_bandwidth=values["host.memory_gbps"],
        sources=table.sources,
    )


def device_names() -> list[str]:
    return sorted(path.stem for path in TABLES_DIR.glob("*.toml"))


@cache
def match_device(name: str) -> DeviceSpec | None:
    """The device of what torch calls one, by the longest words of the name that a table knows; None if none does.

    A part of a GPU (MIG) is no device that is known.
    """
    names = [
        (torch_name, device)
        for table in device_names()
        for device in [load_device(table)]
        for torch_name in device.torch_names
    ]
    matches = [
        (len(part), device)
        for part, device in names
        if "MIG" not in name and re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", name)
    ]
    return max(matches, key=lambda match: match[0], default=(0, None))[1]


def detect_device(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> DeviceSpec | None:
    """The device of this machine's first GPU, as its driver calls it; None where none is, or none that a table knows."""
    for path in sorted(drivers.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        return match_device(model[1]) if model else None
    return None


def select_device(config: Config) -> DeviceSpec | None:
    """What `plan.device` names, else the device here. Raises ConfigError."""
    return load_device(config.plan.device) if config.plan.device is not None else detect_device()


# ---- files


def _resolve_path(name: str, relative_to: Path | None = None) -> Path:
    """A table, or a file here; of `extends` also one beside the file that says so."""
    table, candidates = TABLES_DIR / f"{name}.toml", [Path(name)]
    if relative_to is not None:
        candidates.append(relative_to.parent / name)
    for path in (table, *candidates):
        if path.is_file():
            return path
    close = [table for table in device_names() if table.startswith(name)] or get_close_matches(
        name, device_names(), n=1
    )
    suggestion = [f"did you mean {match}? " for match in close[:1]]
    raise ConfigError(
        [f'device "{name}": there is no such table or file; {"".join(suggestion)}there are {", ".join(device_names())}']
    )


@dataclass
class DeviceTable:
    """What a file says, over the one that it extends."""

    texts: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """By `section.key`, in the units of the file."""
    attention: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self, path: Path, chain: tuple[Path, ...]) -> None:
        values, name = read_toml(path), show_path(path)
        if isinstance(base := values.get("extends"), str):
            self._extend(base, path, chain)
        self.texts.pop("names", None)  # A relative is another device.
        num_problems = len(self.problems)
        for key, value in values.items():
            if key in TEXT_KEYS:
                self._read_text(key, value)
            elif key == "attention" and isinstance(value, dict):
                for kernel, widths in value.items():
                    self._read_attention(kernel, widths)
            elif key in NUMERIC_KEYS and isinstance(value, dict):
                for inner, entry in value.items():
                    self._read_number(key, inner, entry)
            else:
                sections = (*NUMERIC_KEYS, "attention", *TEXT_KEYS)
                self.problems.append(
                    f"{key} = {value} must be a section"
                    if key in sections
                    else f"[{key}] is no section; {_suggest(key, sections)}"
                )
        self.problems[num_problems:] = [f"{name}: {problem}" for problem in self.problems[num_problems:]]

    def _extend(self, base: str, path: Path, chain: tuple[Path, ...]) -> None:
        try:
            base_path = _resolve_path(base, path)
        except ConfigError as error:
            self.problems += error.problems
            return
        if base_path in chain:
            self.problems.append(f'{show_path(path)}: extends = "{base}" goes round in a circle')
        else:
            self.read(base_path, (*chain, base_path))

    def _read_text(self, key: str, value: object) -> None:
        self.texts[key] = value
        texts = value if isinstance(value, list) and key == "names" else [value]
        if isinstance(value, list) != (key == "names") or not all(isinstance(text, str) for text in texts):
            self.problems.append(f"{key} = {value} must be {'a list of names' if key == 'names' else 'text'}")

    def _read_number(self, section: str, key: str, entry: Any) -> None:
        value, source = (entry.get("value"), entry.get("source", "")) if isinstance(entry, dict) else (entry, "")
        self.sources[f"{section}.{key}"] = str(source)
        if key not in NUMERIC_KEYS[section]:
            self.problems.append(f"[{section}] {key}: there is no such key; {_suggest(key, NUMERIC_KEYS[section])}")
        elif (number := _positive(value)) is None:
            self.problems.append(f"[{section}] {key} = {value} must be a number above 0")
        elif key == "devices" and not number.is_integer():
            self.problems.append(f"[{section}] {key} = {value} must be a whole number")
        elif key == "share" and number > 1:
            self.problems.append(f"[{section}] {key} = {value} must be at most 1")
        self.numbers[f"{section}.{key}"] = _positive(value) or 1.0

    def _read_attention(self, kernel: str, widths: Any) -> None:
        if kernel in ATTENTION_KERNELS and not isinstance(widths, dict):
            self.problems.append(f"attention.{kernel} = {widths} must be a section")
            return
        if kernel not in ATTENTION_KERNELS:
            self.problems.append(f"[attention.{kernel}] is no kernel; {_suggest(kernel, ATTENTION_KERNELS)}")
            return
        for key, entry in widths.items():
            forward, backward = (
                _positive(entry.get(which)) if isinstance(entry, dict) else None for which in ("forward", "backward")
            )
            if not re.fullmatch(r"width_[1-9]\d*", key):
                self.problems.append(
                    f"[attention.{kernel}] {key}: there is no such key; they are width_128, width_64, ..."
                )
            elif forward is None or backward is None:
                self.problems.append(
                    f"[attention.{kernel}] {key} = {entry} must have forward and backward, TFLOP/s above 0"
                )
            else:
                rates = 1e12 * forward, 1e12 * backward
                self.attention.setdefault(kernel, {})[int(key.removeprefix("width_"))] = rates
                self.sources[f"attention.{kernel}.{key}"] = str(entry.get("source", ""))


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < inf else None


def _suggest(key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
