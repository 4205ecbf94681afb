"""Text generation: sampling, streaming of whole characters, and errors."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from models.decode import Decoder
from models.transformer import Transformer
from tests.artifacts import forge
from tests.models.small_models import packed
from tests.system.in_process import configured, run_here
from tests.system.runs import reseal, tensors, write_run
from trainer import generate
from trainer.config.data import TokenizerSection
from trainer.data.sentencepiece_tokenizer import SentencePieceTokenizer
from trainer.data.tiktoken_tokenizer import TiktokenTokenizer
from trainer.data.tokenizer import ByteTokenizer, Tokenizer
from trainer.errors import ConfigError
from trainer.evaluation.arguments import generate_parser
from trainer.evaluation.load_checkpoint import resolve_checkpoint
from trainer.metrics import loggers
from trainer.storage.run_dir import ResumeError

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
    """A run folder with two checkpoints. The model's vocabulary is larger than the tokenizer's."""
    root = tmp_path_factory.mktemp("trained")
    options = ("--training.steps", "2", "--checkpoint.interval", "1", "--model.vocab_size", "272")
    config = configured(write_run(root), root / "run", *options)
    run_here(config)
    return config.output_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a command would redirect the log of all later tests to this test's captured
    output.
    """
    monkeypatch.setattr(loggers, "configure_logging", lambda _: None)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a document, so that every text has the requested length."""
    monkeypatch.setattr(ByteTokenizer, "eos", 999)


def sample(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    status = generate.main([str(argument) for argument in argv])
    return status, *capsys.readouterr()


def likeliest_token(logits_V: Tensor) -> int:
    return generate.sample_token(logits_V, temperature=0, top_k=50, generator=torch.Generator())


# ---- complete samples


def test_greedy_tokens_are_those_of_the_training_forward_pass(trained: Path) -> None:
    resolved = resolve_checkpoint(trained, ["--training.dtype=float64"])
    model = generate.load_model(resolved, torch.device("cpu"))
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    model_copy = Transformer(model.config).double()
    weights = {
        name: tensor
        for name, tensor in tensors(resolved.checkpoint).items()
        if name.startswith("model.")
    }
    model_copy.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    )
    prompt = generate.encode_prompt("the fox ", ByteTokenizer())
    assert prompt.tolist() == [256, *b"the fox "]
    decoder = Decoder(model, capacity=60)
    token_stream = generate.generate_tokens(
        decoder,
        decoder.next_token_logits(prompt),
        likeliest_token,
        vocab_size=264,
        stop_tokens={ByteTokenizer.eos},
    )
    sampled = [next(token_stream) for _ in range(20)]
    row = torch.cat([prompt, torch.tensor(sampled)])
    vocab = ByteTokenizer.vocab_size
    batch = packed(*[[len(row)]] * vocab, vocab_size=vocab)
    batch.tokens.copy_(row.expand(vocab, -1))
    batch.labels.copy_(torch.arange(vocab)[:, None].expand_as(batch.labels))
    with torch.no_grad():
        likeliest: Tensor = model_copy(batch).argmin(0)
    assert likeliest[len(prompt) - 1 : -1].tolist() == sampled


@pytest.mark.usefixtures("endless")
def test_text_goes_to_standard_output_and_the_rest_to_standard_error(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, err = sample(capsys, trained, "--prompt", "Größe 🙂: ", "--tokens", "30")
    assert status == 0
    assert text.startswith("Größe 🙂: ")
    assert text.endswith("\n")
    assert err.splitlines()[0].startswith("model llama3 debug: ")
    assert f"float32 on cpu; checkpoint {trained}/checkpoints/step-2, step 2" in err
    assert "prompt: 15 tokens in " in err
    assert "sample 1: 30 tokens in " in err
    assert "tokens/s" in err
    assert "warning" not in err


@pytest.mark.usefixtures("endless")
def test_a_seed_reproduces_its_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trained, "--tokens", "20", "--prompt", "a", "--temperature", "3")
    _, both_texts, _ = sample(capsys, *argv, "--samples", "2")
    _, first, _ = sample(capsys, *argv)
    _, second, _ = sample(capsys, *argv, "--seed", "1")
    assert both_texts == f"{first}\n---\n{second}"
    assert first != second


def test_the_end_of_a_document_is_reported(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (trained, "--temperature", "0", "--prompt", "ab")
    resolved = resolve_checkpoint(trained)
    decoder = Decoder(generate.load_model(resolved, torch.device("cpu")), capacity=3)
    likeliest = int(
        decoder.next_token_logits(generate.encode_prompt("ab", ByteTokenizer())).argmax()
    )
    monkeypatch.setattr(ByteTokenizer, "eos", likeliest)
    status, text, err = sample(capsys, *argv)
    assert (status, text) == (0, "ab\n")
    assert "sample 1: 0 tokens in " in err
    assert err.endswith(", end of document\n")


@pytest.mark.usefixtures("endless")
def test_a_checkpoint_can_be_selected(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, first, err = sample(capsys, trained / "checkpoints" / "step-1", "--tokens", "20")
    assert (status, "step-1, step 1" in err) == (0, True)
    assert first != sample(capsys, trained, "--tokens", "20")[1]


def test_a_text_beyond_the_training_length_is_warned_about(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = trained.parent / "prompt.txt"
    text.write_text("the river runs under the bridge\n" * 3)
    status, message, err = sample(capsys, trained, "--prompt-file", text, "--tokens", "4")
    assert status == 0
    assert message.startswith(text.read_text())
    assert "warning: up to 101 tokens exceed training.seq_len = 64" in err


def test_the_stage_that_wrote_the_checkpoint_defines_the_configuration(copied: Path) -> None:
    (copied / "config.toml").write_text((copied / "config.toml").read_text() + STAGES)
    assert resolve_checkpoint(copied).config.training.seq_len == 64
    path = copied / "checkpoints" / "step-2" / "state.json"
    forge(path, lambda state: state["stage"].update(index=1))
    reseal(path.parent)
    config = resolve_checkpoint(copied).config
    assert (config.training.seq_len, config.model.build().rope.theta) == (256, 9000.0)
    assert resolve_checkpoint(copied / "checkpoints" / "step-1").config.training.seq_len == 64
    forge(path, lambda state: state["stage"].update(index=2))
    reseal(path.parent)
    with pytest.raises(ResumeError, match=r"is from stage 3, but .*config.toml has 2 stages"):
        resolve_checkpoint(copied)


def test_help_names_the_options_and_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = sample(capsys, "--help")
    assert status == 0
    options = (
        "--prompt",
        "--prompt-file",
        "--tokens",
        "--temperature",
        "--top-k",
        "--seed",
        "--samples",
    )
    assert all(
        option in out for option in (*options, "CHECKPOINT", "--section.key", "training.dtype")
    )
    parser = generate_parser()
    for name in ("tokens", "temperature", "top_k", "seed", "samples"):
        assert f"(default: {parser.get_default(name)})" in " ".join(out.split())


# ---- errors


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "command line: trainer.generate needs CHECKPOINT"),
        (["{run}", "more"], 2, "command line: unknown argument more"),
        (["{run}", "--tokens", "0"], 2, "--tokens 0 must be an integer, at least 1"),
        (["{run}", "--top-k=0"], 2, "--top-k 0 must be an integer, at least 1"),
        (["{run}", "--samples", "1.5"], 2, "--samples 1.5 must be an integer, at least 1"),
        (["{run}", "--seed", "-1"], 2, "--seed -1 must be an integer, at least 0"),
        (
            ["{run}", "--temperature", "-1"],
            2,
            "--temperature -1 must be a finite number, at least 0",
        ),
        (
            ["{run}", "--temperature", "nan"],
            2,
            "--temperature nan must be a finite number, at least 0",
        ),
        (
            ["{run}", "--temperature", "warm"],
            2,
            "--temperature warm must be a finite number, at least 0",
        ),
        (["{run}", "--prompt"], 2, "--prompt needs a value"),
        (["{run}", "--prompt", "--tokens", "3"], 2, "--prompt needs a value"),
        (["{run}", "--prompt", "\udcff"], 2, "--prompt is not valid UTF-8"),
        (
            ["{run}", "--prompt-file", "{run}/none"],
            2,
            "--prompt-file {run}/none cannot be read: No such file",
        ),
        (
            ["{run}", "--prompt", "a", "--prompt-file", "{run}/config.toml"],
            2,
            "--prompt-file not allowed with argument --prompt",
        ),
        (["{run}", "--token", "3"], 2, "unknown argument --token; did you mean --tokens?"),
        (
            ["{run}", "--model.num_heads", "3"],
            2,
            "model.num_heads = 3 must be a multiple of model.num_kv_heads = 2",
        ),
        (["{run}", "--data.corpus", "copy"], 2, "so there is no text to generate"),
        (["{run}/checkpoints"], 2, "is neither a run folder nor a checkpoint in one"),
        (["{run}/none"], 2, "is neither a run folder nor a checkpoint in one"),
        (["{run}/checkpoints/step-9"], 2, "contains step-1, step-2"),
        (
            ["{run}", "--model.num_layers", "1"],
            78,
            "step-2 does not match the model: 9 tensors differ",
        ),
        (
            ["{run}", "--model.ffn_dim", "95"],
            78,
            "step-2 does not match the model: 6 tensors differ",
        ),
        (["{run}", "--tokenizer.kind", "tiktoken"], 78, 'tokenizer.kind = "tiktoken", but '),
        (
            ["{run}", "--model.vocab_size", "257"],
            78,
            "this one has 258 tokens, the model's vocabulary 257",
        ),
    ],
)
def test_an_error_is_one_line(
    argv: list[str], status: int, message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text, err = sample(capsys, *(argument.format(run=trained) for argument in argv))
    assert (found, text) == (status, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message.format(run=trained) in err


def test_a_value_may_start_with_dashes_after_an_equals_sign(trained: Path) -> None:
    argv = ["--training.dtype", "float64", str(trained), "--prompt=--x=1", "--tokens", "3"]
    options, overrides = generate_parser().parse(argv)
    assert (generate.read_prompt(options), options.tokens, options.checkpoint) == (
        "--x=1",
        3,
        trained,
    )
    assert overrides == ["--training.dtype=float64"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_exits_with_78(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / "checkpoints" / "step-2" / name
    path.write_bytes(path.read_bytes()[:100])
    status, text, err = sample(capsys, copied)
    assert (status, text) == (78, "")
    assert "step-2 cannot be read: " in err
    assert err.count("\n") == 1


def test_a_run_without_checkpoint_exits_with_2(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert sample(capsys, copied) == (
        2,
        "",
        f"error: {copied} is not a checkpoint; {copied}/checkpoints contains no checkpoints\n",
    )


def test_a_missing_tokenizer_file_exits_with_78(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / "checkpoints" / "step-2" / "state.json"
    forge(path, lambda state: state["config"].update({"tokenizer.kind": "tiktoken"}))
    reseal(path.parent)
    options = ("--tokenizer.kind", "tiktoken", "--tokenizer.path", copied / "tokenizer.model")
    status, _, err = sample(capsys, copied, *options)
    assert status == 78
    assert (
        err
        == f'error: tokenizer.path = "{copied}/tokenizer.model" cannot be read: No such file or directory\n'
    )


# ---- sampling

LOGITS = torch.tensor([0.0, 2.0, -1.0, 3.0, 1.0])


def frequencies(*, temperature: float, top_k: int, draws: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sampled = [
        generate.sample_token(LOGITS, temperature=temperature, top_k=top_k, generator=generator)
        for _ in range(draws)
    ]
    return torch.bincount(torch.tensor(sampled), minlength=len(LOGITS)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_their_probabilities(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(
        frequencies(temperature=temperature, top_k=100), expected, rtol=0, atol=0.025
    )


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_top_k_keeps_only_the_likeliest_tokens(top_k: int) -> None:
    truncated = LOGITS.where(LOGITS.sort(descending=True)[0][top_k - 1] <= LOGITS, -torch.inf)
    torch.testing.assert_close(
        frequencies(temperature=1.0, top_k=top_k), truncated.softmax(-1), rtol=0, atol=0.025
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-310])
def test_zero_temperature_takes_the_likeliest_token(temperature: float) -> None:
    assert frequencies(temperature=temperature, top_k=5, draws=50).tolist() == [0, 0, 0, 1, 0]


class ScriptedDecoder:
    """A decoder with these likeliest tokens; a token outside the vocabulary is likelier still."""

    def __init__(self, *tokens: int) -> None:
        self.remaining = [*tokens]
        self.read_tokens: list[int] = []

    def logits(self) -> Tensor:
        logits = torch.zeros(300)
        logits[299] = 9.0
        logits[self.remaining.pop(0)] = 5.0
        return logits

    def next_token_logits(self, tokens_S: Tensor) -> Tensor:
        self.read_tokens += tokens_S.tolist()
        return self.logits()


def continuation(script: ScriptedDecoder) -> Iterator[int]:
    decoder = cast(Decoder, script)
    return generate.generate_tokens(
        decoder, script.logits(), likeliest_token, vocab_size=264, stop_tokens={ByteTokenizer.eos}
    )


def test_a_prompt_starts_with_the_document_separator() -> None:
    prefixes = {"bos_eos": [256], "eos": [], "none": [], "<|reserved_special_token_0|>": []}
    for separators, first in prefixes.items():
        assert generate.encode_prompt("ab", ByteTokenizer(), separators=separators).tolist() == [
            *first,
            97,
            98,
        ]
    with pytest.raises(ConfigError, match="documents of this run have no start token"):
        generate.encode_prompt("", ByteTokenizer(), separators="none")


def test_the_end_token_stops_the_text_and_is_not_part_of_it() -> None:
    script = ScriptedDecoder(7, 8, ByteTokenizer.eos, 9)
    assert [*continuation(script)] == [7, 8]
    assert script.read_tokens == [7, 8]


def test_non_finite_logits_are_an_error() -> None:
    script = ScriptedDecoder(7)
    tokens = continuation(script)
    assert next(tokens) == 7
    script.next_token_logits = lambda _: torch.full((300,), torch.nan)  # type: ignore[assignment]
    with pytest.raises(ResumeError, match="not finite"):
        next(tokens)


# ---- characters


@pytest.fixture(scope="module", params=["byte", "tiktoken", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Without tokens for characters beyond ASCII."""
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "tiktoken":
        ranks = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
        return TiktokenTokenizer(
            b"".join(ranks), TokenizerSection(kind="tiktoken", pattern="llama3")
        )
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


def test_characters_are_emitted_whole_and_as_soon_as_complete(tokenizer: Tokenizer) -> None:
    context_tokens = tokenizer.encode("in:").tolist()
    ids = tokenizer.encode(f"in:{TEXT}").tolist()
    ids = ids[len(context_tokens) :]
    out = [*generate.stream_text(ids, tokenizer, context_tokens=context_tokens)]
    assert "".join(out) == TEXT
    assert len(out) == len(ids) + 1
    assert "\ufffd" not in "".join(out)
    assert {"ï", "中", "文", "🙂"} <= set(out)
    assert out[-1] == ""


def test_invalid_utf8_is_emitted_as_replacement_characters(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🙂").tolist()[-4:]
    for ids in (smile[:2], smile[1:], smile[:3] + smile, smile[:1] * 9 + smile[1:]):
        context_tokens = tokenizer.encode("in:").tolist()
        *out, last = generate.stream_text(ids, tokenizer, context_tokens=context_tokens)
        assert (
            "".join([*out, last])
            == tokenizer.decode(context_tokens + ids)[len(tokenizer.decode(context_tokens)) :]
        )
        assert len(last) <= 3
