"""A moment is a sum of named tensors, each with the code that allocates it."""

from __future__ import annotations

import ast
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import memory_grid
from trainer.plan.memory_estimate import phase_estimates, rank_memory
from trainer.trace.tensors import DTYPE_BYTES, LINES, MemoryTensor

ROOT = Path(__file__).resolve().parents[2]


def drawn(count: int, seed: int) -> set[MemoryTensor]:
    """All tensors of drawn configurations, with the kernels of a GPU."""
    return {
        tensor
        for case in islice(memory_grid.draw_cases(seed), count)
        for moment in phase_estimates(rank_memory(case.config, case.world_size, case.pp_rank))
        for tensor in moment.tensors
    }


@cache
def defined(file: str) -> set[str]:
    """Functions, classes and methods of a module, as `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return found


@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_tensor_has_a_size_a_lifetime_and_code_that_allocates_it(count: int) -> None:
    for tensor in drawn(count, seed=1):
        assert tensor.name
        assert tensor.lifetime, tensor
        assert tensor.line in LINES, tensor
        assert tensor.dtype in DTYPE_BYTES, tensor
        assert all(isinstance(size, int) and size >= 0 for size in tensor.shape), tensor
        assert tensor.copies >= 0, tensor
        file, _, name = tensor.source.partition(": ")
        assert name in defined(file), tensor
