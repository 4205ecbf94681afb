"""Counts memory, FLOPs and communication of one rank, on fake tensors and a fake process group.

Sees every operation at torch's dispatcher: the storages that it allocates (until freed or
resized), its matmuls, and its messages. Kernel workspaces and copies inside a backend are
invisible. Relies on private APIs of torch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import takewhile, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FakeWork
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES, sent_bytes
from trainer.trace.attention_calls import attention_call, scratch_bytes
from trainer.trace.collective_calls import COLLECTIVES, channel_of
from trainer.trace.fake_kernels import FakeKernels, Layout
from trainer.trace.operator_facts import facts_of
from trainer.trace.pieces import (
    COPY,
    HOST,
    Allocation,
    AttentionKey,
    MessageKey,
    ProductKey,
    Work,
)
from trainer.trace.source_lines import current_line
from trainer.trace.traffic import moved_bytes, tensors_of

MAX_REAL_BYTES = 16 << 20
"""Integer tensors up to this size hold real values, because control flow depends on them."""
RESIZED = "resized"
"""Stands for the operator where FSDP gives a storage its memory."""
SCRATCH_KEY = -1
"""Key of scratch memory, which is no storage."""

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional
MATMUL_OPS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.addmm_: (1, 2),
    aten.baddbmm: (1, 2),
}
"""Indices of the multiplied arguments."""
GROUPED_MATMUL = aten._grouped_mm
DEVICE = torch.ops.prim.device.default


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initializes torch.distributed as rank `rank` of `world_size` without peers: receives leave
    tensors unchanged.
    """
    distributed.init_process_group(
        "fake", store=distributed.HashStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Stored(NamedTuple):
    """A live storage."""

    reference: Any
    kind: str
    allocation: Allocation
    number: int


class StorageTracker:
    """Live storages by the phase that allocated them.

    Subclasses record `on_allocation` and `on_free`.
    """

    def __init__(self) -> None:
        self.live_bytes: Counter[str] = Counter()
        self.device_bytes = self.peak_bytes = self.peak_host_bytes = 0
        self.bytes_at_peak: Counter[str] = Counter()
        self.peak_moment = ""
        self.num_added = 0
        """Storages that were ever alive; their numbers count from 0."""
        self._storages: dict[int, Stored] = {}

    def add(self, x: Tensor, phase: str, operator: str) -> None:
        """Adds the storage of a tensor unless it is known. uint8 storages belong to the pinned
        host pool of activation offload.
        """
        # What control flow depends on, such as the borders of documents, has real values, on the
        # host. They are remembered from step to step.
        if not isinstance(x, FakeTensor) and (x.is_meta or x.dtype != torch.uint8):
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size = storage.nbytes()
            kind = HOST if x.dtype == torch.uint8 else phase
            shape = tuple(x.shape)
            dtype = dtype_name(x.dtype)
            allocation = Allocation(size, kind == HOST, shape, dtype, operator, *current_line())
            self._storages[key] = Stored(
                weakref.ref(storage, partial(self._drop, key)), kind, allocation, self.num_added
            )
            self.num_added += 1
            self.on_allocation(key, allocation)
            self._adjust(kind, size, f"{phase}: {operator}")

    def resize(self, storage: torch.UntypedStorage, phase: str) -> None:
        if (
            stored := self._storages.get(storage._cdata)
        ) is not None and stored.allocation.size != storage.nbytes():
            size = storage.nbytes()
            line, fsdp = current_line()
            resized = stored.allocation._replace(
                size=size, shape=(size,), dtype="uint8", operator=RESIZED, line=line, fsdp=fsdp
            )
            self._replace(storage._cdata, resized, f"{phase}: {RESIZED}")

    def multiply(self, numbers: range, times: int) -> None:
        """The storages of these numbers that are still alive stand for `times` as many."""
        # A dictionary keeps the order of insertion, so storages of this loop are the last ones.
        last_added = reversed(self._storages.items()) if times > 1 else iter(())
        recent = [*takewhile(lambda item: item[1].number >= numbers.start, last_added)]
        for key, stored in recent:
            if stored.number in numbers:
                repeated = stored.allocation._replace(size=stored.allocation.size * times)
                self._replace(key, repeated, "tensors of every part of a loop")

    def move_to_host(self, x: Tensor) -> None:
        """The storage of a tensor is one of the host from now on."""
        key = x.untyped_storage()._cdata
        stored = self._storages[key]
        if stored.kind == HOST:
            return
        self._adjust(stored.kind, -stored.allocation.size, "")
        self._storages[key] = stored._replace(kind=HOST)
        self._adjust(HOST, stored.allocation.size, "")
        self._replace(key, stored.allocation._replace(on_host=True), "")

    def _replace(self, key: int, allocation: Allocation, moment: str) -> None:
        stored = self._storages[key]
        self._storages[key] = stored._replace(allocation=allocation)
        self.on_free(key)
        self.on_allocation(key, allocation)
        self._adjust(stored.kind, allocation.size - stored.allocation.size, moment)

    def use_scratch(self, size: int, phase: str, operator: str) -> None:
        """Counts memory that a kernel allocates and frees while it runs."""
        if size:
            # Up and down at once: scratch can set the peak, and is freed before the next operator.
            self._adjust("scratch", size, f"{phase}: {operator}")
            self._adjust("scratch", -size, "")
            self.on_allocation(
                SCRATCH_KEY,
                Allocation(size, False, (size,), "scratch", operator, *current_line()),  # noqa: FBT003
            )
            self.on_free(SCRATCH_KEY)

    def on_allocation(self, key: int, allocation: Allocation) -> None:
        """`key` identifies the storage until it is freed.

        A resized storage is freed and allocated again.
        """

    def on_free(self, key: int) -> None:
        """The storage of an earlier `on_allocation`."""

    def reset_peak(self) -> None:
        self.peak_bytes = -1
        self.peak_host_bytes = self.live_bytes[HOST]
        self._adjust(HOST, 0, "begin")

    def _drop(self, key: int, _: Any) -> None:
        # Called by the weak reference when the storage dies: that is when torch frees its memory.
        stored = self._storages.pop(key)
        self.on_free(key)
        self._adjust(stored.kind, -stored.allocation.size, "")

    def _adjust(self, kind: str, size: int, moment: str) -> None:
        self.live_bytes[kind] += size
        if kind == HOST:
            self.peak_host_bytes = max(self.peak_host_bytes, self.live_bytes[HOST])
        else:
            self.device_bytes += size
        if self.device_bytes > self.peak_bytes:
            self.peak_bytes, self.bytes_at_peak, self.peak_moment = (
                self.device_bytes,
                self.live_bytes.copy(),
                moment,
            )


class PendingFakeWork(FakeWork):
    """Keeps its tensors alive until dropped, as real backends do."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class OpCounterMode(TorchDispatchMode):
    """Runs operations on fake tensors and counts them under `phase`, which the caller sets."""

    def __init__(self, storages: StorageTracker | None = None) -> None:
        super().__init__()
        self.phase = "setup"
        self.storages = storages or StorageTracker()
        self.num_ops = 0
        self.work = Work()
        self.times = 1
        """How often kernels and messages count."""
        self.deterministic = False
        """Whether kernels of a GPU avoid atomic additions."""
        self.on_message: Callable[[MessageKey, float], int] = lambda key, size: 0  # noqa: ARG005
        """Called when a message starts, with the bytes that it sends; returns its number."""
        self.on_arrival: Callable[[int], None] = lambda number: None  # noqa: ARG005
        """Called when later kernels need a message."""
        self._copied_bytes: int | None = None
        self.small_calls = Counter[MessageKey]()
        """Calls below MIN_COUNTED_BYTES, excluded from the other counts."""
        self._fake = _fake_mode()
        self._fakes = FakeKernels(self._fake)
        self._pending: PendingFakeWork | None = None
        self._allocates = True

    @contextmanager
    def enable(self) -> Iterator[None]:
        original_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original_resize(storage, size)
            self.storages.resize(storage, self.phase)
            return result

        # FSDP resizes gathered storages without going through the dispatcher.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = original_resize  # type: ignore[method-assign]

    def reset_counts(self) -> None:
        """Keeps track of live storages."""
        self.num_ops = 0
        self.work = Work()
        self.small_calls.clear()
        self.storages.reset_peak()

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Kernels and messages count `times` times."""
        self.times *= times
        try:
            yield
        finally:
            self.times //= times

    @contextmanager
    def without_allocations(self) -> Iterator[None]:
        """Until the end of the context, results take no memory."""
        allocates = self._allocates
        self._allocates = False
        try:
            yield
        finally:
            self._allocates = allocates

    @contextmanager
    def copies(self) -> Iterator[list[int]]:
        """Copies between host and device on a stream of their own; gives the number of their
        message at the end.
        """
        self._copied_bytes = 0
        numbers = list[int]()
        yield numbers
        # Read and written.
        size = self._copied_bytes // 2
        self._copied_bytes = None
        numbers.append(self.on_message((HOST, COPY, self.phase), size))

    @property
    def allocates(self) -> bool:
        """Whether results take memory."""
        return self._allocates

    def new(self, layout: Layout) -> Tensor:
        """A tensor that is not tracked."""
        return self._fakes.new(layout)

    def note_allocations(self, result: Any, operator: str) -> None:
        """Results of `without_allocations` take memory after all."""
        for x in tensors_of((result,)) if self._allocates else ():
            self.storages.add(x, self.phase, operator)

    def new_int64(self, *shape: int, track: bool = True) -> Tensor:
        with self._fake:
            tensor = torch.zeros(shape, dtype=torch.int64)
        if track:
            self.storages.add(tensor, self.phase, "integers")
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # Half of all calls.
            return args[0].fake_device
        if not all(issubclass(kind, FakeTensor) for kind in types):
            # DTensor dispatches to its local tensor.
            return NotImplemented
        call_kwargs = (
            {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if kwargs
            else {}
        )
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            # DTensor propagates shapes with fake tensors.
            return func(*args, **call_kwargs)
        self.num_ops += 1
        self._pending = None
        if func.namespace == "longhaul":
            with self:  # Count inside custom operators.
                return OPDEFS[func._schema.name]._init_fn(*args, **call_kwargs)
        if facts_of(func).is_composite:
            # Composite operators arrive undecomposed below autograd.
            with self:
                return func.decompose(*args, **call_kwargs)
        tensors = tensors_of((*args, *call_kwargs.values()))
        if func.namespace in ("c10d", "_c10d_functional") and any(
            isinstance(x, FakeTensor) for x in tensors
        ):
            return self._record_collective(func, tensors, args, call_kwargs)
        if facts_of(func).is_view and all(isinstance(x, FakeTensor) for x in tensors):
            # Half of all operators: no memory, no work.
            return self._fakes.run(func, tensors, args, call_kwargs)
        result = self._execute(func, tensors, args, call_kwargs)
        self._count_work(func, tensors, args, call_kwargs, result)
        return result

    def _execute(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if _needs_real_values(func, tensors, args, kwargs):
            result = func(*args, **kwargs)
            if func is c10d.recv_.default:
                # Pipeline stages first exchange a flag: 1 if shapes are known in advance.
                args[0][0].fill_(1)
        else:
            if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
                # FakeTensorMode would compute with them.
                args, kwargs = tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs))
                tensors = tensors_of((*args, *kwargs.values()))
            result = self._fakes.run(func, tensors, args, kwargs)
        if self._allocates and facts_of(func).allocates:
            for x in tensors_of((result,)):
                self.storages.add(x, self.phase, facts_of(func).name)
        return result

    def _count_work(
        self,
        func: Any,
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        packet = func.overloadpacket
        phase = self.phase
        if (operands := MATMUL_OPS.get(packet)) is not None:
            # The rate depends on the narrowest of rows, inner dimension and columns.
            first, second = (args[index] for index in operands)
            narrowest = min(*first.shape[-2:], second.shape[-1])
            self.count_product(narrowest, 2 * first.numel() * second.shape[-1])
            # A sum that the product is added to is read and written once it is known.
            for total in args[: operands[0]]:
                if total.shape == result.shape:
                    self.count_traffic(2 * total.nbytes, kernels=0)
        elif packet is GROUPED_MATMUL:
            self._count_grouped_product(*args[:3])
        elif (call := attention_call(packet, args, kwargs)) is not None:
            phase = "recompute" if call.products == 2 and phase == "backward" else phase
            self.work.attention[AttentionKey(phase, call.kernel, call.keys, call.head_dim)] += (
                self.times * call.flops
            )
            self.work.kernels[phase] += self.times
            scratch = scratch_bytes(packet, args, deterministic=self.deterministic)
            self.storages.use_scratch(scratch, self.phase, str(packet))
        elif self._allocates:
            results = tensors_of((result,))
            # Integers with real values are computed on the host.
            if any(isinstance(x, FakeTensor) for x in (*tensors, *results)):
                self.count_traffic(moved_bytes(func, tensors, args, kwargs, results))

    def count_product(self, narrowest: int, flops: int, *, is_grouped: bool = False) -> None:
        key = ProductKey(self.phase, narrowest, is_grouped)
        self.work.products[key] += self.times * flops
        self.work.kernels[self.phase] += self.times

    def count_traffic(self, size: int, *, kernels: int = 1) -> None:
        """Bytes that kernels read and write; none for what is no kernel."""
        if not size:
            return
        if self._copied_bytes is not None:
            self._copied_bytes += self.times * size
            return
        self.work.moved_bytes[self.phase] += self.times * size
        self.work.kernels[self.phase] += self.times * kernels

    def _count_grouped_product(self, first: Tensor, second: Tensor, ends: Tensor) -> None:
        """Each row is in one group, whether rows are multiplied or summed over."""
        rows = first.shape[-2]
        inner = first.shape[-1]
        columns = second.shape[-1]
        sizes = [rows, inner, columns]
        summed = 1 if second.dim() == 2 else 0  # The dimension that groups share.
        # The narrowest dimension sets the rate: that of one group, not of all.
        sizes[summed] = max(1, sizes[summed] // len(ends))
        self.count_product(min(sizes), 2 * rows * inner * columns, is_grouped=True)

    # ---- communication

    def _record_collective(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Output tensors keep their shapes; nothing is received."""
        if func is functional.wait_tensor.default:
            return args[0]
        name = func.overloadpacket.__name__
        if name not in COLLECTIVES:
            raise NotImplementedError(f"the dry run cannot count collective {func}")
        kind, size, group = COLLECTIVES[name](args)
        self._record_message(kind, size, group)
        if func.namespace != "c10d":
            return self._execute(func, tensors, args, kwargs)
        # The caller only gets a boxed reference; keep the work alive until the next operation.
        self._pending = PendingFakeWork(tensors)
        work = self._pending.boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def _record_message(self, kind: str, size: float, group: ProcessGroup) -> None:
        # Plans count the messages of the loss head with the forward pass.
        key = channel_of(group), kind, "forward" if self.phase == "head" else self.phase
        ranks = group.size()
        if ranks == 1 or kind == "receive":
            return
        if size < MIN_COUNTED_BYTES:
            self.small_calls[key] += self.times
            self.on_message(key, 0)
            return
        total = self.times * sent_bytes(kind, size, ranks)
        self.work.calls[key] += self.times
        self.work.sent_bytes[key] += total  # type: ignore[assignment]
        self.on_message(key, total)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _fake_mode() -> FakeTensorMode:
    # Shared, because modules cache tensors, such as rotary tables, across dry runs.
    return FakeTensorMode(allow_non_fake_inputs=True)


# ---- real values and allocations


def _needs_real_values(
    func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether control flow may depend on the result: document boundaries, split sizes."""
    others = [x for x in tensors if not isinstance(x, FakeTensor)]
    device = kwargs.get("device")
    if any(x.is_meta for x in others) or (not tensors and _device_type(device) == "meta"):
        return _device_type(device or "meta") == "meta"
    if tensors:
        # An operator on real tensors alone gives real values; one fake argument makes the result
        # fake. A mask of all pairs of tokens, from rows and columns, would be too large.
        return len(others) == len(tensors) and _broadcast_numel(others) * 8 <= MAX_REAL_BYTES
    dtype = kwargs.get("dtype")
    if func.overloadpacket is aten.arange and all(isinstance(x, int) for x in args):
        return len(range(*args)) * 8 <= MAX_REAL_BYTES and (
            dtype is None or not dtype.is_floating_point
        )
    if dtype is None or dtype.is_floating_point:
        return False
    size = args[0] if args and isinstance(args[0], list | tuple) else args
    return prod(size) * int(dtype.itemsize) <= MAX_REAL_BYTES


def _broadcast_numel(tensors: Sequence[Tensor]) -> int:
    """At most the elements of an elementwise result."""
    from_last = (reversed(x.shape) for x in tensors)
    return prod(max(sizes) for sizes in zip_longest(*from_last, fillvalue=1))


def _device_type(device: torch.device | str | None) -> str:
    return torch.device(device or "cpu").type
