"""`python -m trainer.slurm render | submit | status | cancel`: a run as a job of SLURM. Imports no torch.

Leaves with 2 when the configuration is wrong, with 78 when the run folder is of another run, with 1 when the scheduler
cannot be asked or refuses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config.docs import help_text
from trainer.config.parse import find, load, split, to_toml
from trainer.config.slurm import SlurmSection
from trainer.config.training_stages import Recipe
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, ConfigError
from trainer.launch.cluster import Cluster, count
from trainer.launch.launcher import complaint, examine, nothing_to_start
from trainer.slurm import jobs, scheduler, snapshot
from trainer.slurm.scheduler import SlurmError
from trainer.slurm.script import ROOT, Job, log_of, python_of, render

USAGE = """\
python -m trainer.slurm render|submit [--config NAME|PATH] [--section.key VALUE]...
python -m trainer.slurm status|cancel RUN_FOLDER | --config NAME|PATH [--section.key VALUE]...

  render   print the batch script of the run, to be read, changed and given to sbatch
  submit   check the run for the ranks it will have, write script, configuration and code version into
           RUN_FOLDER/slurm/<n>/, and give the script to sbatch
  status   what the scheduler and the run folder say of the run
  cancel   end the run's jobs, for good: they save, and are not requeued

  --config NAME|PATH  a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --nodes N, --gpus-per-node N, --time D-HH:MM:SS, ...
                      short for --slurm.nodes N, --slurm.gpus_per_node N, and so on for every key of [slurm]
  --help              this text

Every key below can stand in the file, under its [section], and on the command line, where it counts
more. Of a repeated option the last one counts. Lists are written 0.9,0.95; null takes a value back.
"""
COMMANDS = ("render", "submit", "status", "cancel")


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        say(help_text(USAGE))
        return DONE
    command, *rest = words or ("",)
    if command not in COMMANDS:
        return refuse(f"{command or 'no command'}: there are {', '.join(COMMANDS)}; see --help")
    try:
        if command in ("render", "submit"):
            return (render_ if command == "render" else submit)(spelled_out(rest))
        run = run_folder(rest)
        return status(run) if command == "status" else cancel(run)
    except ConfigError as error:
        return refuse(*error.problems)
    except SlurmError as error:
        return refuse(str(error), status=FAILED)


def spelled_out(words: Iterable[str]) -> list[str]:
    """`--gpus-per-node 8` as `--slurm.gpus_per_node 8`, and everything else as it is."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        known = name.startswith("--") and key in SlurmSection.model_fields
        found.append(f"--slurm.{key}{equals}{value}" if known else word)
    return found


def run_folder(words: Sequence[str]) -> Path:
    """The run that is meant: a folder, or that of a configuration. Raises `ConfigError`."""
    if len(words) == 1 and not words[0].startswith("--"):
        run = Path(words[0])
    elif words:
        run = load(spelled_out(words)).output_dir
    else:
        raise ConfigError(["which run? give its folder, or --config NAME|PATH"])
    if not run.is_dir():
        raise ConfigError([f"{run}: there is no such run folder"])
    return run.absolute()


# ---- the commands


def render_(argv: Sequence[str]) -> int:
    """Also where corpus and tokenizer are not, which is told."""
    config, problems = examined(argv)
    if config is None or config.shape_problems(config.slurm.nodes * config.slurm.processes):
        return refuse_run(argv, config, problems)
    file = find(split(argv).config).absolute()
    sys.stdout.write(render(job_of(config, ["--config", str(file), *options_of_the_run(argv)])))
    return refuse_run(argv, config, problems) if problems else DONE


def submit(argv: Sequence[str]) -> int:
    config, problems = examined(argv)
    if config is None or problems:
        return refuse_run(argv, config, problems)
    settled = nothing_to_start(config)
    if settled is not None:
        code, reason = settled
        sys.stderr.write(f"{reason}\n")
        return code
    run = config.output_dir.absolute()
    for state in jobs.unfinished(run):
        raise ConfigError([f"job {state.job} of this run is {state}; cancel it first: {command_line('cancel', run)}"])
    folder = jobs.next_folder(run)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "job.sh").write_text(render(job_of(config, ["--config", str(folder / "config.toml")])))
    snapshot.write(ROOT, folder)
    job = scheduler.submit(folder / "job.sh")
    facts = {"job": job, "time": time.time(), "nodes": config.slurm.nodes, "processes": config.slurm.processes}
    (folder / "job.json").write_text(json.dumps(facts) + "\n")
    size = f"{count(config.slurm.nodes, 'node')} x {count(config.slurm.processes, 'rank')}"
    say(
        f"job {job} submitted: {size}, as {folder / 'job.sh'}",
        f"  its log    tail -F {log_of(run, job)}",
        f"  its state  {command_line('status', run)}",
        f"  its end    {command_line('cancel', run)}",
    )
    return DONE


def status(run: Path) -> int:
    say(*jobs.report(run))
    return DONE


def cancel(run: Path) -> int:
    states = jobs.unfinished(run)
    for state in states:
        scheduler.cancel(state.job)
        say(f"job {state.job} cancelled; it was {state}")
    if not states:
        say(f"{run} has no job that is queued or running")
    return DONE


# ---- what they share


def examined(argv: Sequence[str]) -> tuple[Recipe | None, list[str]]:
    """The run, if it can be read, and everything that is wrong with it for the ranks that its job will have."""
    try:
        config = load(argv)
    except ConfigError as error:
        return None, error.problems
    world = {"NGPU": str(config.slurm.processes), "NNODES": str(config.slurm.nodes), "NODE_RANK": "0"}
    return config, examine(argv, world | {"MASTER_ADDR": "the-first-node"})[2]


def refuse_run(argv: Sequence[str], config: Recipe | None, problems: Sequence[str]) -> int:
    cluster = None if config is None else Cluster(processes=config.slurm.processes, nodes=config.slurm.nodes)
    sys.stderr.write(complaint(problems, argv, cluster))
    return BAD_CONFIGURATION


def job_of(config: Recipe, arguments: Sequence[str]) -> Job:
    return Job(
        config=config,
        arguments=arguments,
        run=config.output_dir.absolute(),
        here=Path.cwd(),
        python=python_of(config.slurm, sys.executable),
        code=snapshot.version(ROOT),
    )


def options_of_the_run(argv: Sequence[str]) -> list[str]:
    """What ranks are given beside the file: all but the job's own options."""
    found, words = list[str](), iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name != "--config" and not name.startswith("--slurm."):
            found.append(word)
        elif not equals:
            next(words, None)
    return found


def command_line(command: str, run: Path) -> str:
    return f"{sys.executable} -m trainer.slurm {command} {run}"


def refuse(*problems: str, status: int = BAD_CONFIGURATION) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
