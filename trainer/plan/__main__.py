"""`python -m trainer.plan [search | calibrate]`: plans a run on devices that need not be present.

Exits with 0 if the run fits, 3 if it does not, and 2 for an invalid configuration or option.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
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

ABOUT = {
    "": "Predicts memory, step time and cost of a run. Exits with 3 if it does not fit.",
    "search": "Searches the fastest layouts on a number of devices and prints them as TOML. Exits with 3 if none fits.",
    "calibrate": "Measures this machine's device in about a minute and writes a table for --device.",
}
EXAMPLES = """\
Every configuration key is an option, too: see ./run_train.sh --help and docs/planning.md.

examples:
  python -m trainer.plan --config llama3_8b_1m --device a100-80gb --network 12
  python -m trainer.plan search --config llama3_8b --seq-len 1M --gpus 32 --html plan.html
"""


def main(argv: Sequence[str]) -> int:
    command = argv[0] if argv and not argv[0].startswith("-") else ""
    try:
        if command not in ABOUT:
            raise ConfigError([f"command {command} must be one of {', '.join(filter(None, ABOUT))}, or absent"])
        args, config_args = build_parser(command).parse_known_args(argv[bool(command) :])
        if command == "calibrate":
            return calibrate(args, config_args)
        notes = [f"command: python -m trainer.plan {shlex.join(argv)}".rstrip()]
        config_args = [*(["--config", args.config] if args.config else []), *config_args]
        return search(args, config_args, notes) if command == "search" else plan(args, config_args, notes)
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return EXIT_BAD_CONFIG
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return EXIT_FAILURE


# ---- commands


def plan(args: argparse.Namespace, config_args: Sequence[str], notes: Sequence[str]) -> int:
    from trainer.plan.report import plan_report
    from trainer.plan.search import with_seq_len

    config = load(config_args)
    if args.seq_len:
        config = with_seq_len(require_single_stage(config, "--seq-len"), args.seq_len)
    device = device_from_args(args, config)
    requested_size = world_size_from_args(args, device)
    world_size = requested_size or prod(config.training_stages[0].config.parallelism.degrees(1).values())
    if problems := checks.layout_problems(config, world_size):
        advice = f"the mesh does not match {world_size:,} devices: trainer.plan search --gpus {world_size} finds one"
        raise ConfigError([*problems, advice] if requested_size else problems)
    run = plan_run(config, world_size, device)
    emit_report(plan_report(run, notes=[*device_notes(args, config), *notes]), args.html)
    return EXIT_SUCCESS if run.fits else EXIT_DOES_NOT_FIT


def search(args: argparse.Namespace, config_args: Sequence[str], notes: Sequence[str]) -> int:
    from trainer.plan import search as layouts
    from trainer.plan.report import search_report

    if args.longest + args.fewest + bool(args.seq_len and args.longest) > 1:
        raise ConfigError(["--longest, --fewest: only one of them, and --longest excludes --seq-len"])
    config = require_single_stage(load(config_args), "trainer.plan search")
    device = device_from_args(args, config)
    world_size, shortage, file_tokens = world_size_from_args(args, device), "", tokens_per_step(config)
    if args.seq_len:
        config = layouts.with_seq_len(config, args.seq_len)
    if config.training.seq_len > MAX_SEQ_LEN:
        raise ConfigError([f"--seq-len {config.training.seq_len} must be at most {MAX_SEQ_LEN}"])
    title = f"{config.job.name} with {config.training.seq_len:,} tokens per sequence"
    if args.fewest:
        world_size, result = layouts.fewest_devices(config, device)
        title += f": {world_size:,} x {device.name}" if world_size else " fits no number of devices"
    elif not world_size:
        raise ConfigError(["--gpus or --nodes is missing: give the number of devices, or --fewest"])
    elif args.longest:
        seq_len, result, shortage = layouts.longest_sequence(config, world_size, device)
        found = f"at most {seq_len:,}" if seq_len else f"fewer than {layouts.SEQ_LEN_STEP:,}"
        title = f"{config.job.name} on {world_size:,} x {device.name}: {found} tokens per sequence"
        config = layouts.with_seq_len(config, seq_len) if seq_len else config
    else:
        pinned = pinned_keys(config_args)
        result = layouts.search(config, world_size, device, pinned=pinned)
        title += f" on {world_size:,} x {device.name}"
    remarks = [f"longer sequences do not fit: {shortage}"] if shortage else []
    if tokens_per_step(config) != file_tokens:
        remarks.append(f"a step has {tokens_per_step(config):,} tokens here, and {file_tokens:,} in the configuration")
    emit_report(search_report(result, title, device, notes=[*remarks, *device_notes(args, config), *notes]), args.html)
    return EXIT_SUCCESS if result.best else EXIT_DOES_NOT_FIT


def calibrate(args: argparse.Namespace, unknown_args: Sequence[str]) -> int:
    from trainer.plan.calibrate import measure_device_toml

    if unknown_args:
        raise ConfigError([f"trainer.plan calibrate does not take {' '.join(unknown_args)}"])
    base_device = load_device(args.extends) if args.extends else detect_device() or load_device(DEFAULT_DEVICE)
    require_parent_directory(args.output)
    toml = measure_device_toml(args.extends or base_device.name)
    if args.output is None:
        sys.stdout.write(toml)
    else:
        args.output.write_text(toml)
        sys.stderr.write(f"wrote {args.output}\n")
    return EXIT_SUCCESS


# ---- the command line


class RaisingArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message.removeprefix("argument ")])


def build_parser(command: str) -> RaisingArgumentParser:
    """The help without a command includes the usage of all commands."""
    others = "" if command else "\n".join(build_parser(name).format_usage() for name in ABOUT if name)
    parser = RaisingArgumentParser(
        prog=f"python -m trainer.plan {command}".rstrip(),
        description=ABOUT[command],
        epilog=f"{others}\n{EXAMPLES}" if others else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    if command == "calibrate":
        add("--extends", metavar="DEVICE", help="device table for all other values; default: detected, or h100-80gb")
        add("--output", type=Path, metavar="FILE.toml", help="default: standard output")
        return parser
    devices = fill(", ".join(device_names()), 72)
    add("--config", metavar="NAME|PATH", help="a TOML file, or one of train_configs/ by name; default: debug")
    add(
        "--device", metavar="NAME|PATH", help=f"{devices}, or a file; default: plan.device, the local GPU, or h100-80gb"
    )
    add("--gpus", type=parse_count, metavar="N", help="number of devices; default: the product of the mesh degrees")
    add("--world-size", type=parse_count, metavar="N", help="the same as --gpus")
    add("--nodes", type=parse_count, metavar="N", help="number of whole nodes, instead of --gpus")
    add("--seq-len", type=parse_count, metavar="T", help="sequence length at equal tokens per step; 1M is 1,048,576")
    add("--link", type=parse_bandwidth, metavar="GB/S", help="bandwidth per device within a node")
    add("--network", type=parse_bandwidth, metavar="GB/S", help="bandwidth per device between nodes")
    add("--html", type=Path, metavar="FILE", help="also write the report as an HTML page")
    if command == "search":
        add("--longest", action="store_true", help="the longest sequence length that fits, to within 1/32")
        add("--fewest", action="store_true", help="the fewest devices on which the run fits")
    return parser


def parse_count(text: str) -> int:
    """At least 1, also as 128K or 1M."""
    digits, unit = text[:-1], {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
    number = digits if unit else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer, at least 1, optionally with suffix K or M")
    return int(number) * (unit or 1)


def parse_bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, in GB/s per device")
    return value


def require_single_stage(config: Recipe, command: str) -> Recipe:
    if len(config.training_stages) > 1:
        raise ConfigError([f"{command} needs a configuration of one stage, not of {len(config.training_stages)}"])
    return config


def pinned_keys(argv: Sequence[str]) -> list[str]:
    """Keys on the command line that a search would otherwise change."""
    values = parse_arguments(argv).values
    keys = [f"{section}.{key}" for section in ("parallelism", "memory") for key in values.get(section, {})]
    return [*keys, *["training.micro_batch_size"] * ("micro_batch_size" in values.get("training", {}))]


def tokens_per_step(config: Recipe) -> int:
    return config.training.seq_len * config.training.global_batch_size


def device_from_args(args: argparse.Namespace, config: Recipe) -> DeviceSpec:
    """Raises `ConfigError`, also if --html cannot be written."""
    require_parent_directory(args.html)
    device = load_device(args.device) if args.device else select_device(config) or load_device(DEFAULT_DEVICE)
    rates = {"link_bandwidth": args.link, "network_bandwidth": args.network}
    return replace(device, **{key: 1e9 * value for key, value in rates.items() if value})


def require_parent_directory(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError([f"{file} cannot be written: {file.parent} is not a folder"])


def world_size_from_args(args: argparse.Namespace, device: DeviceSpec) -> int | None:
    requested = {args.world_size, args.gpus, args.nodes * device.devices_per_node if args.nodes else None} - {None}
    if len(requested) > 1:
        raise ConfigError(["--world-size, --gpus and --nodes must give the same number of devices"])
    return requested.pop() if requested else None


def device_notes(args: argparse.Namespace, config: Recipe) -> list[str]:
    rates = {"link": args.link, "network": args.network}
    remarks = [f"{name} bandwidth: {value:g} GB/s per device, as given" for name, value in rates.items() if value]
    return remarks + [DEFAULT_DEVICE_NOTE] * (args.device is None and select_device(config) is None)


def emit_report(report: PlanReport, html: Path | None) -> None:
    from trainer.plan.console import show

    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    show(report)
    if html is not None:
        from trainer.plan.html import render_html

        html.write_text(render_html(report), encoding="utf-8")
        sys.stderr.write(f"wrote {html}\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_FAILURE)
