"""Trains a sentencepiece BPE on a sample of a corpus, deterministically."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import sentencepiece

from trainer.checkpoint.durable_io import write_atomic
from trainer.data.corpus import Corpus
from trainer.data.formats import BadText, read_texts
from trainer.data.source import CorpusSpec
from trainer.errors import DataError

MAX_LINE_BYTES = 16_384  # longer lines are left out
MAX_SAMPLED_PARTITIONS = 64  # per corpus
MAX_PARTITION_CHARS = 1 << 26


def train_sentencepiece(sources: Sequence[CorpusSpec], *, vocab_size: int, lines: int) -> bytes:
    """The serialized model. Raises DataError if the text gives fewer tokens, or vocab_size is too small for all bytes."""
    sample = sample_lines(sources, lines)
    if not sample:
        raise DataError("the corpus has no text to train on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            split_by_whitespace=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = re.sub(r"^.*\) \[.*\] |\s+", " ", str(error)).strip()
        raise DataError(f"cannot train {vocab_size} tokens on {len(sample)} lines: {reason}") from error
    return model.getvalue()


def sample_lines(sources: Sequence[CorpusSpec], count: int) -> list[str]:
    """A uniform sample of `count` of the lines that `iter_lines` reads (reservoir sampling, fixed seed)."""
    random, sample = Random(0), list[str]()
    for number, line in enumerate(line for source in sources for line in iter_lines(source)):
        if number < count:
            sample.append(line)
        elif (slot := random.randrange(number + 1)) < count:
            sample[slot] = line
    return sample


def iter_lines(source: CorpusSpec) -> Iterator[str]:
    """Lines from the start of evenly spaced partitions; all lines of a small corpus."""
    partitions = Corpus(source).partitions()
    for partition in partitions[:: -(-len(partitions) // MAX_SAMPLED_PARTITIONS)]:
        remaining = MAX_PARTITION_CHARS
        for blocks in (blocks for split in partition for blocks in read_texts(split, text_key=source.text_key)):
            with suppress(BadText):
                for block in blocks:
                    remaining -= len(block)
                    yield from (line for line in block.split("\n") if line and len(line) <= MAX_LINE_BYTES)
                    if remaining < 0:
                        break
            if remaining < 0:
                break


def write_model(model: bytes, path: Path) -> None:
    """Raises DataError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, model)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error
