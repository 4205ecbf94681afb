"""Samples of text: what is drawn, how it becomes characters, and what is said where there can be none."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from models.decode import Decoder
from models.transformer import Transformer
from tests.models.small_models import packed
from tests.system.in_process import configured, run_here
from tests.system.runs import reseal, tensors, write_run
from trainer.checkpoint.run_dir import ResumeError
from trainer.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, TiktokenTokenizer, Tokenizer
from trainer.errors import ConfigError
from trainer.export import generate
from trainer.export.checkpoint_cli import (
    CheckpointArgs,
    ResolvedCheckpoint,
    parse_args,
    resolve_checkpoint,
    run_command,
)
from trainer.metrics import log_setup

TEXT = " naïve 中文 🙂 end"
STAGES = """
[[stage]]
name = "short"
seq_len = 64
steps = 3

[[stage]]
name = "long"
seq_len = 256
steps = 3
rope = { theta = 9000.0 }
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of two updates; the model's vocabulary is larger than the tokenizer's."""
    root = tmp_path_factory.mktemp("trained")
    options = ("--training.steps", "2", "--checkpoint.interval", "1", "--model.vocab_size", "272")
    config = configured(write_run(root), root / "run", *options)
    run_here(config)
    return config.output_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(autouse=True)
def one_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command would send the log of all later tests to what this one captures."""
    monkeypatch.setattr(log_setup, "configure", lambda _: None)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a document, so that a text has as many as are asked for."""
    monkeypatch.setattr(ByteTokenizer, "eos", 999)


Said = tuple[int, str, str]


def sample(capsys: pytest.CaptureFixture[str], *words: object) -> Said:
    """Exit status, standard output and standard error."""
    status = run_command([str(word) for word in words], generate.USAGE, generate.run)
    return status, *capsys.readouterr()


def found_in(checkpoint: Path, *overrides: str) -> ResolvedCheckpoint:
    return resolve_checkpoint(CheckpointArgs(str(checkpoint), {}, [*overrides]))


# ---- whole samples


def test_the_likeliest_tokens_are_those_of_the_training_pass(trained: Path) -> None:
    found = found_in(trained, "--training.dtype=float64")
    model = generate.load_model(found, torch.device("cpu"))
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    whole = Transformer(model.config).double()
    saved = {name: tensor for name, tensor in tensors(found.checkpoint).items() if name.startswith("model.")}
    whole.load_state_dict({name.removeprefix("model."): tensor for name, tensor in saved.items()})
    prompt = generate.encode_prompt("the fox ", ByteTokenizer())
    assert prompt.tolist() == [256, *b"the fox "]
    request = generate.parse_sampling_params({"--temperature": "0"})
    decoder = Decoder(model, capacity=60)
    endless = generate.generate_tokens(
        decoder,
        decoder.next_token_logits(prompt),
        request,
        torch.Generator(),
        vocab_size=264,
        stop_tokens={ByteTokenizer.eos},
    )
    drawn = [next(endless) for _ in range(20)]
    row = torch.cat([prompt, torch.tensor(drawn)])
    vocab = ByteTokenizer.vocab_size
    batch = packed(*[[len(row)]] * vocab, vocab_size=vocab)
    batch.tokens.copy_(row.expand(vocab, -1))
    batch.labels.copy_(torch.arange(vocab)[:, None].expand_as(batch.labels))
    with torch.no_grad():
        likeliest: Tensor = whole(batch).argmin(0)
    assert likeliest[len(prompt) - 1 : -1].tolist() == drawn


@pytest.mark.usefixtures("endless")
def test_prompt_and_text_go_out_and_the_rest_is_said_aside(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, aside = sample(capsys, trained, "--prompt", "Größe 🙂: ", "--tokens", "30")
    assert status == 0
    assert text.startswith("Größe 🙂: ")
    assert text.endswith("\n")
    assert aside.splitlines()[0].startswith("model llama3 debug: ")
    assert f"float32 on cpu; checkpoint {trained}/checkpoints/step-2, update 2" in aside
    assert "prompt: 15 tokens in " in aside
    assert "sample 1: 30 tokens in " in aside
    assert "tokens/s" in aside
    assert "remark" not in aside


@pytest.mark.usefixtures("endless")
def test_a_seed_gives_its_text_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trained, "--tokens", "20", "--prompt", "a", "--temperature", "3")
    _, both, _ = sample(capsys, *words, "--samples", "2")
    _, first, _ = sample(capsys, *words)
    _, second, _ = sample(capsys, *words, "--seed", "1")
    assert both == f"{first}\n---\n{second}"
    assert first != second


def test_the_end_of_a_document_is_told(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (trained, "--temperature", "0", "--prompt", "ab")
    found = found_in(trained)
    decoder = Decoder(generate.load_model(found, torch.device("cpu")), capacity=3)
    likeliest = int(decoder.next_token_logits(generate.encode_prompt("ab", ByteTokenizer())).argmax())
    monkeypatch.setattr(ByteTokenizer, "eos", likeliest)
    status, text, aside = sample(capsys, *words)
    assert (status, text) == (0, "ab\n")
    assert "sample 1: 0 tokens in " in aside
    assert aside.endswith(", then the end of the document\n")


@pytest.mark.usefixtures("endless")
def test_a_checkpoint_may_be_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, first, aside = sample(capsys, trained / "checkpoints" / "step-1", "--tokens", "20")
    assert (status, "step-1, update 1" in aside) == (0, True)
    assert first != sample(capsys, trained, "--tokens", "20")[1]


def test_rows_longer_than_trained_are_remarked(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = trained.parent / "prompt.txt"
    text.write_text("the river runs under the bridge\n" * 3)
    status, said, aside = sample(capsys, trained, "--prompt-file", text, "--tokens", "4")
    assert status == 0
    assert said.startswith(text.read_text())
    assert "remark: up to 101 tokens are more than training.seq_len = 64" in aside


def test_of_stages_the_one_that_wrote_the_checkpoint_counts(copied: Path) -> None:
    (copied / "config.toml").write_text((copied / "config.toml").read_text() + STAGES)
    assert found_in(copied).config.training.seq_len == 64
    path = copied / "checkpoints" / "step-2" / "state.json"
    state = json.loads(path.read_text())
    state["stage"]["index"] = 1
    path.write_text(json.dumps(state))
    reseal(path.parent)
    config = found_in(copied).config
    assert (config.training.seq_len, config.model.build().rope.theta) == (256, 9000.0)
    assert found_in(copied / "checkpoints" / "step-1").config.training.seq_len == 64
    state["stage"]["index"] = 2
    path.write_text(json.dumps(state))
    reseal(path.parent)
    with pytest.raises(ResumeError, match=r"is of stage 3, but .*config.toml has 2"):
        found_in(copied)


def test_help_names_the_options_and_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    status, told, _ = sample(capsys, "--help")
    assert status == 0
    assert all(option in told for option in (*generate.DEFAULTS, *generate.PROMPT_OPTIONS, "training.dtype"))
    assert all(f"(default: {value})" in told for value in generate.DEFAULTS.values())


# ---- what is wrong


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "one CHECKPOINT is needed, a run folder or its checkpoints/step-N; none is given"),
        (["{run}", "more"], 2, "2 are given: {run} more"),
        (["{run}", "--tokens", "0"], 2, "--tokens 0 must be an integer, at least 1"),
        (["{run}", "--top-k=0"], 2, "--top-k 0 must be an integer, at least 1"),
        (["{run}", "--samples", "1.5"], 2, "--samples 1.5 must be an integer, at least 1"),
        (["{run}", "--seed", "-1"], 2, "--seed -1 must be an integer, at least 0"),
        (["{run}", "--temperature", "-1"], 2, "--temperature -1 must be a number, at least 0"),
        (["{run}", "--temperature", "nan"], 2, "--temperature nan must be a number, at least 0"),
        (["{run}", "--temperature", "warm"], 2, "--temperature warm must be a number, at least 0"),
        (["{run}", "--prompt"], 2, "--prompt needs a value"),
        (["{run}", "--prompt", "--tokens", "3"], 2, "--prompt needs a value"),
        (["{run}", "--prompt", "\udcff"], 2, "--prompt is not valid UTF-8"),
        (["{run}", "--prompt-file", "{run}/none"], 2, "--prompt-file {run}/none cannot be read: No such file"),
        (["{run}", "--prompt", "a", "--prompt-file", "{run}/config.toml"], 2, "say the same thing"),
        (["{run}", "--token", "3"], 2, "there is no option --token; did you mean --tokens?"),
        (["{run}", "--model.num_heads", "3"], 2, "model.num_heads = 3 must be a multiple of model.num_kv_heads = 2"),
        (["{run}", "--data.corpus", "copy"], 2, "there is no text to show"),
        (["{run}/checkpoints"], 2, "is no run folder and no checkpoint of one"),
        (["{run}/none"], 2, "is no run folder and no checkpoint of one"),
        (["{run}/checkpoints/step-9"], 2, "holds step-1, step-2"),
        (["{run}", "--model.num_layers", "1"], 78, "step-2 does not hold this model: 9 tensors differ"),
        (["{run}", "--model.ffn_dim", "95"], 78, "step-2 does not hold this model: 6 tensors differ"),
        (["{run}", "--tokenizer.kind", "tiktoken"], 78, 'tokenizer.kind = "tiktoken" is not what'),
        (["{run}", "--model.vocab_size", "263"], 78, "this one has 264 tokens, the model rows for 263"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    words: list[str], status: int, said: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text, aside = sample(capsys, *(word.format(run=trained) for word in words))
    assert (found, text) == (status, "")
    assert aside.startswith("error: ")
    assert aside.count("\n") == 1
    assert said.format(run=trained) in aside


def test_all_wrong_arguments_are_told_at_once(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, aside = sample(capsys, trained, "--tokens", "x", "--seed", "y", "--temperature", "z")
    assert [line.split()[3] for line in aside.splitlines()] == ["--tokens", "--seed", "--temperature"]


def test_a_value_may_begin_with_dashes_after_an_equals_sign(trained: Path) -> None:
    words = ["--training.dtype", "float64", str(trained), "--prompt=--x=1", "--tokens", "3"]
    asked = parse_args(words, [*generate.DEFAULTS, *generate.PROMPT_OPTIONS])
    request = generate.parse_sampling_params(asked.options)
    assert (request.prompt, request.max_tokens, asked.checkpoint) == ("--x=1", 3, str(trained))
    assert asked.overrides == ["--training.dtype=float64"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_told(name: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "checkpoints" / "step-2" / name
    path.write_bytes(path.read_bytes()[:100])
    status, text, aside = sample(capsys, copied)
    assert (status, text) == (78, "")
    assert "step-2 cannot be read: " in aside
    assert aside.count("\n") == 1


def test_a_run_without_checkpoint_is_told(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert sample(capsys, copied) == (2, "", f"error: {copied} is no checkpoint; {copied}/checkpoints holds nothing\n")


def test_a_missing_tokenizer_file_is_told(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "checkpoints" / "step-2" / "state.json"
    path.write_text(path.read_text().replace('"tokenizer.kind": "byte"', '"tokenizer.kind": "tiktoken"'))
    reseal(path.parent)
    options = ("--tokenizer.kind", "tiktoken", "--tokenizer.path", copied / "tokenizer.model")
    status, _, aside = sample(capsys, copied, *options)
    assert status == 78
    assert aside == f'error: tokenizer.path = "{copied}/tokenizer.model" cannot be read: No such file or directory\n'


# ---- what is drawn

LOGITS = torch.tensor([0.0, 2.0, -1.0, 3.0, 1.0])


def shares(*, temperature: float, top_k: int, draws: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        generate.sample_token(LOGITS, temperature=temperature, top_k=top_k, generator=generator) for _ in range(draws)
    ]
    return torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_chances(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(shares(temperature=temperature, top_k=100), expected, rtol=0, atol=0.025)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_only_the_likeliest_are_drawn(top_k: int) -> None:
    kept = LOGITS.where(LOGITS.sort(descending=True)[0][top_k - 1] <= LOGITS, -torch.inf)
    torch.testing.assert_close(shares(temperature=1.0, top_k=top_k), kept.softmax(-1), rtol=0, atol=0.025)


@pytest.mark.parametrize("temperature", [0.0, 1e-310])
def test_without_temperature_the_likeliest_is_taken(temperature: float) -> None:
    assert shares(temperature=temperature, top_k=5, draws=50).tolist() == [0, 0, 0, 1, 0]


class Scripted:
    """A decoder whose likeliest tokens are these, and after them one that no tokenizer has."""

    def __init__(self, *tokens: int) -> None:
        self.left = [*tokens]
        self.read_tokens: list[int] = []

    def logits(self) -> Tensor:
        logits = torch.zeros(300)
        logits[299] = 9.0
        logits[self.left.pop(0)] = 5.0
        return logits

    def read(self, tokens_S: Tensor) -> Tensor:
        self.read_tokens += tokens_S.tolist()
        return self.logits()


def continued(script: Scripted) -> Iterator[int]:
    request = generate.parse_sampling_params({"--temperature": "0"})
    decoder = cast(Decoder, script)
    return generate.generate_tokens(
        decoder, script.logits(), request, torch.Generator(), vocab_size=264, stop_tokens={ByteTokenizer.eos}
    )


def test_a_text_begins_and_ends_with_what_documents_do() -> None:
    begins = {"bos_eos": [256], "eos": [], "none": [], "<|reserved_special_token_0|>": []}
    for separators, first in begins.items():
        assert generate.encode_prompt("ab", ByteTokenizer(), separators=separators).tolist() == [*first, 97, 98]
    with pytest.raises(ConfigError, match="no token begins the documents"):
        generate.encode_prompt("", ByteTokenizer(), separators="none")


def test_the_end_of_a_document_ends_the_text_and_is_not_part_of_it() -> None:
    script = Scripted(7, 8, ByteTokenizer.eos, 9)
    assert [*continued(script)] == [7, 8]
    assert script.read_tokens == [7, 8]


def test_numbers_that_are_not_finite_are_told() -> None:
    script = Scripted(7)
    tokens = continued(script)
    assert next(tokens) == 7
    script.read = lambda _: torch.full((300,), torch.nan)  # type: ignore[assignment]
    with pytest.raises(ResumeError, match="not finite"):
        next(tokens)


# ---- characters


@pytest.fixture(scope="module", params=["byte", "tiktoken", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """None has a token for a character beyond ASCII."""
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "tiktoken":
        ranks = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
        return TiktokenTokenizer(b"".join(ranks))
    import sentencepiece

    model = io.BytesIO()
    lines = ["end of a naive line", "in the end", "a line of text"] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


def test_characters_go_out_whole_and_as_soon_as_they_are(tokenizer: Tokenizer) -> None:
    before, ids = tokenizer.encode("in:").tolist(), tokenizer.encode(f"in:{TEXT}").tolist()
    ids = ids[len(before) :]
    out = [*generate.stream_text(ids, tokenizer, context_tokens=before)]
    assert "".join(out) == TEXT
    assert len(out) == len(ids) + 1
    assert "\ufffd" not in "".join(out)
    assert {"ï", "中", "文", "🙂"} <= set(out)
    assert out[-1] == ""


def test_what_is_no_character_goes_out_as_such(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🙂").tolist()[-4:]
    for ids in (smile[:2], smile[1:], smile[:3] + smile, smile[:1] * 9 + smile[1:]):
        before = tokenizer.encode("in:").tolist()
        *out, last = generate.stream_text(ids, tokenizer, context_tokens=before)
        assert "".join([*out, last]) == tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
        assert len(last) <= 3
