"""Recipes: stages run in order, across interruptions and changes of the mesh."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.system.runs import (
    arguments,
    checkpoints,
    end,
    fork,
    forked,
    launched,
    lines,
    metrics,
    state,
    tensors,
    wait_for,
    write_run,
)
from trainer.launch.launcher import load_and_validate

pytestmark = pytest.mark.ranks

RECIPE = """
[data.sources.all]
path = "{root}/corpus"
documents = "folder"

[[stage]]
name = "short"
seq_len = 32
steps = 4
batch_tokens = 192
lr = 5e-3

[[stage]]
name = "middle"
seq_len = 64
tokens = 1_500 # four steps of 384
batch_tokens = 384
warmup = 0.5
mix = [{{ source = "corpus", weight = 0.6 }}, {{ source = "all", max_len = 24, weight = 0.4 }}]
rope = {{ theta = 2e6 }}

[[stage]]
name = "long"
seq_len = 128
steps = 3
batch_tokens = 512
optimizer = "fresh"
packing = "concat"
mask = "none"
schedule = {{ kind = "constant" }}
"""
DOUBLE = ("--training.dtype=float64", "--checkpoint.interval=1", "--metrics.log_interval=1")
MESHES: dict[int, list[tuple[str, ...]]] = {
    1: [()],
    2: [
        (),
        ("--parallelism.cp=2",),
        ("--parallelism.tp=2",),
        ("--parallelism.pp=2", "--memory.recompute=full"),
    ],
    4: [
        ("--parallelism.cp=2", "--parallelism.tp=2"),
        ("--parallelism.cp=4", "--parallelism.cp_method=ring"),
    ],
}
TOTAL = 11


def recipe(root: Path) -> Path:
    config = write_run(root)
    sections = config.read_text()
    for key in ("seq_len = 64\n", "steps = 6\n", "global_batch_size = 6\n"):  # Stages set them.
        sections = sections.replace(key, "")
    config.write_text(sections + RECIPE.format(root=root))
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe on one rank, one launch per stage."""
    root = tmp_path_factory.mktemp("recipe")
    config = recipe(root)
    for text in ('stage "short" done', 'stage "middle" done', "done: all 11 steps"):
        done = forked(config, root / "whole", *DOUBLE)
        assert done.statuses == [0]
        assert text in done.said
    return root


