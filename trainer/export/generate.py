"""`python -m trainer.generate`: a sample of text from a checkpoint, in one process, so that people can look at a model.

Text goes to standard output, what is said about it to standard error. Leaves with 0, with 2 for wrong arguments or
configuration, with 78 where the checkpoint or its tokenizer cannot be used.

Shape suffixes: S tokens, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from models.decode import Decoder
from models.transformer import Transformer
from parallelisms.init_weights import materialise
from trainer.checkpoint.load import WEIGHTS, Reader, fill, require_alike
from trainer.checkpoint.rank_sync import describe
from trainer.checkpoint.run_dir import ResumeError, read_state
from trainer.config.parse import COMMAND_LINE
from trainer.data import DataError
from trainer.data.shard_writer import between
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import FAILED, ConfigError, RankError
from trainer.export.checkpoint_cli import Found, command, find, take
from trainer.hardware.device import attention_kernel, choose_device

USAGE = """\
python -m trainer.generate CHECKPOINT [option]... [--section.key VALUE]...

Goes on from a text as a trained model does, on one GPU or on the CPU. CHECKPOINT is a run folder, of
which the newest checkpoint is taken, or a folder checkpoints/step-N in one. The configuration is the
run's config.toml, and what is given here.

  --prompt TEXT       how the text begins; default: nothing, the beginning of a document
  --prompt-file FILE  the same, from a file of UTF-8 text
  --tokens N          how many tokens to add at most; the end of the document ends it too (default: 200)
  --temperature T     logits are divided by it; 0 takes the likeliest token (default: 0.8)
  --top-k K           only the K likeliest tokens are drawn (default: 50)
  --seed N            decides what is drawn; sample n is the first sample of seed N + n - 1 (default: 0)
  --samples N         how many texts (default: 1)
  --help              this text

A value that begins with -- is written --prompt=VALUE. Keys that matter here are those of [model],
[tokenizer], training.dtype and training.attention.
"""
OPTIONS = {"--tokens": "200", "--temperature": "0.8", "--top-k": "50", "--seed": "0", "--samples": "1"}
TEXTS = ("--prompt", "--prompt-file")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for."""

    prompt: str
    tokens: int
    temperature: float
    top_k: int
    seed: int
    samples: int


def run(words: Sequence[str]) -> None:
    asked = take(words, [*OPTIONS, *TEXTS])
    request, found = parse(asked.options), find(asked)
    if problems := found.config.model.problems():
        raise ConfigError(problems)
    try:
        generate(request, found)
    except torch.OutOfMemoryError as error:
        raise RankError(FAILED, f"a shorter prompt or fewer tokens would need less: {describe(error)}") from error


# ---- the command line


def parse(options: Mapping[str, str]) -> Request:
    """Raises `ConfigError` with all that is wrong."""
    problems, said = list[str](), OPTIONS | dict(options)

    def whole(option: str, least: int) -> int:
        if said[option].isdecimal() and least <= int(said[option]) < 1 << 62:
            return int(said[option])
        problems.append(f"{option} {said[option]} must be an integer, at least {least}")
        return least

    tokens, top_k, samples = (whole(option, 1) for option in ("--tokens", "--top-k", "--samples"))
    seed, temperature = whole("--seed", 0), -1.0
    with suppress(ValueError):
        temperature = float(said["--temperature"])
    if not (temperature >= 0 and isfinite(temperature)):
        problems.append(f"--temperature {said['--temperature']} must be a number, at least 0")
    prompt = said.get("--prompt", "")
    if "--prompt-file" in said:
        problems += ["--prompt and --prompt-file say the same thing"] * ("--prompt" in said)
        try:
            prompt = Path(said["--prompt-file"]).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            problems.append(f"--prompt-file {said['--prompt-file']} cannot be read: {reason}")
    elif any("\ud800" <= character <= "\udfff" for character in prompt):
        problems.append("--prompt is not valid UTF-8")
    if problems:
        raise ConfigError([f"{COMMAND_LINE}: {problem}" for problem in problems])
    return Request(prompt=prompt, temperature=temperature, tokens=tokens, top_k=top_k, seed=seed, samples=samples)


# ---- the checkpoint


def open_model(found: Found, device: torch.device) -> Transformer:
    """The model of a checkpoint, in training.dtype. Raises `ResumeError`."""
    config = found.config
    with torch.device("meta"):
        model = Transformer(config.model.build(), seq_len=config.training.seq_len)
    model = model.to(getattr(torch, config.training.dtype))
    materialise(model, device)
    tensors = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    reader = Reader(found.checkpoint)
    there = {name: (*entry.size,) for name, entry in reader.entries.items() if name.startswith(WEIGHTS)}
    require_alike(found.checkpoint, there, {name: (*tensor.shape,) for name, tensor in tensors.items()}, shown=1)
    fill(reader, tensors, alone=True)
    return model


