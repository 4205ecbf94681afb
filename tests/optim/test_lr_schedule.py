"""The learning-rate schedule is a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainer.config.sections import ScheduleSection
from trainer.step.lr_schedule import lr_factor


def rates(steps: int, **options: Any) -> list[float]:
    """The learning-rate factor of the steps 1 to `steps`."""
    schedule = ScheduleSection.model_validate(options)
    return [lr_factor(schedule, step=step, num_steps=steps) for step in range(1, steps + 1)]


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    assert rates(8, kind="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates(3, kind="cosine", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_constant_schedule_is_constant() -> None:
    assert rates(5, kind="constant", min_lr_factor=0.0) == [1.0] * 5


def test_linear_schedule_decays_to_min_lr_factor() -> None:
    assert rates(6, kind="linear", warmup_steps=2, min_lr_factor=0.2) == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_schedule_decays_to_min_lr_factor() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(1, 9)]
    assert rates(8, kind="cosine") == pytest.approx(expected)
    assert rates(8, kind="cosine")[3] == pytest.approx(0.55)
    assert rates(8, kind="cosine", min_lr_factor=0.0)[-1] == pytest.approx(0, abs=1e-15)


def test_wsd_decays_in_its_last_decay_steps() -> None:
    assert rates(8, kind="wsd", warmup_steps=2, decay_steps=4, min_lr_factor=0.0) == [
        0.5,
        1,
        1,
        1,
        0.75,
        0.5,
        0.25,
        0,
    ]
    assert rates(4, kind="wsd", decay_steps=4, min_lr_factor=0.2) == pytest.approx(
        [0.8, 0.6, 0.4, 0.2]
    )


def test_wsd_decays_in_the_last_tenth_by_default() -> None:
    assert rates(20, kind="wsd", min_lr_factor=0.0) == [1.0] * 18 + [0.5, 0.0]
    assert rates(5, kind="wsd", min_lr_factor=0.5) == [1, 1, 1, 1, 0.5]


def test_wsd_decays_only_after_warmup() -> None:
    assert rates(10, kind="wsd", warmup_steps=10, min_lr_factor=0.0)[-1] == 1.0
    assert rates(4, kind="wsd", warmup_steps=3, decay_steps=3, min_lr_factor=0.0) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0]
    )


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_run_shorter_than_warmup_only_rises(kind: str) -> None:
    assert rates(3, kind=kind, warmup_steps=4, min_lr_factor=0.0) == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_schedule_stays_in_range_and_ends_at_min_lr_factor(kind: str, warmup: int) -> None:
    values = rates(30, kind=kind, warmup_steps=warmup, min_lr_factor=0.25)
    assert all(0 < value <= 1 for value in values)
    assert values[-1] == (1.0 if kind == "constant" else pytest.approx(0.25))
    after = values[max(0, warmup - 1) :]
    assert after == sorted(after, reverse=True)
    assert values[:warmup] == sorted(values[:warmup])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_steps_beyond_the_last_keep_min_lr_factor(kind: str) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "min_lr_factor": 0.5})
    assert lr_factor(schedule, step=12, num_steps=10) == 0.5


def test_learning_rate_depends_only_on_the_step() -> None:
    schedule = ScheduleSection(kind="wsd", warmup_steps=3)
    forwards = [lr_factor(schedule, step=step, num_steps=20) for step in range(1, 21)]
    backwards = [lr_factor(schedule, step=step, num_steps=20) for step in range(20, 0, -1)]
    assert forwards == backwards[::-1]


def test_constant_schedule_does_not_depend_on_the_number_of_steps() -> None:
    assert rates(9, kind="constant", warmup_steps=4)[:6] == rates(
        6, kind="constant", warmup_steps=4
    )
