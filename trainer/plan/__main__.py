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

from trainer.config import checks
from trainer.config.parse import load, parse_arguments
from trainer.config.sections import MAX_SEQ_LEN
from trainer.config.training_stages import Recipe
from trainer.errors import EXIT_BAD_CONFIG, EXIT_DOES_NOT_FIT, EXIT_FAILURE, EXIT_SUCCESS, ConfigError
from trainer.hardware.device_specs import (
    DEFAULT_DEVICE,
    DEFAULT_DEVICE_NOTE,
    DeviceSpec,
    detect_device,
    device_names,
    load_device,
    select_device,
)
from trainer.plan.document import PlanReport
from trainer.plan.plan import plan_run

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


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        sys.stdout.write(USAGE.format(devices=fill(", ".join(device_names()), 76, subsequent_indent=" " * 22)))
        return EXIT_SUCCESS
    command = argv[0] if argv and not argv[0].startswith("-") else ""
    try:
        run = COMMANDS.get(command)
        if run is None:
            raise ConfigError([f"{command}: there are {', '.join(filter(None, COMMANDS))}; see --help"])
        return run(argv[bool(command) :])
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return EXIT_BAD_CONFIG
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return EXIT_FAILURE


# ---- commands


def plan(argv: Sequence[str]) -> int:
    from trainer.plan.report import plan_report
    from trainer.plan.search import with_seq_len

    args, config_args = build_parser(COMMON).parse_known_args(argv)
    config = load(config_args)
    if args.seq_len:
        config = with_seq_len(require_single_stage(config, "--seq-len"), args.seq_len)
    device = device_from_args(args, config)
    world_size = world_size_from_args(args, device) or prod(
        config.training_stages[0].config.parallelism.degrees(1).values()
    )
    if problems := checks.layout_problems(config, world_size):
        advice = (
            f"this mesh is not for {world_size:,} devices: trainer.plan search --gpus {world_size} finds one that is"
        )
        raise ConfigError([*problems, advice] if world_size_from_args(args, device) else problems)
    run = plan_run(config, world_size, device)
    emit_report(
        plan_report(run, notes=request_notes(args, argv, "", is_unknown=select_device(config) is None)), args.html
    )
    return EXIT_SUCCESS if run.fits else EXIT_DOES_NOT_FIT


def search(argv: Sequence[str]) -> int:
    from trainer.plan import search as ways
    from trainer.plan.report import search_report

    args, config_args = build_parser({**COMMON, **SEARCH}).parse_known_args(argv)
    if args.longest + args.fewest + bool(args.seq_len and args.longest) > 1:
        raise ConfigError(["one question at a time: --longest looks for a length, --fewest for a number of devices"])
    config = require_single_stage(load(config_args), "a search")
    device = device_from_args(args, config)
    world_size, shortage, tokens_before = world_size_from_args(args, device), "", tokens_per_step(config)
    if args.seq_len:
        config = ways.with_seq_len(config, args.seq_len)
    if config.training.seq_len > MAX_SEQ_LEN:
        raise ConfigError([f"--seq-len {config.training.seq_len} must be at most {MAX_SEQ_LEN}"])
    name, length_text = config.job.name, f"{config.training.seq_len:,} tokens"
    if args.fewest:
        world_size, result = ways.fewest_devices(config, device, on_progress=print_progress)
        question = f"{name} with rows of {length_text}: {f'{world_size:,} x {device.name}' if world_size else 'nothing holds them'}"
    elif not world_size:
        raise ConfigError(["how many devices? give --gpus N or --nodes N, or ask for the --fewest"])
    elif args.longest:
        seq_len, result, shortage = ways.longest_sequence(config, world_size, device, on_progress=print_progress)
        length_text = f"rows of {seq_len:,} tokens" if seq_len else f"not even rows of {ways.SEQ_LEN_STEP:,} tokens fit"
        question = f"{name} on {world_size:,} x {device.name}: {length_text}"
        config = ways.with_seq_len(config, seq_len) if seq_len else config
    else:
        result = ways.search(config, world_size, device, pinned=pinned_keys(config_args), on_progress=print_progress)
        question = f"{name} with rows of {length_text} on {world_size:,} x {device.name}"
    remarks = [f"longer rows do not fit, {shortage}"] if shortage else []
    remarks += [f"an update has {tokens_per_step(config):,} tokens, and in the file {tokens_before:,}"] * (
        tokens_per_step(config) != tokens_before
    )
    emit_report(
        search_report(
            result,
            question,
            device,
            notes=[*remarks, *request_notes(args, argv, " search", is_unknown=select_device(config) is None)],
        ),
        args.html,
    )
    return EXIT_SUCCESS if result.best else EXIT_DOES_NOT_FIT


