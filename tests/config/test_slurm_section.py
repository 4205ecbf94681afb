"""`[slurm]`: what is refused, and that a run does not depend on it."""

from __future__ import annotations

import pytest

from trainer.checkpoint.run_dir import flatten_config, run_identity
from trainer.config.parse import load
from trainer.config.slurm import parse_time_limit
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("time", "amount"), [("00:00:01", 1), ("1:01:01", 3661), ("100:00:00", 360_000), ("2-03:00:00", 183_600)]
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, amount: int) -> None:
    assert parse_time_limit(time) == amount
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
def test_what_no_line_of_a_script_could_hold_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([f"--slurm.{key}={value}"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"command line: --slurm.{key} ")
    assert " must " in problem


def test_a_lead_must_be_shorter_than_the_time_limit() -> None:
    assert load(["--slurm.time", "00:05:01"]).slurm.problems() == []
    problem = 'slurm.lead_seconds = 300 must be below slurm.time = "00:05:00", 300 s'
    config = load(["--slurm.time", "00:05:00"])
    assert config.slurm.problems() == [problem]
    assert config.problems(1) == [problem]


def test_ranks_are_counted_by_gpus_or_where_there_are_none_by_their_number() -> None:
    assert load([]).slurm.nproc_per_node == 8
    assert load(["--slurm.gpus_per_node", "4"]).slurm.nproc_per_node == 4
    alone = load(["--slurm.gpus_per_node", "0"]).slurm
    assert alone.nproc_per_node == 1
    assert load(["--slurm.gpus_per_node", "0", "--slurm.processes_per_node", "3"]).slurm.nproc_per_node == 3
    (problem,) = load(["--slurm.processes_per_node", "3"]).slurm.problems()
    assert problem.startswith("slurm.processes_per_node = 3 is for slurm.gpus_per_node = 0; 8 GPUs")


def test_a_run_goes_on_in_any_job() -> None:
    one, other = load([]), load(["--slurm.nodes", "4", "--slurm.launcher", "torchrun"])
    assert run_identity(one) == run_identity(other)
    assert flatten_config(one) == flatten_config(other)
