"""`python -m trainer.launch`: checks a run in one process, for the world it would have, and only then starts it.

Workers are started by this process, and again if they fail (trainer/launch/restarts.py); as a task of `srun`, it becomes the worker.
Leaves with 2 when the configuration is wrong, else as the workers do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.checkpoint.initial_weights import validate_initial_weights
from trainer.checkpoint.run_dir import ResumeError, RunDir, finished_message, next_stage
from trainer.config.job_config import Config
from trainer.config.parse import find_config_file, load, parse_arguments, show_path, to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_NO_RETRY, ConfigError, RunFailedError
from trainer.launch.cluster import LaunchWorld, count_gpus, detect_launch_world, pluralize, set_worker_environment
from trainer.launch.restarts import run_with_restarts
from trainer.memory.auto import describe_memory_options, fit_memory_options, node_memory_bytes
from trainer.memory.estimator import GIB, estimate_memory
from trainer.memory.report import memory_summary
from trainer.resilience import exit_markers

TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "train.py"


def main() -> int:
    args = sys.argv[1:]
    flags = {"-h", "--help", "--check", "--plan"}.intersection(args)
    argv = [word for word in args if word not in flags]
    if flags & {"-h", "--help"}:
        from trainer.config.docs import render_help

        sys.stdout.write(render_help() + "\n")
        return 0
    config, cluster, problems = load_and_validate(argv, os.environ)
    if "--check" in flags and cluster and not cluster.srun_rank and not config.layout_problems(cluster.world_size):
        sys.stdout.write(format_resolved_config(config, cluster))  # Also where corpus and tokenizer are not.
    if problems or cluster is None:
        if cluster is None or not cluster.srun_rank:
            sys.stderr.write(format_problems(problems, argv, cluster))
        return EXIT_BAD_CONFIG
    if "--plan" in flags and not cluster.srun_rank:
        from trainer.plan.report import show_plan_at_launch

        show_plan_at_launch(config, cluster.world_size)
    if "--check" in flags:
        return 0
    early_exit = find_early_exit(config)
    if early_exit is not None:
        status, reason = early_exit
        if not cluster.srun_rank:
            sys.stderr.write(f"{reason}\n")
        return status
    set_worker_environment(os.environ, cluster, cpu_optimizer=config.memory.optimizer_placement == "host")
    if cluster.srun_rank is not None:
        os.execv(sys.executable, [sys.executable, "-u", str(TRAIN_SCRIPT), *argv])
    return run_with_restarts(config, argv, cluster, TRAIN_SCRIPT)


def find_early_exit(config: Config) -> tuple[int, str] | None:
    """Exit status and reason, if the run folder says that there is nothing to do or that it must not be done."""
    try:
        RunDir(config.output_dir).create()
        done_reason = finished_message(config)
    except ConfigError as error:
        return EXIT_BAD_CONFIG, f"error: {error}"
    except ResumeError as error:
        exit_markers.write_if_absent(
            config.output_dir, "STOP", reason=str(error), attempt=os.environ.get(exit_markers.ATTEMPT_VARIABLE)
        )
        return EXIT_NO_RETRY, f"error: {error}"
    except RunFailedError as error:
        return EXIT_FAILURE, f"error: {error}"
    if done_reason:
        exit_markers.write_if_absent(
            config.output_dir, "DONE", reason=done_reason, attempt=os.environ.get(exit_markers.ATTEMPT_VARIABLE)
        )
    return (0, done_reason) if done_reason else None


def load_and_validate(
    argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[Recipe, LaunchWorld | None, list[str]]:
    """The run, its world if that is known, and everything that is wrong with either."""
    problems: list[str] = []
    config, cluster = Recipe(), None
    try:
        config = load(argv)
    except ConfigError as error:
        problems += error.problems
    try:
        cluster = detect_launch_world(environment, config, gpus=0 if environment.get("NGPU") else count_gpus())
    except ConfigError as error:
        problems += error.problems
    if problems:
        return config, None, problems
    if cluster is None or config.stage_problems():
        return config, cluster, config.stage_problems()
    remaining_stages = config.training_stages[next_stage_index(config) :]
    problems = config.problems(cluster.world_size, first_stage=remaining_stages[0].index)
    if not remaining_stages[0].config.model.problems():
        problems += collect_problems(lambda: validate_initial_weights(remaining_stages[0].config))
    if config.plan.device is not None:
        from trainer.hardware.device_specs import select_device

        problems += collect_problems(partial(select_device, config))
    for stage in () if problems else remaining_stages:
        problems += collect_problems(partial(_resolve_memory, stage.config, cluster))
    return config, cluster, problems


def collect_problems(check: Callable[[], object]) -> list[str]:
    """What a check raises."""
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def next_stage_index(config: Config) -> int:
    """The number of the stage that is next; what is done may not fit the processes that are left. 0 if that is unclear."""
    with suppress(ResumeError, ConfigError, RunFailedError):
        stage = next_stage(config)
        return 0 if stage is None else stage.index
    return 0


# ---- what is told before anything starts


def format_problems(problems: Sequence[str], argv: Sequence[str], cluster: LaunchWorld | None) -> str:
    """A line for each problem, and one for where they are."""
    name = parse_arguments(argv).config
    with suppress(ConfigError):
        name = show_path(find_config_file(name))
    for_cluster = f" for {cluster}" if cluster else ""
    lines = [f"error: {problem}\n" for problem in problems]
    return "".join([*lines, f"nothing was started: {pluralize(len(problems), 'problem')} in {name}{for_cluster}\n"])


def format_resolved_config(config: Config, cluster: LaunchWorld) -> str:
    """The resolved configuration, and as comments, so that the whole is TOML, what it means for this world."""
    lines = [f"mesh of {cluster}"]
    for stage in config.training_stages:
        lines += [stage.summary()] * bool(stage.name) + describe_stage(stage.config, cluster)
    return to_toml(config) + "\n" + "".join(f"# {line}\n" for line in lines)


def describe_stage(config: Config, cluster: LaunchWorld) -> list[str]:
    model, training = config.model.build(), config.training
    topology = config.topology(cluster.world_size, nodes=cluster.num_nodes)
    num_micro_batches, per_rank = config.micro_batches(cluster.world_size)
    global_batch_size = training.global_batch_size
    memory_lines = _memory_summary(config, cluster)
    return [
        *(f"  {line}" for line in topology.diagram()),
        *config.parallelism_summary(cluster.world_size),
        *memory_lines,
        f"model {config.model.family} {config.model.size}: {model.num_parameters:,} parameters",
        f"update of {pluralize(global_batch_size, 'row')} x {training.seq_len:,} tokens = {global_batch_size * training.seq_len:,} tokens: "
        f"{pluralize(num_micro_batches, 'micro-batch', 'es')} of {pluralize(training.micro_batch_size, 'row')}, "
        f"{per_rank} on each data-parallel rank",
        *(f"remark: {remark}" for remark in (*config.warnings(cluster.world_size), *topology.warnings())),
    ]


def _memory_summary(config: Config, cluster: LaunchWorld) -> list[str]:
    """What memory will hold, as far as it is known before a device is seen."""
    try:
        resolved = _resolve_memory(config, cluster)
    except ConfigError:  # Told elsewhere.
        return []
    if resolved is None:
        return ['memory.recompute = "auto" is settled when devices are seen; with memory.device_gib it is shown here']
    lines = [f'memory.recompute = "auto" takes {describe_memory_options(resolved)}'] * (resolved is not config)
    return [*lines, memory_summary(estimate_memory(resolved, cluster.world_size))]


def _resolve_memory(config: Config, cluster: LaunchWorld) -> Config | None:
    """With `auto` made into levers; None as long as no device is known. Raises ConfigError."""
    if config.memory.recompute == "auto" and config.memory.device_gib is None:
        return None
    device_bytes = (config.memory.device_gib or 0) * GIB
    return fit_memory_options(
        config,
        cluster.world_size,
        ranks_per_node=cluster.nproc_per_node,
        device_bytes=device_bytes,
        host_bytes=node_memory_bytes(),
    )
