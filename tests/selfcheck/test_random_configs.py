"""Random legal configurations equal one process in float64: every pair of settings, and what else
fits a time limit.
"""

from __future__ import annotations

import random
import subprocess
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from parallelisms.mesh import host_staging
from tests.config.wiring.cases import schema_keys
from tests.ranks import RankError, run_ranks
from tests.selfcheck.covering import read_cases, small_pairs, smallest_case
from tests.system.runs import ROOT
from trainer.errors import EXIT_FAILURE, RankFailedError
from trainer.selfcheck.comparison import StepDifference
from trainer.selfcheck.factors import FACTORS, LEVELS, SIMPLEST
from trainer.selfcheck.launches import Launch
from trainer.selfcheck.random_check import CaseResult, RandomCheck, check_case
from trainer.selfcheck.random_configs import (
    Pair,
    all_pairs,
    case_values,
    draw_cases,
    format_case,
    is_named,
    minimize,
    normalize,
    pairs,
    parse_case,
    problems,
    random_case,
    world_size,
)
from trainer.selfcheck.shrink import write_sample_documents
from trainer.selfcheck.worker import run_and_compare
from trainer.step.process_group import World

CASES = read_cases()
NUM_DEFAULT = 6
"""Cases of the covering array in the default check; they have more than a third of the pairs of
small meshes.
"""
RANDOM_SECONDS = 4.0
# Keys that random configurations do not vary, and why.
NOT_VARIED = {
    "job": "folders and time limits",
    "tokenizer": "decides tokens before the run: tests/data",
    "data.bad_files": "decides documents before the run: tests/data",
    "data.text_key": "decides documents before the run: tests/data",
    "data.cache_dir": "a folder",
    "data.remote_cache_gib": "needs a store: tests/data/test_remote_corpus.py",
    "data.copy_period": "tests/data/test_copy_task.py",
    "data.packing_version": "decides sequences before the run: tests/data",
    "data.workers": "ranks of the self-check start no processes: tests/data/test_workers.py",
    "data.holdout": "a level of validation.sets",
    "model.size": "the widths are set one by one",
    "model.local_rope": "theta is; all others are as in model.rope, which is varied",
    "model.layers": "patterns are levels; tests/config/test_wiring.py has every key of a kind",
    "model.head_dim": "the same for all cases: eight, four frequencies",
    "training.steps": "two, and one more after a resume",
    "training.dtype": "only float64 is exact on every mesh; sums in lower precision: tests/precision",
    "training.reduce_dtype": "bfloat16 runs only",
    "training.attention": "CPUs have one kernel",
    "training.gc_interval": "host memory only",
    "parallelism.cp_reduce_dtype": "bfloat16 runs only",
    "parallelism.async_tp": "CUDA only",
    "parallelism.pp_layers": "a level of model.num_layers",
    "memory.device_gib": "recompute = auto only, which resolves to the other settings",
    "memory.optimizer_dtype": "float64 runs keep their moments in float64",
    "training.loss": "one of ours; tests/models/test_token_loss.py has others",
    "optimizer.name": "one of ours; tests/test_extending.py has others",
    "model.mixer": "one of ours; tests/test_extending.py and tests/models/test_layers.py have others",
    "optimizer.lr": "high in all cases, and another in a second stage",
    "schedule.over": "tests/config/test_training_stages.py",
    "schedule.min_lr_factor": "tests/optim/test_lr_schedule.py",
    "checkpoint.interval": "a launch is saved at its end",
    "checkpoint.interval_minutes": "a launch is saved at its end",
    "checkpoint.enabled": "with a level of checkpoint, start or finish",
    "checkpoint.keep": "deletes files",
    "checkpoint.memory_interval": "used after a crash: tests/resilience/test_in_memory.py",
    "checkpoint.keep_every": "deletes files",
    "checkpoint.remote": "needs a store: tests/resilience/test_remote_runs.py",
    "checkpoint.initial_load_path": "levels of start",
    "checkpoint.initial_ignore_keys": "no number depends on it: tests/export/test_contradictions.py",
    "data.sources.path": "a folder",
    "data.sources.max_document": "tests/config/test_wiring.py",
    "data.sources.separators": "tests/config/test_wiring.py",
    "data.sources.text_key": "decides documents before the run: tests/data",
    "data.files": "decides documents before the run: tests/data",
    "data.sources.files": "decides documents before the run: tests/data",
    "validation.sets.source": "tests/config/test_wiring.py",
    "validation.interval": "every launch is validated at its end",
    "metrics": "files and logs",
    "health": "decisions on the host",
    "profiler": "files",
    "distributed": "timeouts and restarts; tensors through host memory: a test above",
    "slurm": "the batch job",
    "plan": "the planner",
    "stage": "a level of checkpoint; its keys: tests/config/test_wiring.py",
}