def open_tokenizer(found: Found) -> Tokenizer:
    """Raises `ConfigError` where there is no text, and DataError unless the tokenizer may be that of the training."""
    config = found.config
    if config.is_made_up:
        raise ConfigError(
            ['there is no text to show: data.corpus = "copy" trains on made-up tokens, without tokenizer']
        )
    kind, trained = config.tokenizer.kind, read_state(found.checkpoint)["config"].get("tokenizer.kind")
    if kind != trained:
        raise DataError(f'tokenizer.kind = "{kind}" is not what {found.checkpoint} was trained with, "{trained}"')
    tokenizer, rows = load_tokenizer(kind, config.tokenizer.path), config.model.build().vocab_size
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"{found.checkpoint} was trained with another tokenizer: this one has {tokenizer.vocab_size} tokens, "
            f"the model rows for {rows}"
        )
    return tokenizer


# ---- the text


def generate(request: Request, found: Found) -> None:
    """Writes the samples. Raises as `open_model` and `open_tokenizer` do, and RankError where a kernel does not work."""
    config, tokenizer, device = found.config, open_tokenizer(found), choose_device(0)
    prompt_S = encoded(request.prompt, tokenizer, separators=config.data.separators)
    ends = {tokenizer.eos, *map(int, between(tokenizer, config.data.separators)[1])}
    read, trained = prompt_S.numel(), config.training.seq_len
    model, kernel = open_model(found, device), attention_kernel(config, device)
    remark(
        f"model {config.model.family} {config.model.size}: {model.config.num_parameters:,} parameters, "
        f"{config.training.dtype} on {device}; checkpoint {found.checkpoint}, update {found.step:,}"
    )
    if read + request.tokens > trained:
        remark(f"remark: up to {read + request.tokens:,} tokens are more than training.seq_len = {trained:,}")
    decoder = Decoder(model, capacity=read + request.tokens, kernel=kernel)
    started = time.perf_counter()
    first_V = decoder.read(prompt_S).cpu()
    remark(f"prompt: {rate(read, time.perf_counter() - started)}")
    for sample in range(request.samples):
        decoder.rewind(read)
        say("\n---\n" * (sample > 0) + request.prompt)
        generator, count = torch.Generator().manual_seed(request.seed + sample), -1  # One piece more than tokens.
        started = time.perf_counter()
        drawn = continuation(decoder, first_V, request, generator, known=tokenizer.vocab_size, ends=ends)
        tokens = islice(drawn, request.tokens)
        for piece in pieces(tokens, tokenizer, before=prompt_S[-8:].tolist()):
            say(piece)
            count += 1
        say("\n")
        ended = ", then the end of the document" * (count < request.tokens)
        remark(f"sample {sample + 1}: {rate(count, time.perf_counter() - started)}{ended}")


def encoded(prompt: str, tokenizer: Tokenizer, *, separators: str = "bos_eos") -> Tensor:
    """int64 [S]: a document that begins so. Raises `ConfigError` if that is nothing at all."""
    begins, _ = between(tokenizer, separators)
    tokens_S = torch.cat([begins, tokenizer.encode(prompt)]).long()
    if not tokens_S.numel():
        raise ConfigError(["command line: --prompt is needed: no token begins the documents of this run"])
    return tokens_S


def continuation(
    decoder: Decoder,
    logits_V: Tensor,
    request: Request,
    generator: torch.Generator,
    *,
    known: int,
    ends: Container[int],
) -> Iterator[int]:
    """Tokens up to the end of the document, of the `known` first. Raises `ResumeError` where the model has diverged."""
    while True:
        if not bool(logits_V.isfinite().all()):
            raise ResumeError("the model gives numbers that are not finite: its training has diverged")
        # The model may have more rows than the tokenizer has tokens.
        token = draw(logits_V[:known], temperature=request.temperature, top_k=request.top_k, generator=generator)
        if token in ends:
            return
        yield token
        logits_V = decoder.read(torch.tensor([token])).cpu()


def draw(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token by its chances, of logits on the host: the same on every device, as far as the logits are."""
    if temperature == 0:
        return int(logits_V.argmax())
    kept, tokens = logits_V.double().topk(min(top_k, logits_V.numel()))
    # Less the largest: a very small temperature would make all of them infinite.
    chances = ((kept - kept[0]) / temperature).softmax(-1)
    return int(tokens[chances.multinomial(1, generator=generator)])


def pieces(tokens: Iterable[int], tokenizer: Tokenizer, *, before: Sequence[int]) -> Iterator[str]:
    """What each token adds to the text, as soon as its characters are whole, and what is left at the end.

    `before` are some tokens that the text goes on from: a piece may read differently where a text begins.
    """
    ids = list(before)
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        text = text[:-3] + text[-3:].rstrip("\ufffd")  # A character that is not whole reads as one to three of these.
        yield text[shown:]
        shown = max(shown, len(text))
    yield tokenizer.decode(ids)[shown:]


def rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"


def say(text: str) -> None:
    sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the locale is.
    sys.stdout.buffer.flush()


def remark(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(argv: list[str]) -> int:
    return command(argv, USAGE, run)
