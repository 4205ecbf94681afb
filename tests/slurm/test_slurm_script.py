"""The rendered batch script: its text, and that bash parses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.slurm.script import BATCH_TEMPLATE, ROOT, render
from trainer.storage import exit_markers

HEAD = """\
#!/bin/bash
# Longhaul: long on 4 nodes x 8 ranks; rendered with commit abc.
# Submit with sbatch; /runs/long/slurm must exist. docs/slurm.md describes how it handles signals.
#SBATCH --job-name=long
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --partition=h100
#SBATCH --account=lab
#SBATCH --qos=long
#SBATCH --constraint=nvlink
#SBATCH --exclude=node[3,7]
#SBATCH --chdir=/home/me
#SBATCH --output=/runs/long/slurm/job-%j.log
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --mail-type=FAIL

umask o-w # Strangers may not write what this job creates.

RUN=/runs/long # the run folder
ROOT={root} # Longhaul
PYTHON=/venv/bin/python
OUTSIDE_PYTHON=/venv/bin/python # in no container
ARGUMENTS=(--config /runs/long/slurm/1/config.toml)
NODES=4 # that train
RANKS=32 # tasks of srun
PREFLIGHT=1
MAX_REQUEUES=50
MAX_STUCK=2 # consecutive launches without a new checkpoint
BACKOFF=30 # seconds

# ---- the environment of this shell and of all ranks
module load cuda
ulimit -n 65536
export PYTHONPATH=$ROOT${{PYTHONPATH:+:$PYTHONPATH}}
"""
SRUN = """\
    srun --kill-on-bad-exit=1 --wait=60 --label --nodes="$NODES" --ntasks="$RANKS" --nodelist="$used" --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none \\
        "$PYTHON" -P -u -m trainer.launch "${ARGUMENTS[@]}" &
    srun_pid=$!
"""
TORCHRUN = """\
    srun --kill-on-bad-exit=1 --wait=60 --label --nodes="$NODES" --ntasks="$RANKS" --nodelist="$used" \\
        "$PYTHON" -P -u -m trainer.slurm.torchrun_agent --nodes "$NODES" --processes 4 --meet "$MASTER_ADDR:$MASTER_PORT" \\
        --id "$LONGHAUL_ATTEMPT" "${ARGUMENTS[@]}" &
    srun_pid=$!
