"""The copy task: its loss falls only if attention crosses the context-parallel shards of a
sequence.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.system.runs import ROOT, forked, launched, metrics

CONFIG = ROOT / "train_configs" / "copy.toml"

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_the_copy_task_starts_at_chance_on_every_shard(tmp_path: Path) -> None:
    short = ("--training.seq_len", "256", "--data.copy_period", "128", "--training.steps", "2")
    done = forked(CONFIG, tmp_path / "run", *short, "--metrics.log_interval", "1", processes=4)
    assert done.statuses == [0] * 4, done.said
    assert "context parallelism: ring (4 ranks), layout doc_headtail (as configured)" in done.said
    ((loss, by_shard),) = metrics(tmp_path / "run", "loss", "loss_by_shard")[:1]
    assert len(by_shard) == 4
    assert all(abs(one - math.log(64)) < 0.3 for one in (loss, *by_shard))


@pytest.mark.slow
def test_the_copy_task_is_learned_across_four_ranks(tmp_path: Path) -> None:
    done = launched(CONFIG, tmp_path / "run", processes=4, patience=1200)
    assert done.statuses == [0], done.said
    loss, by_shard = metrics(tmp_path / "run", "loss", "loss_by_shard")[-1]
    assert loss < 0.05
    assert max(by_shard) < 0.1
