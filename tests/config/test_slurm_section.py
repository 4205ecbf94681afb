"""Validation of the `[slurm]` section."""

from __future__ import annotations

import pytest

from trainer.config import checks
from trainer.config.parse import load
from trainer.config.slurm import parse_time_limit
from trainer.errors import ConfigError
from trainer.storage.run_dir import flatten_config, run_identity


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("00:00:01", 1), ("1:01:01", 3661), ("100:00:00", 360_000), ("2-03:00:00", 183_600)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, seconds: int) -> None:
    assert parse_time_limit(time) == seconds
    assert load(["--slurm.time", time]).slurm.time == time


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time", "90"),
        ("time", "10:70:00"),
        ("time", "1d-00:00:00"),
        ("memory", "64GB"),
        ("partition", "a b"),
        ("account", "$(reboot)"),
        ("exclude", "n1'"),
        ("options", "exclusive"),
        ("options", "--a\n#SBATCH --b"),
        ("srun_options", '--x="y"'),
        ("launcher", "mpirun"),
        ("lead_seconds", "70000"),
        ("nodes", "0"),
    ],
)
def test_values_that_a_script_cannot_quote_are_errors(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([f"--slurm.{key}={value}"])
    (problem,) = error.value.problems
    assert problem.startswith(f"command line: --slurm.{key} ")
    assert " must " in problem


def test_a_lead_must_be_shorter_than_the_time_limit() -> None:
    assert [*checks.slurm_problems(load(["--slurm.time", "00:05:01"]).slurm)] == []
    problem = 'slurm.lead_seconds = 300 must be below slurm.time = "00:05:00", 300 s'
    config = load(["--slurm.time", "00:05:00"])
    assert [*checks.slurm_problems(config.slurm)] == [problem]
    assert checks.problems(config, 1) == [problem]


def test_ranks_per_node_are_gpus_or_processes() -> None:
    assert load([]).slurm.nproc_per_node == 8
    assert load(["--slurm.gpus_per_node", "4"]).slurm.nproc_per_node == 4
    cpu_job = load(["--slurm.gpus_per_node", "0"]).slurm
    assert cpu_job.nproc_per_node == 1
    assert (
        load(
            ["--slurm.gpus_per_node", "0", "--slurm.processes_per_node", "3"]
        ).slurm.nproc_per_node
        == 3
    )
    (problem,) = checks.slurm_problems(load(["--slurm.processes_per_node", "3"]).slurm)
    assert problem.startswith(
        "slurm.processes_per_node = 3 is only used with slurm.gpus_per_node = 0, not 8"
    )


def test_the_slurm_section_does_not_identify_a_run() -> None:
    one = load([])
    other = load(["--slurm.nodes", "4", "--slurm.launcher", "torchrun"])
    assert run_identity(flatten_config(one)) == run_identity(flatten_config(other))
    assert flatten_config(one) == flatten_config(other)
