"""Perplexity and needles of a transformers model by one command: those of one process on any
number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longhaul_attention import register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.longhaul_attention.test_refusals import flat_mesh
from tests.longhaul_attention.test_transformers_models import model
from tests.ranks import run_ranks, team
from tests.system.runs import become, free_port

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
TEXT = "".join(chr(97 + (7 * i * i) % 26) for i in range(4000))


def write_model(folder: Path) -> Path:
    """A tiny model whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab = {chr(code): code - 31 for code in range(32, 127)} | {"<s>": 0, "\n": 96}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def run_here(rank: int, ranks: int, port: int, folder: Path, arguments: tuple[str, ...]) -> int:
    from longhaul_attention.__main__ import main

    become(rank, ranks, port, folder / "log")
    # transformers deprecates what it does itself.
    warnings.simplefilter("ignore")
    os.chdir(folder)
    return main(arguments)


def results(folder: Path, ranks: int, *arguments: str) -> Any:
    """What the command writes, as torchrun would start it."""
    port = free_port()
    arguments = (*arguments, "--json", "results.json")
    tasks = [partial(run_here, rank, ranks, port, folder, arguments) for rank in range(ranks)]
    with team(tasks, fresh=True) as workers:
        outcomes = workers.outcomes(120, failed=lambda outcome: not outcome.succeeded)
    assert [outcome.value for outcome in outcomes.values()] == [0] * ranks, (
        outcomes,
        (folder / "log").read_text(),
    )
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    arguments = (
        "perplexity",
        ".",
        "text.txt",
        "--tokens",
        "301",
        "--sequences",
        "3",
        "--method",
        "ring",
    )
    found = results(folder, 2, *arguments)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.tensor(
        transformers.AutoTokenizer.from_pretrained(folder).encode(TEXT, add_special_tokens=False)
    )
    sequences = F.pad(tokens[:900].view(3, 300), (1, 0))
    with torch.no_grad():
        loss = float(plain(sequences, labels=sequences).loss)
    assert [(each["tokens"], each["sequences"]) for each in found] == [(301, 3)]
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found[0]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.slow
def test_needles_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    arguments = (
        "needle",
        ".",
        "text.txt",
        "--tokens",
        "200,333",
        "--depths",
        "3",
        "--trials",
        "2",
    )
    one, four = (results(folder, ranks, *arguments) for ranks in (1, 4))
    assert len(one) == 6
    for a, b in zip(one, four, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def likeliest(name: str) -> list[bool]:
    """Whether a number is found if it is the likeliest, if its first token is not, and if its last
    is not.
    """
    from longhaul_attention import ContextParallel, evaluation

    register_transformers()
    cp = ContextParallel(flat_mesh(), method="allgather")
    tokens = torch.arange(21) % 40
    with float64_throughout():
        sharded = model(name, "longhaul")
        scores = evaluation.token_scores(sharded, cp, tokens[None])
        plain = model(name, "eager")(tokens[None]).logits[0]
        torch.testing.assert_close(
            scores.losses[0],
            F.cross_entropy(plain[:-1], tokens[1:], reduction="none"),
            rtol=1e-10,
            atol=1e-10,
        )
        found = []
        for wrong in (None, 19, 20):
            # What the model finds likeliest, or not.
            for place in (19, 20):
                likely = int(model(name, "eager")(tokens[None, :place]).logits[0, -1].argmax())
                tokens[place] = (likely + (place == wrong)) % 40
            found.append(evaluation.finds(sharded, cp, evaluation.Needle(tokens, 2))[0])
        return found


@pytest.mark.parametrize(
    "name",
    [
        "Granite",
        pytest.param("Gemma2", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_whole_model_and_a_needle_is_found_if_every_token_is_likeliest(
    name: str,
) -> None:
    assert run_ranks(likeliest, 2, name) == [[True, False, False]] * 2


def test_mistakes_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from longhaul_attention.__main__ import main

    monkeypatch.chdir(write_model(tmp_path))
    for arguments, told in (
        (
            ("perplexity", ".", "text.txt", "--tokens", "5000"),
            "--tokens 5000 needs at least 2, and as much text",
        ),
        (("needle", ".", "text.txt", "--tokens", "40"), "a needle of 40 tokens needs"),
        (("needle", ".", "missing.txt"), "No such file or directory: 'missing.txt'"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main(arguments) == 2
        assert told in capfd.readouterr().err.splitlines()[-1]
