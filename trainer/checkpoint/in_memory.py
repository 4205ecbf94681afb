"""In-memory checkpoints: each rank's shards and state in the shared memory of its node and, with
several nodes, the next.

They outlive the ranks: a launch that follows a crash resumes from them where every rank finds its
part of one step, here or on the next node, with the recorded hash. They are used by the same run
on the same mesh only, byte by byte, and never instead of a newer checkpoint on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import receive, receive_async, send, send_async, to_local
from trainer.checkpoint.background_save import Save
from trainer.checkpoint.memory_folder import (
    FILES_PER_RANK,
    InMemoryCheckpoint,
    Newest,
    create_memory_folder,
    hold,
    memory_folder,
    naming_the_key,
    remove_abandoned,
    remove_entry,
    remove_memory_folder,
    remove_others,
)
from trainer.checkpoint.rank_sync import run_and_gather, run_on_all_ranks, run_on_rank_zero
from trainer.checkpoint.save import HostStaging, LocalTensorsGetter, optimizer_steps
from trainer.errors import ResumeError, RunFailedError
from trainer.step.distributed import World
from trainer.storage.artifact import (
    HEADER_BYTES,
    DamageError,
    seal,
    sealed_header,
    unseal,
    unseal_header,
)
from trainer.storage.durable_io import format_bytes
from trainer.storage.run_dir import RunDir
from trainer.storage.train_state import TrainState

log = logging.getLogger("trainer")

STATE_BYTES = 1 << 20
"""Reserved for the training state, which holds a configuration and 128 losses."""
ALIGNMENT = 64


class MemoryFile:
    """A file in shared memory, mapped; of one rank's checkpoint, or none."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises `RunFailedError` if memory is short.

        Keeps the content of a file of the same size.
        """
        self.path = path
        # To open a pipe would wait for a reader.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            remove_entry(path)
        with naming_the_key(path), path.open("ab") as file:
            if file.tell() != size:
                file.truncate(0)
            try:
                # A page that is missing later would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                path.unlink(missing_ok=True)
                free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
                raise RunFailedError(
                    f"checkpoint.memory_interval needs {format_bytes(size)} more in {path.parents[1]}, which has "
                    f"{format_bytes(free)} free ({error.strerror}): enlarge it (of a container: --shm-size), or leave the key out"
                ) from None
        self.bytes = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def read_header(self) -> InMemoryCheckpoint | None:
        """None without a whole header. Does not read what follows it."""
        try:
            return unseal_header(self.bytes[:HEADER_BYTES].numpy().tobytes(), InMemoryCheckpoint)[
                0
            ]
        except (DamageError, ResumeError):
            return None

    def read_state(self, header: InMemoryCheckpoint) -> TrainState | None:
        try:
            return unseal(
                self.bytes[HEADER_BYTES:][: header.state_bytes].numpy().tobytes(), TrainState
            )[0]
        except (DamageError, ResumeError):
            return None

    def clear(self) -> None:
        """Before it is overwritten: a file without a header is no checkpoint."""
        self.bytes[:HEADER_BYTES] = 0

    def write_header(self, header: InMemoryCheckpoint) -> None:
        self.bytes[:HEADER_BYTES] = torch.frombuffer(
            bytearray(sealed_header(header, made_from="")), dtype=torch.uint8
        )

    def is_intact(self) -> bool:
        header = self.read_header()
        return header is not None and header.sha256 == self.compute_sha256()

    def compute_sha256(self) -> str:
        return hashlib.sha256(self.bytes[HEADER_BYTES:].numpy().data).hexdigest()


class Layout:
    """Where the shards of a rank lie in its files."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self.size = HEADER_BYTES + STATE_BYTES
        self._entries: dict[str, tuple[int, Tensor]] = {}
        for name, shard in shards.items():
            self._entries[name] = self.size, shard
            self.size += -(-shard.nbytes // ALIGNMENT) * ALIGNMENT
        described = [(name, [*shard.shape], str(shard.dtype)) for name, shard in shards.items()]
        self.sha256 = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def map(self, content: Tensor) -> dict[str, Tensor]:
        """The shards, as views of a file's bytes."""
        return {
            name: content[at : at + shard.nbytes].view(shard.dtype).view(shard.shape)
            for name, (at, shard) in self._entries.items()
        }


class InMemoryCheckpoints:
    """Of one rank.

    All ranks call every method at the same steps. Allocates the memory on construction.
    """

    def __init__(
        self, run_dir: RunDir, world: World, group: ProcessGroup, tensors: Mapping[str, Tensor]
    ) -> None:
        """Raises `RunFailedError` on all ranks if memory is short."""
        self.run_dir = run_dir
        self._group = group
        self._rank = world.rank
        self._size = world.size
        self._device = world.device
        self._ranks_per_node = world.size // world.num_nodes
        self._next = (world.rank + self._ranks_per_node) % world.size
        """Holds a copy of this rank's checkpoint: on the next node."""
        self._previous = (world.rank - self._ranks_per_node) % world.size
        self._layout = Layout(
            {name: to_local(tensor.detach()) for name, tensor in tensors.items()}
        )
        self._launch = run_and_gather(lambda: token_hex(8), group)[0]
        self.folder = run_on_all_ranks(lambda: memory_folder(run_dir.path), group)
        run_on_all_ranks(lambda: create_memory_folder(self.folder), group)
        self._descriptor = run_on_all_ranks(self._hold, group)
        run_on_all_ranks(remove_abandoned, group)
        sizes = run_and_gather(lambda: self._layout.size, group)
        kinds = ("rank", "held") if world.num_nodes > 1 else ("rank",)
        run_on_all_ranks(lambda: self._remove_others(kinds), group)
        held = self._previous if world.num_nodes > 1 else None
        try:
            self._files = run_on_all_ranks(lambda: self._open("rank", world.rank, sizes), group)
            self._held = (
                []
                if held is None
                else run_on_all_ranks(lambda: self._open("held", held, sizes), group)
            )
        except RunFailedError:
            self.remove()
            raise
        self._staging = {
            file.path: HostStaging(self._layout.map(file.bytes)) for file in self._files
        }
        self._pending: Save | None = None
        self._is_reported = False
        self._newest = Newest()
        self._recording = Lock()
        self._in_use: MemoryFile | None = None
        """Being written to disk, by any rank: all ranks overwrite the files of the same step."""
        self._has_released = True

    def _hold(self) -> int:
        with naming_the_key(self.folder):
            return hold(self.folder)

    def _remove_others(self, kinds: Sequence[str]) -> None:
        with naming_the_key(self.folder):
            remove_others(self.folder, kinds, self._size)

    def _open(self, kind: str, rank: int, sizes: list[int]) -> list[MemoryFile]:
        files = [
            MemoryFile(self.folder / f"{kind}-{rank}.{index}", sizes[rank])
            for index in range(FILES_PER_RANK)
        ]
        # Pins the memory, so that a copy does not block.
        if self._device.type == "cuda" and kind == "rank":
            for file in files:
                address = file.bytes.data_ptr()
                size = file.bytes.nbytes
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        return files

    # ---- writing

    def copy(
        self, tensors: Mapping[str, Tensor], state: TrainState, *, to_disk: bool
    ) -> LocalTensorsGetter:
        """Copies the state; a thread hashes the copy and sends it to the next node.

        With `to_disk`, a save writes what the returned function gives, until it calls `release`.
        """
        self.wait()
        start_time = time.monotonic()
        # The save before has ended on all ranks.
        if to_disk:
            self._in_use = None
        file = min((each for each in self._files if each is not self._in_use), key=_step)
        if to_disk:
            self._in_use = file
            self._has_released = False
        file.clear()
        get_shards = self._staging[file.path].start_copy(tensors)
        self._pending = Save(state.step, file.path, start_time)
        self._pending.start(partial(self._publish, file, get_shards, state), threaded=True)
        return get_shards

    def release(self, committed_step: int) -> None:
        """The save to disk has ended; the newest checkpoint there is of this step."""
        self._has_released = True
        self._record(on_disk=committed_step)

    def _record(self, **changed: int) -> None:
        """What the launcher counts as progress, and what the next launch may resume from.

        A disk that cannot be written does not end the run; it then lacks metrics, too, and steps
        since are not resumed from.
        """
        if self._rank == 0:
            with self._recording:
                self._newest = self._newest._replace(launch=self._launch, **changed)
                try:
                    self._newest.write(self.run_dir.checkpoints_dir)
                except OSError as error:
                    log.warning("in-memory checkpoints are not recorded: %s", error.strerror)

    def wait(self) -> None:
        """For the newest copy to be complete on all ranks."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        pending.wait()
        pending.raise_if_aborted()
        if pending.problem is not None and self._rank == 0:
            log.warning(
                "in-memory checkpoint of step %d failed: %s", pending.step, pending.problem
            )
        elif not self._is_reported:
            self._is_reported = True
            size = format_bytes(FILES_PER_RANK * pending.bytes * (2 if self._held else 1))
            log.info(
                "in-memory checkpoints: %s per rank, the first complete after %.1f s",
                size,
                pending.seconds,
            )

    def _publish(self, file: MemoryFile, get_shards: LocalTensorsGetter, state: TrainState) -> int:
        """In the background thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Per thread; the default is device 0.
        run_on_all_ranks(lambda: self._complete(file, get_shards, state), self._group)
        if self._held:
            run_on_all_ranks(lambda: self._exchange(file), self._group)
        if all(run_and_gather(lambda: self._has_released, self._group)):
            self._in_use = None
        self._record(in_memory=state.step)
        return file.bytes.nbytes

    def _complete(
        self, file: MemoryFile, get_shards: LocalTensorsGetter, state: TrainState
    ) -> None:
        shards = get_shards()
        content = seal(state.model_copy(update={"optimizer_steps": optimizer_steps(shards)}))
        if len(content) > STATE_BYTES:
            raise RunFailedError(
                f"the training state has {len(content):,} bytes, more than {STATE_BYTES:,}"
            )
        file.bytes[HEADER_BYTES:][: len(content)] = torch.frombuffer(
            bytearray(content), dtype=torch.uint8
        )
        header = InMemoryCheckpoint(
            step=state.step,
            launch=self._launch,
            layout=self._layout.sha256,
            state_bytes=len(content),
            sha256=file.compute_sha256(),
        )
        file.write_header(header)
        os.utime(self.folder)

    def _exchange(self, file: MemoryFile) -> None:
        """Sends a copy to the next node and receives that of the previous one; the header last."""
        held = min(self._held, key=_step)
        held.clear()
        for part in (slice(HEADER_BYTES, None), slice(0, HEADER_BYTES)):
            sent = send_async(file.bytes[part], self._group, to=self._next)
            receive_async(self._group, buffer=held.bytes[part], source=self._previous).wait()
            sent.wait()

    def discard(self) -> None:
        """What is in memory must not be resumed from: it has a loss spike, or copies that
        differ.
        """
        self.wait()
        self._record(in_memory=-1)
        for file in (*self._files, *self._held):
            file.clear()

    def remove(self) -> None:
        """At an ending after which nothing resumes from memory.

        The memory is freed once all ranks have ended.
        """
        remove_memory_folder(self.folder)

    # ---- resuming

    def load_newest(
        self, tensors: Mapping[str, Tensor], current: TrainState, *, committed_step: int
    ) -> TrainState | None:
        """Fills the tensors from the newest step that is whole on all ranks and newer than any on
        disk; returns its state.

        None without one, and if a checkpoint was removed from the disk: then an earlier step is
        wanted. `current` is the state of this run before it resumes. All other steps are
        forgotten.
        """

        def states_by_step() -> dict[int, TrainState]:
            found = (
                (header, file)
                for file in self._files
                if (header := file.read_header()) is not None
            )
            states = (
                (header.step, self._usable_state(file, header, current)) for header, file in found
            )
            return {step: state for step, state in states if state is not None}

        loaded: TrainState | None = None
        recorded: list[Any] = run_on_rank_zero(
            lambda: [*Newest.read(self.run_dir.checkpoints_dir)], self._group
        )
        newest = Newest(*recorded)
        for file in (*self._files, *self._held):
            header = file.read_header()
            if header is None or header.launch != newest.launch or header.step > newest.in_memory:
                file.clear()
        steps_held = {_step(file) for file in self._held}
        offered = set[int]().union(
            *run_and_gather(lambda: sorted({*states_by_step()} | steps_held), self._group)
        )
        if newest.on_disk > committed_step:
            offered = set()
        for step in sorted(offered, reverse=True):
            if (
                step > committed_step
                and (whole := self._assemble(step, states_by_step)) is not None
            ):
                for name, shard in self._layout.map(whole.bytes).items():
                    to_local(tensors[name].detach()).copy_(shard)
                loaded = states_by_step()[step]
                break
        for file in (*self._files, *self._held):
            header = file.read_header()
            if loaded is not None and header is not None and header.step == loaded.step:
                file.write_header(header.model_copy(update={"launch": self._launch}))
            else:
                # The next copy must not go in place of the step that all ranks have.
                file.clear()
        run_on_all_ranks(lambda: None, self._group)
        self._record(in_memory=-1 if loaded is None else loaded.step, on_disk=committed_step)
        return loaded

    def _usable_state(
        self, file: MemoryFile, header: InMemoryCheckpoint, current: TrainState
    ) -> TrainState | None:
        """None for another run, mesh or torch."""
        if header.layout != self._layout.sha256:
            return None
        state = file.read_state(header)
        varying = {name: getattr(current, name) for name in ("step", "trainer", "optimizer_steps")}
        return state if state is not None and state.model_copy(update=varying) == current else None

    def _assemble(
        self, step: int, states_by_step: Callable[[], Mapping[int, TrainState]]
    ) -> MemoryFile | None:
        """The file of the step of this rank, if all ranks have theirs. Collective."""

        def intact_file() -> MemoryFile | None:
            for file in self._files:
                if _step(file) == step and step in states_by_step() and file.is_intact():
                    return file
                if _step(file) == step:
                    file.clear()
            return None

        holds = next((each for each in self._held if _step(each) == step), None)
        file = run_on_all_ranks(intact_file, self._group)
        found = run_and_gather(lambda: [file is not None, holds is not None], self._group)
        missing = [rank for rank, (is_intact, _) in enumerate(found) if not is_intact]
        holders = [(rank + self._ranks_per_node) % self._size for rank in missing]
        if not all(found[holder][1] for holder in holders):
            return None
        for rank, holder in zip(missing, holders, strict=True):
            if self._rank == holder and holds is not None:
                send(holds.bytes, self._group, to=rank)
            elif self._rank == rank:
                receive(self._group, buffer=min(self._files, key=_step).bytes, source=holder)
        if missing:
            log.info(
                "step %d of ranks %s is restored from the memory of the next node", step, missing
            )
            file = run_on_all_ranks(intact_file, self._group)
        return file if all(run_and_gather(lambda: file is not None, self._group)) else None


def _step(file: MemoryFile) -> int:
    header = file.read_header()
    return -1 if header is None else header.step
