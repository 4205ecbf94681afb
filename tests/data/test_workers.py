"""Processes that read micro-batches for a rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch

from models.batch import Batch
from tests.build_datasets import build_blended_dataset
from trainer.config.data import DataSection
from trainer.data.loader import MicroBatchLoader
from trainer.data.packing import PackedDataset
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError
from trainer.resilience.signals import STOP_SIGNALS

PLANNED = object()


@pytest.fixture
def dataset(section: Callable[..., DataSection]) -> BlendedDataset:
    texts = {f"{n:02}": f"text {n} of {n * n * n}" for n in range(15)}
    return build_blended_dataset(section(texts), ByteTokenizer(), seq_len=8, seed=1)


def loader(dataset: BlendedDataset, num_workers: int) -> MicroBatchLoader:
    return MicroBatchLoader(
        dataset,
        dp_rank=1,
        dp_size=2,
        global_batch_size=5,
        micro_batch_size=1,
        plan_attention=lambda boundaries: (PLANNED, os.getpid(), boundaries.tolist()),
        num_workers=num_workers,
    )


def worker_pids() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def contents(steps: Iterator[list[Batch]], count: int) -> list[list[object]]:
    return [
        [
            (
                batch.tokens.tolist(),
                batch.labels.tolist(),
                batch.boundaries.tolist(),
                batch.sequence_sources,
                batch.busiest_pairs,
                batch.attention_plans,
            )
            for batch in step
        ]
        for step in islice(steps, count)
    ]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_read_what_the_thread_reads_from_any_position(
    num_workers: int, dataset: BlendedDataset
) -> None:
    before = worker_pids()
    state = torch.get_rng_state()
    with (
        closing(loader(dataset, 0).steps(20)) as in_thread,
        closing(loader(dataset, num_workers).steps(20)) as in_workers,
    ):
        # Plans are made in this process, where attention looks for them.
        assert contents(in_workers, 7) == contents(in_thread, 7)
        assert len(worker_pids()) == len(before) + num_workers
    assert worker_pids() == before, "closing ends the workers"
    assert torch.equal(torch.get_rng_state(), state)


def test_signals_of_a_scheduler_do_not_end_reading(dataset: BlendedDataset) -> None:
    before = worker_pids()
    with (
        closing(loader(dataset, 1).steps(0)) as steps,
        closing(loader(dataset, 0).steps(0)) as own,
    ):
        assert contents(steps, 1) == contents(own, 1)
        (pid,) = set(worker_pids()) - set(before)
        for number in STOP_SIGNALS:
            os.kill(pid, number)
        assert contents(steps, 5) == contents(own, 5)


def test_damage_is_a_data_error_of_the_sequences(dataset: BlendedDataset) -> None:
    (source,) = dataset.sources
    assert isinstance(source, PackedDataset)
    path: Path = source.token_dataset.folder / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with (
        closing(loader(dataset, 1).steps(5)) as steps,
        pytest.raises(DataError, match=r"^sequences \[\d\]: .* checksum mismatch in bytes 0 to"),
    ):
        next(steps)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status != "Z"


def test_workers_die_with_their_rank(dataset: BlendedDataset) -> None:
    reading, writing = os.pipe()
    before = set(worker_pids())
    rank = os.fork()
    if rank == 0:
        try:
            steps = loader(dataset, 2).steps(0)
            next(steps)
            os.write(writing, " ".join(map(str, set(worker_pids()) - before)).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    pids = [int(pid) for pid in os.read(reading, 100).split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    deadline = time.monotonic() + 3
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


@pytest.mark.slow  # torchdata looks for dead workers every five seconds.
def test_a_worker_that_was_killed_is_named(dataset: BlendedDataset) -> None:
    before = worker_pids()
    with closing(loader(dataset, 1).steps(0)) as steps:
        next(steps)
        (pid,) = set(worker_pids()) - set(before)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            RuntimeError,
            match=rf"sequences of a step cannot be read: .* \(pid\(s\) {pid}\) exited",
        ):
            for _ in range(4):
                next(steps)


def test_a_daemonic_process_reads_by_itself(
    dataset: BlendedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = worker_pids()
    monkeypatch.setattr(type(multiprocessing.current_process()), "daemon", True)
    with closing(loader(dataset, 2).steps(0)) as steps:
        next(steps)
        assert worker_pids() == before
