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

TABLES = Path(__file__).parent / "specs"
DEFAULT = "h100-80gb"
"""What is planned for where no GPU is."""
NOBODYS = f"no GPU that a table knows is here: planned for {DEFAULT}; --device or plan.device names another"
FIGURES = {
    "device": ("memory_gib", "peak_tflops", "matmul_tflops", "memory_gbps", "launch_us"),
    "link": ("devices", "gbps", "share", "latency_us"),
    "network": ("gbps", "share", "latency_us"),
    "host": ("devices", "gbps", "memory_gib", "memory_gbps"),
}
"""Keys of each section, beside those of [attention.KERNEL]: `width_128`, `width_64`, ..."""
KERNELS = ("flash", "cudnn", "efficient", "plain", "fa3", "fa4")
WORDS = ("extends", "description", "names")
UNITS = {"tflops": 1e12, "gbps": 1e9, "gib": float(1 << 30), "us": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, its links and its host: FLOP/s, bytes, bytes per second each way, seconds."""

    name: str
    description: str
    names: tuple[str, ...]
    """Parts of what torch calls it."""
    memory: float
    peak: float
    """Dense, bfloat16."""
    matmul: float
    """The most that large matrix products were seen to reach."""
    attention: Mapping[str, Mapping[int, tuple[float, float]]]
    """Forward and backward, by kernel and width of a head; causal, FLOPs as the kernel carries them out."""
    hbm: float
    launch: float
    """Between the beginnings of two kernels that have nothing to do."""
    linked: int
    """Devices that fast links join."""
    link: float
    link_latency: float
    """Of each step of a collective."""
    network: float
    """Of each device's share of its node's."""
    network_latency: float
    node: int
    """Devices of a host."""
    host_link: float
    """Between a device and its host, of all copying at once."""
    host_memory: float
    host_bandwidth: float
    """Of a host's memory, for all its devices together."""
    sources: Mapping[str, str]

    def kernel(self, asked: str) -> str:
        """The kernel whose rates stand for what `training.attention` asks for."""
        if asked in self.attention:
            return asked
        return "flash" if "flash" in self.attention else next(iter(self.attention))

    def attention_rates(self, asked: str, width: int) -> tuple[float, float]:
        """FLOP/s forward and backward, of the width nearest to that of a head."""
        rates = self.attention[self.kernel(asked)]
        return rates[min(rates, key=lambda known: abs(log(known / width)))]


def load_device(name: str) -> Device:
    """One of the tables by its name, or a file by its path. Raises ConfigError with everything that is wrong with it."""
    path = _found(name)
    table = Table()
    table.read(path, (path,))
    told = show_path(path)
    problems = table.problems or [
        f"{told}: [{section}] {key} is missing"
        for section, keys in FIGURES.items()
        for key in keys
        if f"{section}.{key}" not in table.figures
    ]
    if not problems and table.figures.get("device.matmul_tflops", 0) > table.figures.get("device.peak_tflops", inf):
        problems.append(f"{told}: [device] matmul_tflops must be at most peak_tflops")
    if not table.problems and not table.attention:
        problems.append(f"{told}: [attention.flash] is missing, or that of another kernel")
    if problems:
        raise ConfigError(problems)
    figures = {key: value * UNITS.get(re.split("[._]", key)[-1], 1) for key, value in table.figures.items()}
    return Device(
        name=path.stem,
        description=table.words.get("description", path.stem),
        names=tuple(table.words.get("names", ())),
        memory=figures["device.memory_gib"],
        peak=figures["device.peak_tflops"],
        matmul=figures["device.matmul_tflops"],
        attention=table.attention,
        hbm=figures["device.memory_gbps"],
        launch=figures["device.launch_us"],
        linked=int(figures["link.devices"]),
        link=figures["link.gbps"] * figures["link.share"],
        link_latency=figures["link.latency_us"],
        network=figures["network.gbps"] * figures["network.share"],
        network_latency=figures["network.latency_us"],
        node=int(figures["host.devices"]),
        host_link=figures["host.gbps"],
        host_memory=figures["host.memory_gib"],
        host_bandwidth=figures["host.memory_gbps"],
        sources=table.sources,
    )


def tables() -> list[str]:
    return sorted(path.stem for path in TABLES.glob("*.toml"))


@cache
def device_called(name: str) -> Device | None:
    """The device of what torch calls one, by the longest words of the name that a table knows; None if none does.

    A part of a GPU (MIG) is no device that is known.
    """
    known = [(part, device) for table in tables() for device in [load_device(table)] for part in device.names]
    fitting = [
        (len(part), device)
        for part, device in known
        if "MIG" not in name and re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", name)
    ]
    return max(fitting, key=lambda found: found[0], default=(0, None))[1]


def device_here(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> Device | None:
    """The device of this machine's first GPU, as its driver calls it; None where none is, or none that a table knows."""
    for path in sorted(drivers.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        return device_called(model[1]) if model else None
    return None


def device_for(config: Config) -> Device | None:
    """What `plan.device` names, else the device here. Raises ConfigError."""
    return load_device(config.plan.device) if config.plan.device is not None else device_here()


# ---- files


def _found(name: str, beside: Path | None = None) -> Path:
    """A table, or a file here; of `extends` also one beside the file that says so."""
    table, places = TABLES / f"{name}.toml", [Path(name)]
    if beside is not None:
        places.append(beside.parent / name)
    for path in (table, *places):
        if path.is_file():
            return path
    close = [table for table in tables() if table.startswith(name)] or get_close_matches(name, tables(), n=1)
    near = [f"did you mean {match}? " for match in close[:1]]
    raise ConfigError(
        [f'device "{name}": there is no such table or file; {"".join(near)}there are {", ".join(tables())}']
    )


@dataclass
class Table:
    """What a file says, over the one that it extends."""

    words: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    """By `section.key`, in the units of the file."""
    attention: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self, path: Path, chain: tuple[Path, ...]) -> None:
        values, name = read_toml(path), show_path(path)
        if isinstance(below := values.get("extends"), str):
            self._extend(below, path, chain)
        self.words.pop("names", None)  # A relative is another device.
        known = len(self.problems)
        for key, value in values.items():
            if key in WORDS:
                self._word(key, value)
            elif key == "attention" and isinstance(value, dict):
                for kernel, widths in value.items():
                    self._kernel(kernel, widths)
            elif key in FIGURES and isinstance(value, dict):
                for inner, given in value.items():
                    self._figure(key, inner, given)
            else:
                sections = (*FIGURES, "attention", *WORDS)
                self.problems.append(
                    f"{key} = {value} must be a section"
                    if key in sections
                    else f"[{key}] is no section; {_near(key, sections)}"
                )
        self.problems[known:] = [f"{name}: {problem}" for problem in self.problems[known:]]

    def _extend(self, below: str, path: Path, chain: tuple[Path, ...]) -> None:
        try:
            found = _found(below, path)
        except ConfigError as error:
            self.problems += error.problems
            return
        if found in chain:
            self.problems.append(f'{show_path(path)}: extends = "{below}" goes round in a circle')
        else:
            self.read(found, (*chain, found))

    def _word(self, key: str, value: object) -> None:
        self.words[key] = value
        texts = value if isinstance(value, list) and key == "names" else [value]
        if isinstance(value, list) != (key == "names") or not all(isinstance(text, str) for text in texts):
            self.problems.append(f"{key} = {value} must be {'a list of names' if key == 'names' else 'text'}")

    def _figure(self, section: str, key: str, given: Any) -> None:
        value, source = (given.get("value"), given.get("source", "")) if isinstance(given, dict) else (given, "")
        self.sources[f"{section}.{key}"] = str(source)
        if key not in FIGURES[section]:
            self.problems.append(f"[{section}] {key}: there is no such key; {_near(key, FIGURES[section])}")
        elif (number := _positive(value)) is None:
            self.problems.append(f"[{section}] {key} = {value} must be a number above 0")
        elif key == "devices" and not number.is_integer():
            self.problems.append(f"[{section}] {key} = {value} must be a whole number")
        elif key == "share" and number > 1:
            self.problems.append(f"[{section}] {key} = {value} must be at most 1")
        self.figures[f"{section}.{key}"] = _positive(value) or 1.0

    def _kernel(self, kernel: str, widths: Any) -> None:
        if kernel in KERNELS and not isinstance(widths, dict):
            self.problems.append(f"attention.{kernel} = {widths} must be a section")
            return
        if kernel not in KERNELS:
            self.problems.append(f"[attention.{kernel}] is no kernel; {_near(kernel, KERNELS)}")
            return
        for key, given in widths.items():
            forward, backward = (
                _positive(given.get(which)) if isinstance(given, dict) else None for which in ("forward", "backward")
            )
            if not re.fullmatch(r"width_[1-9]\d*", key):
                self.problems.append(
                    f"[attention.{kernel}] {key}: there is no such key; they are width_128, width_64, ..."
                )
            elif forward is None or backward is None:
                self.problems.append(
                    f"[attention.{kernel}] {key} = {given} must have forward and backward, TFLOP/s above 0"
                )
            else:
                rates = 1e12 * forward, 1e12 * backward
                self.attention.setdefault(kernel, {})[int(key.removeprefix("width_"))] = rates
                self.sources[f"attention.{kernel}.{key}"] = str(given.get("source", ""))


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < inf else None


def _near(key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
