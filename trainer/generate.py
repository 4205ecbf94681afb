"""`longhaul generate`: sample text from a checkpoint in one process.

Writes the text to standard output and everything else to standard error.

Shape suffixes: S tokens, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from models.decode import Decoder
from models.transformer import Transformer
from parallelisms.init_weights import materialize
from trainer.checkpoint.load import MODEL_PREFIX, read_tensors
from trainer.checkpoint.rank_sync import describe_error
from trainer.commands import run_command
from trainer.config import extension
from trainer.config.parse import COMMAND_LINE
from trainer.data.shard_writer import document_separators
from trainer.data.tokenizer import Tokenizer, open_tokenizer
from trainer.data.vocabulary import text_vocab_size
from trainer.errors import EXIT_FAILURE, ConfigError, DataError, RankFailedError
from trainer.evaluation.arguments import generate_parser
from trainer.evaluation.load_checkpoint import (
    ResolvedCheckpoint,
    open_model,
    resolve_checkpoint,
)
from trainer.hardware.device import choose_attention_kernel, choose_device
from trainer.storage import manifest
from trainer.storage.run_dir import ResumeError


def run(options: Namespace, overrides: Sequence[str]) -> None:
    options.prompt = read_prompt(options)
    resolved = resolve_checkpoint(options.checkpoint, overrides)
    if problems := resolved.config.model.problems():
        raise ConfigError(problems)
    kinds = resolved.config.model.build().kinds
    if others := sorted({kind.mixer for kind in kinds if extension.is_no_attention(kind.mixer)}):
        raise ConfigError([f"mixer {', '.join(others)} cannot generate text: it has no KV cache"])
    try:
        generate(options, resolved)
    except torch.OutOfMemoryError as error:
        reason = f"out of memory; use a shorter prompt or fewer --tokens: {describe_error(error)}"
        raise RankFailedError(EXIT_FAILURE, reason) from error


# ---- command line


def read_prompt(options: Namespace) -> str:
    """The text of --prompt or --prompt-file. Raises `ConfigError`."""
    prompt = options.prompt or ""
    try:
        if options.prompt_file is not None:
            return str(options.prompt_file.read_bytes().decode("utf-8-sig"))
        prompt.encode()
    except OSError as error:
        reason = f"--prompt-file {options.prompt_file} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        reason = f"--prompt-file {options.prompt_file} is not UTF-8 text"
    except UnicodeEncodeError:
        reason = "--prompt is not valid UTF-8"
    else:
        return str(prompt)
    raise ConfigError([f"{COMMAND_LINE}: {reason}"])


# ---- checkpoint


def load_model(resolved: ResolvedCheckpoint, device: torch.device) -> Transformer:
    """The model with the checkpoint's weights, in training.dtype. Raises `ResumeError`."""
    config = resolved.config
    with torch.device("meta"):
        model = Transformer(config.model.build(), seq_len=config.training.seq_len)
        model = model.cast(getattr(torch, config.training.dtype))
    materialize(model, device)
    tensors = model.named_tensors()
    reader = open_model(
        resolved.checkpoint, {name: each.shape for name, each in tensors.items()}, max_shown=1
    )
    read_tensors(reader, {f"{MODEL_PREFIX}{name}": each for name, each in tensors.items()})
    return model


def load_matching_tokenizer(resolved: ResolvedCheckpoint) -> Tokenizer:
    """The run's tokenizer.

    Raises `ConfigError` for a run without text, `DataError` for a tokenizer mismatch.
    """
    config = resolved.config
    if config.data.is_synthetic:
        raise ConfigError(
            [
                'data.corpus = "copy" trains on synthetic tokens without a tokenizer, so there is no text to generate'
            ]
        )
    kind = config.tokenizer.kind
    trained_kind = manifest.read_state(resolved.checkpoint).config.get("tokenizer.kind")
    if kind != trained_kind:
        raise DataError(
            f'tokenizer.kind = "{kind}", but {resolved.checkpoint} was trained with tokenizer.kind = "{trained_kind}"'
        )
    tokenizer = open_tokenizer(config.tokenizer)
    model_vocab_size = config.model.build().vocab_size
    if (size := text_vocab_size(tokenizer, config.data.separators)) > model_vocab_size:
        raise DataError(
            f"{resolved.checkpoint} was trained with another tokenizer: this one has {size} tokens, "
            f"the model's vocabulary {model_vocab_size}"
        )
    return tokenizer


# ---- text


