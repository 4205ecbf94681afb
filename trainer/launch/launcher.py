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

from trainer.checkpoint.initial_weights import require_initial
from trainer.checkpoint.run_dir import ResumeError, RunFolder, finished, next_stage
from trainer.config.job_config import Config
from trainer.config.parse import find, load, show_path, split, to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import BAD_CONFIGURATION, FAILED, NO_RETRY, ConfigError, RunError
from trainer.launch.cluster import Cluster, count, count_gpus, prepare_environment, read_cluster
from trainer.launch.restarts import live
from trainer.memory.auto import fitted, memory_of_node, told
from trainer.memory.estimator import GIB, ledger
from trainer.memory.report import short
from trainer.resilience import exit_markers

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def main() -> int:
    words = sys.argv[1:]
    flags = {"-h", "--help", "--check", "--plan"}.intersection(words)
    argv = [word for word in words if word not in flags]
    if flags & {"-h", "--help"}:
        from trainer.config.docs import help_text

        sys.stdout.write(help_text() + "\n")
        return 0
    config, cluster, problems = examine(argv, os.environ)
    if "--check" in flags and cluster and not cluster.task and not config.shape_problems(cluster.world_size):
        sys.stdout.write(report(config, cluster))  # Also where corpus and tokenizer are not.
    if problems or cluster is None:
        if cluster is None or not cluster.task:
            sys.stderr.write(complaint(problems, argv, cluster))
        return BAD_CONFIGURATION
    if "--plan" in flags and not cluster.task:
        from trainer.plan.report import show_before

        show_before(config, cluster.world_size)
    if "--check" in flags:
        return 0
    settled = nothing_to_start(config)
    if settled is not None:
        status, reason = settled
        if not cluster.task:
            sys.stderr.write(f"{reason}\n")
        return status
    prepare_environment(os.environ, cluster, host_works=config.memory.optimizer_placement == "host")
    if cluster.task is not None:
        os.execv(sys.executable, [sys.executable, "-u", str(TRAIN), *argv])
    return live(config, argv, cluster, TRAIN)


def nothing_to_start(config: Config) -> tuple[int, str] | None:
    """Exit status and reason, if the run folder says that there is nothing to do or that it must not be done."""
    try:
        RunFolder(config.output_dir).make()
        already = finished(config)
    except ConfigError as error:
        return BAD_CONFIGURATION, f"error: {error}"
    except ResumeError as error:
        exit_markers.settle(config.output_dir, "STOP", reason=str(error), attempt=os.environ.get(exit_markers.ATTEMPT))
        return NO_RETRY, f"error: {error}"
    except RunError as error:
        return FAILED, f"error: {error}"
    if already:
        exit_markers.settle(config.output_dir, "DONE", reason=already, attempt=os.environ.get(exit_markers.ATTEMPT))
    return (0, already) if already else None


def examine(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Recipe, Cluster | None, list[str]]:
    """The run, its world if that is known, and everything that is wrong with either."""
    problems: list[str] = []
    config, cluster = Recipe(), None
    try:
        config = load(argv)
    except ConfigError as error:
        problems += error.problems
    try:
        cluster = read_cluster(environment, config, gpus=0 if environment.get("NGPU") else count_gpus())
    except ConfigError as error:
        problems += error.problems
    if problems:
        return config, None, problems
    if cluster is None or config.stage_problems():
        return config, cluster, config.stage_problems()
    left = config.stages[first_stage(config) :]
    problems = config.problems(cluster.world_size, first=left[0].index)
    if not left[0].config.model.problems():
        problems += complaints_of(lambda: require_initial(left[0].config))
    if config.plan.device is not None:
        from trainer.hardware.device_specs import device_for

        problems += complaints_of(partial(device_for, config))
    for stage in () if problems else left:
        problems += complaints_of(partial(_fitted, stage.config, cluster))
    return config, cluster, problems


def complaints_of(check: Callable[[], object]) -> list[str]:
    """What a check raises."""
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def first_stage(config: Config) -> int:
    """The number of the stage that is next; what is done may not fit the processes that are left. 0 if that is unclear."""
    with suppress(ResumeError, ConfigError, RunError):
        stage = next_stage(config)
        return 0 if stage is None else stage.index
    return 0


# ---- what is told before anything starts


def complaint(problems: Sequence[str], argv: Sequence[str], cluster: Cluster | None) -> str:
    """A line for each problem, and one for where they are."""
    name = split(argv).config
    with suppress(ConfigError):
        name = show_path(find(name))
    world = f" for {cluster}" if cluster else ""
    lines = [f"error: {problem}\n" for problem in problems]
    return "".join([*lines, f"nothing was started: {count(len(problems), 'problem')} in {name}{world}\n"])


def report(config: Config, cluster: Cluster) -> str:
    """The resolved configuration, and as comments, so that the whole is TOML, what it means for this world."""
    lines = [f"mesh of {cluster}"]
    for stage in config.stages:
        lines += [stage.summary()] * bool(stage.name) + report_stage(stage.config, cluster)
    return to_toml(config) + "\n" + "".join(f"# {line}\n" for line in lines)


def report_stage(config: Config, cluster: Cluster) -> list[str]:
    model, training = config.model.build(), config.training
    topology = config.topology(cluster.world_size, nodes=cluster.nodes)
    total, each = config.micro_batches(cluster.world_size)
    rows = training.global_batch_size
    settled = _settled(config, cluster)
    return [
        *(f"  {line}" for line in topology.drawing()),
        *config.plans(cluster.world_size),
        *settled,
        f"model {config.model.family} {config.model.size}: {model.num_parameters:,} parameters",
        f"update of {count(rows, 'row')} x {training.seq_len:,} tokens = {rows * training.seq_len:,} tokens: "
        f"{count(total, 'micro-batch', 'es')} of {count(training.micro_batch_size, 'row')}, "
        f"{each} on each data-parallel rank",
        *(f"remark: {remark}" for remark in (*config.remarks(cluster.world_size), *topology.remarks())),
    ]


def _settled(config: Config, cluster: Cluster) -> list[str]:
    """What memory will hold, as far as it is known before a device is seen."""
    try:
        found = _fitted(config, cluster)
    except ConfigError:  # Told elsewhere.
        return []
    if found is None:
        return ['memory.recompute = "auto" is settled when devices are seen; with memory.device_gib it is shown here']
    chosen = [f'memory.recompute = "auto" takes {told(found)}'] * (found is not config)
    return [*chosen, short(ledger(found, cluster.world_size))]


def _fitted(config: Config, cluster: Cluster) -> Config | None:
    """With `auto` made into levers; None as long as no device is known. Raises ConfigError."""
    if config.memory.recompute == "auto" and config.memory.device_gib is None:
        return None
    device = (config.memory.device_gib or 0) * GIB
    return fitted(config, cluster.world_size, ranks=cluster.processes, device=device, host=memory_of_node())
