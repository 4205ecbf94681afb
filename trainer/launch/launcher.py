"""`longhaul train`: validates a run in one process for the world it would have, then starts it.

This process starts the workers and restarts them on failure (trainer/launch/restarts.py). As a
task of `srun` it becomes the worker. Exits with 2 if the configuration is wrong, else with the
status of the workers.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from trainer.checkpoint.initial_weights import initial_url
from trainer.command_table import typed
from trainer.commands import CommandParser, run_command
from trainer.config import checks, summary
from trainer.config.job_config import Config, TrainingStage
from trainer.config.parse import find_config_file, load, name_flags, parse_arguments, show_path
from trainer.config.run_spec import SECRET_ENV, RunSpec
from trainer.config.sections import is_remote, remote_url
from trainer.config.source import corpus_specs
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.data.corpus_files import corpus_problems
from trainer.errors import (
    EXIT_BAD_CONFIG,
    EXIT_DOES_NOT_FIT,
    EXIT_FAILURE,
    EXIT_SUCCESS,
    ConfigError,
    RunError,
    failure_ending,
    missing_package,
    shorten,
)
from trainer.hardware.attention_choice import attention_problems
from trainer.hardware.device_specs import detect_device, select_device
from trainer.hardware.host import node_memory_bytes
from trainer.launch.cluster import (
    LaunchWorld,
    count_gpus,
    detect_launch_world,
    launch_id,
    pluralize,
    set_worker_environment,
)
from trainer.launch.host_memory import in_memory_checkpoint_problems
from trainer.launch.initial_checks import validate_initial_weights
from trainer.launch.initial_tokenizer import validate_initial_tokenizer
from trainer.launch.predict import memory_summary, planned_device, predict
from trainer.launch.remote_weights import fetch_initial_weights
from trainer.launch.restarts import run_with_restarts
from trainer.launch.secret import launch_secret
from trainer.metrics import loggers
from trainer.plan.memory_options import Choice, choose_memory_options
from trainer.resilience.signals import Interrupted, SignalHandler
from trainer.step.planner import trace_early
from trainer.storage import exit_markers
from trainer.storage.object_store import missing_library
from trainer.storage.restore import require_readable_copies, restore_newest
from trainer.storage.run_dir import RunDir, finished_message, keep_packing_version, next_stage
from trainer.storage.uploads import finish_uploads

DESCRIPTION = """\
Trains a run: checks it for the world that it would have, prepares its data and starts its ranks.