"""
EVERYTHING = {
    "nodes": "4",
    "cpus_per_task": "12",
    "memory": "0",
    "time": "1-00:00:00",
    "partition": "h100",
    "account": "lab",
    "qos": "long",
    "constraint": "nvlink",
    "exclude": "node[3,7]",
    "lead_seconds": "900",
    "max_requeues": "50",
    "max_stuck": "2",
    "backoff_seconds": "30",
    "setup": '["module load cuda", "ulimit -n 65536"]',
    "options": '["--exclusive", "--mail-type=FAIL"]',
    "srun_options": "[--cpu-bind=none]",
}


def script(run: str = "/runs/long", here: str = "/home/me", **keys: str) -> str:
    config = load(
        [
            "--job.name",
            "long",
            f"--job.output_dir={run}",
            *(f"--slurm.{key}={value}" for key, value in keys.items()),
        ]
    )
    arguments = ["--config", f"{run}/slurm/1/config.toml"]
    return render(
        config,
        arguments,
        working_dir=Path(here),
        current_python="/venv/bin/python",
        code_version="commit abc",
    )


def directives(text: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    ]


def bash_output(text: str, code: str) -> str:
    """The output of `code` in bash after the settings of a script."""
    settings = "".join(
        f"{line}\n" for line in text.splitlines() if line.partition("=")[0].isupper()
    )
    return subprocess.run(
        ["bash", "-c", f"{settings}{code}"], capture_output=True, text=True, check=True
    ).stdout


def test_every_key_appears_in_the_script() -> None:
    text = script(**EVERYTHING)
    assert text.startswith(HEAD.format(root=ROOT))
    assert SRUN in text


def test_unset_keys_keep_the_defaults_of_the_cluster() -> None:
    names = [line.partition("=")[0] for line in directives(script())]
    options = [
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "chdir",
        "output",
        "signal",
    ]
    assert names == [*(f"--{name}" for name in options), "--requeue", "--open-mode"]
    assert "cpus-per-task" not in script()


def segments(nodes: int, device: str = "gb200", **keys: str) -> list[str]:
    config = load(
        ["--slurm.gpus_per_node=4", f"--slurm.nodes={nodes}", f"--plan.device={device}"]
        + [f"--{key}={value}" for key, value in keys.items()]
    )
    text = render(config, [], working_dir=Path("/"), current_python="python", code_version="")
    return [line for line in directives(text) if line.startswith("--segment")]


def test_segments_are_the_nodes_of_a_rack_that_no_process_group_straddles() -> None:
    assert segments(64) == ["--segment=16"]
    assert segments(36) == ["--segment=18"]
    assert segments(8) == ["--segment=8"]


def test_no_segment_where_a_link_domain_is_one_node_or_the_user_states_one() -> None:
    assert segments(64, "h100-80gb") == []
    assert segments(64, **{"slurm.gpus_per_node": "2"}) == []
    # SLURM requires segments that divide the nodes.
    assert segments(19) == []
    assert segments(64, **{"slurm.options": '["--segment=8"]'}) == ["--segment=8"]


def test_other_lines_are_those_of_the_template() -> None:
    template = BATCH_TEMPLATE.read_text().splitlines()
    text = script(**EVERYTHING).splitlines()
    kept = [line for line in template if not line.lstrip().startswith("# @")]
    assert len(template) - len(kept) == 7
    assert [line for line in text if line in kept] == kept
    assert not any("# @" in line for line in text)


def test_srun_does_not_end_rank_0_while_it_uploads() -> None:
    config = load(["--job.output_dir=/runs/long", "--checkpoint.remote", "s3://bucket/runs/long"])
    text = render(config, [], working_dir=Path("/"), current_python="python", code_version="")
    assert "srun --kill-on-bad-exit=1 --wait=0 --label" in text


def test_spare_nodes_are_allocated_and_do_not_train() -> None:
    text = script(nodes="4", spare_nodes="2", gpus_per_node="8")
    assert "--nodes=6" in directives(text)
    assert {"NODES=4 # that train", "RANKS=32 # tasks of srun"} <= {*text.splitlines()}
    assert "RANKS=4 # tasks of srun" in script(nodes="4", launcher="torchrun").splitlines()
    assert segments(16, **{"slurm.spare_nodes": "2"}) == []
    assert segments(16, **{"slurm.spare_nodes": "16"}) == ["--segment=16"]


def test_the_preflight_expects_the_gpus_of_a_node() -> None:
    assert "-m trainer.preflight" in script()
    assert "--devices 8 &" in script(gpus_per_node="8")
    assert "--devices" not in script(gpus_per_node="0", processes_per_node="2")
    assert "PREFLIGHT=0" in script(preflight="false").splitlines()


def test_torchrun_gets_one_task_per_node_with_all_cores() -> None:
    text = script(launcher="torchrun", gpus_per_node="4")
    assert TORCHRUN in text
    assert "--ntasks-per-node=1" in directives(text)
    assert "--gpus-per-node=4" in directives(text)
    assert "--cpus-per-task=48" in directives(
        script(launcher="torchrun", gpus_per_node="4", cpus_per_task="12")
    )


def test_nodes_without_gpus_request_none() -> None:
    found = directives(script(gpus_per_node="0", processes_per_node="6"))
    assert "--ntasks-per-node=6" in found
    assert not any("gpus" in line for line in found)


def test_a_container_mounts_the_same_paths() -> None:
    text = script(container="nvcr.io#nvidia/pytorch:26.01")
    options = "--container-image='nvcr.io#nvidia/pytorch:26.01' "
    options += '--container-mounts="$MOUNTS" '
    # The report and the check of nodes, and the ranks.
    assert text.count(options + '--container-workdir="$PWD"') == 3


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("container", [{}, {"container": "/images/longhaul.sqsh"}])
def test_bash_parses_the_script(launcher: str, container: dict[str, str]) -> None:
    text = script(launcher=launcher, **EVERYTHING, **container)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("run", ["/runs/it's $HOME", '/runs/a b;"c"', "/runs/50%"])
def test_paths_are_quoted(run: str) -> None:
    text = script(run=run)
    assert bash_output(text, 'printf %s "$RUN"') == run
    assert (
        bash_output(text, 'printf "%s|" "${ARGUMENTS[@]}"')
        == f"--config|{run}/slurm/1/config.toml|"
    )
    (output,) = (
        line for line in directives(script(run="/runs/50% of it")) if line.startswith("--output")
    )
    assert output == '--output="/runs/50%% of it/slurm/job-%j.log"'


@pytest.mark.parametrize("kind", exit_markers.EXIT_MARKERS)
def test_the_script_finds_the_exit_markers_of_its_attempt(tmp_path: Path, kind: str) -> None:
    lines = BATCH_TEMPLATE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("has_marker() {"))
    function = "\n".join(lines[start : lines.index("}", start) + 1])
    exit_markers.write(tmp_path, kind, reason='"quoted"', attempt="41.0.1")
    code = f'{function}\nRUN={tmp_path}\nfor LONGHAUL_ATTEMPT in 41.0.1 41.0.11 41.0 ""; do has_marker {kind}; echo $?; done; has_marker OTHER'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "1", "1", "1"]
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize(
    "option",
    ["--array=1-3", "--no-requeue", "--arr 2", "--no-req", "--output=x", "--time=1:00:00"],
)
def test_options_that_would_break_the_run_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm.options.*must not be --"):
        load([f'--slurm.options=["{option}"]'])


def test_a_line_break_does_not_become_a_line_of_the_script() -> None:
    with pytest.raises(ConfigError, match=r"job.output_dir.*must not contain line breaks"):
        load(["--job.output_dir=/runs/a\n#SBATCH --nodes=99"])


# ---- containers


def test_a_container_mounts_every_path_that_the_configuration_names(tmp_path: Path) -> None:
    for name in ("here", "books", "cache", "tokenizer", "weights", "real", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "real")
    sources = f'[data.sources]\nweb = {{ path = "{tmp_path}/here/linked" }}\n'
    (tmp_path / "run.toml").write_text(sources)
    config = load(
        [
            f"--config={tmp_path}/run.toml",
            f"--job.output_dir={tmp_path}/runs/long",
            "--slurm.container=/images/longhaul.sqsh",
            f"--data.corpus={tmp_path}/books",
            f"--data.cache_dir={tmp_path}/cache/not/yet",
            "--tokenizer.kind=huggingface",
            f"--tokenizer.path={tmp_path}/tokenizer",
            f"--checkpoint.initial_load_path=hf:{tmp_path}/weights",
        ]
    )
    text = render(
        config,
        [],
        working_dir=tmp_path / "here",
        current_python="/venv/bin/python",
        code_version="",
    )
    expected = ["books", "cache", "real", "tokenizer", "weights"]
    always = [ROOT, tmp_path / "runs/long", tmp_path / "here"]
    mounted = bash_output(text, 'printf %s "$MOUNTS"').split(",")
    assert mounted[:3] == [f"{path}:{path}" for path in always]
    assert {f"{tmp_path / name}:{tmp_path / name}" for name in expected} <= set(mounted[3:])
    assert not any(place.startswith("/:") for place in mounted)


def test_a_path_that_pyxis_cannot_mount_is_refused() -> None:
    with pytest.raises(ConfigError, match="/a,b has a comma, a colon or a quote"):
        script(run="/runs/a,b", container="/images/longhaul.sqsh")


FAKE_SRUN = """#!/bin/bash
# Runs the command once, with what an image may set; the host's variables lose against them, as with pyxis.
while [[ $1 == --* ]]; do shift; done
[[ $1 == timeout || $1 == srun ]] && shift
PYTHONPATH=/of/the/image PYTHONHOME=/of/the/image exec "$@"
"""


@pytest.mark.parametrize("user_site", ["", "1"])
def test_the_interpreter_of_a_container_finds_our_code(user_site: str, tmp_path: Path) -> None:
    text = script(container="/images/longhaul.sqsh", run=str(tmp_path), python=sys.executable)
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    (start,) = (line for line in text.splitlines() if "-m trainer.launch" in line)
    command = (
        start.strip()
        .removesuffix(" &")
        .replace(
            '-P -u -m trainer.launch "${ARGUMENTS[@]}"',
            "-P -c 'import sys, trainer; print(trainer.__file__, sys.flags.no_user_site)'",
        )
    )
    code = f"export PYTHONPATH=$ROOT{'; export PYTHONNOUSERSITE=' + user_site if not user_site else ''}\n{srun} --label {command}"
    found, no_user_site = bash_output(text, code).split()
    assert found == str(ROOT / "trainer/__init__.py")
    # The packages of a home that is mounted are those of another interpreter, unless asked for.
    assert no_user_site == (user_site or "0")
