"""Tokenizes partitions of a corpus independently, each by one process into its own shards."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from models.files import MAX_RECORD_BYTES
from trainer.config import extension
from trainer.config.source import CorpusSpec
from trainer.data.contents import full_suffix
from trainer.data.formats import BadText, InputSplit, Text, read_texts
from trainer.data.own_files import RECORDS_FOLDER
from trainer.data.shard_writer import ShardWriter
from trainer.data.text_chunks import EncodingError
from trainer.data.token_dataset import DTYPES, PartitionResult, TextCounts, token_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import (
    EXIT_FAILURE,
    DataError,
    RankFailedError,
    ResumeError,
    RunError,
    in_one_line,
)
from trainer.storage.artifact import DamageError, read_artifact, write_artifact

# bytes of text between two progress reports
REPORT_BYTES = 1 << 20
MAX_LISTED_PROBLEMS = 20  # per partition

NumberedPartition = tuple[int, list[InputSplit]]
Advance = Callable[[int, int], None]
"""Called with the bytes of the corpus and the tokens processed since the last call."""


@dataclass(frozen=True)
class TokenizeJob:
    folder: Path
    spec: CorpusSpec
    tokenizer: Tokenizer
    shard_tokens: int

    def record_path(self, number: int) -> Path:
        """The file that marks a partition as finished, written after its shards."""
        return self.folder / RECORDS_FOLDER / f"{number:05d}.json"

    def finished_result(self, number: int) -> PartitionResult | None:
        """The record of a finished partition, unless its shards are missing or truncated."""
        try:
            result = read_artifact(self.record_path(number), PartitionResult)
            width = DTYPES[token_dtype(self.tokenizer.vocab_size)].itemsize
            sizes = [(self.folder / f"{shard.name}.bin").stat().st_size for shard in result.shards]
        except (OSError, DamageError, ResumeError):
            return None
        return result if sizes == [shard.tokens * width for shard in result.shards] else None


def tokenize_partitions(
    job: TokenizeJob, partitions: list[NumberedPartition], *, workers: int, advance: Advance
) -> None:
    """Writes the shards and the record of every partition.

    Raises DataError and OSError, from workers too, and RankFailedError if a worker dies.
    """
    workers = min(workers, len(partitions))
    # A daemonic process cannot start children.
    if workers <= 1 or multiprocessing.current_process().daemon:
        for partition in partitions:
            tokenize_partition(job, partition, advance)
        return
    # A fork of a process with threads, as torch and pyarrow start them, may deadlock. The fork
    # server has none, and imports this module once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    connections: dict[Connection, ForkServerProcess] = {}
    try:
        for _ in range(workers):
            parent_end, worker_end = context.Pipe()
            process = context.Process(
                target=_worker_main, args=(worker_end, job, extension.references()), daemon=True
            )
            process.start()
            # With this copy open, `recv` would never report the end of a worker that died.
            worker_end.close()
            connections[parent_end] = process
        _dispatch(connections, iter(partitions), advance)
    finally:
        for connection, process in connections.items():
            connection.close()
            process.kill()
            process.join()


def _dispatch(
    connections: dict[Connection, ForkServerProcess],
    partitions: Iterator[NumberedPartition],
    advance: Advance,
) -> None:
    """Sends a partition to each worker that asks for one, with None, until none is left."""
    busy = set(connections)
    while busy:
        for connection in [each for each in wait(list(busy)) if isinstance(each, Connection)]:
            try:
                # None asks for work; (bytes, tokens) is progress; an exception ends the
                # preparation.
                message = connection.recv()
                if message is None and (partition := next(partitions, None)) is not None:
                    connection.send(partition)
                elif message is None:
                    busy.remove(connection)
            except (EOFError, ConnectionError):
                connections[connection].join()
                status = connections[connection].exitcode
                cause = (
                    f"killed by {signal.Signals(-status).name}"
                    if status and status < 0
                    else f"status {status}"
                )
                raise RankFailedError(
                    EXIT_FAILURE, f"a worker ended ({cause}); run the same command again to resume"
                ) from None
            if isinstance(message, Exception):
                raise message
            if message is not None:
                advance(*message)


def _worker_main(connection: Connection, job: TokenizeJob, extensions: Sequence[str]) -> None:
    # Ctrl-C reaches all processes; the parent kills its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def advance(more_bytes: int, more_tokens: int) -> None:
        connection.send((more_bytes, more_tokens))

    extension.install(extensions)
    # The pipe breaks when the parent dies.
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(None)
            partition = connection.recv()
            try:
                tokenize_partition(job, partition, advance)
            # A ConnectionError is an OSError, too, but of the pipe: the parent is gone, and nobody
            # reads.
            except ConnectionError:
                raise
            except (DataError, OSError) as error:
                connection.send(error)
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                connection.send(RuntimeError("".join(traceback.format_exception(error))))


def tokenize_partition(job: TokenizeJob, partition: NumberedPartition, advance: Advance) -> None:
    number, _ = partition
    # Per process: a worker of a killed parent may still be running when another one tokenizes the
    # same partition.
    scratch = job.record_path(number).with_name(f"{number:05d}-{os.getpid()}")
    scratch.mkdir()
    threads = torch.get_num_threads()
    # Others would spin between operations on short documents.
    torch.set_num_threads(1)
    try:
        result = _write_shards(job, scratch, partition, advance)
        # Shards first, the record last: without its record a partition is tokenized again.
        for path in scratch.iterdir():
            path.rename(job.folder / path.name)
        write_artifact(job.record_path(number), result)
    except RunError:
        raise
    except Exception as error:
        if (problem := extension.describe_error(error)) is None:
            raise
        raise DataError(problem) from error
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(scratch, ignore_errors=True)


class _Progress:
    """Reports what was read and written about every REPORT_BYTES; the bytes of a split add up to
    its size.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._remaining = 0
        self._num_bytes = 0
        self.tokens = 0

    def begin(self, split: InputSplit) -> None:
        self._remaining = split.size

    def count(self, blocks: Iterable[str]) -> Iterator[str]:
        for block in blocks:
            self._num_bytes += len(block) if block.isascii() else len(block.encode())
            yield block
            if self._num_bytes >= REPORT_BYTES:
                # The text of a compressed file is longer than its size, to which progress adds up.
                self._report(min(self._num_bytes, self._remaining))

    def end(self) -> None:
        self._report(self._remaining)

    def _report(self, num_bytes: int) -> None:
        self._advance(num_bytes, self.tokens)
        self._remaining -= num_bytes
        self._num_bytes = 0
        self.tokens = 0


