"""Every key of the configuration takes effect: two configurations that differ in it differ in an
observable.

The keys are those of the schema, so a new key fails here until the table lists it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import pytest

from tests.config.wiring import runs
from tests.config.wiring.cases import (
    Case,
    Task,
    as_stage,
    has_one_value,
    inherited_key,
    schema_keys,
)
from tests.config.wiring.inputs import write_inputs
from tests.config.wiring.observables import observe_all
from tests.config.wiring.table import TABLE
from tests.ranks import run_ranks, team
from trainer.config.checks import problems
from trainer.config.job_config import Config
from trainer.config.training_stages import Recipe

TIME_LIMIT = 300
KEYS = dict(schema_keys())
STAGE_KEYS = {
    key: inherited
    for key in KEYS
    if key not in TABLE and (inherited := inherited_key(key)) is not None
}


def pairs(*keys: str) -> Iterator[tuple[str, Task, Task]]:
    for key in keys or TABLE:
        cases = TABLE[key]
        for case in (cases,) if isinstance(cases, Case) else cases:
            yield (key, *case.tasks(key))


def is_run(task: Task) -> bool:
    return task.observable.__module__ == runs.__name__


Observation = tuple[list[str], Any]
"""Problems of the configuration, and what it changes."""


def observe(tasks: list[Task], world_size: int, folder: Path) -> list[list[Observation]]:
    """By rank, the observation of each task."""
    work = partial(observe_all, tasks, folder)
    if not is_run(tasks[0]):
        return run_ranks(work, world_size, timeout=TIME_LIMIT)
    with team([work]) as ranks:  # Without a process group.
        outcome = ranks.outcomes(TIME_LIMIT, failed=lambda outcome: not outcome.succeeded)[0]
    assert outcome.succeeded, outcome.error
    return [outcome.value]


def observe_distinct(tasks: list[Task], folder: Path) -> dict[str, list[Observation]]:
    """By task, the observation of each rank. Equal tasks run once."""
    found: dict[str, list[Observation]] = {}
    for size, whole in sorted({(task.world_size, is_run(task)) for task in tasks}):
        distinct = {
            str(task): task for task in tasks if (task.world_size, is_run(task)) == (size, whole)
        }
        by_rank = observe([*distinct.values()], size, folder)
        found |= {
            name: list(of_ranks)
            for name, of_ranks in zip(distinct, zip(*by_rank, strict=True), strict=True)
        }
    return found


def test_every_key_is_listed() -> None:
    can_differ = {key for key, annotation in KEYS.items() if not has_one_value(annotation)}
    assert can_differ - TABLE.keys() - STAGE_KEYS.keys() == set()
    assert TABLE.keys() - can_differ == set()


@pytest.mark.ranks
@pytest.mark.parametrize("section", [*dict.fromkeys(key.partition(".")[0] for key in TABLE)])
def test_every_key_takes_effect(section: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    chosen = [*pairs(*(key for key in TABLE if key.startswith(f"{section}.")))]
    found = observe_distinct([task for _, *tasks in chosen for task in tasks], tmp_path)
    assert {
        problem for of_ranks in found.values() for problems, _ in of_ranks for problem in problems
    } == set()
    # Rank by rank, on the ranks that both have.
    equal = [key for key, a, b in chosen if all(map(eq, found[str(a)], found[str(b)]))]
    assert equal == []


@pytest.mark.slow
@pytest.mark.ranks
def test_equal_configurations_are_observed_equal(tmp_path: Path) -> None:
    """Or a difference would not be that of the key. The first configuration of each observable."""
    write_inputs(tmp_path)
    tasks = {task.observable: task for _, task, _ in reversed([*pairs()])}
    require_repeatable([*tasks.values()], tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_every_first_configuration_is_observed_equal(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    require_repeatable([task for _, task, _ in pairs()], tmp_path)


def require_repeatable(tasks: list[Task], folder: Path) -> None:
    first, second = (observe_distinct(tasks, folder) for _ in range(2))
    assert [name for name in first if first[name] != second[name]] == []


def test_a_stage_overrides_every_key_of_its_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for key, inherited in STAGE_KEYS.items():
        for _, *tasks in pairs(inherited):
            configs = []
            for task in tasks:
                recipe = Recipe.model_validate(as_stage(task, key).values)
                assert problems(recipe, task.world_size) == [], key
                (stage,) = recipe.training_stages
                assert (
                    stage.config.model_dump() == Config.model_validate(task.values).model_dump()
                ), key
                configs.append(stage.config)
            assert configs[0] != configs[1], key
