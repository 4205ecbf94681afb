"""Pieces of a corpus, each turned into shards by one process, in any order and whatever happens to the others."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from trainer.checkpoint.durable_io import write_synced
from trainer.data.errors import DataError
from trainer.data.formats import BadText, Unit, texts
from trainer.data.shard_writer import ShardWriter
from trainer.data.token_dataset import DTYPES, Piece, narrowest
from trainer.data.tokenizer import Tokenizer
from trainer.errors import FAILED, RankError

RECORDS = "pieces"
REPORT = 1 << 20  # bytes of text between two reports
NAMED = 20  # of what is bad in a piece

Numbered = tuple[int, list[Unit]]
Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done with each piece."""

    folder: Path
    tokenizer: Tokenizer
    text_key: str
    separators: str
    max_document: int | None
    shard_tokens: int
    refuses: bool

    def record(self, number: int) -> Path:
        """Where it stands what became of a piece; written when all of it is on disk."""
        return self.folder / RECORDS / f"{number:05d}.json"

    def done(self, number: int) -> Piece | None:
        """What became of a piece, if it is finished and its tokens are there."""
        try:
            piece = Piece.model_validate_json(self.record(number).read_bytes())
            width = DTYPES[narrowest(self.tokenizer.vocab_size)].itemsize
            sizes = [(self.folder / f"{shard.name}.bin").stat().st_size for shard in piece.shards]
        except (OSError, ValueError):
            return None
        return piece if sizes == [shard.tokens * width for shard in piece.shards] else None


def write_pieces(job: Job, pieces: list[Numbered], *, workers: int, advance: Advance) -> None:
    """Writes the shards and the record of every piece. `advance` is told bytes of the corpus and tokens.

    Raises DataError and OSError as one process would, and RankError if a worker dies.
    """
    workers = min(workers, len(pieces))
    # A daemon may have no children.
    if workers <= 1 or multiprocessing.current_process().daemon:
        for piece in pieces:
            write_piece(job, piece, advance)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    connections: dict[Connection, ForkServerProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            connections[ours] = process
        _serve(connections, iter(pieces), advance)
    finally:
        for connection, process in connections.items():
            connection.close()
            process.kill()
            process.join()


def _serve(connections: dict[Connection, ForkServerProcess], pieces: Iterator[Numbered], advance: Advance) -> None:
    """Gives each worker a piece when it asks, with None, until there is none."""
    busy = set(connections)
    while busy:
        for connection in [each for each in wait(list(busy)) if isinstance(each, Connection)]:
            try:
                said = connection.recv()
                if said is None and (piece := next(pieces, None)) is not None:
                    connection.send(piece)
                elif said is None:
                    busy.remove(connection)
            except (EOFError, ConnectionError):
                connections[connection].join()
                status = connections[connection].exitcode
                cause = f"killed by {signal.Signals(-status).name}" if status and status < 0 else f"status {status}"
                raise RankError(FAILED, f"a worker ended ({cause}); the same command goes on from there") from None
            if isinstance(said, Exception):
                raise said
            if said is not None:
                advance(*said)


def _work(connection: Connection, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all; whoever asked ends the others.
    torch.set_num_threads(1)

    def advance(more_bytes: int, more_tokens: int) -> None:
        connection.send((more_bytes, more_tokens))

    # Where the other end is gone, so is whoever wanted the pieces.
    with suppress(EOFError, ConnectionError):
        try:
            while True:
                connection.send(None)
                write_piece(job, connection.recv(), advance)
        except (EOFError, ConnectionError):
            raise
        except (DataError, OSError) as error:
            connection.send(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is to be told
            connection.send(RuntimeError("".join(traceback.format_exception(error))))


def write_piece(job: Job, piece: Numbered, advance: Advance) -> None:
    number, _ = piece
    # Its own: a worker whose parent was killed may not have noticed when the next one does the same piece.
    scratch = job.record(number).with_name(f"{number:05d}-{os.getpid()}")
    scratch.mkdir()
    try:
        record = _written(job, scratch, piece, advance)
        for path in scratch.iterdir():
            path.rename(job.folder / path.name)
        write_synced(scratch / "record", record.model_dump_json().encode())
        (scratch / "record").rename(job.record(number))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _written(job: Job, folder: Path, piece: Numbered, advance: Advance) -> Piece:
    """Writes the shards of a piece."""
    number, units = piece
    bad: list[str] = []
    document = ""
    writer = ShardWriter(
        folder,
        f"shard-{number:05d}",
        job.tokenizer,
        separators=job.separators,
        max_document=job.max_document,
        shard_tokens=job.shard_tokens,
    )
    with closing(writer):
        for unit in units:
            if unit.document != document:
                writer.end_document()
            document = unit.document
            bad += _add(job, writer, unit, advance)
            if unit.mtime_ns and _mtime_ns(unit) != unit.mtime_ns:
                raise DataError(f"{unit.path} was changed while the corpus was read; start again")
        writer.finish()
    return Piece(shards=writer.shards, longest=writer.longest, skipped=len(bad), bad=bad[:NAMED])


def _add(job: Job, writer: ShardWriter, unit: Unit, advance: Advance) -> list[str]:
    """Adds the texts of a unit. What is bad leaves nothing behind, and is named."""
    bad: list[str] = []
    left, read, tokens = unit.size, 0, 0
    for blocks in texts(unit, text_key=job.text_key):
        mark = writer.mark()
        try:
            for text in blocks:
                ids = _encode(job.tokenizer, text, unit)
                writer.add(ids)
                tokens += len(ids)
                read += len(text) if text.isascii() else len(text.encode())
                if read >= REPORT:
                    advance(min(read, left), tokens)
                    left, read, tokens = max(left - read, 0), 0, 0
        except BadText as error:
            if job.refuses:
                raise DataError(f'data.bad_files = "refuse", and the corpus holds {error}') from error
            writer.go_back(mark)
            bad.append(str(error))
        if not unit.document:
            writer.end_document()
    advance(left, tokens)
    return bad


def _mtime_ns(unit: Unit) -> int | None:
    try:
        return Path(unit.path).stat().st_mtime_ns
    except OSError:
        return None


def _encode(tokenizer: Tokenizer, text: str, unit: Unit) -> torch.Tensor:
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{unit.name}: {error}") from error
