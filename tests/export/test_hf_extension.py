"""A family of an extension comes from Hugging Face's files and goes back to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.test_extending import RUN, command, write_example

FAMILY = """\
        hf_families={
            "nemotron_tiny": Family(
                architecture="NemotronTinyForCausalLM",
                options={"feed_forward": "squared_relu"},
                activation_keys=(),
                allowed={"hidden_act": ("relu2",)},
            )
        },
        on_step=stop_early,
"""
GIVEN = ("--extension", "nemotron_parts:extension")


def add_family(folder: Path) -> None:
    family_import = ("import torch\n", "import torch\n\nfrom models.hf_family import Family\n")
    write_example(folder, ("        on_step=stop_early,\n", FAMILY), family_import)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the family in `outputs/run`, and its export in `hf`."""
    folder = tmp_path_factory.mktemp("nemotron")
    add_family(folder)
    (folder / "run.toml").write_text(RUN)
    (folder / "own").mkdir()
    (folder / "own" / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog.\n" * 200
    )
    alone = ("--parallelism.cp", "1", "--parallelism.tp", "1")
    trained = command(folder, "trainer.launch", "--config", "run.toml", *alone)
    assert trained.returncode == 0, trained.stderr
    done = command(folder, "trainer.hf", "export", "outputs/run", "hf", *GIVEN)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_an_export_has_the_names_of_the_declaration(exported: Path) -> None:
    config = json.loads((exported / "hf" / "config.json").read_text())
    assert (config["model_type"], config["hidden_act"]) == ("nemotron_tiny", "relu2")
    assert config["architectures"] == ["NemotronTinyForCausalLM"]
    (file,) = (exported / "hf").glob("*.safetensors")
    names = load_file(file).keys()
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= names
    assert not any("gate_proj" in name for name in names)


@pytest.mark.slow
def test_an_import_starts_a_run_that_needs_the_extension(exported: Path) -> None:
    done = command(exported, "trainer.hf", "import", "hf", "begin.toml", *GIVEN)
    assert done.returncode == 0, done.stderr
    assert 'extension = ["nemotron_parts:extension"]' in (exported / "begin.toml").read_text()
    words = (
        "--job.name",
        "again",
        "--data.corpus",
        "own",
        "--training.seq_len",
        "64",
        "--training.steps",
        "1",
    )
    again = command(
        exported,
        "trainer.launch",
        "--config",
        "begin.toml",
        *words,
        "--training.dtype",
        "float32",
        "--distributed.restarts",
        "0",
        "--parallelism.cp",
        "1",
        ranks=1,
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_neither_imports_code_that_is_not_named(exported: Path) -> None:
    exporting = command(exported, "trainer.hf", "export", "outputs/run", "other")
    assert exporting.returncode == 2
    assert (
        'was trained with extension "nemotron parts": name it, --extension MODULE:FUNCTION'
        in exporting.stderr
    )
    importing = command(exported, "trainer.hf", "import", "hf")
    assert importing.returncode == 2
    assert 'model_type = "nemotron_tiny" is not supported' in importing.stderr


def test_a_model_type_of_ours_cannot_be_replaced(tmp_path: Path) -> None:
    add_family(tmp_path)
    code = (tmp_path / "nemotron_parts.py").read_text()
    (tmp_path / "nemotron_parts.py").write_text(code.replace('"nemotron_tiny"', '"llama"'))
    done = command(tmp_path, "trainer.hf", "import", "hf", *GIVEN)
    assert done.returncode == 2
    assert 'it may not replace hf_families "llama"' in done.stderr
