"""`python -m trainer.plan [search | calibrate]`: what a run would cost on devices that need not be there.

Leaves with 0 where it fits, with 3 where it does not, with 2 for a configuration or an option that is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from trainer.describe import help_text
from trainer.load import load
from trainer.plan.devices import DEFAULT, Device, device_for, device_here, load_device, tables
from trainer.plan.plan import run_plan
from trainer.plan.report import Report
from trainer.stages import Recipe
from trainer.status import BAD_CONFIGURATION, DONE, FAILED, MISFIT, ConfigError

USAGE = """\
python -m trainer.plan [--config NAME|PATH] [OPTION]... [--section.key VALUE]...
python -m trainer.plan search [--config NAME|PATH] [--gpus N] [--seq-len T] [OPTION]... [--section.key VALUE]...
python -m trainer.plan calibrate [--extends DEVICE] [--output FILE.toml]

  (nothing)   memory, time and cost of the run; leaves with 3 if it does not fit
  search      the fastest meshes for so many devices, as TOML to paste
  calibrate   measures this machine's device, and prints a table for --device

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --device NAME|PATH  {devices}, or a file of one's own; default: the GPU here, else h100-80gb
  --world-size N      ranks; default: as many as the degrees of the mesh need
  --nodes N           whole nodes, instead of --world-size or --gpus
  --link GB/S, --network GB/S
                      what a device really gets of the links in a node, and between nodes
  --html FILE         also as a page
  search: --gpus N, --seq-len T, --longest (the longest rows that fit on N), --fewest (the fewest devices for the run)
  --help              this text

Every key below can stand in the file, under its [section], and on the command line, where it counts
more. Of a repeated option the last one counts. Lists are written 0.9,0.95; null takes a value back.
"""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        sys.stdout.write(help_text(USAGE.replace("{devices}", ", ".join(tables()))) + "\n")
        return DONE
    command = words[0] if words and not words[0].startswith("-") else ""
    try:
        run = COMMANDS.get(command)
        if run is None:
            raise ConfigError([f"{command}: there are {', '.join(filter(None, COMMANDS))}; see --help"])
        return run(words[bool(command) :])
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return BAD_CONFIGURATION
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return FAILED


# ---- commands


def plan(words: Sequence[str]) -> int:
    from trainer.plan.telling import planned

    asked, argv = parser(COMMON).parse_known_args(words)
    config = load(argv)
    device = device_of(asked, config)
    size = ranks_of(asked, asked.world_size, device) or prod(config.stages[0].config.parallelism.degrees(1).values())
    if problems := config.shape_problems(size):
        raise ConfigError(problems)
    found = run_plan(config, size, device)
    tell(planned(found), asked.html)
    return DONE if found.fits else MISFIT


def search(words: Sequence[str]) -> int:
    from trainer.plan import search as ways
    from trainer.plan.telling import searched

    asked, argv = parser({**COMMON, **SEARCH}).parse_known_args(words)
    config = single(load(argv))
    device = device_of(asked, config)
    size = ranks_of(asked, asked.gpus, device)
    if asked.seq_len:
        config = ways.with_length(config, asked.seq_len)
    name, rows = config.job.name, f"{config.training.seq_len:,} tokens"
    if asked.fewest:
        size, found = ways.fewest(config, device, told=progress)
        question = (
            f"{name} with rows of {rows} takes {size:,} x {device.name}" if size else f"{name}: nothing holds {rows}"
        )
    elif not size:
        raise ConfigError(["how many devices? give --gpus N or --nodes N, or ask for the --fewest"])
    elif asked.longest:
        length, found = ways.longest(config, size, device, told=progress)
        question = f"{name} on {size:,} x {device.name}: rows of {length:,} tokens"
    else:
        found = ways.search(config, size, device, told=progress)
        question = f"{name} with rows of {rows} on {size:,} x {device.name}"
    tell(searched(found, question, device), asked.html)
    return DONE if found.best else MISFIT


def calibrate(words: Sequence[str]) -> int:
    from trainer.plan.calibrate import calibrated

    asked = parser(CALIBRATE).parse_args(words)
    table = calibrated(asked.extends or (device_here() or load_device(DEFAULT)).name)
    if asked.output is None:
        sys.stdout.write(table)
    else:
        asked.output.write_text(table)
    return DONE


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"": plan, "search": search, "calibrate": calibrate}


# ---- what they share


def whole(text: str) -> int:
    """At least 1; argparse says what is not."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def rate(text: str) -> float:
    """Above 0; argparse says what is not."""
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


Options = dict[str, Callable[[str], object] | None]
COMMON: Options = {
    "--device": str, "--world-size": whole, "--nodes": whole, "--link": rate, "--network": rate, "--html": Path
}  # fmt: skip
SEARCH: Options = {"--gpus": whole, "--seq-len": whole, "--longest": None, "--fewest": None}
CALIBRATE: Options = {"--extends": str, "--output": Path}


def parser(options: Options) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m trainer.plan", allow_abbrev=False, add_help=False)
    for name, kind in options.items():
        if kind is None:
            found.add_argument(name, action="store_true")
        else:
            found.add_argument(name, type=kind)
    return found


def single(config: Recipe) -> Recipe:
    """Raises `ConfigError` for a run of several stages."""
    if len(config.stages) > 1:
        raise ConfigError(["a search is of one stage: take the others out of the file, or plan them one by one"])
    return config


def device_of(asked: argparse.Namespace, config: Recipe) -> Device:
    """Raises `ConfigError`."""
    device = load_device(asked.device) if asked.device else device_for(config) or load_device(DEFAULT)
    rates = {"link": asked.link, "network": asked.network}
    return replace(device, **{key: 1e9 * value for key, value in rates.items() if value})


def ranks_of(asked: argparse.Namespace, stated: int | None, device: Device) -> int | None:
    return asked.nodes * device.node if asked.nodes else stated


def progress(plans: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{plans:,} plans")


def tell(report: Report, html: Path | None) -> None:
    from trainer.plan.console import show

    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    show(report)
    if html is not None:
        from trainer.plan.html import html as page

        html.write_text(page(report), encoding="utf-8")
        sys.stderr.write(f"written: {html}\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(FAILED)
