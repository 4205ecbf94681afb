"""`python -m trainer.slurm render | submit | status | cancel`: runs as SLURM jobs. Imports no torch.

Exits with 2 if the configuration is wrong, 78 if the run folder belongs to another run, 1 if a SLURM command fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config import checks
from trainer.config.help_text import render_help
from trainer.config.parse import find_config_file, load, parse_arguments
from trainer.config.slurm import SlurmSection
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_SUCCESS, ConfigError
from trainer.launch.cluster import LaunchWorld, pluralize
from trainer.launch.launcher import find_early_exit, format_problems, load_and_validate
from trainer.slurm import jobs, scheduler, snapshot
from trainer.slurm.scheduler import SlurmError
from trainer.slurm.script import ROOT, BatchJob, interpreter_for, log_path, render

USAGE = """\
python -m trainer.slurm render|submit [--config NAME|PATH] [--section.key VALUE]...
python -m trainer.slurm status|cancel RUN_FOLDER | --config NAME|PATH [--section.key VALUE]...

  render   print the batch script of the run, to read, edit and submit with sbatch
  submit   check the run for the world of the job, write script, configuration and code version to
           RUN_FOLDER/slurm/<n>/, and submit the script with sbatch
  status   show the state of the run's jobs, newest step and checkpoint
  cancel   cancel the run's jobs permanently: they save and are not requeued

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --nodes N, --gpus-per-node N, --time D-HH:MM:SS, ...
                      short for --slurm.nodes N, --slurm.gpus_per_node N, and so on for every key of [slurm]
  --help              this text