def assert_same_metrics(folder: Path, whole: Path) -> None:
    found = metrics(folder, "step", "tokens", "loss", "grad_norm", "lr")
    expected = metrics(whole, "step", "tokens", "loss", "grad_norm", "lr")
    assert [line[:2] for line in found] == [line[:2] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line[2:] == pytest.approx(other[2:], rel=1e-11)


def test_stages_run_in_order_and_are_logged(whole: Path) -> None:
    folder = whole / "whole"
    log = folder.with_suffix(".log").read_text()
    assert [stage for (stage,) in metrics(folder, "stage")] == ["short"] * 4 + ["middle"] * 4 + [
        "long"
    ] * 3
    assert (
        f'stage "middle" starts from {folder}/checkpoints/step-4 with the optimizer\'s state'
        in log
    )
    assert f'stage "long" starts from {folder}/checkpoints/step-8 with a new optimizer' in log
    assert (
        'stage "middle" (2 of 3): steps 5 to 8, each 6 x 64 tokens; 1,536 tokens in total' in log
    )
    written = [state(folder / "checkpoints" / name) for name in checkpoints(folder)]
    assert [
        (one["step"], one["stage"]["name"], one["trainer"]["next_sequence"]) for one in written
    ] == [
        (10, "long", 8),
        (11, "long", 12),
        (8, "middle", 24),  # The last stage started from it.
        (9, "long", 4),
    ]
    kinds = [
        line["event"] for line in lines(folder / "events.jsonl") if line["event"] != "checkpoint"
    ]
    assert kinds == ["start", "stage", "start", "stage", "start", "end"]


def test_the_start_up_log_lists_the_sources_of_the_stage_that_starts(whole: Path) -> None:
    log = (whole / "whole").with_suffix(".log").read_text()
    assert re.findall(r"(\S+): \d+ sequences of (\d+) tokens", log) == [
        ("corpus", "32"),
        ("corpus", "64"),
        ("all|24", "64"),
        ("corpus", "128"),
    ]
    start_ups = [launch.partition(" step ")[0] for launch in log.split("model llama3 debug")[1:]]
    assert len(start_ups) == 3
    assert all(len(text.splitlines()) <= 12 for text in start_ups), start_ups


def test_schedules_restart_with_a_stage(whole: Path) -> None:
    rates = [lr for (lr,) in metrics(whole / "whole", "lr")]
    assert rates[:4] == sorted(rates[:4], reverse=True)
    assert rates[0] < 5e-3
    assert rates[4:6] == pytest.approx([0.5e-2, 1e-2])
    assert rates[8:] == [1e-2] * 3


def test_tokens_per_source_add_up(whole: Path) -> None:
    last = dict(metrics(whole / "whole", "step", "sources"))
    assert list(last[4]) == list(last[11]) == ["corpus"]
    assert list(last[8]) == ["corpus", "all|24"]
    for step, total in metrics(whole / "whole", "step", "tokens"):
        every = {
            name: found["tokens"] for at in range(1, step + 1) for name, found in last[at].items()
        }
        assert sum(every.values()) == total
    assert last[8]["all|24"]["loss"] is not None


def test_optimizer_fresh_resets_the_optimizer(whole: Path) -> None:
    step = tensors(whole / "whole" / "checkpoints" / "step-11")["optimizer.head.proj.weight.step"]
    assert step == 3, "steps since the reset"


# test_resume.py has the fast case of one stage.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_recipe_killed_at_random_steps_matches_on_other_meshes(
    whole: Path, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "killed"
    config = whole / "run.toml"

    def newest() -> int:
        return max(
            (int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0
        )

    kills = 0
    while newest() < TOTAL:
        processes = draw.choice([1, 2, 2, 4])
        options = (
            *DOUBLE,
            *draw.choice(MESHES[processes]),
            f"--training.micro_batch_size={draw.choice([1, 2])}",
        )
        before = newest()
        if kills < 4 and before not in (3, 7, 10):
            ranks = fork(config, folder, *options, processes=processes)
            assert wait_for(lambda before=before: newest() > before or newest() >= TOTAL)  # type: ignore[misc]
            wait_for(lambda: False, draw.uniform(0, 0.2))
            end(ranks)
            kills += 1
        else:
            assert (
                forked(config, folder, *options, processes=processes).statuses == [0] * processes
            )
    assert kills > 2
    assert_same_metrics(folder, whole / "whole")


@pytest.mark.slow
def test_one_launch_runs_all_stages(whole: Path, tmp_path: Path) -> None:
    done = launched(whole / "run.toml", tmp_path / "run", *DOUBLE, processes=2)
    assert done.statuses == [0]
    assert done.said.count(" done, loss") == 2
    assert_same_metrics(tmp_path / "run", whole / "whole")


def test_a_started_stage_must_not_change_but_a_later_one_may(whole: Path, tmp_path: Path) -> None:
    text = (whole / "run.toml").read_text()
    folder = tmp_path / "run"
    config = tmp_path / "run.toml"
    config.write_text(text)
    assert forked(config, folder, *DOUBLE).statuses == [0]
    changes = {
        "lr = 5e-3\n": ("lr = 6e-3\n", None),
        "seq_len = 32": ("seq_len = 48", "training.seq_len was 32 and is now 48"),
        "steps = 4\n": ("steps = 3\n", 'stage "short" was at step 4 and now ends at step 3'),
        'name = "short"': ('name = "brief"', 'stage.name was "short" and is now "brief"'),
        "theta = 2e6": ("theta = 3e6", None),
        'documents = "folder"': ('documents = "repository"', None),
    }
    for old, (new, problem) in changes.items():
        changed = tmp_path / "changed.toml"
        changed.write_text(text.replace(old, new))
        assert load_and_validate(arguments(changed, folder, *DOUBLE), {"NGPU": "1"})[2] == []
        if problem is not None:
            rejected = forked(changed, folder, *DOUBLE)
            assert rejected.statuses == [78]
            assert problem in rejected.said


def test_the_batch_size_of_a_stage_limited_by_tokens_must_not_change(
    whole: Path, tmp_path: Path
) -> None:
    text = (whole / "run.toml").read_text()
    folder = tmp_path / "run"
    config = tmp_path / "run.toml"
    config.write_text(text)
    for _ in range(2):
        assert forked(config, folder, *DOUBLE).statuses == [0]
    config.write_text(text.replace("tokens = 1_500", "tokens = 3_000"))
    assert launched(config, folder, *DOUBLE, "--check", processes=1).statuses == [0]
    config.write_text(text.replace("batch_tokens = 384", "batch_tokens = 768"))
    rejected = forked(config, folder, *DOUBLE)
    assert rejected.statuses == [78]
    assert "stage.global_batch_size was 6 and is now 12" in rejected.said
