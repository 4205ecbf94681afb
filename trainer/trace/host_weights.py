"""Copies of weights and gradients between host and device, where the optimizer runs on the host.

A trace runs on a CPU, where FSDP has nothing to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from parallelisms.mesh.collectives import to_local
from trainer.trace.operators import OpCounterMode
from trainer.trace.pieces import COPY, GRADIENTS, HOST, WEIGHTS


@contextmanager
def weights_on_host(counter: OpCounterMode) -> Iterator[None]:
    """FSDP copies weights to the device before it gathers them, and gradients to the host once
    they are reduced.
    """
    inputs_of = cast(Any, FSDPParam).all_gather_inputs.fget
    reduce: Callable[..., Any] = _fsdp_param_group.foreach_reduce

    def copied_inputs(parameter: Any) -> list[Tensor]:
        (x,) = inputs_of(parameter)
        shard = parameter._sharded_param_data
        # A single rank copies on the stream that computes, once it needs them.
        is_single = parameter.mesh_info.shard_mesh_size == 1
        kind = COPY if is_single else WEIGHTS
        number = counter.on_message((HOST, kind, counter.phase), shard.nbytes)
        if is_single:
            counter.on_arrival(number)
        copy = torch.empty_like(shard)
        # Beside what it is rounded to, or in its place.
        return [copy if x is shard else x]

    def reduced(parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = reduce(parameters, *args, **kwargs)
        size = sum(each._sharded_param_data.nbytes for each in parameters)
        counter.on_message((HOST, GRADIENTS, counter.phase), size)
        for each in parameters:
            counter.storages.move_to_host(to_local(each.sharded_param.grad))
        return result

    with (
        patch.object(FSDPParam, "all_gather_inputs", property(copied_inputs)),
        patch.object(_fsdp_param_group, "foreach_reduce", reduced),
    ):
        yield