Every key below can be set in the file, under its [section], and on the command line, which takes
precedence. The last of repeated options wins. Lists are written 0.9,0.95; null unsets a value.
"""
COMMANDS = ("render", "submit", "status", "cancel")


def main(args: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(args):
        print_lines(render_help(USAGE))
        return EXIT_SUCCESS
    command, *command_args = args or ("",)
    if command not in COMMANDS:
        return print_errors(f"command {command or '(none)'} must be one of {', '.join(COMMANDS)}; see --help")
    try:
        if command in ("render", "submit"):
            return (render_command if command == "render" else submit_command)(expand_short_options(command_args))
        run_dir = find_run_dir(command_args)
        return status_command(run_dir) if command == "status" else cancel_command(run_dir)
    except ConfigError as error:
        return print_errors(*error.problems)
    except SlurmError as error:
        return print_errors(str(error), exit_code=EXIT_FAILURE)


def expand_short_options(args: Iterable[str]) -> list[str]:
    """Expands `--gpus-per-node 8` to `--slurm.gpus_per_node 8`; other arguments are unchanged."""
    expanded = []
    for arg in args:
        name, equals, value = arg.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        is_slurm_key = name.startswith("--") and key in SlurmSection.model_fields
        expanded.append(f"--slurm.{key}{equals}{value}" if is_slurm_key else arg)
    return expanded


def find_run_dir(args: Sequence[str]) -> Path:
    """The run folder, given directly or by a configuration. Raises `ConfigError`."""
    if len(args) == 1 and not args[0].startswith("--"):
        run_dir = Path(args[0])
    elif args:
        run_dir = load(expand_short_options(args)).output_dir
    else:
        raise ConfigError(["no run given: pass its folder, or --config NAME|PATH"])
    if not run_dir.is_dir():
        raise ConfigError([f"{run_dir}: no such run folder"])
    return run_dir.absolute()


# ---- commands


def render_command(argv: Sequence[str]) -> int:
    """Prints the script even if corpus or tokenizer are missing, and reports that."""
    config, problems = load_and_validate_job(argv)
    if config is None or checks.layout_problems(config, config.slurm.nodes * config.slurm.nproc_per_node):
        return print_config_problems(argv, config, problems)
    file = find_config_file(parse_arguments(argv).config).absolute()
    sys.stdout.write(render(build_job(config, ["--config", str(file), *run_options(argv)])))
    return print_config_problems(argv, config, problems) if problems else EXIT_SUCCESS


def submit_command(argv: Sequence[str]) -> int:
    config, problems = load_and_validate_job(argv)
    if config is None or problems:
        return print_config_problems(argv, config, problems)
    early_exit = find_early_exit(config)
    if early_exit is not None:
        exit_code, reason = early_exit
        sys.stderr.write(f"{reason}\n")
        return exit_code
    run_dir = config.output_dir.absolute()
    for state in jobs.active_jobs(run_dir):
        raise ConfigError(
            [f"job {state.job_id} of this run is {state}; cancel it first: {command_line('cancel', run_dir)}"]
        )
    folder = jobs.create_submission_dir(run_dir)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "job.sh").write_text(render(build_job(config, ["--config", str(folder / "config.toml")])))
    snapshot.write_code_version(ROOT, folder)
    job_id = scheduler.submit(folder / "job.sh")
    metadata = {
        "job": job_id,
        "time": time.time(),
        "nodes": config.slurm.nodes,
        "processes": config.slurm.nproc_per_node,
    }
    (folder / "job.json").write_text(json.dumps(metadata) + "\n")
    size = f"{pluralize(config.slurm.nodes, 'node')} x {pluralize(config.slurm.nproc_per_node, 'rank')}"
    print_lines(
        f"job {job_id} submitted: {size}, as {folder / 'job.sh'}",
        f"  log     tail -F {log_path(run_dir, job_id)}",
        f"  status  {command_line('status', run_dir)}",
        f"  cancel  {command_line('cancel', run_dir)}",
    )
    return EXIT_SUCCESS


def status_command(run_dir: Path) -> int:
    print_lines(*jobs.status_report(run_dir))
    return EXIT_SUCCESS


def cancel_command(run_dir: Path) -> int:
    states = jobs.active_jobs(run_dir)
    for state in states:
        scheduler.cancel(state.job_id)
        print_lines(f"job {state.job_id} cancelled; it was {state}")
    if not states:
        print_lines(f"{run_dir} has no job that is queued or running")
    return EXIT_SUCCESS


# ---- shared by commands


def load_and_validate_job(argv: Sequence[str]) -> tuple[Recipe | None, list[str]]:
    """The run, if it can be parsed, and all its problems for the world of the job."""
    try:
        config = load(argv)
    except ConfigError as error:
        return None, error.problems
    environment = {"NGPU": str(config.slurm.nproc_per_node), "NNODES": str(config.slurm.nodes), "NODE_RANK": "0"}
    return config, load_and_validate(argv, environment | {"MASTER_ADDR": "the-first-node"})[2]


def print_config_problems(argv: Sequence[str], config: Recipe | None, problems: Sequence[str]) -> int:
    cluster = (
        None
        if config is None
        else LaunchWorld(nproc_per_node=config.slurm.nproc_per_node, num_nodes=config.slurm.nodes)
    )
    sys.stderr.write(format_problems(problems, argv, cluster))
    return EXIT_BAD_CONFIG


def build_job(config: Recipe, arguments: Sequence[str]) -> BatchJob:
    return BatchJob(
        config=config,
        arguments=arguments,
        run_dir=config.output_dir.absolute(),
        working_dir=Path.cwd(),
        python=interpreter_for(config.slurm, sys.executable),
        code_version=snapshot.code_version(ROOT),
    )


def run_options(argv: Sequence[str]) -> list[str]:
    """The arguments for ranks: all but --config and --slurm.*."""
    options, args = list[str](), iter(argv)
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name != "--config" and not name.startswith("--slurm."):
            options.append(arg)
        elif not equals:
            next(args, None)
    return options


def command_line(command: str, run_dir: Path) -> str:
    return f"{sys.executable} -m trainer.slurm {command} {run_dir}"


def print_errors(*problems: str, exit_code: int = EXIT_BAD_CONFIG) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return exit_code


def print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
