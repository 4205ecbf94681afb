"""What routers take from a step: load, bias, metrics. And that a run keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.router import statistics_length
from tests.models.small_models import DEEPSEEK, small_model
from tests.system.in_process import configured, trainer_of
from tests.system.runs import write_run
from trainer.config.sections import TrainingSection
from trainer.step.routers import Routers, expert_layers, router_metrics

EXPERTS = DEEPSEEK.num_experts


def sums_of(counts: list[list[float]]) -> Tensor:
    """Statistics of two layers."""
    rows = torch.zeros(len(counts), statistics_length(EXPERTS), dtype=torch.float64)
    rows[:, :EXPERTS] = torch.tensor(counts)
    return rows.flatten()


def test_load_and_bias_follow_the_counts_of_each_layer() -> None:
    model = small_model(DEEPSEEK)
    routers = Routers([model], TrainingSection(correction_bias_rate=0.25), None)
    before = [layer.get_buffer("correction_bias").clone() for layer in model.expert_layers()]
    counts = [[8.0, 0, 2, 2, 2, 2, 0, 0], [0.0, 0, 0, 0, 0, 0, 1, 1]]  # The second: of one token.
    routers.adjust(sums_of(counts), torch.ones((), dtype=torch.bool))
    for layer, was, of_layer in zip(model.expert_layers(), before, counts, strict=True):
        mean = sum(of_layer) / 8
        assert layer.get_buffer("last_load").tolist() == [count / mean for count in of_layer]
        moved = (layer.get_buffer("correction_bias") - was).tolist()
        assert moved == pytest.approx(
            [0.25 * ((count < mean) - (count > mean)) for count in of_layer]
        )


@pytest.mark.parametrize(("counts", "finite"), [([[1.0] * 8] * 2, False), ([[0.0] * 8] * 2, True)])
def test_a_skipped_step_and_one_without_targets_leave_both(
    counts: list[list[float]], *, finite: bool
) -> None:
    model = small_model(DEEPSEEK)
    before = {name: each.clone() for name, each in model.named_buffers()}
    Routers([model], TrainingSection(correction_bias_rate=0.25), None).adjust(
        sums_of(counts), torch.tensor(finite)
    )
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())


def test_metrics_name_the_busiest_expert_and_the_dead_ones() -> None:
    found = router_metrics(
        DEEPSEEK, sums_of([[8.0, 0, 2, 2, 2, 2, 0, 0], [2.0] * 8]).tolist(), targets=8
    )
    assert (found["expert_load_max"], found["dead_experts"]) == (4.0, 3)
    assert expert_layers(DEEPSEEK) == [1, 2]
    assert router_metrics(DEEPSEEK, [], targets=8) == {}


MIXTURE = (
    *(
        "--model.feed_forward=moe",
        "--model.num_experts=4",
        "--model.top_k=1",
        "--model.expert_dim=8",
    ),
    *("--model.correction_bias=true", "--training.dtype=float64"),
)


def test_no_weight_decay_moves_the_bias_and_micro_batches_are_summed(tmp_path: Path) -> None:
    """One step of four sequences, in micro-batches of one and of four, counts the same."""
    loads = []
    for size in (1, 4):
        options = [
            *MIXTURE,
            f"--training.micro_batch_size={size}",
            "--training.global_batch_size=4",
        ]
        options += ["--optimizer.weight_decay=0.9", "--training.correction_bias_rate=0.0"]
        config = configured(write_run(tmp_path), tmp_path / f"run-{size}", *options)
        with trainer_of(config) as trainer:
            layer = trainer.stage_modules[0].expert_layers()[0]
            layer.get_buffer("correction_bias").copy_(torch.arange(4.0))
            next(trainer.train_steps())
            assert layer.get_buffer("correction_bias").tolist() == [0.0, 1.0, 2.0, 3.0]
            loads.append(layer.get_buffer("last_load").clone())
            assert {name for name in trainer.state_dict() if "last_load" in name} == {
                f"model.blocks.{index}.feed_forward.last_load"
                for index in range(config.model.build().num_layers)
            }
    assert torch.equal(*loads)
    assert float(loads[0].mean()) == pytest.approx(1)