NGPU sets the processes per node. Default: the GPUs present; without GPUs, the product of the degrees in the
configuration, at least 2 and at most 8. For several nodes, set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on
each of them; they share a secret, ~/.longhaul/secret or the file that LONGHAUL_SECRET_FILE names,
which is created if it does not exist. Run the same command again, and the run resumes."""
INITIAL_CHECKS = (validate_initial_weights, validate_initial_tokenizer)
TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "train.py"


def main() -> int:
    return run_command(sys.argv[1:], build_parser())


def build_parser() -> CommandParser:
    def refusal(problems: Sequence[str], argv: Sequence[str]) -> str:
        return format_problems(problems, argv, None)

    parser = CommandParser(
        typed("train"), DESCRIPTION, run=launch, overrides=_keys_help, report=refusal
    )
    parser.add_config()
    check_help = "print the resolved configuration and the mesh; start nothing"
    parser.add_argument("--check", action="store_true", help=check_help)
    plan_help = "print the plan of the run: memory, step time, bottleneck; start nothing"
    parser.add_argument("--plan", action="store_true", help=plan_help)
    return parser


def _keys_help() -> str:
    from trainer.config.help_text import render_keys

    return render_keys() + "\n"


def launch(options: Namespace, argv: Sequence[str]) -> int:
    config, world, problems = load_and_validate(
        argv,
        os.environ,
        planning=options.plan,
        checking=options.check,
        fetching=not options.check,
    )
    if (
        options.check
        and world
        # Every rank of srun runs this launcher; one prints.
        and not world.rank
        and not checks.layout_problems(config, world.world_size)
    ):
        # Also where corpus and tokenizer are missing.
        sys.stdout.write(format_resolved_config(config, world))
    if problems or world is None:
        if world is None or world.is_first_of_node:  # Nodes may differ.
            sys.stderr.write(format_problems(problems, argv, world))
        return EXIT_BAD_CONFIG
    if (wrong_part := find_wrong_part(config, world)) is not None:
        _print_reason(world, f"error: {wrong_part}")
        return wrong_part.status
    if options.plan:
        from trainer.plan.report import show_plan_at_launch

        return EXIT_SUCCESS if show_plan_at_launch(config, world.world_size) else EXIT_DOES_NOT_FIT
    if options.check:
        return EXIT_SUCCESS
    loggers.configure_logging(world.rank or 0)
    if (secret := launch_secret(os.environ, world)) is not None:
        os.environ[SECRET_ENV] = secret
    # Nothing is at stake yet, so a signal may raise anywhere. Afterwards the workers decide when
    # to stop.
    with SignalHandler().raising_alone():
        restored = restore_checkpoint(config, world, argv)
        spec = restored if isinstance(restored, int) else prepare_run(restored, world)
    if not isinstance(spec, RunSpec):
        return spec
    set_worker_environment(
        os.environ, world, cpu_optimizer=config.memory.optimizer_placement == "host"
    )
    # Under srun or torchrun this process is the rank. Replacing it keeps the process id, so
    # signals and exit status need no forwarding.
    if world.rank is not None:
        os.execv(sys.executable, [sys.executable, "-u", str(TRAIN_SCRIPT), spec.to_json()])
    return run_with_restarts(
        spec,
        world,
        TRAIN_SCRIPT,
        reload=lambda: keep_packing_version(load(argv)),
        prepare=prepare_run,
    )


def find_wrong_part(config: Recipe, world: LaunchWorld) -> RunError | None:
    """The first mistake in a part that an extension adds to any stage, if there is one."""
    if not config.job.extension or not world.is_first_of_node:
        return None
    # Imports torch.
    from trainer.step.added_parts import require_sound_parts_on_host

    try:
        for stage in config.training_stages:
            require_sound_parts_on_host(
                stage.config,
                runs_on_gpu=detect_device() is not None,
                is_sharded=world.world_size > 1,
            )
    except RunError as error:
        return error
    return None


def restore_checkpoint(config: Recipe, world: LaunchWorld, argv: Sequence[str]) -> Recipe | int:
    """Downloads the newest copy of `checkpoint.remote` if it is newer than what is here; returns
    the configuration to go on with, or an exit code.
    """
    url = config.checkpoint.remote
    if url is None:
        return config
    try:
        folder = RunDir(config.output_dir)
        if restore_newest(folder, url, name=config.job.name, probes=is_first(world)):
            # The run keeps the version of the packing that it has had.
            return keep_packing_version(load(argv))
        return config
    except (Interrupted, RunError) as error:
        return _report_failure(config, world, error)


def is_first(world: LaunchWorld) -> bool:
    """Whether this process is the one that speaks for the launch."""
    return not world.rank and not world.node_rank


def prepare_run(config: Recipe, world: LaunchWorld) -> RunSpec | int:
    """Prepares the data of a validated run and predicts its memory and step time; returns an exit
    code if nothing should start.

    Of several processes on a shared file system, one tokenizes and the others wait.
    """
    try:
        early_exit = find_early_exit(config)
        if early_exit is not None and is_first(world):
            finish_uploads(config)
        if early_exit is None:
            stage = next_stage(config)
            if stage is not None and is_first(world) and detect_device() is not None:
                trace_early(
                    stage.config,
                    world.world_size,
                    ranks_per_node=world.nproc_per_node,
                    host_bytes=node_memory_bytes(),
                    on_cpu=False,
                )
            # Imports torch, which checks do not need.
            from trainer.data.prepare import prepare_once

            datasets = prepare_once(config, None if world.rank is None else launch_id(os.environ))
            prediction = None
            # Rank 0 predicts and writes for all. A finished run needs no prediction.
            if not world.rank and stage is not None:
                found = predict(stage.config, world.world_size, num_nodes=world.num_nodes)
                prediction = found.model_dump(mode="json")
            return RunSpec(config=config, datasets=datasets, prediction=prediction)
        status, reason = early_exit
    except (Interrupted, RunError) as error:
        return _report_failure(config, world, error)
    _print_reason(world, reason)
    return status


def _report_failure(config: Config, world: LaunchWorld, error: Interrupted | RunError) -> int:
    """Writes the marker of a failure before the first step and prints it; returns its exit
    code.
    """
    status = EXIT_FAILURE
    reason = "error: stopped before the first step"
    if isinstance(error, RunError):
        status, reason = _record_failure(config, error)
    _print_reason(world, reason)
    return status


def _print_reason(world: LaunchWorld, reason: str) -> None:
    if world.is_first_of_node:  # Nodes may differ.
        prefix = f"error: [rank {world.rank}] " if world.rank else "error: "
        sys.stderr.write(f"{reason.replace('error: ', prefix, 1)}\n")


def find_early_exit(config: Config) -> tuple[int, str] | None:
    """Exit code and reason if the run is finished or its folder is unusable, else None."""
    try:
        RunDir(config.output_dir).create()
        done_reason = finished_message(config)
    except RunError as error:
        return _record_failure(config, error)
    if done_reason:
        _write_marker(config, "DONE", done_reason)
    return (EXIT_SUCCESS, done_reason) if done_reason else None


def _record_failure(config: Config, error: RunError) -> tuple[int, str]:
    _write_marker(config, failure_ending(error.status).marker, str(error))
    return error.status, f"error: {error}"


def _write_marker(config: Config, marker: str, reason: str) -> None:
    attempt = os.environ.get(exit_markers.ATTEMPT_VARIABLE)
    # If the folder is not writable, the reason says so.
    with suppress(OSError):
        exit_markers.write_if_absent(config.output_dir, marker, reason=reason, attempt=attempt)


def load_and_validate(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    planning: bool = False,
    checking: bool = False,
    fetching: bool = False,
) -> tuple[Recipe, LaunchWorld | None, list[str]]:
    """Returns the run, its world if known, and all problems of either.

    With `planning`, files need not exist, and without NGPU the world size is the product of the
    stated degrees. With `checking`, the corpora's files are looked at, as the preparation of the
    data does otherwise. With `fetching`, initial weights at a URL are downloaded and checked.
    """
    problems: list[str] = []
    config = Recipe()
    world = None
    if environment.get("CONFIG_FILE") and not any(arg.startswith("--config") for arg in argv):
        problems.append("CONFIG_FILE, a variable of torchtitan, is not read: use --config")
    with collecting(problems):
        config = keep_packing_version(load(argv))
    with collecting(problems):
        if planning and not environment.get("NGPU"):
            world = LaunchWorld(nproc_per_node=config.stated_world_size)
        else:
            world = detect_launch_world(
                environment, config, gpus=0 if environment.get("NGPU") else count_gpus()
            )
    with collecting(problems):
        if config.plan.device is not None:
            select_device(config)
    # Later checks assume a configuration that parsed and a world that is known.
    if problems:
        return config, None, problems
    if world is None or checks.stage_problems(config):
        return config, world, checks.stage_problems(config)
    if planning:
        return config, world, checks.layout_problems(config, world.world_size)
    stages = remaining_stages(config)
    problems = checks.problems(config, world.world_size, first_stage=stages[0].index)
    problems += RunDir(config.output_dir).problems() + missing_trackers(config)
    problems += remote_problems(config)
    # A launch reads these files anyway when it prepares its data, and looks for copies of
    # checkpoints; only --check stops before.
    if checking:
        problems += corpora_problems(config) + copies_problems(config) + device_problems(config)
    if fetching and not problems:
        with collecting(problems):
            fetch_initial_weights(config)
    problems += initial_problems(stages[0].config)
    # Memory comes last: the plan of an invalid layout would raise or mislead.
    for each in () if problems else stages:
        problems += memory_problems(each.config, world)
    return config, world, problems


def device_problems(config: Config) -> list[str]:
    """Why the device that `plan.device` names cannot run the attention kernel."""
    device = None if config.plan.device is None else select_device(config)
    return [] if device is None else attention_problems(config, device)


def memory_problems(config: Config, world: LaunchWorld) -> list[str]:
    """Why memory is known to be too small before any device is."""
    problems = in_memory_checkpoint_problems(
        config,
        world.world_size,
        ranks_per_node=world.nproc_per_node,
        host_bytes=node_memory_bytes(),
    )
    if config.memory.recompute == "auto" and config.memory.device_gib is not None:
        with collecting(problems):
            _choose_memory(config, world)
    return problems


def initial_problems(config: Config) -> list[str]:
    """Why a new run cannot start from its initial weights."""
    problems = list[str]()
    for validate in () if config.model.problems() else INITIAL_CHECKS:
        with collecting(problems):
            validate(config)
    return problems


def remaining_stages(config: Recipe) -> Sequence[TrainingStage]:
    """The stages that are not finished, which alone are checked for this world."""
    stages = config.training_stages
    with suppress(RunError):
        return stages[stage.index :] if (stage := next_stage(config)) else stages
    return stages


def remote_problems(config: Config) -> list[str]:
    """Why URLs cannot be used on this machine, as far as it is known without the network."""
    urls = {spec.key: spec.corpus for spec in corpus_specs(config).values()}
    urls["checkpoint.remote"] = config.checkpoint.remote or ""
    urls["checkpoint.initial_load_path"] = (
        initial_url(config.checkpoint.initial_load_path or "") or ""
    )
    urls["tokenizer.path"] = remote_url(config.tokenizer.path) or ""
    return [
        problem
        for key, url in urls.items()
        if is_remote(url) and (problem := missing_library(key, url))
    ]


def corpora_problems(config: Config) -> list[str]:
    """Why the corpora cannot be read, as far as names, first bytes and the seals at URLs say.

    Raises as `require_prepared` for a store that fails and for damage.
    """
    specs = corpus_specs(config).values()
    problems = [problem for spec in specs for problem in corpus_problems(spec)]
    for spec in specs:
        if is_remote(spec.corpus) and missing_library(spec.key, spec.corpus) is None:
            # Imports torch.
            from trainer.data.remote_corpus import require_prepared

            with collecting(problems):
                require_prepared(spec)
    return problems


def copies_problems(config: Config) -> list[str]:
    """Why copies of checkpoints cannot be looked at."""
    problems = list[str]()
    url = config.checkpoint.remote
    if url is not None and missing_library("checkpoint.remote", url) is None:
        with collecting(problems):
            require_readable_copies(url)
    return problems


def missing_trackers(config: Config) -> list[str]:
    """Trackers whose packages are not installed on this machine."""
    missing = [name for name in dict.fromkeys(config.metrics.trackers) if find_spec(name) is None]
    return [str(missing_package(name, f"metrics.trackers = {name}")) for name in missing]


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Adds the problems of a `ConfigError` that is raised in this context."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


# ---- reports before anything starts


def format_problems(
    problems: Sequence[str], argv: Sequence[str], world: LaunchWorld | None
) -> str:
    """One line per problem, and one with the file and the world."""
    name = parse_arguments(argv).config
    with suppress(ConfigError):
        name = show_path(find_config_file(name))
    for_world = f" for {world}" if world else ""
    prefix = f"[rank {world.rank}] " if world and world.rank else ""
    lines = [f"error: {prefix}{shorten(name_flags(problem, argv))}\n" for problem in problems]
    return "".join(
        [
            *lines,
            f"nothing was started: {pluralize(len(problems), 'problem')} with {name}{for_world}\n",
        ]
    )


def format_resolved_config(config: Config, world: LaunchWorld) -> str:
    """The resolved configuration as TOML, with the mesh, memory and model of this world as
    comments.
    """
    lines = [f"mesh of {world}"]
    for stage in config.training_stages:
        if stage.name:
            lines.append(stage.summary())
        lines += describe_stage(stage.config, world)
    return to_toml(config) + "\n" + "".join(f"# {line}\n" for line in lines)


def describe_stage(config: Config, world: LaunchWorld) -> list[str]:
    model = config.model.build()
    training = config.training
    topology = summary.topology(config, world.world_size, nodes=world.num_nodes)
    num_micro_batches, per_rank = config.micro_batches(world.world_size)
    global_batch_size = training.global_batch_size
    return [
        *(f"  {line}" for line in topology.diagram()),
        *summary.parallelism_summary(config, world.world_size),
        *_memory_summary(config, world),
        f"model {config.model.family} {config.model.size}: {model.parameter_summary}",
        f"step of {pluralize(global_batch_size, 'sequence')} x {training.seq_len:,} tokens = {training.tokens_per_step:,} tokens: "
        f"{pluralize(num_micro_batches, 'micro-batch', 'es')} of {pluralize(training.micro_batch_size, 'sequence')}, "
        f"{per_rank} on each data-parallel rank",
        *(
            f"warning: {warning}"
            for warning in (*summary.warnings(config, world.world_size), *topology.warnings())
        ),
    ]


def _memory_summary(config: Config, world: LaunchWorld) -> list[str]:
    """Predicted memory, where a device is known."""
    if select_device(config) is None and config.memory.device_gib is None:
        return ["memory is predicted where devices are known: set plan.device to see it here"]
    try:
        choice = _choose_memory(config, world)
    except ConfigError as error:
        return error.problems
    described = choice.description
    lines = [f'memory options that are "auto": {described}'] if described else []
    return [*lines, memory_summary(choice.plan)]


def _choose_memory(config: Config, world: LaunchWorld) -> Choice:
    """Resolves what is "auto". Raises ConfigError."""
    device = planned_device(
        config, ranks_per_node=world.nproc_per_node, host_bytes=node_memory_bytes()
    )
    return choose_memory_options(config, world.world_size, device)
