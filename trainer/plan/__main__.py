"""`longhaul plan [search | calibrate]`: plans a run on devices that need not be present.

Exits with 0 if the run fits, 3 if it does not, and 2 for an invalid configuration or option.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill

from trainer.command_table import typed
from trainer.commands import (
    CommandParser,
    count,
    number,
    overrides_help,
    run_command,
    writable_file,
)
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load, parse_arguments
from trainer.config.sections import MAX_SEQ_LEN
from trainer.config.training_stages import Recipe
from trainer.errors import EXIT_DOES_NOT_FIT, EXIT_SUCCESS, ConfigError
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
from trainer.plan.run_plan import plan_run
from trainer.plan.search import (
    SEQ_LEN_STEP,
    SearchResult,
    fewest_devices,
    longest_sequence,
    with_seq_len,
)
from trainer.plan.search import search as search_layouts
from trainer.plan.suggestions import suggestions
from trainer.plan.tracing import tracing_processes
from trainer.trace.answers import show_progress

DESCRIPTION = "Predicts memory, step time and cost of a run. Exits with 3 if it does not fit."
SEARCH = """\
the fastest layouts on a number of devices, with --longest the longest sequence, with --fewest the fewest devices.
Printed as TOML. Exits with 3 if none fits"""
CALIBRATE = "a table for --device, measured on this machine's device in about a minute; --output writes it to a file"
SEARCHED_TRAINING_KEYS = ("training.micro_batch_size", "training.attention", "training.compile")
EXAMPLES = """

examples, explained in docs/planning.md:
  {plan} --config llama3_8b_1m --device a100-80gb --network 12
  {plan} search --config llama3_8b --seq-len 1M --gpus 32 --html plan.html
