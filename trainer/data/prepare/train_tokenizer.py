"""A sentencepiece BPE out of a sample of a corpus: the same pieces for the same text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import sentencepiece

from trainer.checkpoint.durable_io import write_and_fsync
from trainer.data.corpus import Corpus
from trainer.data.errors import DataError
from trainer.data.formats import BadText, read_texts
from trainer.data.source import CorpusSpec

DEFAULT_LINES = 100_000
MAX_LINE_BYTES = 16_384  # bytes of a line that is learned from
MAX_SAMPLED_PARTITIONS = 64  # of a corpus that are read
MAX_PARTITION_CHARS = 1 << 26


def train_sentencepiece(sources: Sequence[CorpusSpec], *, vocab_size: int, lines: int) -> bytes:
    """The model. Raises DataError if the text does not give as many pieces, or the size has no room for all bytes."""
    sample = sample_lines(sources, lines)
    if not sample:
        raise DataError("there is no text to learn from")
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
        raise DataError(f"no tokenizer of {vocab_size} tokens can be made of {len(sample)} lines: {reason}") from error
    return model.getvalue()


def sample_lines(sources: Sequence[CorpusSpec], count: int) -> list[str]:
    """`count` lines, each as likely as any other of the text that is read, which is all of a corpus that is not large."""
    random, sample = Random(0), list[str]()
    for number, line in enumerate(line for source in sources for line in iter_lines(source)):
        if number < count:
            sample.append(line)
        elif (slot := random.randrange(number + 1)) < count:
            sample[slot] = line
    return sample


def iter_lines(source: CorpusSpec) -> Iterator[str]:
    """Lines of pieces that lie evenly over a corpus, and of each piece of its beginning."""
    partitions = Corpus(source).partitions()
    for partition in partitions[:: -(-len(partitions) // MAX_SAMPLED_PARTITIONS)]:
        remaining = MAX_PARTITION_CHARS
        for blocks in (blocks for unit in partition for blocks in read_texts(unit, text_key=source.text_key)):
            with suppress(BadText):
                for block in blocks:
                    remaining -= len(block)
                    yield from (line for line in block.split("\n") if line and len(line) <= MAX_LINE_BYTES)
                    if remaining < 0:
                        break
            if remaining < 0:
                break


def write_model(model: bytes, path: Path) -> None:
    """The whole file or nothing. Raises DataError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_and_fsync(temporary, model)
        temporary.rename(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error
