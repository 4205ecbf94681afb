"""One save in progress, in a background thread or synchronously, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallelisms.collectives import to_local
from trainer.checkpoint.rank_sync import PhaseError, describe_error
from trainer.checkpoint.save import SaveRequest, write_checkpoint
from trainer.errors import EXIT_FAILURE, RankFailedError, ResumeError, RunFailedError


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Outcome of a save."""

    step: int
    path: Path | None
    """None for a failed save; `problem` then has the reason."""
    problem: str | None
    bytes: int
    seconds: float
    blocked_seconds: float
    """Time for which training was blocked: by the copy of the state and by waits for the end of the save."""


class AsyncSave:
    """A save in a daemon thread: a process that exits on an error must not wait for ranks that are gone."""

    def __init__(
        self,
        request: SaveRequest,
        group: ProcessGroup,
        device: torch.device,
        *,
        on_commit: Callable[[], None],
        start_time: float,
    ) -> None:
        """`on_commit` is called in the thread after a commit. Training has been blocked since `start_time`."""
        self._request, self._group, self._device, self._on_commit = request, group, device, on_commit
        self._start_time, self._blocked_seconds = start_time, 0.0
        self._bytes, self._seconds = 0, 0.0
        self._problem: str | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"checkpoint of step {request.step}", daemon=True)

    def start(self, *, threaded: bool) -> None:
        if threaded:
            self._thread.start()
        else:
            self._run()
        self._blocked_seconds = time.monotonic() - self._start_time

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._blocked_seconds += time.monotonic() - started

    def result(self) -> SaveResult:
        """The outcome. Raises `RankFailedError` if the ranks could not agree on one; no further save is possible."""
        step = self._request.step
        if self._error is not None:
            message = f"checkpoint of step {step} aborted: {describe_error(self._error)}"
            raise RankFailedError(EXIT_FAILURE, message) from self._error
        return SaveResult(
            step=step,
            path=None if self._problem else self._request.final_path,
            problem=self._problem,
            bytes=self._bytes,
            seconds=self._seconds,
            blocked_seconds=self._blocked_seconds,
        )

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # Per thread; the default is device 0.
            self._bytes = write_checkpoint(self._request, self._group)
            self._on_commit()
        except (PhaseError, ResumeError, RunFailedError) as error:
            self._problem = str(error)
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the main thread
            self._error = error
        self._seconds = time.monotonic() - self._start_time


LocalTensorsGetter = Callable[[], Mapping[str, Tensor]]
"""Waits for the copies and returns this rank's shard of every tensor."""


class HostStaging:
    """Host buffers for this rank's shards, as large as the state, allocated by the first copy.

    For state on a CUDA device the buffers are pinned. The copies run on the current stream, so they precede the next
    change of the state.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copy_done: torch.cuda.Event | None = None

    def start_copy(self, tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
        """Starts to overwrite the buffers. The returned function raises the error if the copy could not start."""
        try:
            staged = self._copy(tensors)
        except RuntimeError as error:  # Usually out of memory. A failed save must not stop training.
            failure = error

            def fail() -> NoReturn:
                raise failure

            return fail

        def wait_for_copy() -> dict[str, Tensor]:
            self._wait()
            return staged

        return wait_for_copy

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shards = {name: to_local(tensor.detach()) for name, tensor in tensors.items()}
        on_device = [shard for shard in shards.values() if shard.device.type == "cuda"]
        for name, shard in shards.items():
            self._buffer(name, shard).copy_(shard, non_blocking=True)
        self._copy_done = torch.cuda.current_stream(on_device[0].device).record_event() if on_device else None
        return {name: self._buffers[name] for name in shards}

    def _wait(self) -> None:
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shard.shape, shard.dtype):
            pinned = shard.device.type == "cuda"
            buffer = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer


def without_staging(tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
    """The shards themselves, without a copy, for a synchronous save."""
    return lambda: {name: to_local(tensor) for name, tensor in tensors.items()}


class StagedSavePlanner(DefaultSavePlanner):
    """Plans by the placement of the state's tensors and writes the data of their host copies."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local_tensors = local_tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local_tensors[index.fqn]