def generate(options: Namespace, resolved: ResolvedCheckpoint) -> None:
    """Writes the samples. Raises as `load_model` and `load_matching_tokenizer`."""
    config = resolved.config
    tokenizer = load_matching_tokenizer(resolved)
    device = choose_device(0)
    prompt_S = encode_prompt(options.prompt, tokenizer, separators=config.data.separators)
    stop_tokens = {
        *tokenizer.stop_tokens,
        # Documents of the run end with this token, which the tokenizer may not count as a stop.
        *map(int, document_separators(tokenizer, config.data.separators)[1]),
    }
    prompt_len = prompt_S.numel()
    seq_len = config.training.seq_len
    capacity = prompt_len + options.tokens
    model = load_model(resolved, device)
    kernel = choose_attention_kernel(config, device)
    print_status(
        f"model {config.model.family} {config.model.size}: {model.config.parameter_summary}, "
        f"{config.training.dtype} on {device}; checkpoint {resolved.checkpoint}, step {resolved.step:,}"
    )
    if capacity > seq_len:
        print_status(f"warning: up to {capacity:,} tokens exceed training.seq_len = {seq_len:,}")
    decoder = Decoder(model, capacity=capacity, kernel=kernel)
    started = time.perf_counter()
    # The prompt is run once; each sample rewinds the KV cache to its end.
    first_logits_V = decoder.next_token_logits(prompt_S).cpu()
    print_status(f"prompt: {format_throughput(prompt_len, started)}")
    for sample in range(options.samples):
        decoder.rewind(prompt_len)
        write_text(("\n---\n" if sample else "") + options.prompt)
        generator = torch.Generator().manual_seed(options.seed + sample)
        sample_one = partial(
            sample_token, temperature=options.temperature, top_k=options.top_k, generator=generator
        )
        continuation = generate_tokens(
            decoder,
            first_logits_V,
            sample_one,
            vocab_size=tokenizer.vocab_size,
            stop_tokens=stop_tokens,
        )
        # `stream_text` yields one string more than tokens.
        num_tokens = -1
        started = time.perf_counter()
        for text in stream_text(
            islice(continuation, options.tokens), tokenizer, context_tokens=prompt_S[-8:].tolist()
        ):
            write_text(text)
            num_tokens += 1
        write_text("\n")
        end_note = ", end of document" if num_tokens < options.tokens else ""
        print_status(f"sample {sample + 1}: {format_throughput(num_tokens, started)}{end_note}")


def encode_prompt(prompt: str, tokenizer: Tokenizer, *, separators: str = "bos_eos") -> Tensor:
    """int64 [S]: the start of a document with this text.

    Raises `ConfigError` if it has no tokens.
    """
    # A prompt looks like the beginning of a training document.
    prefix_tokens, _ = document_separators(tokenizer, separators)
    tokens_S = torch.cat([prefix_tokens, tokenizer.encode(prompt)]).long()
    if not tokens_S.numel():
        raise ConfigError(
            [f"{COMMAND_LINE}: --prompt is required: documents of this run have no start token"]
        )
    return tokens_S


def generate_tokens(
    decoder: Decoder,
    logits_V: Tensor,
    sample_one: Callable[[Tensor], int],
    *,
    vocab_size: int,
    stop_tokens: Container[int],
) -> Iterator[int]:
    """Yields tokens up to the end of the document. Raises `ResumeError` for non-finite logits.

    Samples from the first `vocab_size` logits, because the model's vocabulary may be larger than
    the tokenizer's.
    """
    while bool(logits_V.isfinite().all()):
        if (token := sample_one(logits_V[:vocab_size])) in stop_tokens:
            return
        yield token
        logits_V = decoder.next_token_logits(torch.tensor([token])).cpu()
    raise ResumeError("the model's logits are not finite: its training has diverged")


def sample_token(
    logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    """Samples a token from logits on the host, so that equal logits give the same token on every
    device.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    top_logits, top_tokens = logits_V.double().topk(min(top_k, logits_V.numel()))
    # Subtract the maximum: a tiny temperature would overflow.
    probs = ((top_logits - top_logits[0]) / temperature).softmax(-1)
    return int(top_tokens[probs.multinomial(1, generator=generator)])


def stream_text(
    tokens: Iterable[int], tokenizer: Tokenizer, *, context_tokens: Sequence[int]
) -> Iterator[str]:
    """Yields what each token adds to the text, holding back incomplete characters, and then the
    rest.

    `context_tokens` precede the text: some tokenizers decode the first token of a text
    differently.
    """
    ids = list(context_tokens)
    num_emitted = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        # Decoded from the beginning each time, because a character may span several tokens.
        text = tokenizer.decode(ids)
        # An incomplete character decodes to one to three of these.
        text = text[:-3] + text[-3:].rstrip("\ufffd")
        yield text[num_emitted:]
        # Never backwards: a later token may change how earlier ones decode.
        num_emitted = max(num_emitted, len(text))
    yield tokenizer.decode(ids)[num_emitted:]


def format_throughput(tokens: int, started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"


def write_text(text: str) -> None:
    sys.stdout.buffer.write(text.encode())  # UTF-8 in every locale.
    sys.stdout.buffer.flush()


def print_status(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(argv: Sequence[str]) -> int:
    return run_command(argv, generate_parser())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
