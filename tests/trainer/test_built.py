"""What a configuration asks of a model is what is built."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from models import feed_forward, tiles
from tests.system.runs import write_run
from tests.trainer.inside import configured, trainer_of


@pytest.mark.parametrize("mib", [None, 3])
def test_feed_forwards_run_by_tiles_of_the_size_that_was_asked_for(tmp_path: Path, mib: int | None) -> None:
    options = () if mib is None else ("--memory.mlp_tile_mib", str(mib))
    with trainer_of(configured(write_run(tmp_path), tmp_path / "run", *options)) as trainer:
        runs = [block.feed_forward.run for part in trainer.parts.values() for block in part.layers()]
    assert len(runs) == 2
    for run in runs:
        if mib is None:
            assert run is feed_forward.at_once
        else:
            assert isinstance(run, partial)
            assert (run.func, run.keywords) == (tiles.feed_forward, {"limit": 3 << 20})
