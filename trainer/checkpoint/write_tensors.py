"""Writes the tensors of a checkpoint: torch.distributed.checkpoint's plan and files, without its
pickles between ranks.

`dcp.save` sends plans and results to rank 0 as pickles, and back. Here ranks describe both as
JSON, and rank 0 answers with a mask. Planner and writer, and so the files, are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, WriteItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from parallelisms.mesh.collectives import gather_values, max_over_ranks, scatter
from trainer.checkpoint.rank_sync import run_on_all_ranks


class StagedSavePlanner(DefaultSavePlanner):
    """Plans by the placement of the state's tensors and writes the data of their host copies."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local_tensors = local_tensors

    # dcp asks for the data only when it writes: by then training may have changed the state.
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local_tensors[index.fqn]


def write_tensors(
    tensors: Mapping[str, Tensor],
    planner: DefaultSavePlanner,
    writer: FileSystemWriter,
    group: ProcessGroup,
) -> None:
    """Writes every shard once, and on rank 0 `.metadata`.

    Collective. Raises as `run_on_all_ranks`.
    """
    rank = group.rank()
    size = group.size()

    def plan_own_items() -> SavePlan:
        planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        # The writer names files by the position of a plan among those of all ranks.
        return writer.prepare_global_plan([plan] * size)[rank]

    own_plan = run_on_all_ranks(plan_own_items, group)
    # Rank 0 decides who writes a shard that several ranks hold, as torch's global plan does.
    described = gather_values([describe_item(item) for item in own_plan.items], group)
    # `scatter` sends tensors of one shape, so masks are padded to the longest plan.
    longest = int(max_over_ranks(group, [float(len(own_plan.items))])[0])
    plans, metadata = run_on_all_ranks(lambda: _plan_globally(planner, described), group)
    masks = run_on_all_ranks(
        lambda: [_mask(*each, longest) for each in zip(described, plans, strict=True)], group
    )
    is_written = scatter(torch.empty(longest, dtype=torch.uint8), masks or None, group).tolist()
    kept = [item for item, keeps in zip(own_plan.items, is_written, strict=False) if keeps]

    def write_own_items() -> list[WriteResult]:
        return writer.write_data(
            planner.finish_plan(replace(own_plan, items=kept)), planner
        ).wait()

    results = run_on_all_ranks(write_own_items, group)
    written = gather_values([_describe_result(result) for result in results], group)

    def write_metadata() -> None:
        if metadata is not None:
            writer.finish(
                metadata, [_results(plan, rows) for plan, rows in zip(plans, written, strict=True)]
            )

    run_on_all_ranks(write_metadata, group)


def _plan_globally(
    planner: DefaultSavePlanner, described: list[list[Any]]
) -> tuple[list[SavePlan], Metadata | None]:
    """Plans on rank 0 which rank writes each chunk; returns each rank's plan, and nothing on other
    ranks.
    """
    if not described:
        return [], None
    # Planner data maps flattened names to paths; our state is flat, so each name is its own path.
    names = {name: (name,) for items in described for name, *_ in items}
    plans = [
        SavePlan([read_item(item) for item in items], planner_data=names) for items in described
    ]
    return planner.create_global_plan(plans)


def describe_item(item: WriteItem) -> list[Any]:
    """Name, kind, offsets, sizes and dtype of the chunk of a tensor that a rank has, and the shape
    of the tensor.
    """
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [
        item.index.fqn,
        item.type.name,
        [*data.chunk.offsets],
        [*data.chunk.sizes],
        dtype,
        [*data.size],
    ]


def read_item(described: list[Any]) -> WriteItem:
    """The item that `describe_item` described.

    Raises ValueError, TypeError or KeyError for anything else.
    """
    name, kind, offsets, sizes, dtype_name, shape = described
    # The name comes from another process: it must be a dtype, not any attribute of torch.
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype_name} is no dtype")
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType[kind],
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape)),
    )


def _mask(items: list[list[Any]], plan: SavePlan, length: int) -> Tensor:
    """Mask of the items that a rank's plan keeps, padded to `length`."""
    # Name and offset identify a chunk; of replicas with the same ones, the global plan keeps one.
    kept = {(item.index.fqn, item.index.offset) for item in plan.items}
    mask = [(name, torch.Size(offsets)) in kept for name, _, offsets, *_ in items]
    return torch.tensor(mask + [False] * (length - len(mask)), dtype=torch.uint8)


def _describe_result(result: WriteResult) -> list[Any]:
    """Name and offsets of a chunk, its bytes in memory, and the file, position and bytes that it
    was written to.
    """
    stored = result.storage_data
    offsets = [*(result.index.offset or ())]
    return [
        result.index.fqn,
        offsets,
        result.size_in_bytes,
        stored.relative_path,
        stored.offset,
        stored.length,
    ]


def _results(plan: SavePlan, described: list[list[Any]]) -> list[WriteResult]:
    indices = {(item.index.fqn, item.index.offset): item.index for item in plan.items}
    return [
        WriteResult(indices[name, torch.Size(offsets)], size, _StorageInfo(file, position, length))
        for name, offsets, size, file, position, length in described
    ]