def calibrate(argv: Sequence[str]) -> int:
    from trainer.plan.calibrate import measure_device_toml

    args = build_parser(CALIBRATE).parse_args(argv)
    base_device = load_device(args.extends) if args.extends else detect_device() or load_device(DEFAULT_DEVICE)
    require_parent_directory(args.output)
    toml = measure_device_toml(args.extends or base_device.name)
    if args.output is None:
        sys.stdout.write(toml)
    else:
        args.output.write_text(toml)
        sys.stderr.write(f"written: {args.output}\n")
    return EXIT_SUCCESS


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"": plan, "search": search, "calibrate": calibrate}


# ---- what they share


def parse_count(text: str) -> int:
    """At least 1, also as 128K or 1M."""
    digits, unit = text[:-1], {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
    number = digits if unit else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 at least (128K and 1M are numbers, too)")
    return int(number) * (unit or 1)


def parse_bandwidth(text: str) -> float:
    """Above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, in GB/s that a device gets")
    return value


Options = dict[str, Callable[[str], object] | None]
COMMON: Options = {
    "--device": str, "--world-size": parse_count, "--gpus": parse_count, "--nodes": parse_count, "--seq-len": parse_count,
    "--link": parse_bandwidth, "--network": parse_bandwidth, "--html": Path,
}  # fmt: skip
SEARCH: Options = {"--longest": None, "--fewest": None}
CALIBRATE: Options = {"--extends": str, "--output": Path}


class RaisingArgumentParser(argparse.ArgumentParser):
    """Says what is wrong as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def build_parser(options: Options) -> RaisingArgumentParser:
    argument_parser = RaisingArgumentParser(prog="python -m trainer.plan", allow_abbrev=False, add_help=False)
    for name, kind in options.items():
        if kind is None:
            argument_parser.add_argument(name, action="store_true")
        else:
            argument_parser.add_argument(name, type=kind)
    return argument_parser


def require_single_stage(config: Recipe, command: str) -> Recipe:
    """Raises `ConfigError` for a run of several stages."""
    if len(config.training_stages) > 1:
        raise ConfigError(
            [f"{command} is for one stage, and the file has {len(config.training_stages)}: take the others out"]
        )
    return config


def pinned_keys(argv: Sequence[str]) -> list[str]:
    """Keys that were given on the command line, of those that a search changes."""
    values = parse_arguments(argv).values
    keys = [f"{section}.{key}" for section in ("parallelism", "memory") for key in values.get(section, {})]
    return [*keys, *["training.micro_batch_size"] * ("micro_batch_size" in values.get("training", {}))]


def tokens_per_step(config: Recipe) -> int:
    """Of an update."""
    return config.training.seq_len * config.training.global_batch_size


def device_from_args(args: argparse.Namespace, config: Recipe) -> DeviceSpec:
    """Raises `ConfigError`, also where a page could not be written."""
    require_parent_directory(args.html)
    device = load_device(args.device) if args.device else select_device(config) or load_device(DEFAULT_DEVICE)
    rates = {"link_bandwidth": args.link, "network_bandwidth": args.network}
    return replace(device, **{key: 1e9 * value for key, value in rates.items() if value})


def require_parent_directory(file: Path | None) -> None:
    """Before the work, not after it. Raises `ConfigError`."""
    if file is not None and not file.parent.is_dir():
        raise ConfigError([f"{file} cannot be written: {file.parent} is no folder"])


def world_size_from_args(args: argparse.Namespace, device: DeviceSpec) -> int | None:
    """Those that were asked for. Raises `ConfigError` for two answers."""
    requested = {args.world_size, args.gpus, args.nodes * device.devices_per_node if args.nodes else None} - {None}
    if len(requested) > 1:
        raise ConfigError(["--world-size, --gpus and --nodes say how many devices: they must agree"])
    return requested.pop() if requested else None


def request_notes(args: argparse.Namespace, argv: Sequence[str], command: str, *, is_unknown: bool) -> list[str]:
    """What a page is the answer to."""
    rates = {"links in a node": args.link, "network": args.network}
    remarks = [f"{what}: {value:g} GB/s of a device, as given" for what, value in rates.items() if value]
    remarks += [DEFAULT_DEVICE_NOTE] * (args.device is None and is_unknown)
    return [*remarks, f"asked: python -m trainer.plan{command} {shlex.join(argv)}".rstrip()]


def print_progress(num_plans: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{num_plans:,} plans")


def emit_report(report: PlanReport, html: Path | None) -> None:
    from trainer.plan.console import show

    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    show(report)
    if html is not None:
        from trainer.plan.html import render_html as page

        html.write_text(page(report), encoding="utf-8")
        sys.stderr.write(f"written: {html}\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_FAILURE)
