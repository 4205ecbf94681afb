"""Counts what one rank of many does, without memory, kernels or peers: on fake tensors, in a made-up process group.

Every operation that reaches torch's dispatcher is seen: what it allocates (storages, until they die or are resized),
the matrices that it multiplies, what it sends. Inside an operation nothing is: neither the scratch of a kernel nor what
a backend copies. Only this file names what is private in torch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FakeWork
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - lets torch know the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

from parallelisms.collectives import named
from trainer.plan.comm_volume import sent

SMALL = 4096
"""Bytes of a message below which it is counted apart: sums of a few numbers, which grow with nothing."""
REAL = 16 << 20
"""Bytes of integers up to which they are made for real, since the host decides by them."""
HOST = "host"
Key = tuple[str, str, str]
"""Channel, kind and phase."""

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
MATRICES = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.addmm_: (1, 2), aten.baddbmm: (1, 2)}
"""Which arguments are multiplied."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (2, slice(0, 2), 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, slice(1, 3), 7),
}
"""Matrix products in it; which arguments are queries and keys; and which says whether it is causal."""


@contextmanager
def made_up_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process rank `rank` of so many, of which there are no others: whatever they would send stays away."""
    distributed.init_process_group("fake", store=distributed.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Alive:
    """Storages that are alive, by the phase in which they were allocated."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.device = self.peak = self.most_on_host = 0
        self.fullest: Counter[str] = Counter()
        """What was held when most was on the device."""
        self.moment = ""
        self._sizes: dict[int, tuple[Any, str, int]] = {}

    def add(self, x: Tensor, phase: str, moment: str) -> None:
        """A new tensor's storage, unless it is known. Bytes (uint8) are what `HostMemory` keeps on the host."""
        if x.device.type == "meta":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size, kind = storage.nbytes(), HOST if x.dtype == torch.uint8 else phase
            self._sizes[key] = weakref.ref(storage, partial(self._gone, key)), kind, size
            self._more(kind, size, moment)

    def resized(self, storage: torch.UntypedStorage, moment: str) -> None:
        if (known := self._sizes.get(storage._cdata)) is not None:
            reference, kind, before = known
            size = storage.nbytes()
            self._sizes[storage._cdata] = reference, kind, size
            self._more(kind, size - before, moment)

    def begin(self) -> None:
        """From now on the fullest moment is looked for."""
        self.peak, self.most_on_host = -1, self.held[HOST]
        self._more(HOST, 0, "begin")

    def _gone(self, key: int, _: Any) -> None:
        _, kind, size = self._sizes.pop(key)
        self._more(kind, -size, "")

    def _more(self, kind: str, size: int, moment: str) -> None:
        self.held[kind] += size
        if kind == HOST:
            self.most_on_host = max(self.most_on_host, self.held[HOST])
        else:
            self.device += size
        if self.device > self.peak:
            self.peak, self.fullest, self.moment = self.device, self.held.copy(), moment