class _TextLog:
    """Counts the texts of a partition by suffix, and describes the bad ones."""

    def __init__(self, *, fail_on_bad_files: bool) -> None:
        self.counts: dict[str, TextCounts] = {}
        self.problems: list[str] = []
        self._fail_on_bad_files = fail_on_bad_files

    def read(self, text: Text) -> Iterator[str]:
        """The blocks of a text, which is counted after the last one."""
        is_empty = True
        for block in text.blocks:
            is_empty = False
            yield block
        self._add(text.split, TextCounts(empty=1) if is_empty else TextCounts(texts=1))

    def skip(self, text: Text, error: BadText) -> None:
        """Counts and records a bad text. Raises DataError if bad files are errors."""
        if self._fail_on_bad_files:
            raise DataError(
                f'data.bad_files = "error", and the corpus holds {in_one_line(str(error))}'
            ) from error
        self.problems.append(str(error))
        self._add(text.split, TextCounts(skipped=1))

    def _add(self, split: InputSplit, counted: TextCounts) -> None:
        suffix = full_suffix(split.name)
        self.counts[suffix] = self.counts.get(suffix, TextCounts()) + counted


def _write_shards(
    job: TokenizeJob, folder: Path, partition: NumberedPartition, advance: Advance
) -> PartitionResult:
    number, splits = partition
    texts = _TextLog(fail_on_bad_files=job.spec.fail_on_bad_files)
    progress = _Progress(advance)
    with closing(
        ShardWriter(
            folder, f"shard-{number:05d}", job.tokenizer, job.spec, shard_tokens=job.shard_tokens
        )
    ) as writer:
        for document_key, group in groupby(splits, lambda split: split.document_key):
            if document_key:
                blocks = _document_blocks(job, group, texts, progress)
                try:
                    _encode(job, writer, blocks, progress)
                except EncodingError as error:
                    raise DataError(f"the document {document_key}: {error}") from error
                writer.end_document()
            else:
                for split in group:
                    _add_texts(job, writer, split, texts, progress)
        writer.finish()
    return PartitionResult(
        shards=writer.shards,
        longest=writer.longest,
        counts=texts.counts,
        bad=texts.problems[:MAX_LISTED_PROBLEMS],
    )


def _add_texts(
    job: TokenizeJob, writer: ShardWriter, split: InputSplit, texts: _TextLog, progress: _Progress
) -> None:
    """Adds each text of a split as a document, and rolls back bad ones."""
    for text in _read_split(job, split, progress):
        # A text may turn out bad after its first blocks were written.
        savepoint = writer.savepoint()
        try:
            _encode(job, writer, progress.count(texts.read(text)), progress)
        except EncodingError as error:
            raise DataError(f"{text.name}: {error}") from error
        except BadText as error:
            writer.rollback(savepoint)
            texts.skip(text, error)
        writer.end_document()


def _document_blocks(
    job: TokenizeJob, splits: Iterable[InputSplit], texts: _TextLog, progress: _Progress
) -> Iterator[str]:
    """The text of a document of several files.

    Of a bad one nothing is kept, so each is read before it is passed on.
    """
    for split in splits:
        for text in _read_split(job, split, progress):
            try:
                yield from [*progress.count(bounded(texts.read(text), text.name))]
            except BadText as error:
                texts.skip(text, error)


def bounded(blocks: Iterator[str], name: str) -> Iterator[str]:
    """Raises BadText for a text that is too long to be held as a whole."""
    num_chars = 0
    for block in blocks:
        num_chars += len(block)
        if num_chars > MAX_RECORD_BYTES:
            raise BadText(
                f"{name}: longer than {MAX_RECORD_BYTES:,} characters, in a document of several files"
            )
        yield block


def _read_split(job: TokenizeJob, split: InputSplit, progress: _Progress) -> Iterator[Text]:
    """The texts of a split. Raises DataError if the file changes meanwhile."""
    progress.begin(split)
    yield from read_texts(split, text_key=job.spec.text_key)
    progress.end()
    mtime_ns = 0
    with suppress(OSError):
        mtime_ns = Path(split.path).stat().st_mtime_ns
    if split.mtime_ns and mtime_ns != split.mtime_ns:
        raise DataError(f"{split.path} changed while the corpus was read; run the command again")


def _encode(
    job: TokenizeJob, writer: ShardWriter, blocks: Iterator[str], progress: _Progress
) -> None:
    """Adds a text. Raises EncodingError if the tokenizer refuses it."""
    for ids in job.tokenizer.encode_blocks(blocks):
        writer.add(ids)
        progress.tokens += ids.numel()
