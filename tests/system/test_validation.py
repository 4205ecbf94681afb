"""Validation in whole runs: events and their steps, and no side effects on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.system.runs import SETS, checkpoints, digests, forked, lines, metrics, write_run

pytestmark = pytest.mark.ranks

EVERY_OTHER = "\n[validation]\ninterval = 2\n" + SETS
RUN = (
    "--data.holdout=0.4",
    "--training.steps=5",
    "--checkpoint.interval=3",
    "--schedule.kind=constant",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("validation"))


@pytest.fixture(scope="module")
def validated(plain: Path) -> Path:
    """The same configuration with validation."""
    path = plain.with_name("validated.toml")
    path.write_text(plain.read_text() + EVERY_OTHER)
    return path


def events(folder: Path, kind: str = "validation") -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["event"] == kind]


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process, tensorboard": (
        1,
        ("--metrics.tensorboard=true", "--training.deterministic=true"),
    ),
    "FSDP, recomputed": (2, ("--parallelism.dp_shard=2", "--memory.recompute=full")),
    "FSDP without resharding": (
        2,
        ("--parallelism.reshard_after_forward=false", "--parallelism.dp_shard=2"),
    ),
    "deferred updates on the host": (
        2,
        ("--memory.optimizer_placement=host", "--memory.recompute=keep_attention"),
    ),
    "activations on the host": (
        1,
        ("--memory.recompute=keep_attention", "--memory.offload=inputs_and_attention"),
    ),
    "a pipeline": (
        2,
        (
            "--parallelism.pp=2",
            "--parallelism.pp_schedule=Interleaved1F1B",
            "--model.num_layers=4",
        ),
    ),
}
SLOW_CASES = (
    "deferred updates on the host",
    "a pipeline",
    "FSDP, recomputed",
    "activations on the host",
    "FSDP without resharding",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW_CASES else ()) for case in CASES],
)
def test_validation_does_not_change_training(plain: Path, validated: Path, case: str) -> None:
    processes, options = CASES[case]
    root = plain.parent / case.replace(" ", "-")
    for config, folder in ((plain, root / "plain"), (validated, root / "validated")):
        root.mkdir(exist_ok=True)
        done = forked(config, folder, *RUN, *options, processes=processes)
        assert done.statuses == [0] * processes, done.said
    assert [event["step"] for event in events(root / "validated")] == [0, 0, 2, 2, 4, 4, 5, 5]
    assert events(root / "plain") == []
    keys = ("step", "tokens", "loss", "grad_norm", "loss_by_position")
    assert metrics(root / "validated", *keys) == metrics(root / "plain", *keys)
    for name in checkpoints(root / "plain"):
        assert digests(root / "validated/checkpoints" / name) == digests(
            root / "plain/checkpoints" / name
        )


def test_regression_is_relative_to_the_first_launch_after_a_resume(validated: Path) -> None:
    folder = validated.parent / "resumed"
    whole = validated.parent / "whole"
    done = forked(validated, folder, *RUN, "--training.steps=3")
    assert done.statuses == [0], done.said
    done = forked(validated, folder, *RUN)
    assert done.statuses == [0], done.said
    assert [event["step"] for event in events(folder)] == [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]
    assert forked(validated, whole, *RUN).statuses == [0]
    found = {(event["set"], event["step"]): event for event in events(folder)}
    assert all("time" in event and event["stage"] == "" for event in found.values())
    for event in events(whole):
        ours = found[event["set"], event["step"]]
        assert {**ours, "time": 0} == {**event, "time": 0}
        first = found[event["set"], 0]["loss"]
        assert ours["regression"] == ours["loss"] - first
        assert ours["regression"] < 0 or event["step"] == 0, "the loss falls below the first"
    assert "validation context at step 4: loss" in done.said
    assert "validation packed at step 5: loss" in done.said


@pytest.fixture(scope="module")
def written(validated: Path) -> Path:
    folder = validated.parent / "written"
    done = forked(validated, folder, *RUN, "--training.steps=2", "--metrics.tensorboard=true")
    assert done.statuses == [0], done.said
    return folder


def test_validation_events_have_the_documented_fields(written: Path) -> None:
    packed, context = events(written)[-2:]
    assert packed["by_context"] is packed["gain"] is None
    assert packed["by_position"]["0-256"] == pytest.approx(packed["loss"])
    assert packed["by_position"]["256-1K"] is None
    assert context["by_position"] is None
    assert [*context["by_context"]] == ["16", "40", "81"]
    assert context["loss"] == context["by_context"]["81"]
    assert context["gain"] == context["by_context"]["16"] - context["by_context"]["81"]
    assert 0 < packed["accuracy"] < 1
    assert json.dumps(packed["targets"]).isdigit()


def test_tensorboard_has_validation_losses(written: Path) -> None:
    board = EventAccumulator(str(written / "tensorboard" / "run")).Reload()
    for name, each in (("packed", ()), ("context", ("16", "40", "81"))):
        losses = [event["loss"] for event in events(written) if event["set"] == name]
        assert [point.value for point in board.Scalars(f"validation/{name}")] == pytest.approx(
            losses
        )
        for length in each:
            points = [
                event["by_context"][length] for event in events(written) if event["set"] == name
            ]
            found = board.Scalars(f"validation_context/{name}/{length}")
            assert [point.value for point in found] == pytest.approx(points)
            assert [point.step for point in found] == [0, 2]
