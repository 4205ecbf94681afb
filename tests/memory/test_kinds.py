"""The memory estimate of models whose layers are of several kinds, which it knows by their
declarations only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import distributed

from benchmarks.counted import Counted, count
from models.config import ModelConfig
from models.layers import LayerKind
from tests.models.other_kinds import other_kinds
from tests.ranks import run_ranks
from trainer.config import model as model_section
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.plan.memory_estimate import estimate_memory, rank_memory

PATTERNS = {
    "squared": (LayerKind(feed_forward="squared"), LayerKind(qkv_bias=True)),
    "shift": (
        LayerKind(),
        LayerKind(mixer="shift", feed_forward="squared"),
        LayerKind(qk_norm=True),
    ),
}
RECOMPUTE = ("none", "full")


def configured(recompute: str) -> Config:
    sizes = "model.dim=64 model.num_layers=6 model.num_heads=4 model.num_kv_heads=2 model.head_dim=16 model.ffn_dim=192"
    rest = f"data.corpus=copy training.seq_len=2048 training.global_batch_size=2 memory.recompute={recompute}"
    return load([f"--{each}" for each in f"{sizes} {rest}".split()])


def with_pattern(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    build = model_section._build_model_config.__wrapped__

    def patterned(section: model_section.ModelSection) -> ModelConfig:
        return replace(build(section), layers=PATTERNS[name])

    monkeypatch.setattr(model_section, "_build_model_config", patterned)


def counted(name: str) -> list[tuple[Counted, float, int, int]]:
    """With the estimated peak, the elements of this rank's parameters, and the model's."""
    found = []
    with other_kinds(), pytest.MonkeyPatch.context() as monkeypatch:
        with_pattern(monkeypatch, name)
        for recompute in RECOMPUTE:
            config = configured(recompute)
            estimate = estimate_memory(config, distributed.get_world_size(), on_cpu=True)
            numel = rank_memory(config, 1, 0, on_cpu=True).local_numel
            found.append(
                (
                    count(config, steps=2),
                    estimate.device_bytes,
                    numel,
                    config.model.build().num_parameters,
                )
            )
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_weights_are_exact_and_peaks_within_7_percent(name: str) -> None:
    (by_policy,) = run_ranks(counted, 1, name)
    for recompute, (found, estimated, numel, parameters) in zip(RECOMPUTE, by_policy, strict=True):
        assert numel == parameters
        assert estimated == pytest.approx(found.peak, rel=0.07), recompute
