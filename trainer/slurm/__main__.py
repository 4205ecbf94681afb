"""`longhaul slurm render | submit | status | cancel`: runs as SLURM jobs. Imports no torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from trainer.command_table import typed
from trainer.commands import CommandParser, Run, overrides_help, print_lines, run_command
from trainer.config import checks
from trainer.config.parse import find_config_file, load, parse_arguments
from trainer.config.slurm import SlurmSection
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS, ConfigError
from trainer.launch.cluster import LaunchWorld, pluralize
from trainer.launch.launcher import (
    device_problems,
    find_early_exit,
    format_problems,
    load_and_validate,
)
from trainer.slurm import jobs, scheduler, snapshot
from trainer.slurm.script import ROOT, log_path, render

DESCRIPTION = "Runs as SLURM jobs that requeue themselves."
SUMMARIES = {
    "render": "print the batch script of the run, to read, edit and submit with sbatch",
    "submit": "check the run for the world of the job, write script, configuration and code version to "
    "RUN_FOLDER/slurm/<n>/, and submit the script with sbatch",
    "status": "show the state of the run's jobs, newest step and checkpoint",
    "cancel": "cancel the run's jobs permanently: they save and are not requeued",
}


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("slurm"), DESCRIPTION)
    runs: dict[str, Run] = {
        "render": print_script,
        "submit": submit,
        "status": print_status,
        "cancel": cancel,
    }
    for name, run in runs.items():
        command = parser.add_command(name, SUMMARIES[name], run=run, overrides=overrides_help())
        command.add_config()
        for key, field in SlurmSection.model_fields.items():
            option = f"--{key.replace('_', '-')}"
            text = str(field.description).replace("%", "%%")
            command.add_argument(option, dest=f"slurm.{key}", metavar="VALUE", help=text)
        if name in ("status", "cancel"):
            command.add_argument(
                "run_dir", nargs="?", type=Path, metavar="RUN_FOLDER", help="or --config NAME|PATH"
            )
    return parser


def print_script(_: Namespace, overrides: Sequence[str]) -> int:
    """Prints the script, and names what is missing here: corpus, tokenizer or weights may be where
    the job runs, and `submit` looks for them.
    """
    config, problems = load_job(overrides)
    is_possible = not checks.layout_problems(
        config, config.slurm.nodes * config.slurm.nproc_per_node
    )
    if is_possible:
        file = find_config_file(parse_arguments(overrides).config).absolute()
        # Ranks need no options of the job.
        for_ranks = [each for each in overrides if not each.startswith(("--config=", "--slurm."))]
        sys.stdout.write(render_script(config, ["--config", str(file), *for_ranks]))
    status = print_problems(problems, config, overrides) if problems else EXIT_SUCCESS
    return EXIT_SUCCESS if is_possible else status


def submit(_: Namespace, overrides: Sequence[str]) -> int:
    config, problems = load_job(overrides)
    if problems:
        return print_problems(problems, config, overrides)
    if early_exit := find_early_exit(config):
        exit_code, reason = early_exit
        sys.stderr.write(f"{reason}\n")
        return exit_code
    run_dir = config.output_dir.absolute()
    slurm = config.slurm
    for state in jobs.active_jobs(run_dir):
        cancel_command = typed("slurm", "cancel", run_dir)
        raise ConfigError(
            [f"job {state.job_id} of this run is {state}; cancel it first: {cancel_command}"]
        )
    folder = jobs.create_submission_dir(run_dir)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "job.sh").write_text(
        render_script(config, ["--config", str(folder / "config.toml")])
    )
    snapshot.write_code_version(ROOT, folder)
    job_id = scheduler.submit(folder / "job.sh")
    jobs.record_submission(folder, run_dir, job_id, config)
    size = f"{pluralize(slurm.nodes, 'node')} x {pluralize(slurm.nproc_per_node, 'rank')}"
    print_lines(
        f"job {job_id} submitted: {size}, as {folder / 'job.sh'}",
        f"  log     tail -F {log_path(run_dir, job_id)}",
        f"  status  {typed('slurm', 'status', run_dir)}",
        f"  cancel  {typed('slurm', 'cancel', run_dir)}",
    )
    return EXIT_SUCCESS


def print_status(options: Namespace, overrides: Sequence[str]) -> None:
    print_lines(*jobs.status_report(find_run_dir(options, overrides)))


def cancel(options: Namespace, overrides: Sequence[str]) -> None:
    run_dir = find_run_dir(options, overrides)
    states = jobs.active_jobs(run_dir)
    for state in states:
        scheduler.cancel(state.job_id)
        print_lines(f"job {state.job_id} cancelled; it was {state}")
    if not states:
        print_lines(f"{run_dir} has no job that is queued or running")


def find_run_dir(options: Namespace, overrides: Sequence[str]) -> Path:
    """The run folder, given directly or by a configuration. Raises `ConfigError`."""
    if not options.run_dir and not overrides:
        raise ConfigError(["no run given: pass its folder, or --config NAME|PATH"])
    run_dir: Path = options.run_dir or load(overrides).output_dir
    if not run_dir.is_dir():
        raise ConfigError([f"{run_dir}: no such run folder"])
    return run_dir.absolute()


def load_job(overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The run, and all its problems for the world of the job.

    Raises `ConfigError` if it cannot be parsed.
    """
    config = load(overrides)
    environment = {
        "NGPU": str(config.slurm.nproc_per_node),
        "NNODES": str(config.slurm.nodes),
        "NODE_RANK": "0",
    }
    environment["MASTER_ADDR"] = "the-first-node"
    return config, load_and_validate(overrides, environment)[2] or device_problems(config)


def print_problems(problems: Sequence[str], config: Recipe, overrides: Sequence[str]) -> int:
    world = LaunchWorld(nproc_per_node=config.slurm.nproc_per_node, num_nodes=config.slurm.nodes)
    sys.stderr.write(format_problems(problems, overrides, world))
    return EXIT_BAD_CONFIG


def render_script(config: Recipe, arguments: Sequence[str]) -> str:
    version = snapshot.code_version(ROOT)
    return render(
        config,
        arguments,
        working_dir=Path.cwd(),
        current_python=sys.executable,
        code_version=version,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
