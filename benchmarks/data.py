"""What data costs before and during training.

    python -m benchmarks.data prepare [--vocab-size 8192] [--rounds 3] [--corpus PATH]
    python -m benchmarks.data rows [--rounds 5] [--seq-len 65536 1048576]
    python -m benchmarks.data loader [--rounds 5] [--steps 40]

prepare: text of the standard library to tokens on disk, one process, for each kind of tokenizer:
bytes, a BPE in tiktoken's format and a sentencepiece BPE, both trained on the spot on the same
lines, and the first of them as tokenizer.json, as it comes and with a pattern that keeps it out of
tiktoken. CPU-seconds of the whole call of `prepare`, reading and writing included, the best of the
rounds; the tokenizers' training does not count. Last, 100,000 lines of JSON of 370 bytes.

rows: what one rank reads of a row of 64K and of 1M tokens, alone and as one of eight that share it
head-tail: CPU-seconds of the slowest rank's whole batch (tokens, labels, positions, documents,
boundaries), the mean over rows, best of the rounds, from a warm cache; and the bytes of that
batch. Packed by best fit from the standard library as bytes, a document a package (long pieces) or
a file (many short ones).

loader: micro-batches of one sequence, four a step, from a warm cache, by a thread that calls the
dataset itself, and by StatefulDataLoader in that thread and in one or two workers. Milliseconds of
a micro-batch: of a loop that only takes them; of CPU, all processes together; and those that a
loop waits which computes 10 ms for each. The four alternate; medians over the rounds, and of the
ratio to the first in the same round.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import regex
import torch
from torch import Tensor

from parallelisms.context.batch_layout import BatchLayout
from tests.build_datasets import build_blended_dataset
from tests.sentencepiece_model import train_sentencepiece
from trainer.config.data import STDLIB_CORPUS, DataSection, TokenizerSection
from trainer.config.source import CorpusSpec
from trainer.data.byte_level_bpe import LLAMA3_PATTERN
from trainer.data.corpus import Corpus
from trainer.data.formats import BadText, read_texts
from trainer.data.hf_tokenizer import byte_level_bpe
from trainer.data.loader import MicroBatchLoader
from trainer.data.prepare import prepare
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset
from trainer.data.tiktoken_tokenizer import LLAMA3_SPECIAL_TOKENS
from trainer.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer

LINES = 100_000


def byte_pairs(lines: list[str], vocab_size: int) -> list[bytes]:
    """Byte sequences in the order of their rank: what byte-pair encoding learns from lines."""
    counts = Counter(
        word.encode() for line in lines for word in regex.findall(LLAMA3_PATTERN, f"{line}\n")
    )
    words = [([bytes([byte]) for byte in word], count) for word, count in counts.items()]
    tokens = [bytes([byte]) for byte in range(256)]
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for number, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            pairs[pair] += count
            where[pair].add(number)
    while len(tokens) < vocab_size:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(b"".join(best))
        for number in where.pop(best):
            parts, count = words[number]
            for pair in pairwise(parts):
                pairs[pair] -= count
            parts[:] = merged(parts, best)
            for pair in pairwise(parts):
                pairs[pair] += count
                where[pair].add(number)
        del pairs[best]
    return tokens


def merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    found: list[bytes] = []
    for part in parts:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return found


def sample_lines(corpus: str) -> list[str]:
    """A uniform sample of the lines of a corpus, always the same one."""
    lines: list[str] = []
    for split in chain.from_iterable(Corpus(CorpusSpec(corpus=corpus)).partitions()):
        for text in read_texts(split, text_key="text"):
            with suppress(BadText):
                lines += [
                    line
                    for block in text.blocks
                    for line in block.split("\n")
                    if 0 < len(line) < 16_384
                ]
    return Random(0).sample(lines, min(LINES, len(lines)))


def tokenizers(folder: Path, vocab_size: int, corpus: str) -> dict[str, Tokenizer]:
    lines = sample_lines(corpus)
    train_sentencepiece(folder / "sentencepiece", lines, vocab_size=vocab_size)
    tokens = byte_pairs(lines[: LINES // 10], vocab_size - len(LLAMA3_SPECIAL_TOKENS))
    ranks = b"".join(
        b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)
    )
    (folder / "tiktoken").write_bytes(ranks)
    tokenizer_json = byte_level_bpe(
        dict(zip(tokens, range(len(tokens)), strict=True)),
        LLAMA3_SPECIAL_TOKENS,
        pattern=LLAMA3_PATTERN,
        bos=LLAMA3_SPECIAL_TOKENS[0],
    )
    stated = TokenizerSection(kind="tiktoken", path=folder / "tiktoken", pattern="llama3")
    kinds = {
        "tiktoken": open_tokenizer(stated),
        "sentencepiece": load_tokenizer("sentencepiece", folder / "sentencepiece"),
    }
    for name, pattern in (
        ("in tiktoken", LLAMA3_PATTERN),
        ("in tokenizers", f"(?:{LLAMA3_PATTERN})"),
    ):
        (folder / name).mkdir()
        tokenizer_json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        (folder / name / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": LLAMA3_SPECIAL_TOKENS[1]})
        )
        kinds[f"huggingface, {name}"] = load_tokenizer("huggingface", folder / name)
    return {"byte": load_tokenizer("byte", None), **kinds}


def measure_prepare(vocab_size: int, rounds: int, corpus: str) -> None:
    say(f"{machine()}; {Corpus(CorpusSpec(corpus=corpus)).size / 1e6:.1f} MB, {rounds} rounds\n")
    say(
        "| tokenizer | vocabulary | bytes per token | CPU-s | MB/s per core |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        wanted = [
            (name, tokenizer, corpus)
            for name, tokenizer in tokenizers(Path(folder), vocab_size, corpus).items()
        ]
        wanted += [
            (
                "byte, short records",
                load_tokenizer("byte", None),
                write_records(Path(folder, "records.jsonl")),
            )
        ]
        for name, tokenizer, each in wanted:
            size = Corpus(CorpusSpec(corpus=each)).size
            seconds = []
            tokens = 0
            for number in range(rounds):
                source = CorpusSpec(corpus=each, cache_dir=Path(folder, name + str(number)))
                began = time.process_time()
                tokens = prepare(source, tokenizer).num_tokens
                seconds.append(time.process_time() - began)
            best = min(seconds)
            say(
                f"| {name} | {tokenizer.vocab_size} | {size / tokens:.2f} | {best:.2f} | {size / 1e6 / best:.1f} |"
            )


def write_records(path: Path, count: int = 100_000) -> str:
    """Lines of JSON of 370 bytes."""
    rng = Random(0)
    with path.open("w") as file:
        for _ in range(count):
            words = "".join(rng.choices("etaoin shrdlu ", k=356))
            file.write(json.dumps({"text": words}) + "\n")
    return str(path)


@dataclass(frozen=True)
class HeadTail:
    """The part of one of several ranks that share rows; see `Share`."""

    rank: int
    ranks: int

    @property
    def seq_len_divisor(self) -> int:
        return 2 * self.ranks

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        spans = BatchLayout("headtail", self.ranks, boundaries_D[None]).of_rank(self.rank)
        return spans.start, spans.length

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
        return BatchLayout("headtail", self.ranks, boundaries_BD).pairs_per_rank(window)[self.rank]


def measure_rows(rounds: int, lengths: Sequence[int]) -> None:
    torch.set_num_threads(1)
    say(f"{machine()}; {rounds} rounds\n")
    say(
        "| document | tokens per sequence | segments per sequence | cp | CPU-ms per sequence | sequences/s | MiB per rank |"
    )
    say("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for documents, seq_len, ranks in product(("repository", "file"), lengths, (1, 8)):
            data = DataSection(documents=documents, cache_dir=Path(folder))
            rows = build_blended_dataset(
                data, load_tokenizer("byte", None), seq_len=seq_len, seed=0
            )
            (source,) = rows.sources
            numbers = range(min(8, source.num_sequences))
            mean = sum(len(source.segment_lengths(number)) for number in numbers) / len(numbers)
            slowest = 0.0
            held = 0
            for rank in (0, ranks - 1):
                share = HeadTail(rank, ranks) if ranks > 1 else FULL_SEQUENCE
                batch = rows.read([0], share)
                times = []
                for _ in range(rounds):
                    began = time.process_time()
                    for number in numbers:
                        batch = rows.read([number], share)
                    times.append((time.process_time() - began) / len(numbers))
                tensors = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
                slowest = max(slowest, min(times))
                held = sum(tensor.nbytes for tensor in tensors)
            cells = (
                documents,
                f"{seq_len:,}",
                f"{mean:.0f}",
                ranks,
                f"{1000 * slowest:.2f}",
                f"{1 / slowest:,.0f}",
            )
            say(f"| {' | '.join(map(str, cells))} | {held / 2**20:.1f} |")


MICRO_BATCHES = 4
COMPUTE_SECONDS = 0.01
Steps = Generator[Sequence[object], None, None]


def thread_steps(rows: BlendedDataset) -> Steps:
    """The steps that one thread reads without torchdata, one ahead."""
    dealer = micro_batches(rows, 0)
    with ThreadPoolExecutor(1) as pool:
        first = 0
        reading: list[Any] = []
        while True:
            current = reading
            reading = [pool.submit(rows.read, each.indices) for each in dealer.deal(first)]
            first += MICRO_BATCHES
            if current:
                yield [each.result() for each in current]


def micro_batches(rows: BlendedDataset, num_workers: int) -> MicroBatchLoader:
    return MicroBatchLoader(
        rows,
        dp_rank=0,
        dp_size=1,
        global_batch_size=MICRO_BATCHES,
        micro_batch_size=1,
        num_workers=num_workers,
    )


def compute() -> None:
    """Keeps this thread busy as training does, outside of the interpreter."""
    x = torch.ones(256, 256)
    end = time.perf_counter() + COMPUTE_SECONDS
    while time.perf_counter() < end:
        x @ x


def time_steps(begin: Callable[[], Steps], count: int) -> tuple[float, float, float]:
    """Milliseconds of a micro-batch: taken at once, of CPU, and waited for beside computation."""
    cpu = cpu_seconds()
    with closing(begin()) as steps:
        next(steps)
        began = time.perf_counter()
        for _ in range(count):
            next(steps)
        taken = time.perf_counter() - began
    # Those of workers count once they have ended.
    used = cpu_seconds() - cpu
    waited = 0.0
    with closing(begin()) as steps:
        next(steps)
        for _ in range(count):
            for _ in range(MICRO_BATCHES):
                compute()
            began = time.perf_counter()
            next(steps)
            waited += time.perf_counter() - began
    scale = 1000 / count / MICRO_BATCHES
    return taken * scale, used * scale, waited * scale


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_loader(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    say(f"{machine()}; {rounds} rounds of {steps} steps\n")
    say("| documents | tokens | read by | ms | beside the thread | CPU-ms | waited, ms |")
    say("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        records = write_records(Path(folder, "records.jsonl"))
        for name, corpus, seq_len in (
            ("short records", records, 1 << 12),
            ("files", STDLIB_CORPUS, 1 << 15),
            ("files", STDLIB_CORPUS, 1 << 17),
        ):
            data = DataSection(corpus=corpus, cache_dir=Path(folder))
            tokenizer = load_tokenizer("byte", None)
            rows = build_blended_dataset(data, tokenizer, seq_len=seq_len, seed=0)
            # Every block is hashed before the first round.
            for number in range(rows.sources[0].num_sequences):
                rows.read([number])
            readers: dict[str, Callable[[], Steps]] = {
                "a thread": partial(thread_steps, rows),
                **{
                    f"StatefulDataLoader, {workers} workers": partial(
                        micro_batches(rows, workers).steps, 0
                    )
                    for workers in (0, 1, 2)
                },
            }
            timed: dict[str, list[tuple[float, float, float]]] = {each: [] for each in readers}
            for _ in range(rounds):
                for reader, begin in readers.items():
                    timed[reader].append(time_steps(begin, steps))
            first = timed["a thread"]
            for reader, times in timed.items():
                taken, used, waited = (median(column) for column in zip(*times, strict=True))
                ratio = median(
                    each[0] / other[0] for each, other in zip(times, first, strict=True)
                )
                cells = (name, f"{seq_len:,}", reader, f"{taken:.2f}", f"{ratio:.2f}")
                say(f"| {' | '.join(cells)} | {used:.2f} | {waited:.2f} |")


def machine() -> str:
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="text to tokens on disk")
    preparing.add_argument("--vocab-size", type=int, default=8192)
    preparing.add_argument("--rounds", type=int, default=3)
    preparing.add_argument("--corpus", default=STDLIB_CORPUS)
    reading = commands.add_parser("rows", help="tokens on disk to what a rank holds")
    reading.add_argument("--rounds", type=int, default=5)
    reading.add_argument("--seq-len", type=int, nargs="+", default=[1 << 16, 1 << 20])
    loading = commands.add_parser("loader", help="what a training loop waits for")
    loading.add_argument("--rounds", type=int, default=5)
    loading.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.command == "loader":
        measure_loader(options.rounds, options.steps)
    elif options.command == "prepare":
        measure_prepare(options.vocab_size, options.rounds, options.corpus)
    else:
        measure_rows(options.rounds, options.seq_len)


if __name__ == "__main__":
    main()