class Held(FakeWork):
    """Communication under way. As with real backends, who drops it lets go of what is sent and received."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class Counting(TorchDispatchMode):
    """While it counts, tensors of numbers are fake, and what is done with them is counted.

    `phase` is for the caller to say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "setup"
        self.alive = Alive()
        self.operations = 0
        self.matmul: Counter[str] = Counter()
        """FLOPs by phase."""
        self.attention: Counter[str] = Counter()
        """FLOPs of its kernels by phase; those of a forward pass within the backward pass are `again`."""
        self.bytes: Counter[Key] = Counter()
        """Sent by this rank."""
        self.calls: Counter[Key] = Counter()
        self.small: Counter[Key] = Counter()
        """Calls with messages below `SMALL`, which are in no other count."""
        self._fake = _fake_mode()
        self._work: Held | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, everything that this thread does is."""
        before = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = before(storage, size)
            self.alive.resized(storage, f"{self.phase}: resized")
            return found

        # FSDP frees and allocates what it gathers without the dispatcher.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forgets what was counted, but not what is alive."""
        self.operations = 0
        for counter in (self.matmul, self.attention, self.bytes, self.calls, self.small):
            counter.clear()
        self.alive.begin()

    def integers(self, *shape: int, counted: bool = True) -> Tensor:
        """A fake tensor of int64."""
        with self._fake:
            made = torch.zeros(shape, dtype=torch.int64)
        if counted:
            self.alive.add(made, self.phase, "integers")
        return made

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # A sharded tensor, which then says what becomes of its part.
        given = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **given)  # Sharded tensors find the shapes of results so.
        self.operations += 1
        self._work = None
        if func.namespace == "longhaul":
            with self:  # An operator of our own is what happens inside it.
                return OPDEFS[func._schema.name]._init_fn(*args, **given)
        if _is_composite(func):
            with self:  # Below autograd they come whole.
                return func.decompose(*args, **given)
        if func.namespace in ("c10d", "_c10d_functional") and any(isinstance(x, FakeTensor) for x in _tensors(args)):
            return self._communicate(func, args, given)
        self._multiply(func.overloadpacket, args)
        return self._run(func, args, given)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_real(func, args, kwargs):
            found = func(*args, **kwargs)
            if func is c10d.recv_.default:
                # Before the first update stages of a pipeline ask each other whether shapes were said in advance.
                args[0][0].fill_(1)
        else:
            with self._fake:
                found = func(*args, **kwargs)
        if _allocates(func):
            for x in _tensors((found,)):
                self.alive.add(x, self.phase, f"{self.phase}: {func.overloadpacket}")
        return found

    def _multiply(self, packet: Any, args: tuple[Any, ...]) -> None:
        if (both := MATRICES.get(packet)) is not None:
            first, second = (args[index] for index in both)
            self.matmul[self.phase] += 2 * first.numel() * second.shape[-1]
        elif (products := ATTENTION.get(packet)) is not None:
            count, inputs, is_causal = products
            q, k = args[inputs]
            rows, heads, queries, width = q.shape
            masked = args[is_causal : is_causal + 1] == (True,)
            pairs = queries * (queries + 1) // 2 if masked else queries * k.shape[2]
            phase = "again" if count == 2 and self.phase == "backward" else self.phase
            self.attention[phase] += 2 * count * rows * heads * width * pairs

    # ---- messages

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What peers would send is taken for received."""
        if func is functional.wait_tensor.default:
            return args[0]
        name = func.overloadpacket.__name__
        if name not in MESSAGES:
            raise NotImplementedError(f"a dry run does not know how much {func} sends")
        kind, size, group = MESSAGES[name](args)
        self._send(kind, size, group)
        if func.namespace != "c10d":
            return self._run(func, args, kwargs)
        # Held here until the next operation: on its way to whoever waits for it nobody else does.
        self._work = Held(_tensors(args))
        work = self._work.boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def _send(self, kind: str, size: float, group: ProcessGroup) -> None:
        key = _channel(group), kind, "forward" if self.phase == "head" else self.phase
        ranks = group.size()
        if ranks == 1 or kind == "receive":
            return
        if size < SMALL:
            self.small[key] += 1
            return
        self.calls[key] += 1
        self.bytes[key] += sent(kind, size, ranks)  # type: ignore[assignment]


@cache
def _fake_mode() -> FakeTensorMode:
    # One: what modules keep from one run to the next, such as frequencies, must fit the next.
    return FakeTensorMode(allow_non_fake_inputs=True)


Told = tuple[str, float, ProcessGroup]
"""Kind, size and group of a message: see `sent`."""


def _all_to_all(args: tuple[Any, ...]) -> Told:
    group, splits = ProcessGroup.unbox(args[2]), args[4]
    size = args[1].nbytes
    if splits:
        # So much evenly spread would be as much to others as this is.
        to_others = size - size * splits[group.rank()] / sum(splits)
        size = to_others * group.size() / (group.size() - 1)
    return "all_to_all", size, group


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


MESSAGES: dict[str, Any] = {
    "allreduce_": lambda args: ("all_reduce", _nbytes(args[0]), ProcessGroup.unbox(args[1])),
    "_allgather_base_": lambda args: ("all_gather", args[1].nbytes, ProcessGroup.unbox(args[2])),
    "_reduce_scatter_base_": lambda args: ("reduce_scatter", args[0].nbytes, ProcessGroup.unbox(args[2])),
    "alltoall_base_": _all_to_all,
    "send": lambda args: ("send", _nbytes(args[0]), ProcessGroup.unbox(args[1])),
    "recv_": lambda args: ("receive", 0, ProcessGroup.unbox(args[1])),
    "all_reduce": lambda args: ("all_reduce", args[0].nbytes, named(args[2])),
    "all_gather_into_tensor": lambda args: ("all_gather", args[0].nbytes, named(args[2])),
    "reduce_scatter_tensor": lambda args: ("reduce_scatter", args[0].nbytes / args[2], named(args[3])),
}


def _channel(group: ProcessGroup) -> str:
    """A group is described by its channel and its ranks: `parallelisms.mesh`."""
    described = group.group_desc
    return "world" if described in ("", "default_pg") else described.split()[0]


# ---- what is real, and what is new


def _is_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is on integers that the host decides by: starts of documents, numbers of ranks."""
    tensors, device = _tensors((*args, *kwargs.values())), kwargs.get("device")
    if any(x.is_meta for x in tensors) or (not tensors and _type(device) == "meta"):
        return _type(device or "meta") == "meta"
    if tensors:
        return not any(isinstance(x, FakeTensor) for x in tensors)
    dtype = kwargs.get("dtype")
    if func.overloadpacket is aten.arange and all(isinstance(x, int) for x in args):
        return len(range(*args)) * 8 <= REAL and (dtype is None or not dtype.is_floating_point)
    if dtype is None or dtype.is_floating_point:
        return False
    size = args[0] if args and isinstance(args[0], list | tuple) else args
    return prod(size) * int(dtype.itemsize) <= REAL


def _type(device: torch.device | str | None) -> str:
    return torch.device(device or "cpu").type


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Also those in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


@cache
def _is_composite(func: Any) -> bool:
    known = func.namespace == "aten"  # `prim::device` is asked for, but is no operation.
    return known and bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


@cache
def _allocates(func: Any) -> bool:
    """Whether something that an operation returns is neither an argument nor a view of one."""
    return any(value.alias_info is None for value in func._schema.returns)
