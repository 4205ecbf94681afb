"""In-memory checkpoints: each rank's shards and state in the shared memory of its node and, with
several nodes, the next.

They outlive the ranks: a launch that follows a crash resumes from the newest step of which every
rank's part is whole in the memory of some node, by the recorded hash, also if ranks have moved to
other nodes. They are used by the same run on the same mesh only, byte by byte, and never instead
of a newer checkpoint on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
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
    Copy,
    InMemoryCheckpoint,
    Newest,
    create_memory_folder,
    hold,
    identity_of,
    memory_folder,
    naming_the_key,
    newest_whole,
    owner_of,
    remove_abandoned,
    remove_entry,
    remove_memory_folder,
    remove_others,
    stems,
)
from trainer.checkpoint.rank_sync import run_and_gather, run_on_all_ranks, run_on_rank_zero
from trainer.checkpoint.save import HostStaging, LocalTensorsGetter, optimizer_steps
from trainer.errors import ResumeError, RunFailedError
from trainer.step.process_group import World
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
    """A mapped file in shared memory that holds one rank's checkpoint, or none."""

    def __init__(self, path: Path, size: int) -> None:
        """Creates or opens the file; keeps the content of one that has the same size.

        Raises `RunFailedError` if memory is short.
        """
        self.path = path
        # Every user of the host can create files here. Opening a pipe would wait for its reader.
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
        # The tensor maps the file: what is copied into it outlives this process.
        self.bytes = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def read_header(self) -> InMemoryCheckpoint | None:
        """Reads the header, and not what follows it; None if it is not whole."""
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
        """Removes the header before the file is overwritten: without one it is no checkpoint."""
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
    """Offsets of a rank's shards in its files, and a hash that identifies the layout."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self.size = HEADER_BYTES + STATE_BYTES
        self._entries: dict[str, tuple[int, Tensor]] = {}
        for name, shard in shards.items():
            # Views by dtype need aligned offsets; 64 bytes are a cache line.
            self._entries[name] = self.size, shard
            self.size += -(-shard.nbytes // ALIGNMENT) * ALIGNMENT
        # Shards are read back as raw bytes, so names, shapes, dtypes and their order must agree.
        described = [(name, [*shard.shape], str(shard.dtype)) for name, shard in shards.items()]
        self.sha256 = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def map(self, content: Tensor) -> dict[str, Tensor]:
        """The shards, as views of a file's bytes."""
        return {
            name: content[at : at + shard.nbytes].view(shard.dtype).view(shard.shape)
            for name, (at, shard) in self._entries.items()
        }


