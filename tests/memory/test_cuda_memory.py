"""The estimate against what torch's CUDA allocator was asked for, as docs/memory.md records it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import cuda_memory
from trainer.config.parse import load
from trainer.memory.estimator import estimate_memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
RECORDED = re.findall(r"\| `(--\S.*)` \| [\d.]+ \| ([\d.]+) \| [+-][\d.]+% \|", PAGE.read_text())


def test_most_variants_are_recorded() -> None:
    assert len(RECORDED) == len(cuda_memory.VARIANTS) - 1


@pytest.mark.parametrize(("variant", "requested_mib"), RECORDED)
def test_estimates_equal_what_the_allocator_was_asked_for(variant: str, requested_mib: str) -> None:
    config = load([*cuda_memory.MODEL.split(), *variant.split()])
    found = estimate_memory(config, 1).device_bytes / 2**20
    assert found == pytest.approx(float(requested_mib), rel=cuda_memory.LIMIT)
