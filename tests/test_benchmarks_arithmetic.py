"""The pages on parallelism and memory have the tables that their script makes, and blocks keep what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.mesh_arithmetic import (
    actions,
    eight,
    idle,
    keeps,
    kept,
    memory,
    pipelines,
    pulled,
    shipped,
    thumb,
    working,
)
from models import rope
from models.config import ModelConfig
from models.transformer import TransformerBlock
from parallelisms.pipeline_plan import PipelinePlan, PipelineSchedule

DOCS = Path(__file__).parents[1] / "docs"
PAGES = dict.fromkeys((thumb, keeps, shipped, eight, pipelines), "parallelism.md") | {
    memory: "memory.md",
    pulled: "memory.md",
    working: "memory.md",
}


@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_the_page_has_the_table_that_the_script_makes(make: Callable[[], list[str]]) -> None:
    rows = make()
    page = [line.strip() for line in (DOCS / PAGES[make]).read_text().splitlines()]
    places = [place for place, line in enumerate(page) if line.startswith(rows[0])]
    assert len(places) == 1
    # The page may have more columns.
    there = page[places[0] : places[0] + len(rows)]
    assert [line[: len(row)] for line, row in zip(there, rows, strict=True)] == rows


@pytest.mark.parametrize(("schedule", "each"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 3)])
def test_a_schedule_that_goes_back_once_waits_as_its_formula_says(schedule: PipelineSchedule, each: int) -> None:
    plan = PipelinePlan(pp=4, schedule=schedule, num_layers=12, pp_stages_per_rank=each, num_micro_batches=8)
    assert plan.bubble_fraction is not None
    assert idle(plan, actions(plan), {"F": 1.0, "B": 2.5}) == pytest.approx(100 * plan.bubble_fraction)


def test_a_block_keeps_as_many_bytes_of_a_token_as_the_page_counts() -> None:
    config = ModelConfig(vocab_size=8, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=96)
    tokens = 16
    block = TransformerBlock(config).bfloat16()
    x_BSE = torch.randn(1, tokens, config.dim, dtype=torch.bfloat16)
    rotation = rope.cos_sin_table(config.rope, config.head_dim, torch.arange(tokens)[None], torch.float32)
    found: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        if x.is_floating_point():
            found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        block(x_BSE, rotation, torch.tensor([[0, tokens]], dtype=torch.int32))
    for given in (rotation, *block.parameters()):
        found.pop(given.untyped_storage().data_ptr(), None)
    assert sum(x.untyped_storage().nbytes() for x in found.values()) == tokens * kept(config, "none")
