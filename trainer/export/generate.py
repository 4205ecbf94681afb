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
from parallelisms.init_weights import materialize
from trainer.checkpoint.load import MODEL_PREFIX, CheckpointReader, read_tensors, require_matching_tensors
from trainer.checkpoint.rank_sync import describe_error
from trainer.checkpoint.run_dir import ResumeError, read_state
from trainer.config.parse import COMMAND_LINE
from trainer.data.shard_writer import document_separators
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import EXIT_FAILURE, ConfigError, DataError, RankFailedError
from trainer.export.checkpoint_cli import ResolvedCheckpoint, parse_args, resolve_checkpoint, run_command
from trainer.hardware.device import choose_attention_kernel, choose_device

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
DEFAULTS = {"--tokens": "200", "--temperature": "0.8", "--top-k": "50", "--seed": "0", "--samples": "1"}
PROMPT_OPTIONS = ("--prompt", "--prompt-file")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What is asked for."""

    prompt: str
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    num_samples: int


def run(argv: Sequence[str]) -> None:
    args = parse_args(argv, [*DEFAULTS, *PROMPT_OPTIONS])
    params, resolved = parse_sampling_params(args.options), resolve_checkpoint(args)
    if problems := resolved.config.model.problems():
        raise ConfigError(problems)
    try:
        generate(params, resolved)
    except torch.OutOfMemoryError as error:
        raise RankFailedError(
            EXIT_FAILURE, f"a shorter prompt or fewer tokens would need less: {describe_error(error)}"
        ) from error


# ---- the command line


def parse_sampling_params(options: Mapping[str, str]) -> SamplingParams:
    """Raises `ConfigError` with all that is wrong."""
    problems, values = list[str](), DEFAULTS | dict(options)

    def parse_int(option: str, minimum: int) -> int:
        if values[option].isdecimal() and minimum <= int(values[option]) < 1 << 62:
            return int(values[option])
        problems.append(f"{option} {values[option]} must be an integer, at least {minimum}")
        return minimum

    tokens, top_k, samples = (parse_int(option, 1) for option in ("--tokens", "--top-k", "--samples"))
    seed, temperature = parse_int("--seed", 0), -1.0
    with suppress(ValueError):
        temperature = float(values["--temperature"])
    if not (temperature >= 0 and isfinite(temperature)):
        problems.append(f"--temperature {values['--temperature']} must be a number, at least 0")
    prompt = values.get("--prompt", "")
    if "--prompt-file" in values:
        problems += ["--prompt and --prompt-file say the same thing"] * ("--prompt" in values)
        try:
            prompt = Path(values["--prompt-file"]).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            problems.append(f"--prompt-file {values['--prompt-file']} cannot be read: {reason}")
    elif any("\ud800" <= character <= "\udfff" for character in prompt):
        problems.append("--prompt is not valid UTF-8")
    if problems:
        raise ConfigError([f"{COMMAND_LINE}: {problem}" for problem in problems])
    return SamplingParams(
        prompt=prompt, temperature=temperature, max_tokens=tokens, top_k=top_k, seed=seed, num_samples=samples
    )


# ---- the checkpoint


def load_model(resolved: ResolvedCheckpoint, device: torch.device) -> Transformer:
    """The model of a checkpoint, in training.dtype. Raises `ResumeError`."""
    config = resolved.config
    with torch.device("meta"):
        model = Transformer(config.model.build(), seq_len=config.training.seq_len)
    model = model.to(getattr(torch, config.training.dtype))
    materialize(model, device)
    tensors = {f"{MODEL_PREFIX}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    reader = CheckpointReader(resolved.checkpoint)
    saved_shapes = {
        name: (*entry.size,) for name, entry in reader.tensor_metadata.items() if name.startswith(MODEL_PREFIX)
    }
    require_matching_tensors(
        resolved.checkpoint, saved_shapes, {name: (*tensor.shape,) for name, tensor in tensors.items()}, max_shown=1
    )
    read_tensors(reader, tensors, no_dist=True)
    return model


def load_matching_tokenizer(resolved: ResolvedCheckpoint) -> Tokenizer:
    """Raises `ConfigError` where there is no text, and DataError unless the tokenizer may be that of the training."""
    config = resolved.config
    if config.is_synthetic:
        raise ConfigError(
            ['there is no text to show: data.corpus = "copy" trains on made-up tokens, without tokenizer']
        )
    kind, trained_kind = config.tokenizer.kind, read_state(resolved.checkpoint)["config"].get("tokenizer.kind")
    if kind != trained_kind:
        raise DataError(
            f'tokenizer.kind = "{kind}" is not what {resolved.checkpoint} was trained with, "{trained_kind}"'
        )
    tokenizer, model_vocab_size = load_tokenizer(kind, config.tokenizer.path), config.model.build().vocab_size
    if tokenizer.vocab_size > model_vocab_size:
        raise DataError(
            f"{resolved.checkpoint} was trained with another tokenizer: this one has {tokenizer.vocab_size} tokens, "
            f"the model rows for {model_vocab_size}"
        )
    return tokenizer


# ---- the text


def generate(params: SamplingParams, resolved: ResolvedCheckpoint) -> None:
    """Writes the samples. Raises as `open_model` and `open_tokenizer` do, and RankError where a kernel does not work."""
    config, tokenizer, device = resolved.config, load_matching_tokenizer(resolved), choose_device(0)
    prompt_S = encode_prompt(params.prompt, tokenizer, separators=config.data.separators)
    stop_tokens = {tokenizer.eos, *map(int, document_separators(tokenizer, config.data.separators)[1])}
    prompt_len, seq_len = prompt_S.numel(), config.training.seq_len
    model, kernel = load_model(resolved, device), choose_attention_kernel(config, device)
    print_status(
        f"model {config.model.family} {config.model.size}: {model.config.num_parameters:,} parameters, "
        f"{config.training.dtype} on {device}; checkpoint {resolved.checkpoint}, update {resolved.step:,}"
    )
    if prompt_len + params.max_tokens > seq_len:
        print_status(
            f"remark: up to {prompt_len + params.max_tokens:,} tokens are more than training.seq_len = {seq_len:,}"
        )
    decoder = Decoder(model, capacity=prompt_len + params.max_tokens, kernel=kernel)
    started = time.perf_counter()
    first_logits_V = decoder.next_token_logits(prompt_S).cpu()
    print_status(f"prompt: {format_throughput(prompt_len, time.perf_counter() - started)}")
    for sample in range(params.num_samples):
        decoder.rewind(prompt_len)
        write_text("\n---\n" * (sample > 0) + params.prompt)
        generator, num_tokens = torch.Generator().manual_seed(params.seed + sample), -1  # One piece more than tokens.
        started = time.perf_counter()
        token_stream = generate_tokens(
            decoder, first_logits_V, params, generator, vocab_size=tokenizer.vocab_size, stop_tokens=stop_tokens
        )
        tokens = islice(token_stream, params.max_tokens)
        for text in stream_text(tokens, tokenizer, context_tokens=prompt_S[-8:].tolist()):
            write_text(text)
            num_tokens += 1
        write_text("\n")
        end_note = ", then the end of the document" * (num_tokens < params.max_tokens)
        print_status(f"sample {sample + 1}: {format_throughput(num_tokens, time.perf_counter() - started)}{end_note}")


def encode_prompt(prompt: str, tokenizer: Tokenizer, *, separators: str = "bos_eos") -> Tensor:
    """int64 [S]: a document that begins so. Raises `ConfigError` if that is nothing at all."""
    prefix_tokens, _ = document_separators(tokenizer, separators)
    tokens_S = torch.cat([prefix_tokens, tokenizer.encode(prompt)]).long()
    if not tokens_S.numel():
        raise ConfigError(["command line: --prompt is needed: no token begins the documents of this run"])
    return tokens_S


def generate_tokens(
    decoder: Decoder,
    logits_V: Tensor,
    params: SamplingParams,
    generator: torch.Generator,
    *,
    vocab_size: int,
    stop_tokens: Container[int],
) -> Iterator[int]:
    """Tokens up to the end of the document, of the `known` first. Raises `ResumeError` where the model has diverged."""
    while True:
        if not bool(logits_V.isfinite().all()):
            raise ResumeError("the model gives numbers that are not finite: its training has diverged")
        # The model may have more rows than the tokenizer has tokens.
        token = sample_token(
            logits_V[:vocab_size], temperature=params.temperature, top_k=params.top_k, generator=generator
        )
        if token in stop_tokens:
            return
        yield token
        logits_V = decoder.next_token_logits(torch.tensor([token])).cpu()


def sample_token(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token by its chances, of logits on the host: the same on every device, as far as the logits are."""
    if temperature == 0:
        return int(logits_V.argmax())
    top_logits, top_tokens = logits_V.double().topk(min(top_k, logits_V.numel()))
    # Less the largest: a very small temperature would make all of them infinite.
    probs = ((top_logits - top_logits[0]) / temperature).softmax(-1)
    return int(top_tokens[probs.multinomial(1, generator=generator)])


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer, *, context_tokens: Sequence[int]) -> Iterator[str]:
    """What each token adds to the text, as soon as its characters are whole, and what is left at the end.

    `before` are some tokens that the text goes on from: a piece may read differently where a text begins.
    """
    ids = list(context_tokens)
    num_emitted = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        text = text[:-3] + text[-3:].rstrip("\ufffd")  # A character that is not whole reads as one to three of these.
        yield text[num_emitted:]
        num_emitted = max(num_emitted, len(text))
    yield tokenizer.decode(ids)[num_emitted:]


def format_throughput(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"


def write_text(text: str) -> None:
    sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the locale is.
    sys.stdout.buffer.flush()


def print_status(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(argv: list[str]) -> int:
    return run_command(argv, USAGE, run)
