"""`python -m trainer.plan [search | calibrate]`: what a run would cost on devices that need not be there.

Leaves with 0 where it fits, with 3 where it does not, with 2 for a configuration or an option that is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from trainer.config.parse import load, split
from trainer.config.sections import LONGEST_ROW
from trainer.config.training_stages import Recipe
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, MISFIT, ConfigError
from trainer.hardware.device_specs import DEFAULT, NOBODYS, Device, device_for, device_here, load_device, tables
from trainer.plan.document import Report
from trainer.plan.plan import run_plan

USAGE = """\
python -m trainer.plan [--config NAME|PATH] [OPTION]... [--section.key VALUE]...
python -m trainer.plan search [--config NAME|PATH] --gpus N [--longest] [OPTION]... [--section.key VALUE]...
python -m trainer.plan search [--config NAME|PATH] --fewest [OPTION]... [--section.key VALUE]...
python -m trainer.plan calibrate [--extends DEVICE] [--output FILE.toml]

  (nothing)   memory, time and cost of the run; leaves with 3 if it does not fit
  search      the fastest meshes for so many devices, as TOML to paste; leaves with 3 if nothing fits
  calibrate   measures this machine's device in a minute, and writes a table for --device

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
  --device NAME|PATH  a file of one's own, or {devices};
                      default: plan.device, the GPU here, or h100-80gb
  --gpus N            devices, as --world-size; default: as many as the degrees of the mesh need
  --nodes N           whole nodes instead
  --seq-len T         rows of so many tokens, and as many tokens in an update (1M is 1,048,576)
  --link GB/S, --network GB/S
                      what one device gets of the links in a node, and between nodes: of a card that
                      eight devices share, an eighth
  --html FILE         also as a page
  --longest           search: the longest rows that fit on the devices, to within a thirty-second
  --fewest            search: the fewest devices that hold the run
  --extends DEVICE    calibrate: what says the rest; default: the table of the GPU here, or h100-80gb

Every key of the configuration is an option, too: ./run_train.sh --help. More: docs/planning.md.

  python -m trainer.plan --config llama3_8b_1m --device a100-80gb --network 12
  python -m trainer.plan search --config llama3_8b --seq-len 1M --gpus 32 --html plan.html
  python -m trainer.plan.dry_run --config llama3_8b_1m      the real trainer, counted: minutes
"""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        sys.stdout.write(USAGE.format(devices=fill(", ".join(tables()), 76, subsequent_indent=" " * 22)))
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
    from trainer.plan.report import planned
    from trainer.plan.search import with_length

    asked, argv = parser(COMMON).parse_known_args(words)
    config = load(argv)
    if asked.seq_len:
        config = with_length(single(config, "--seq-len"), asked.seq_len)
    device = device_of(asked, config)
    size = ranks_of(asked, device) or prod(config.stages[0].config.parallelism.degrees(1).values())
    if problems := config.shape_problems(size):
        advice = f"this mesh is not for {size:,} devices: trainer.plan search --gpus {size} finds one that is"
        raise ConfigError([*problems, advice] if ranks_of(asked, device) else problems)
    found = run_plan(config, size, device)
    tell(planned(found, notes=notes(asked, words, "", unknown=device_for(config) is None)), asked.html)
    return DONE if found.fits else MISFIT


def search(words: Sequence[str]) -> int:
    from trainer.plan import search as ways
    from trainer.plan.report import searched

    asked, argv = parser({**COMMON, **SEARCH}).parse_known_args(words)
    if asked.longest + asked.fewest + bool(asked.seq_len and asked.longest) > 1:
        raise ConfigError(["one question at a time: --longest looks for a length, --fewest for a number of devices"])
    config = single(load(argv), "a search")
    device = device_of(asked, config)
    size, stops, before = ranks_of(asked, device), "", tokens_of(config)
    if asked.seq_len:
        config = ways.with_length(config, asked.seq_len)
    if config.training.seq_len > LONGEST_ROW:
        raise ConfigError([f"--seq-len {config.training.seq_len} must be at most {LONGEST_ROW}"])
    name, rows = config.job.name, f"{config.training.seq_len:,} tokens"
    if asked.fewest:
        size, found = ways.fewest(config, device, told=progress)
        question = f"{name} with rows of {rows}: {f'{size:,} x {device.name}' if size else 'nothing holds them'}"
    elif not size:
        raise ConfigError(["how many devices? give --gpus N or --nodes N, or ask for the --fewest"])
    elif asked.longest:
        length, found, stops = ways.longest(config, size, device, told=progress)
        rows = f"rows of {length:,} tokens" if length else f"not even rows of {ways.UNIT:,} tokens fit"
        question = f"{name} on {size:,} x {device.name}: {rows}"
        config = ways.with_length(config, length) if length else config
    else:
        found = ways.search(config, size, device, fixed=fixed(argv), told=progress)
        question = f"{name} with rows of {rows} on {size:,} x {device.name}"
    stopped = [f"longer rows do not fit, {stops}"] if stops else []
    stopped += [f"an update has {tokens_of(config):,} tokens, and in the file {before:,}"] * (
        tokens_of(config) != before
    )
    tell(
        searched(
            found,
            question,
            device,
            notes=[*stopped, *notes(asked, words, " search", unknown=device_for(config) is None)],
        ),
        asked.html,
    )
    return DONE if found.best else MISFIT


def calibrate(words: Sequence[str]) -> int:
    from trainer.plan.calibrate import calibrated

    asked = parser(CALIBRATE).parse_args(words)
    known = load_device(asked.extends) if asked.extends else device_here() or load_device(DEFAULT)
    require_folder(asked.output)
    table = calibrated(asked.extends or known.name)
    if asked.output is None:
        sys.stdout.write(table)
    else:
        asked.output.write_text(table)
        sys.stderr.write(f"written: {asked.output}\n")
    return DONE


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"": plan, "search": search, "calibrate": calibrate}


# ---- what they share


def whole(text: str) -> int:
    """At least 1, also as 128K or 1M."""
    digits, unit = text[:-1], {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
    number = digits if unit else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 at least (128K and 1M are numbers, too)")
    return int(number) * (unit or 1)


def rate(text: str) -> float:
    """Above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0
    if not 0 < found < inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, in GB/s that a device gets")
    return found