"""


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def plan(options: Namespace, overrides: Sequence[str]) -> int:
    from trainer.plan.report import curves, plan_report

    config = load(overrides)
    if options.seq_len:
        config = with_seq_len(require_single_stage(config, "--seq-len"), options.seq_len)
    device = selected_device(options, config)
    requested_size = requested_world_size(options, device)
    world_size = requested_size or config.stated_world_size
    if problems := checks.layout_problems(config, world_size):
        advice = f"the mesh does not match {world_size:,} devices: {typed('plan', 'search', '--gpus', world_size)} finds one"
        raise ConfigError([*problems, advice] if requested_size else problems)
    with tracing_processes() as trace:
        run = plan_run(config, world_size, device, trace=trace)
        stage = run.fullest_stage
        report = plan_report(run, why=options.why, notes=option_notes(options, config))
        if options.html:
            report = replace(report, sections=[*report.sections, *curves(stage, trace)])
        emit_report(report, lambda: map(str, suggestions(stage, trace)), options.html)
    return EXIT_SUCCESS if run.fits else EXIT_DOES_NOT_FIT


def search(options: Namespace, overrides: Sequence[str]) -> int:
    from trainer.plan.report import search_report, search_suggestions

    if options.longest + options.fewest + bool(options.seq_len and options.longest) > 1:
        raise ConfigError(
            ["--longest, --fewest: only one of them, and --longest excludes --seq-len"]
        )
    config = require_single_stage(load(overrides), typed("plan", "search"))
    device = selected_device(options, config)
    world_size = requested_world_size(options, device)
    if options.fewest and world_size:
        raise ConfigError(["--fewest finds the number of devices: leave out --gpus and --nodes"])
    if not options.fewest and not world_size:
        raise ConfigError(
            ["--gpus or --nodes is missing: give the number of devices, or --fewest"]
        )
    file_tokens = config.training.tokens_per_step
    if options.seq_len:
        config = with_seq_len(config, options.seq_len)
    # What the command line states is the user's choice: the search must keep it.
    pinned = pinned_keys(overrides)
    if world_size is None:
        find = partial(fewest_devices, config, pinned=pinned)
    else:
        finder = longest_sequence if options.longest else search_layouts
        find = partial(finder, config, world_size, pinned=pinned)
    with tracing_processes() as trace:
        result = find(device=device, trace=trace)
        title = search_title(options, config, world_size, device, result)
        notes = [*remarks_of(result, config, file_tokens), *option_notes(options, config)]
        report = search_report(result, title, device, notes=notes)
        emit_report(report, lambda: search_suggestions(result, trace), options.html)
    return EXIT_SUCCESS if result.best else EXIT_DOES_NOT_FIT


def remarks_of(result: SearchResult, config: Config, file_tokens: int) -> Iterator[str]:
    """`file_tokens`: tokens of a step in the configuration file."""
    if result.shortage:
        yield f"longer sequences do not fit: {result.shortage}"
    found = result.best[0].config if result.best else config
    tokens = found.training.tokens_per_step
    if tokens != file_tokens:
        yield f"a step has {tokens:,} tokens here, and {file_tokens:,} in the configuration"


def search_title(
    options: Namespace,
    config: Config,
    world_size: int | None,
    device: DeviceSpec,
    result: SearchResult,
) -> str:
    best = result.best[0] if result.best else None
    name = config.job.name
    if options.longest:
        length = (
            f"at most {best.config.training.seq_len:,}" if best else f"fewer than {SEQ_LEN_STEP:,}"
        )
        return f"{name} on {world_size:,} x {device.name}: {length} tokens per sequence"
    name += f" with {config.training.seq_len:,} tokens per sequence"
    if options.fewest:
        return (
            f"{name}: {best.world_size:,} x {device.name}"
            if best
            else f"{name} fits no number of devices"
        )
    return f"{name} on {world_size:,} x {device.name}"


def calibrate(options: Namespace, _: Sequence[str]) -> int:
    from trainer.plan.calibrate import measure_device_toml

    base_device = (
        load_device(options.extends)
        if options.extends
        else detect_device() or load_device(DEFAULT_DEVICE)
    )
    toml = measure_device_toml(options.extends or base_device.name)
    if options.output is None:
        sys.stdout.write(toml)
    else:
        options.output.write_text(toml)
        sys.stderr.write(f"wrote {options.output}\n")
    return EXIT_SUCCESS


def build_parser() -> CommandParser:
    overrides = overrides_help() + EXAMPLES.format(plan=typed("plan"))
    parser = CommandParser(typed("plan"), DESCRIPTION, run=plan, overrides=overrides)
    add_devices(parser)
    add = parser.add_argument
    why_help = (
        "also every tensor of the fullest rank: shape, dtype, lifetime, and who allocates it"
    )
    add("--why", action="store_true", help=why_help)
    searching = parser.add_command("search", SEARCH, run=search, overrides=overrides)
    add_devices(searching)
    add = searching.add_argument
    add(
        "--longest",
        action="store_true",
        help="the longest sequence length that fits, to within 1/32",
    )
    add("--fewest", action="store_true", help="the fewest devices on which the run fits")
    add = parser.add_command("calibrate", CALIBRATE, run=calibrate).add_argument
    add(
        "--extends",
        metavar="DEVICE",
        help="device table for all other values; default: detected, or h100-80gb",
    )
    add("--output", type=writable_file, metavar="FILE.toml", help="default: standard output")
    return parser


def add_devices(parser: CommandParser) -> None:
    """Options that a plan and a search have in common."""
    parser.add_config()
    add = parser.add_argument
    devices = fill(", ".join(device_names()), 72)
    bandwidth = number(positive=True)
    add(
        "--device",
        metavar="NAME|PATH",
        help=f"{devices}, or a file; default: plan.device, the local GPU, or h100-80gb",
    )
    world_size_help = "number of devices; default: the product of the mesh degrees"
    add("--gpus", "--world-size", dest="world_size", type=count, metavar="N", help=world_size_help)
    add("--nodes", type=count, metavar="N", help="number of whole nodes, instead of --gpus")
    seq_len_help = "sequence length at equal tokens per step; 1M is 1,048,576"
    add(
        "--seq-len",
        type=partial(count, minimum=2, maximum=MAX_SEQ_LEN),
        metavar="T",
        help=seq_len_help,
    )
    add("--link", type=bandwidth, metavar="GB/S", help="bandwidth per device within a node")
    add("--network", type=bandwidth, metavar="GB/S", help="bandwidth per device between nodes")
    add("--html", type=writable_file, metavar="FILE", help="also write the report as an HTML page")


def require_single_stage(config: Recipe, command: str) -> Recipe:
    if len(config.training_stages) > 1:
        raise ConfigError(
            [f"{command} needs a configuration of one stage, not of {len(config.training_stages)}"]
        )
    return config


def pinned_keys(argv: Sequence[str]) -> list[str]:
    """Keys on the command line that a search would otherwise change."""
    values = parse_arguments(argv).values
    keys = [
        f"{section}.{key}"
        for section in ("parallelism", "memory", "training")
        for key in values.get(section, {})
    ]
    return [
        key for key in keys if not key.startswith("training.") or key in SEARCHED_TRAINING_KEYS
    ]


def selected_device(options: Namespace, config: Recipe) -> DeviceSpec:
    device = (
        load_device(options.device)
        if options.device
        else select_device(config) or load_device(DEFAULT_DEVICE)
    )
    rates = {"link_bandwidth": options.link, "network_bandwidth": options.network}
    return replace(device, **{key: 1e9 * value for key, value in rates.items() if value})


def requested_world_size(options: Namespace, device: DeviceSpec) -> int | None:
    requested = {options.world_size, options.nodes and options.nodes * device.devices_per_node} - {
        None
    }
    # Both options may be given if they agree.
    if len(requested) > 1:
        raise ConfigError(
            ["--world-size, --gpus and --nodes must give the same number of devices"]
        )
    return requested.pop() if requested else None


def option_notes(options: Namespace, config: Recipe) -> list[str]:
    rates = {"link": options.link, "network": options.network}
    remarks = [
        f"{name} bandwidth: {value:g} GB/s per device, as given"
        for name, value in rates.items()
        if value
    ]
    is_default = options.device is None and select_device(config) is None
    notes = [DEFAULT_DEVICE_NOTE] if is_default else []
    return [*remarks, *notes, f"command: {typed('plan', *options.words)}"]


def emit_report(
    report: PlanReport, suggest: Callable[[], Iterable[str]], html: Path | None
) -> None:
    """Prints a report, and its suggestions as soon as they are traced."""
    from trainer.plan.console import show, show_suggestions

    show_progress("")
    if html is None:
        show(report)
        suggested = [*suggest()]
        show_progress("")
        show_suggestions(suggested)
        return
    # The page comes first: a reader of standard output may close it early.
    from trainer.plan.html import render_html

    report = replace(report, suggestions=[*suggest()])
    show_progress("")
    html.write_text(render_html(report), encoding="utf-8")
    sys.stderr.write(f"wrote {html}\n")
    show(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
