"""Process groups whose tensors travel through host memory, over gloo.

NCCL needs a GPU for each rank, and gloo neither gathers nor scatters CUDA tensors. Through host
memory several ranks can share a GPU: a check of a mesh on one card, far slower than NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Store, Work

BACKEND = "host_staged"
NO_TIMEOUT = timedelta()
"""Torch's value for the timeout of the group."""
OPERATIONS = (
    "allgather",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    # As torch 2.13 names them, and as earlier ones do.
    *("all_gather_single", "_allgather_base"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("all_to_all_single", "alltoall_base"),
    *("reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of a process group that exchange tensors. The first argument is what they write to, but
for `send` and `barrier`, which write nothing.
"""


class HostStagedGroup(ProcessGroup):
    """A process group that copies what it sends to the host, and what it receives to the
    device.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Torch's annotations lack the form that a class in Python can have.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        # Not this group: a method of torch's class would call this group's again.
        self.on_host = ProcessGroup(store, rank, size)
        for group in (self, self.on_host):
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)


class HostStagedWork(Work):
    """A collective in flight over gloo, whose results `wait` copies to the device."""

    def __init__(self, work: Work, results: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._results = results

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits on the host; what the current stream does next sees the results."""
        self._work.wait(timeout)
        for result, received in self._results:
            result.copy_(received)
        self._results = []
        return True


def _on_host(value: Any) -> Any:
    """Copies of the tensors in nested lists; anything else unchanged."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
    return [_on_host(each) for each in value] if isinstance(value, list) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _tensors(each)


def _through_host(name: str) -> Callable[..., Work]:
    operation = getattr(ProcessGroup, name)

    def staged(self: HostStagedGroup, *arguments: Any, **options: Any) -> Work:
        on_host = [_on_host(argument) for argument in arguments]
        work = operation(self.on_host, *on_host, **options)
        if name in ("send", "barrier"):
            return HostStagedWork(work, [])
        return HostStagedWork(
            work, [*zip(_tensors(arguments[0]), _tensors(on_host[0]), strict=True)]
        )

    return staged


for _name in OPERATIONS:
    if hasattr(ProcessGroup, _name):
        setattr(HostStagedGroup, _name, _through_host(_name))

distributed.Backend.register_backend(BACKEND, HostStagedGroup, devices=["cpu", "cuda"])