def run_rank(launch: Launch, reference: Path) -> list[StepDifference]:
    warnings.simplefilter("ignore")
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    return run_and_compare(launch, world, reference=reference)


class TestPool:
    """The rank pool of the tests."""

    __test__ = False

    def __init__(self, backend: str = "gloo") -> None:
        self._options: dict[str, Any] = {"backend": backend, "timeout": 120}

    def run(self, launch: Launch, *, reference: Path) -> list[list[StepDifference]]:
        try:
            return run_ranks(run_rank, launch.world_size, launch, reference, **self._options)
        except RankError as error:
            raise RankFailedError(EXIT_FAILURE, str(error)) from error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    write_sample_documents(path)
    return path


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if index >= NUM_DEFAULT else [])
        for index, case in enumerate(CASES)
    ],
    ids=[f"{index}-{world_size(case)}-processes" for index, case in enumerate(CASES)],
)
def test_a_case_of_the_covering_array_equals_one_process(
    case: dict[str, str], folder: Path
) -> None:
    result = check_case(case, TestPool(), folder)
    assert result.problem == "", "\n".join(
        [
            result.problem,
            *result.table,
            f'python -m trainer.selfcheck --case "{format_case(case)}"',
        ]
    )


NAMED_CASES = {
    # Failed once.
    "padding for cp without tp": "parallelism.cp=2 parallelism.tp=2 training.seq_len=97 'validation.sets=one length'",
    "copy task of a second stage": "checkpoint=stage data.corpus=copy",
    # Of different numbers of targets, which the reference does not have.
    "micro-batches": "parallelism.dp_shard=2 training.global_batch_size=4",
    # Failed once, the tensors because their names are not those of the model_type that the preset
    # states.
    "ranks without an expert": "parallelism.dp_shard=5 model.feed_forward=softmax model.dim=24 start=folder finish=export",
    "bias that no gradient changes": "parallelism.dp_shard=2 model.feed_forward=glm4_moe start=folder",
    "MXFP4": "parallelism.tp=2 model.feed_forward=gpt_oss start=folder start.weights=MXFP4 finish=generate",
    "weights of another run": "parallelism.dp_shard=3 start=run finish=evaluate",
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", NAMED_CASES.values(), ids=NAMED_CASES)
def test_a_named_case_equals_one_process(case: str, folder: Path) -> None:
    result = check_case(parse_case(case), TestPool(), folder)
    assert result.problem == "", result.table
    assert (
        world_size(parse_case(case)) == 1
        or min(result.errors[kind] for kind in ("weights", "moments")) > 0
    )


THROUGH_HOST = [
    "parallelism.dp_shard=2 parallelism.cp=2 training.global_batch_size=2",
    "parallelism.tp=2 parallelism.cp=2 parallelism.cp_method=ulysses",
    "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2 model.feed_forward=softmax training.global_batch_size=4",
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(parse_case(case), id=case) for case in THROUGH_HOST),
        *(
            pytest.param(case, id=f"{index}", marks=pytest.mark.slow)
            for index, case in enumerate(CASES)
            if index % 8 == 0 and world_size(case) > 1
        ),
    ],
)
def test_a_case_whose_tensors_travel_through_host_memory_equals_one_process(
    case: dict[str, str], folder: Path
) -> None:
    result = check_case(case, TestPool(host_staging.BACKEND), folder)
    assert result.problem == "", result.table


