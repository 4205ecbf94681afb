"""A folder of every family: imported, trained, exported, and loaded by transformers as the same
kind of folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models import hf
from models.hf import read_config
from models.hf_config import read_model
from models.hf_config_write import config_differences
from models.hf_tensors import tensor_specs
from tests.huggingface_folders import write_family
from tests.models.hf_models import MADE, load, logits_of, logits_there, made
from tests.models.test_hf_families import assert_close, in_float32
from tests.system.runs import forked, tensors, write_run
from trainer.hf import main

TOKENIZERS = {
    "Llama": "llama3",
    "Mistral": "mistral",
    "Ministral": "mistral",
    "Gemma2": "gemma",
    "Gemma3": "gemma",
}
"""By the first word of a model's name; all others have that of their own name, or of Qwen2."""
OWN = {
    "Qwen3": "qwen3",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "SmolLM3": "smollm3",
    "Granite": "granite",
    "Phi3": "phi3",
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", MADE)
def test_a_folder_goes_in_and_comes_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    source, begin, run, output = (
        tmp_path / each for each in ("source", "begin.toml", "run", "output")
    )
    made(name, vocab_size=1200).save_pretrained(source, max_shard_size="100KB")
    kind = name.split()[0]
    write_family(source, TOKENIZERS.get(kind) or OWN.get(kind, "qwen2"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["import", str(source), str(begin)]) == 0
    data = (
        f"--data.corpus={write_run(tmp_path).parent / 'corpus'}",
        f"--data.cache_dir={tmp_path / 'prepared'}",
    )
    options = (
        "--training.seq_len=64",
        "--training.steps=2",
        "--training.global_batch_size=4",
        "--optimizer.lr=1e-3",
    )
    mesh = ("--parallelism.tp=2", "--training.dtype=float32")
    done = forked(begin, run, *options, *data, *mesh, "--checkpoint.interval=1", processes=4)
    assert done.statuses == [0] * 4, done.said
    assert main(["export", str(run), str(output), "--max-shard-gib", "1e-4"]) == 0, (
        capsys.readouterr().err
    )

    # The same kind of folder: its type, its tensors, its tokenizer.
    config = read_model(output)
    assert read_config(output)["model_type"] == read_config(source)["model_type"]
    changed = config_differences(config, read_model(source))
    assert changed == {}
    names = [
        {tensor for path in each.glob("*.safetensors") for tensor in keys(path)}
        for each in (source, output)
    ]
    assert names[0] - {hf.LM_HEAD} == names[1] - {hf.LM_HEAD}
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in (*WEIGHTS, "config.json"):
            assert_same_content(path, output / path.name)
    text = "def f(x):\n    return naïve  # 12345 ▁ 🙂\n\nThe end."
    ids = [
        transformers.AutoTokenizer.from_pretrained(each)(text)["input_ids"]
        for each in (source, output)
    ]
    assert ids[0] == ids[1]

    # Every weight is the checkpoint's, and transformers computes with it what we do.
    saved = tensors(run / "checkpoints/step-2")
    weights = hf.SafetensorsReader(output)
    for parameter, spec in tensor_specs(config).items():
        assert torch.equal(weights.read(spec), saved[f"model.{parameter}"]), parameter
    model = load(output, in_float32(config))
    tokens, logits = logits_of(model, in_float32(config))
    assert_close(logits, logits_there(output, tokens))
    before = hf.SafetensorsReader(source).read(
        tensor_specs(config)["blocks.0.attention.q_proj.weight"]
    )
    assert not torch.equal(before, saved["model.blocks.0.attention.q_proj.weight"]), "trained"


@pytest.mark.slow
def test_a_run_starts_from_the_language_model_of_several_modalities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    begin = tmp_path / "begin.toml"
    run = tmp_path / "run"
    made("Gemma3", vocab_size=1200).save_pretrained(source)
    write_family(source, "gemma")
    weights = load_file(source / hf.SINGLE_FILE)
    renamed = {
        name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()
    }
    save_file({**renamed, "model.vision_tower.weight": torch.ones(2)}, source / hf.SINGLE_FILE)
    values = {
        "model_type": "gemma3",
        "text_config": read_config(source),
        "vision_config": {},
        "eos_token_id": 2,
    }
    (source / hf.CONFIG_FILE).write_text(json.dumps(values))
    assert main(["import", str(source), str(begin)]) == 2
    assert "--text-only imports its language model alone" in capsys.readouterr().err
    assert main(["import", str(source), str(begin), "--text-only"]) == 0
    assert "left out: vision_tower (1 tensors)" in capsys.readouterr().out
    assert f'initial_load_path = "hf-text:{source}"' in begin.read_text()
    data = (
        f"--data.corpus={write_run(tmp_path).parent / 'corpus'}",
        f"--data.cache_dir={tmp_path / 'prepared'}",
    )
    options = (
        "--training.seq_len=64",
        "--training.steps=1",
        "--training.global_batch_size=2",
        "--optimizer.lr=1e-20",
    )
    done = forked(begin, run, *options, *data, "--training.dtype=float32")
    assert done.statuses == [0], done.said
    saved = tensors(run / "checkpoints/step-1")
    torch.testing.assert_close(saved["model.embed.weight"], weights["model.embed_tokens.weight"])


def keys(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def assert_same_content(path: Path, other: Path) -> None:
    if path.suffix == ".json":
        assert json.loads(path.read_bytes()) == json.loads(other.read_bytes()), path.name
    else:
        assert path.read_bytes() == other.read_bytes(), path.name
