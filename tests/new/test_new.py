"""`longhaul new`: what it writes starts, and is the best that the planner finds."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig
from tests.huggingface_folders import write_family
from tests.models.hf_models import LLAMA, write
from tests.models.small_models import small_model
from tests.plan.made_up_traces import make_up_traces
from tests.system.runs import launched, metrics
from trainer.config.parse import load
from trainer.hardware.device_specs import load_device
from trainer.launch import launcher
from trainer.new import __main__ as new_command
from trainer.new.__main__ import main
from trainer.new.choices import Choices
from trainer.plan import search as layouts
from trainer.plan.run_plan import plan_stage
from trainer.plan.search import SearchResult, search
from trainer.slurm.__main__ import main as slurm_main

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--model", "llama3/debug", "--seq-len", "512", "--device", "h100-80gb", "--gpus", "2"]
SMALL_STEPS = ["--training.global_batch_size", "4", "--training.steps", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with a corpus; nobody is at the terminal, nothing was downloaded, and
    traces are made up.
    """
    make_up_traces(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(new_command, "is_terminal", lambda: False)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a document of the corpus\n" * 50)
    return tmp_path


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def check_status(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `longhaul train --config NAME.toml --check`."""
    monkeypatch.setattr(sys, "argv", ["launch", "--config", f"{name}.toml", "--check"])
    monkeypatch.setenv("NGPU", str(ranks))
    return launcher.main()


@pytest.mark.slow
def test_the_configuration_passes_the_check_and_is_the_best_of_the_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["long", "--model", "llama3/8b", "--tokenizer", "byte", "--seq-len", "128K"]
    assert main([*words, "--device", "h200", "--gpus", "8", "--corpus", "texts"]) == 0
    assert files_in(folder) == ["long.md", "long.toml"]
    assert check_status("long", 8, monkeypatch) == 0
    written = load(["--config", "long.toml"])
    assert written.training.seq_len == 131_072
    assert written.stated_world_size == 8
    # The search asks for no layout: what the file says of it does not count.
    best = search(written, 8, load_device("h200")).best[0]
    assert best.mesh["cp"] * best.mesh["tp"] > 1
    planned = plan_stage(written, 8, load_device("h200"))
    assert planned.config.parallelism == best.config.parallelism
    assert planned.config.memory == best.config.memory
    assert planned.step_seconds == best.step_seconds


def test_the_page_gives_the_plan_and_the_commands_that_follow(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", *TINY, "--corpus", "texts", *SMALL_STEPS]) == 0
    page = (folder / "tiny.md").read_text()
    printed = capsys.readouterr().out
    for word in ("prepare --config tiny.toml", "selfcheck --config tiny.toml", "NGPU=2 "):
        assert word in page
        assert word in printed
    for heading in ("Peak device memory", "Step time", "Fastest layouts that fit"):
        assert f"### {heading}" in page
    assert "| tokens / s | " in page
    assert "longhaul new tiny" in page or "trainer.new tiny" in page
    assert "wrote tiny.toml, tiny.md\n" in printed


@pytest.mark.parametrize(
    ("size", "steps", "epochs"), [(1024, 10, 20), (100_352, 196, None), (1_048_576, 1000, None)]
)
def test_a_small_corpus_is_read_four_times_and_more_is_said(
    size: int, steps: int, epochs: int | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "texts" / "one.txt").write_text("x" * size)
    # 2,048 tokens a step, of one byte each.
    assert main(["read", *TINY, "--corpus", "texts", "--training.global_batch_size", "4"]) == 0
    written = load(["--config", "read.toml"])
    assert written.training.steps == steps
    assert written.schedule.warmup_steps == steps // 10
    line = f"the corpus has about {size:,} tokens: {steps:,} steps of 2,048 read it {epochs} times"
    assert (line in capsys.readouterr().out) == (epochs is not None)


def test_all_that_is_missing_is_named_at_once_and_nothing_is_asked_without_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lacking", "--model", "llama3/8b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    options = [line.split()[1] for line in err.splitlines()]
    assert options == ["--seq-len", "--device", "--gpus", "--corpus", "--tokenizer"]
    assert all(" is missing: " in line for line in err.splitlines())
    assert files_in(folder) == []


@pytest.mark.ranks
def test_a_terminal_is_asked_once_for_each_choice_that_is_missing(folder: Path) -> None:
    # The first answer is refused. An empty one takes the suggestion, which a corpus has none of.
    answers = ["llama3/9b", "llama3/debug", "", "2", "", "texts"]
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "trainer.new", "asked", "--seq-len", "512"]
    command += SMALL_STEPS
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        os.close(theirs)
        os.write(mine, "".join(f"{answer}\n" for answer in answers).encode())
        shown = b""
        while part := read_terminal(mine):
            shown += part
        assert process.wait(120) == 0, shown
    os.close(mine)
    text = shown.decode()
    questions = ["as llama3/8b: ", "a name or a file [", "number of devices [", "hf:DATASET, or"]
    assert [text.count(question) for question in questions] == [2, 1, 1, 2]
    assert "family llama3 has no size 9b" in text
    assert "tokens of a sequence" not in text
    config = load(["--config", "asked.toml"])
    assert (config.training.seq_len, config.data.corpus) == (512, "texts")
    assert config.plan.device == "h100-80gb"
    # The page repeats the answers as options.
    assert "--model llama3/debug --device h100-80gb" in (folder / "asked.md").read_text()


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    # Linux's end of file, once nobody holds the other side.
    except OSError:
        return b""


def test_a_cluster_gets_the_script_that_slurm_renders(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "llama3/debug", "--seq-len", "16K", "--device", "h100-80gb"]
    cluster = ["--nodes", "2", "--partition", "gpu", "--account", "lab", "--slurm.memory", "0"]
    assert main(["job", *words, *cluster, "--corpus", "texts"]) == 0
    assert "slurm submit --config job.toml" in capsys.readouterr().out
    script = (folder / "job.sh").read_text()
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = script.splitlines()
    assert {"NODES=2 # that train", "RANKS=16 # tasks of srun"} <= {*lines}
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --mem=0"} <= {*lines}
    assert slurm_main(["render", "--config", "job.toml"]) == 0
    assert capsys.readouterr().out == script
    assert load(["--config", "job.toml"]).stated_world_size == 16


def test_a_job_has_time_for_two_steps_and_two_checkpoints_before_its_end() -> None:
    words = [
        "--model",
        "llama3/70b",
        "--tokenizer",
        "byte",
        "--seq-len",
        "1M",
        "--corpus",
        "texts",
    ]
    mesh = ["--parallelism.cp", "32", "--training.micro_batch_size", "1"]
    assert (
        main(["slow", *words, *mesh, "--device", "h100-80gb", "--nodes", "4", "--time", "1:00:00"])
        == 0
    )
    config = load(["--config", "slow.toml"])
    planned = plan_stage(config, 32, load_device("h100-80gb"))
    assert planned.step_seconds > 150
    assert config.slurm.lead_seconds > 2 * planned.step_seconds + 30


def test_keys_are_written_as_given_and_the_search_keeps_those_of_the_layout() -> None:
    keys = ["--parallelism.tp", "2", "--optimizer.lr", "0.001", "--memory.recompute", "full"]
    assert main(["keyed", *TINY, "--corpus", "texts", *keys, "--seq-len", "2K"]) == 0
    config = load(["--config", "keyed.toml"])
    assert (config.parallelism.tp, config.memory.recompute) == (2, "full")
    assert (config.optimizer.lr, config.training.seq_len) == (0.001, 2048)


def test_existing_files_are_replaced_only_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old.md").write_text("mine")
    command = ["old", *TINY, "--corpus", "texts"]
    assert main(command) == 2
    assert capsys.readouterr().err == "error: old.md exists already; --force replaces it\n"
    assert files_in(folder) == ["old.md"]
    assert main([*command, "--force"]) == 0
    assert (folder / "old.md").read_text() != "mine"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("debug", [], 'NAME "debug" is that of a shipped configuration'),
        ("a/b", [], "command line: --job.name a/b must match"),
        ("x", ["--model", "lama3/8b"], "did you mean llama3?"),
        ("x", ["--model", "llama3/1b"], "no size 1b; did you mean llama3.2/1b?"),
        ("x", ["--model", "Qwen/Qwen3-0.6B"], 'a model of the Hub is "hf:Qwen/Qwen3-0.6B"'),
        ("x", ["--model", "llama3/9b"], "family llama3 has no size 9b; sizes: debug, 8b, 70b"),
        (
            "x",
            ["--model", "hf:meta-llama/Llama-3.1-8B"],
            "run hf download meta-llama/Llama-3.1-8B",
        ),
        ("x", ["--model", "hf:a/../../b"], "run hf download a/../../b"),
        ("x", ["--model", "texts"], "texts"),
        ("x", ["--device", "h100-90gb"], 'device "h100-90gb" is neither a table nor a file; did'),
        ("x", ["--device", "cpu"], "a plan is of the GPUs that a run will use; tables: a100-40gb"),
        ("x", ["--seq-len", "1T"], "--seq-len 1T must be an integer"),
        ("x", ["--nodes", "3"], "--gpus 2 must be the devices of 3 nodes, 24, or be left out"),
        ("x", ["--corpus", "absent"], 'data.corpus = "absent" is neither'),
        ("x", ["--tokenizer", "texts"], '--tokenizer "texts" must be'),
        ("x", ["--optimizer.rl", "1"], "--optimizer.rl 1: unknown key; [optimizer] has"),
        ("x", ["--job.name", "y"], "--job.name is NAME, x: leave it out"),
        ("x", ["--text-only"], "--text-only is only used with a folder"),
        ("x", ["--parallelism.tp", "3"], "parallelism.tp as given: no layout of 2 devices"),
        ("x", ["--gpus", "12", "--partition", "gpu"], "must be a multiple of the 8 of a node"),
    ],
)
def test_mistakes_exit_with_2_and_write_nothing(
    name: str, words: Sequence[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of a repeated option the last counts.
    assert main([name, *TINY, "--corpus", "texts", *words]) == 2
    assert message in capsys.readouterr().err
    assert files_in(folder) == []


def test_a_run_that_fits_nowhere_exits_with_3_and_says_what_would_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = folder / "small.toml"
    device.write_text('extends = "h100-80gb"\n[device]\nmemory_gib = 0.4\n')
    words = ["--model", "llama3/debug", "--device", "small.toml", "--corpus", "texts"]
    assert main(["big", *words, "--gpus", "1", "--seq-len", "128K"]) == 3
    shortage, devices, length = capsys.readouterr().err.splitlines()
    assert "131,072 tokens fit no layout of 1 x small; with " in shortage
    assert "a device needs" in shortage
    assert devices.startswith("error: ")
    assert length.startswith("error: ")
    gpus = devices.rpartition("--gpus ")[2]
    shorter = length.rpartition("--seq-len ")[2]
    assert main(["more", *words, "--gpus", gpus, "--seq-len", "128K"]) == 0
    assert main(["less", *words, "--gpus", "1", "--seq-len", shorter]) == 0
    assert not (folder / "big.toml").exists()


def test_a_run_that_fits_nowhere_is_refused_where_no_trace_shows_its_leanest_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untraceable(*args: Any, **kwargs: Any) -> SearchResult:
        return replace(search(*args, **kwargs), not_fitting=[])

    monkeypatch.setattr(layouts, "search", untraceable)
    device = folder / "small.toml"
    device.write_text('extends = "h100-80gb"\n[device]\nmemory_gib = 0.4\n')
    words = ["--model", "llama3/debug", "--device", "small.toml", "--corpus", "texts"]
    assert main(["big", *words, "--gpus", "1", "--seq-len", "128K"]) == 3
    problem, *_ = capsys.readouterr().err.splitlines()
    assert problem.endswith("131,072 tokens fit no layout of 1 x small")


def model_folder(path: Path, config: ModelConfig = LLAMA) -> Path:
    """A model of random weights with a tokenizer."""
    config = replace(config, vocab_size=1200)
    write(path, config, small_model(config))
    return write_family(path, "llama2")


def test_a_folder_gives_weights_and_tokenizer_and_warns_of_longer_sequences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_folder(folder / "model")
    words = [
        "--seq-len",
        "256",
        "--device",
        "h100-80gb",
        "--gpus",
        "2",
        "--corpus",
        "texts",
    ]
    assert main(["tuned", "--model", "model", *words, "--training.global_batch_size", "2"]) == 0
    assert "the weights were trained for 64 tokens" in capsys.readouterr().out
    config = load(["--config", "tuned.toml"])
    assert config.checkpoint.initial_load_path == f"hf:{source}"
    assert (config.tokenizer.kind, config.tokenizer.path) == ("huggingface", source)
    assert config.model.build().vocab_size == 1200
    assert config.optimizer.lr == 2e-5
    assert check_status("tuned", 2, monkeypatch) == 0


def test_a_name_of_the_hub_is_what_was_downloaded(folder: Path) -> None:
    model = folder / "cache/hub/models--me--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0123abc")
    # As `hf download` lays it out: names link to blobs, which are named by their hashes.
    source = model_folder(folder / "source")
    (model / "blobs").mkdir()
    (model / "snapshots/0123abc").mkdir(parents=True)
    for path in source.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(model / "blobs" / blob)
        (model / "snapshots/0123abc" / path.name).symlink_to(Path("../../blobs") / blob)
    words = [
        "--seq-len",
        "64",
        "--device",
        "h100-80gb",
        "--gpus",
        "1",
        "--corpus",
        "texts",
    ]
    assert main(["hub", "--model", "hf:me/tiny", *words, "--training.global_batch_size", "2"]) == 0
    initial = load(["--config", "hub.toml"]).checkpoint.initial_load_path
    assert initial == f"hf:{model / 'snapshots/0123abc'}"


@pytest.mark.ranks
def test_what_was_written_trains(folder: Path) -> None:
    command = [
        "trained",
        *TINY,
        "--corpus",
        "texts",
        *SMALL_STEPS,
        "--training.dtype",
        "float32",
    ]
    assert main(command) == 0
    done = launched(folder / "trained.toml", folder / "run", processes=2)
    assert done.statuses == [0], done.said
    assert [step for (step,) in metrics(folder / "run", "step")] == [1, 2]


def test_a_choice_that_is_given_asks_nothing() -> None:
    choices = Choices(is_terminal=True)
    assert choices.choose(3, None) == 3  # type: ignore[arg-type]
    assert choices.answers == []