class InMemoryCheckpoints:
    """One rank's in-memory checkpoints: two files of its own and, with several nodes, two of the
    previous one.

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
        # A node that fails takes all of its memory with it, so a copy goes to the same local rank
        # of the next node.
        self._next = (world.rank + self._ranks_per_node) % world.size
        """Holds a copy of this rank's checkpoint: on the next node."""
        self._previous = (world.rank - self._ranks_per_node) % world.size
        self._layout = Layout(
            {name: to_local(tensor.detach()) for name, tensor in tensors.items()}
        )
        # Random, so that no two launches share a name; that of rank 0 counts for all.
        self._launch = run_and_gather(lambda: token_hex(8), group)[0]
        self.folder = run_on_all_ranks(lambda: memory_folder(run_dir.path), group)
        run_on_all_ranks(lambda: create_memory_folder(self.folder), group)
        self._descriptor = run_on_all_ranks(self._hold, group)
        run_on_all_ranks(remove_abandoned, group)
        # A rank also holds the shards of another rank, whose size may differ: pipeline stages are
        # not equal.
        self._sizes = run_and_gather(lambda: self._layout.size, group)
        self._layouts = run_and_gather(lambda: self._layout.sha256, group)
        # Memory that a larger launch left is needed now, so it is freed before files are
        # allocated.
        all_ranks = stems("rank", range(world.size)) | stems("held", range(world.size))
        run_on_all_ranks(lambda: remove_others(self.folder, all_ranks), group)
        ranks = self._ranks_of_node()
        held = []
        if world.num_nodes > 1:
            held = [(rank - self._ranks_per_node) % world.size for rank in ranks]
        self._answers_for_node = world.rank == ranks[0]
        self._stems = stems("rank", ranks) | stems("held", held)
        """Names, without index, of the files that the ranks of this node write."""
        try:
            self._files = run_on_all_ranks(lambda: self._open("rank", world.rank), group)
            self._held = run_on_all_ranks(
                lambda: self._open("held", self._previous) if held else [], group
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
        """The file that a save writes to disk, on any rank: all ranks must overwrite files of one
        step.
        """
        self._has_released = True

    def _ranks_of_node(self) -> list[int]:
        """Ranks that see the same folder of shared memory as this one."""
        folders = run_and_gather(lambda: identity_of(self.folder), self._group)
        return [rank for rank, folder in enumerate(folders) if folder == folders[self._rank]]

    def _hold(self) -> int:
        with naming_the_key(self.folder):
            return hold(self.folder)

    def _open(self, kind: str, rank: int) -> list[MemoryFile]:
        paths = [self.folder / f"{kind}-{rank}.{index}" for index in range(FILES_PER_RANK)]
        try:
            files = [MemoryFile(path, self._sizes[rank]) for path in paths]
        except RunFailedError:
            # Files of ranks that trained here before need the room: training comes first.
            remove_others(self.folder, self._stems)
            files = [MemoryFile(path, self._sizes[rank]) for path in paths]
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
        # The older of both files is overwritten; the newer one stays whole meanwhile.
        file = min((each for each in self._files if each is not self._in_use), key=_step)
        if to_disk:
            self._in_use = file
            self._has_released = False
        # Order matters: a crash from here on leaves a file without a header, never a mixture of
        # two steps under a valid one.
        file.clear()
        get_shards = self._staging[file.path].start_copy(tensors)
        self._pending = Save(state.step, file.path, start_time)
        self._pending.start(partial(self._publish, file, get_shards, state), threaded=True)
        return get_shards

    def release(self, committed_step: int) -> None:
        """Ends the use of the copy by a save to disk, whose newest checkpoint is now
        `committed_step`.
        """
        self._has_released = True
        self._record(on_disk=committed_step)

    def _record(self, **changed: int) -> None:
        """Records the newest steps: the launcher counts them as progress, and the next launch
        resumes only from them.

        A disk that cannot be written does not end the run. Metrics are missing then, too, so steps
        that are not recorded must not be resumed from.
        """
        if self._rank == 0:
            with self._recording:
                self._newest = self._newest._replace(launch=self._launch, **changed)
                try:
                    self._newest.write(self.run_dir.checkpoints_dir)
                except OSError as error:
                    log.warning("in-memory checkpoints are not recorded: %s", error.strerror)

    def wait(self) -> None:
        """Waits until the newest copy is complete on all ranks."""
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
        """Completes the copy of this rank, and sends it to the next node. Runs in the background
        thread.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Per thread; the default is device 0.
        # Every rank has hashed its part before any is sent: a step counts once it is whole
        # everywhere.
        run_on_all_ranks(lambda: self._complete(file, get_shards, state), self._group)
        if self._held:
            run_on_all_ranks(lambda: self._exchange(file), self._group)
        # Ranks finish a save at different times. They free its file together, so that all choose
        # the same one for the next copy.
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
        # The time of the folder shows other runs on this node that this one is not abandoned.
        os.utime(self.folder)

    def _exchange(self, file: MemoryFile) -> None:
        """Sends a copy to the next node and receives that of the previous one; the header last."""
        held = min(self._held, key=_step)
        held.clear()
        # The header goes last: a copy that was cut off has none. All ranks send at once around the
        # ring of nodes, so each posts its receive before it waits for its send.
        for part in (slice(HEADER_BYTES, None), slice(0, HEADER_BYTES)):
            sent = send_async(file.bytes[part], self._group, to=self._next)
            receive_async(self._group, buffer=held.bytes[part], source=self._previous).wait()
            sent.wait()

    def discard(self) -> None:
        """Forgets the steps in memory, which have a loss spike or copies that differ: no launch
        resumes from them.
        """
        self.wait()
        self._record(in_memory=-1)
        for file in (*self._files, *self._held):
            file.clear()

    def remove(self) -> None:
        """Removes the folder, once nothing will resume from memory.

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
        recorded: list[Any] = run_on_rank_zero(
            lambda: [*Newest.read(self.run_dir.checkpoints_dir)], self._group
        )
        newest = Newest(*recorded)
        files = run_on_all_ranks(lambda: self._usable_files(current, newest), self._group)
        offered: list[Any] = run_and_gather(lambda: [[*copy] for copy in files], self._group)
        copies = {Copy(*each) for each in chain.from_iterable(offered)}
        # A person removed a checkpoint in order to go back: later steps in memory would undo that.
        if newest.on_disk > committed_step:
            copies = set()
        whole: MemoryFile | None = None
        while whole is None and (
            chosen := newest_whole(copies, self._size, newer_than=committed_step)
        ):
            damaged = self._find_damaged(chosen, files)
            if not damaged:
                whole, damaged = self._collect(chosen, files)
            copies -= damaged
        loaded = None if whole is None else self._load(whole, tensors)
        for file in (*self._files, *self._held):
            header = file.read_header()
            if loaded is not None and header is not None and header.step == loaded.step:
                file.write_header(header.model_copy(update={"launch": self._launch}))
            else:
                # The next copy must not go in place of the step that all ranks have.
                file.clear()
        # Also makes every rank's headers bear this launch's name before rank 0 records it.
        run_on_all_ranks(lambda: remove_others(self.folder, self._stems), self._group)
        self._record(in_memory=-1 if loaded is None else loaded.step, on_disk=committed_step)
        return loaded

    def _usable_files(self, current: TrainState, newest: Newest) -> dict[Copy, MemoryFile]:
        """Files that this rank can read, of the newest launch of this run, mesh and torch. Their
        hashes are not compared yet.
        """
        found = dict[Copy, MemoryFile]()
        for file in (*self._files, *self._held, *self._files_of_others()):
            header = file.read_header()
            owner = owner_of(file.path)
            if header is not None and self._is_usable(file, header, current, newest):
                found[Copy(header.step, owner, self._rank, file.path.name)] = file
            else:
                file.clear()
        return found

    def _is_usable(
        self, file: MemoryFile, header: InMemoryCheckpoint, current: TrainState, newest: Newest
    ) -> bool:
        if header.launch != newest.launch or header.step > newest.in_memory:
            return False
        if header.layout != self._layouts[owner_of(file.path)]:
            return False
        state = file.read_state(header)
        # All else must be equal: configuration, mesh, data and version of torch. Shards are read
        # as bytes, which only the same layout can interpret.
        varying = {name: getattr(current, name) for name in ("step", "trainer", "optimizer_steps")}
        return state is not None and state.model_copy(update=varying) == current

    def _files_of_others(self) -> list[MemoryFile]:
        """Files of ranks that trained on this node before, and those that they held.

        One rank answers for the node.
        """
        if not self._answers_for_node:
            return []
        paths = [path for path in sorted(self.folder.iterdir()) if path.stem not in self._stems]
        sizes = {
            path: self._sizes[owner_of(path)]
            for path in paths
            if path.is_file() and not path.is_symlink()
        }
        return [
            MemoryFile(path, size) for path, size in sizes.items() if path.stat().st_size == size
        ]

    def _find_damaged(self, chosen: Sequence[Copy], files: Mapping[Copy, MemoryFile]) -> set[Copy]:
        """The chosen copies that are not what their hash says. Collective."""

        def damaged_here() -> list[int]:
            damaged = [
                copy
                for copy in chosen
                if copy.holder == self._rank and not files[copy].is_intact()
            ]
            for copy in damaged:
                files[copy].clear()
            return [copy.owner for copy in damaged]

        return {
            chosen[rank] for rank in chain.from_iterable(run_and_gather(damaged_here, self._group))
        }

    def _collect(
        self, chosen: Sequence[Copy], files: Mapping[Copy, MemoryFile]
    ) -> tuple[MemoryFile | None, set[Copy]]:
        """Puts this rank's part into one of its own files and returns it, or the copies that
        arrived damaged on any rank. Collective.
        """
        own = files.get(chosen[self._rank])
        if own is None or own not in self._files:
            own = min(self._files, key=_step)
        for rank, copy in enumerate(chosen):
            if self._rank == copy.holder == rank:
                if files[copy] is not own:
                    own.bytes.copy_(files[copy].bytes)
            elif self._rank == copy.holder:
                send(files[copy].bytes, self._group, to=rank)
            elif self._rank == rank:
                receive(self._group, buffer=own.bytes, source=copy.holder)
        if moved := [copy.owner for copy in chosen if copy.holder != copy.owner]:
            log.info(
                "step %d of ranks %s is restored from the memory of other ranks",
                chosen[0].step,
                moved,
            )
        wrong = run_and_gather(lambda: self._rank in moved and not own.is_intact(), self._group)
        damaged = {copy for copy, is_wrong in zip(chosen, wrong, strict=True) if is_wrong}
        return (None if damaged else own), damaged

    def _load(self, whole: MemoryFile, tensors: Mapping[str, Tensor]) -> TrainState | None:
        """Fills the tensors; returns the state."""
        header = whole.read_header()
        for name, shard in self._layout.map(whole.bytes).items():
            to_local(tensors[name].detach()).copy_(shard)
        return None if header is None else whole.read_state(header)


def _step(file: MemoryFile) -> int:
    header = file.read_header()
    return -1 if header is None else header.step