Options = dict[str, Callable[[str], object] | None]
COMMON: Options = {
    "--device": str, "--world-size": whole, "--gpus": whole, "--nodes": whole, "--seq-len": whole,
    "--link": rate, "--network": rate, "--html": Path,
}  # fmt: skip
SEARCH: Options = {"--longest": None, "--fewest": None}
CALIBRATE: Options = {"--extends": str, "--output": Path}


class Parser(argparse.ArgumentParser):
    """Says what is wrong as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def parser(options: Options) -> Parser:
    found = Parser(prog="python -m trainer.plan", allow_abbrev=False, add_help=False)
    for name, kind in options.items():
        if kind is None:
            found.add_argument(name, action="store_true")
        else:
            found.add_argument(name, type=kind)
    return found


def single(config: Recipe, who: str) -> Recipe:
    """Raises `ConfigError` for a run of several stages."""
    if len(config.stages) > 1:
        raise ConfigError([f"{who} is for one stage, and the file has {len(config.stages)}: take the others out"])
    return config


def fixed(argv: Sequence[str]) -> list[str]:
    """Keys that were given on the command line, of those that a search changes."""
    given = split(argv).values
    kept = [f"{section}.{key}" for section in ("parallelism", "memory") for key in given.get(section, {})]
    return [*kept, *["training.micro_batch_size"] * ("micro_batch_size" in given.get("training", {}))]


def tokens_of(config: Recipe) -> int:
    """Of an update."""
    return config.training.seq_len * config.training.global_batch_size


def device_of(asked: argparse.Namespace, config: Recipe) -> Device:
    """Raises `ConfigError`, also where a page could not be written."""
    require_folder(asked.html)
    device = load_device(asked.device) if asked.device else device_for(config) or load_device(DEFAULT)
    rates = {"link": asked.link, "network": asked.network}
    return replace(device, **{key: 1e9 * value for key, value in rates.items() if value})


def require_folder(file: Path | None) -> None:
    """Before the work, not after it. Raises `ConfigError`."""
    if file is not None and not file.parent.is_dir():
        raise ConfigError([f"{file} cannot be written: {file.parent} is no folder"])


def ranks_of(asked: argparse.Namespace, device: Device) -> int | None:
    """Those that were asked for. Raises `ConfigError` for two answers."""
    given = {asked.world_size, asked.gpus, asked.nodes * device.node if asked.nodes else None} - {None}
    if len(given) > 1:
        raise ConfigError(["--world-size, --gpus and --nodes say how many devices: they must agree"])
    return given.pop() if given else None


def notes(asked: argparse.Namespace, words: Sequence[str], command: str, *, unknown: bool) -> list[str]:
    """What a page is the answer to."""
    rates = {"links in a node": asked.link, "network": asked.network}
    given = [f"{what}: {value:g} GB/s of a device, as given" for what, value in rates.items() if value]
    given += [NOBODYS] * (asked.device is None and unknown)
    return [*given, f"asked: python -m trainer.plan{command} {shlex.join(words)}".rstrip()]


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
