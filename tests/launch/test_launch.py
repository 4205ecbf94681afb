"""The launcher: world detection, validation, reports, and exit codes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from trainer.config.job_config import Config
from trainer.config.migrations import migrate_file
from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.launch.cluster import (
    LaunchWorld,
    allocator_settings,
    default_nproc_per_node,
    detect_launch_world,
    set_worker_environment,
)
from trainer.launch.launcher import (
    format_problems,
    format_resolved_config,
    load_and_validate,
    main,
)
from trainer.launch.workers import exit_status
from trainer.slurm.__main__ import load_job

ROOT = Path(__file__).resolve().parents[2]
Launch = Callable[..., subprocess.CompletedProcess[str]]

LAUNCH = """
import sys
from pathlib import Path
from trainer.launch.cluster import LaunchWorld
from trainer.launch.workers import Workers
workers = Workers()
with workers.forward_signals():
    sys.exit(workers.run(Path(sys.argv[1]), sys.argv[2:], LaunchWorld(nproc_per_node=2)))
"""


def config_with(**degrees: int) -> Config:
    return Recipe.model_validate({"parallelism": degrees})


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    for name in (
        "NGPU",
        "NNODES",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer.launch", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


# ---- the world


@pytest.mark.parametrize(
    ("degrees", "processes"),
    [
        ({}, 2),
        ({"cp": 4}, 4),
        ({"dp_shard": 2, "tp": 2}, 4),
        ({"dp_shard": 1}, 2),
        ({"dp_shard": 64}, 8),
    ],
)
def test_without_gpus_the_stated_degrees_give_two_to_eight_processes(
    degrees: dict[str, int], processes: int
) -> None:
    assert default_nproc_per_node(config_with(**degrees)) == processes
    assert detect_launch_world({}, config_with(**degrees), gpus=0) == LaunchWorld(
        nproc_per_node=processes
    )


def test_gpus_give_the_processes_and_ngpu_overrides_them() -> None:
    assert detect_launch_world({}, config_with(dp_shard=4), gpus=3).nproc_per_node == 3
    assert detect_launch_world({"NGPU": "5"}, config_with(dp_shard=4), gpus=3).nproc_per_node == 5
    assert detect_launch_world({"NGPU": ""}, config_with(dp_shard=4), gpus=0).nproc_per_node == 4


def test_nnodes_multiplies_the_world_size() -> None:
    environment = {
        "NGPU": "8",
        "NNODES": "4",
        "NODE_RANK": "3",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "1234",
    }
    cluster = detect_launch_world(environment, Recipe(), gpus=0)
    assert cluster == LaunchWorld(
        nproc_per_node=8, num_nodes=4, node_rank=3, master_endpoint="host:1234"
    )
    assert cluster.world_size == 32


@pytest.mark.parametrize(
    ("environment", "problems"),
    [
        ({"NGPU": "0"}, ['environment: NGPU = "0" must be an integer, 1 to 1024']),
        ({"NGPU": "-2"}, ['environment: NGPU = "-2" must be an integer, 1 to 1024']),
        (
            {"NGPU": "two", "NNODES": "1.5"},
            ['NGPU = "two"', 'NNODES = "1.5" must be an integer, at least 1'],
        ),
        ({"NNODES": "2"}, ["NNODES = 2 needs NODE_RANK", "NNODES = 2 needs MASTER_ADDR"]),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            ['NODE_RANK = "2" must be an integer, 0 to 1'],
        ),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "70000"},
            ['MASTER_PORT = "70000" must be an integer, 1 to 65535'],
        ),
    ],
)
def test_each_wrong_environment_variable_is_reported(
    environment: dict[str, str], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_launch_world(environment, Recipe(), gpus=0)
    assert len(caught.value.problems) == len(problems)
    assert all(
        part in problem for part, problem in zip(problems, caught.value.problems, strict=True)
    )


def test_a_task_of_srun_is_one_rank_of_its_step() -> None:
    environment = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "NGPU": "7"}
    assert detect_launch_world(environment, Recipe(), gpus=2) == LaunchWorld(
        nproc_per_node=4, rank=3, master_endpoint="127.0.0.1:20000"
    )
    two_nodes = environment | {
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "123",
        "SLURM_STEP_NUM_NODES": "2",
    }
    assert detect_launch_world(two_nodes, Recipe(), gpus=2) == LaunchWorld(
        nproc_per_node=2, num_nodes=2, rank=3, master_endpoint="node7:123"
    )
    uneven = two_nodes | {"SLURM_NTASKS": "5"}
    assert detect_launch_world(uneven, Recipe(), gpus=2) == LaunchWorld(
        nproc_per_node=5, rank=3, master_endpoint="node7:123"
    )


def test_srun_on_several_nodes_needs_master_addr() -> None:
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }
    with pytest.raises(ConfigError, match="srun on 2 nodes needs MASTER_ADDR"):
        detect_launch_world(environment, Recipe(), gpus=2)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
        },
    ],
    ids=["batch script", "single task", "shell in an allocation"],
)
def test_a_single_slurm_task_starts_its_own_workers(environment: dict[str, str]) -> None:
    assert detect_launch_world(environment, Recipe(), gpus=2) == LaunchWorld(nproc_per_node=2)


def test_workers_share_the_cores_unless_the_environment_is_set() -> None:
    many_workers: dict[str, str] = {}
    set_worker_environment(many_workers, LaunchWorld(nproc_per_node=10_000))
    assert many_workers["OMP_NUM_THREADS"] == "1"
    given = {
        "OMP_NUM_THREADS": "3",
        "PYTORCH_ALLOC_CONF": "backend:native",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth2",
    }
    preset = dict(given)
    set_worker_environment(preset, LaunchWorld(nproc_per_node=1))
    assert preset == given


def test_threads_that_touch_pinned_memory_are_those_of_a_worker_and_not_many() -> None:
    found = [allocator_settings(threads).rpartition(":")[2] for threads in (1, 8, 128)]
    assert found == ["1", "8", "16"]


# ---- reports


def test_problems_of_file_command_line_and_environment_are_reported_together() -> None:
    config, cluster, problems = load_and_validate(
        ["--config", "nowhere", "--training.steps", "0"], {"NGPU": "x"}
    )
    assert (config, cluster, len(problems)) == (Recipe(), None, 3)
    assert format_problems(problems, ["--config", "nowhere"], cluster).endswith(
        "nothing was started: 3 problems with nowhere\n"
    )


@pytest.mark.parametrize(
    ("device", "kernel", "rule"),
    [
        ("a100-80gb", "fa3", "runs on hopper devices, not on ampere"),
        ("b200", "fa3", "runs on hopper devices, not on blackwell"),
        ("rtx-5090", "fa4", "not on blackwell rtx"),
        ("h200", "fa3", ""),
    ],
)
def test_check_and_a_batch_script_refuse_a_kernel_that_the_stated_device_lacks(
    device: str, kernel: str, rule: str
) -> None:
    argv = [
        "--training.dtype=bfloat16",
        f"--plan.device={device}",
        f"--training.attention={kernel}",
    ]
    checked = load_and_validate(argv, {"NGPU": "1"}, checking=True)[2]
    # The folder of a cluster's nodes, and their GPUs, are not this machine's.
    _, scripted = load_job([*argv, "--slurm.gpus_per_node=1"])
    for problems in (checked, scripted):
        assert len(problems) == bool(rule)
        assert all(rule in problem and kernel in problem for problem in problems)


def test_a_problem_report_names_the_file_and_the_world() -> None:
    text = format_problems(["wrong"], [], LaunchWorld(nproc_per_node=4, num_nodes=2))
    assert text.splitlines()[0] == "error: wrong"
    assert text.splitlines()[1].endswith("debug.toml for 8 processes (2 nodes x 4)")


def test_check_output_is_the_resolved_toml_with_the_mesh_in_comments() -> None:
    config = load(["--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "16"])
    text = format_resolved_config(config, LaunchWorld(nproc_per_node=8, num_nodes=4))
    assert Recipe.model_validate(migrate_file(tomli.loads(text))) == config
    assert "# mesh of 32 processes (4 nodes x 8)" in text
    assert "#   dp_shard                16  across 2 nodes    0-15  16-31\n" in text
    assert (
        "#   dp_replicate             2  across 2 nodes    0,16  1,17  2,18  3,19 ... (16 groups)\n"
        in text
    )
    assert "#   tp " not in text
    assert f"{config.model.build().num_parameters:,} parameters" in text
    assert "8 micro-batches of 1 sequence, 1 on each data-parallel rank" in text
    assert "# warning: training.global_batch_size = 8" in text
    assert "ranks_per_node" not in text.partition("# mesh of")[2]
    text = format_resolved_config(
        load(["--parallelism.tp", "16"]), LaunchWorld(nproc_per_node=4, num_nodes=4)
    )
    assert "# warning: parallelism.tp = 16 crosses nodes of 8 ranks" in text
    assert (
        "# warning: parallelism.ranks_per_node = 8 does not match 4 nodes of 4 processes" in text
    )


def test_check_prints_the_configuration_and_starts_nothing(launch: Launch) -> None:
    done = launch("--check", "--parallelism.dp_shard", "4", "--training.steps", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert tomli.loads(done.stdout)["training"]["steps"] == 7
    assert "# mesh of 4 processes" in done.stdout
    assert "# memory is predicted where devices are known: set plan.device" in done.stdout


def test_check_predicts_memory_where_a_device_is_known(launch: Launch) -> None:
    words = ("--plan.device", "h100-80gb", "--memory.recompute", "auto")
    done = launch("--check", "--parallelism.dp_shard", "4", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert '# memory options that are "auto": memory.recompute = "none"' in done.stdout
    assert "# predicted peak memory per rank: " in done.stdout


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_wrong_configuration_exits_with_2_and_no_traceback(
    launch: Launch, flags: list[str]
) -> None:
    done = launch("--training.micro_batch_size", "3", *flags, "--parallelism.dp_shard", "64")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error: ") == 2
    assert "the world size is 8" in done.stderr
    assert "Traceback" not in done.stderr


def test_torchtitans_config_file_variable_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIG_FILE", "theirs.toml")
    done = launch("--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: CONFIG_FILE, a variable of torchtitan, is not read: use --config" in done.stderr
    assert launch("--check", "--config", "debug").returncode == 0


def test_only_the_first_srun_task_reports_problems(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    for task, reports in (("0", True), ("1", False)):
        monkeypatch.setenv("SLURM_PROCID", task)
        done = launch("--parallelism.dp_shard", "2")
        assert done.returncode == 2
        assert ("the world size is 3" in done.stderr) == reports


def test_help_ignores_other_arguments(launch: Launch) -> None:
    done = launch("--help", "--zebra")
    assert done.returncode == 0
    assert "--training.seq_len" in done.stdout


def test_plan_rejects_a_wrong_configuration(launch: Launch) -> None:
    for words in (["--zebra"], ["--plan.device", "zebra"]):
        done = launch("--plan", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "zebra" in done.stderr


# ---- exit codes of workers


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([78], 78),
        ([1, 78], 78),
        ([-6, 1, 78], 78),
        ([2, 2], 2),
        ([1], 1),
        ([-9], 1),
        ([3], 1),
        ([255, -15], 1),
    ],
)
def test_a_conclusive_exit_code_of_any_worker_wins(codes: list[int], status: int) -> None:
    assert exit_status(codes) == status


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("sys.exit(0 if sys.argv[1:] == ['--a', 'b c'] else 1)", 0, ""),
        ("sys.exit(78 if rank == 1 else 0)", 78, "rank 1 (pid"),
        ("rank == 0 and os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL"),
        (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            "if rank == 0: time.sleep(1); os.kill(os.getppid(), signal.SIGTERM)\n"
            "time.sleep(60); sys.exit(1)",
            0,
            "",
        ),
    ],
    ids=["done", "permanent failure", "killed", "stop signal"],
)
def test_the_launcher_exits_with_the_status_of_its_workers(
    tmp_path: Path, body: str, status: int, message: str
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    command = [sys.executable, "-c", LAUNCH, str(worker), "--a", "b c"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(message)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_launchers_form_one_world(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    code = LAUNCH.replace(
        "LaunchWorld(nproc_per_node=2)",
        "LaunchWorld(nproc_per_node=1, num_nodes=2, node_rank={}, master_endpoint='localhost:{}')",
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(node, port), str(worker)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted("".join(outputs).splitlines()) == ["0 2", "1 2"]


def test_check_prints_the_mesh_without_corpus_and_tokenizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.setattr(sys, "argv", ["launch", "--config", "llama3_8b_128k", "--check"])
    assert main() == 2
    printed = capsys.readouterr()
    assert "# mesh of 8 processes" in printed.out
    assert "error: tokenizer.path" in printed.err
    monkeypatch.setenv("NGPU", "4")
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        "needs 8 processes, but the world size is 4 (NGPU x NNODES, or torchrun's)" in printed.err
    )