def commit_seed() -> int:
    """Of the commit, so that each commit draws other cases, and the same ones again."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(done.stdout.strip()[:8] or "0", 16)


@pytest.mark.ranks
def test_random_cases_equal_one_process(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    seed = commit_seed()
    check = RandomCheck(TestPool(), folder)
    check.run(draw_cases(seed, max_processes=4), total=1000, max_seconds=RANDOM_SECONDS)
    record_property("summary", f"random configurations: seed {seed}, {check.num_cases} cases")
    assert check.num_cases > 0
    assert check.failed == [], capsys.readouterr().out


# ---- the covering array


def test_the_covering_array_has_every_pair_that_is_legal_alone() -> None:
    """After a change of the factors: python -m tests.selfcheck.covering."""
    missing = all_pairs().difference(*map(pairs, CASES))
    assert [
        pair
        for pair in missing
        if world_size(smallest_case(pair)) <= 8 and not problems(smallest_case(pair))
    ] == []
    assert len(missing) < 0.1 * len(all_pairs())


def test_the_default_cases_have_more_than_a_third_of_the_pairs_of_small_meshes() -> None:
    whole, default = (
        small_pairs().intersection(set[Pair]().union(*map(pairs, cases)))
        for cases in (CASES, CASES[:NUM_DEFAULT])
    )
    assert len(default) > len(whole) / 3


def test_settings_without_effect_are_no_part_of_a_case() -> None:
    assert (
        normalize(
            {
                "parallelism.tp": "1",
                "parallelism.loss_parallel": "false",
                "checkpoint.mesh": "tp 2",
            }
        )
        == {}
    )
    hybrid = {
        "parallelism.cp": "4",
        "parallelism.cp_method": "hybrid",
        "parallelism.cp_outer_method": "ring",
    }
    assert "parallelism.cp_outer_method" not in normalize(hybrid)
    assert normalize(hybrid | {"parallelism.cp_ulysses": "2"}) == hybrid | {
        "parallelism.cp_ulysses": "2"
    }
    assert normalize({"data.corpus": "copy", "data.mask": "none"}) == {"data.corpus": "copy"}


@pytest.mark.slow
def test_every_case_of_the_covering_array_is_legal_and_small() -> None:
    for case in CASES:
        assert case == normalize(case)
        assert problems(case) == []
        assert world_size(case) <= 8
        assert parse_case(format_case(case)) == case


def test_every_level_of_every_factor_changes_the_configuration() -> None:
    plain = case_values({})
    for factor, level in LEVELS:
        values = case_values({factor: level})
        # Says how often the run is launched, not how.
        is_launch = factor.startswith(("checkpoint", "start", "finish"))
        assert (values == plain) == (level == SIMPLEST[factor]) or is_launch, (factor, level)


def varied_keys() -> Iterator[str]:
    yield from (factor for factor in FACTORS if "." in factor)
    for levels in FACTORS.values():
        for key, value in (item for level in levels.values() for item in level.items()):
            if isinstance(value, dict) and not any(
                isinstance(entry, dict) for entry in value.values()
            ):
                yield from (f"{key}.{name}" for name in value)
                continue
            entries = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list) and isinstance(value[0], dict)
                else []
            )
            yield from (f"{key}.{name}" for entry in entries for name in entry)
            yield key


def test_every_key_of_the_schema_is_varied_or_has_a_reason() -> None:
    varied = {*varied_keys()}
    unlisted = [
        key
        for key, _ in schema_keys()
        if key not in varied
        and not any(key == name or key.startswith(f"{name}.") for name in NOT_VARIED)
    ]
    assert unlisted == []
    known = {key for key, _ in schema_keys()}
    assert [
        name
        for name in NOT_VARIED
        if not any(key == name or key.startswith(f"{name}.") for key in known)
    ] == []
    tests = [
        word.rstrip(":,")
        for reason in NOT_VARIED.values()
        for word in reason.split()
        if word.startswith("tests/")
    ]
    assert [path for path in tests if not (ROOT / path).exists()] == []


def test_what_is_refused_names_a_setting() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        case = normalize({factor: rng.choice([*levels]) for factor, levels in FACTORS.items()})
        for problem in problems(case):
            refused += 1
            assert any(is_named(factor, case, problem) for factor in case), problem
    assert refused > 60


# ---- drawing and shrinking


def test_a_seed_draws_the_same_legal_cases_again() -> None:
    first, again, other = ([*islice(draw_cases(seed, max_processes=4), 8)] for seed in (1, 1, 2))
    assert first == again != other
    assert all(problems(case) == [] and world_size(case) <= 4 for case in first)
    fixed = {"parallelism.cp": "3", "parallelism.cp_method": "ring"}
    case = random_case(random.Random(0), max_processes=4, fixed=fixed)
    assert case is not None
    assert case.items() >= fixed.items()


def test_a_failing_case_shrinks_to_the_settings_that_fail() -> None:
    tried: list[dict[str, str]] = []

    def fails(case: Any) -> bool:
        tried.append(dict(case))
        return case.get("parallelism.cp") in ("2", "3") and case.get("training.seq_len") in (
            "97",
            "31",
        )

    large = {"parallelism.cp": "3", "parallelism.cp_method": "ring", "training.seq_len": "97"}
    case = random_case(random.Random(3), max_processes=4, fixed=large)
    assert case is not None
    assert minimize(case, fails) == {"parallelism.cp": "2", "training.seq_len": "31"}
    assert len(tried) < 60
    assert all(problems(case) == [] for case in tried)


def test_shrinking_tries_again_what_another_setting_had_kept() -> None:
    def fails(case: Any) -> bool:
        return "parallelism.cp" in case and ("data.mix" not in case or "training.seed" in case)

    case = {"parallelism.cp": "2", "training.seed": "7", "data.mix": "two sources"}
    assert minimize(case, fails) == {"parallelism.cp": "2"}


def test_time_ends_shrinking_and_the_errors_of_failures_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.selfcheck.random_check.check_case",
        lambda *_: CaseResult("MISMATCH", {"loss": 0.5}, ["a table"]),
    )
    case = {
        "parallelism.cp": "2",
        "parallelism.cp_layout": "headtail",
        "parallelism.cp_method": "ring",
    }
    check = RandomCheck(TestPool(), tmp_path, options=" --device cuda")
    check.run(repeat(case), total=9, max_seconds=0)
    check.summary()
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[-2] == f'  python -m trainer.selfcheck --device cuda --case "{format_case(case)}"'
    )
    assert printed[-1] == "the time limit is reached: 1 of 9 cases"
    assert check.summary()[1].startswith(
        "largest relative errors: loss 5.0e-01, gradient norm 0.0e+00"
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_failure_is_shrunk_and_its_command_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class BrokenPool(TestPool):
        """Off by one in the loss of head-tail layouts."""

        def run(self, launch: Launch, *, reference: Path) -> list[list[StepDifference]]:
            ranks = super().run(launch, reference=reference)
            if launch.config.parallelism.cp_layout == "headtail":
                ranks[-1][-1].values["loss"] += 1e-6
            return ranks

    check = RandomCheck(BrokenPool(), folder)
    check.check(
        {
            "parallelism.cp": "2",
            "parallelism.cp_layout": "headtail",
            "parallelism.cp_method": "ring",
        }
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "MISMATCH with 3 settings; shrinking them"
    assert printed[1] == "MISMATCH on 2 processes:"
    assert printed[-1].startswith(
        '  python -m trainer.selfcheck --case "parallelism.cp=2 parallelism.cp_layout=headtail'
    )
    assert check.summary()[0].startswith("1 case, 1 failed")
