"""Metric records: keys, values, which steps are logged, and how the console and TensorBoard show
them.
"""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tomli
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_multiplexer import (  # type: ignore[import-untyped]
    EventMultiplexer,
)
from tensorboard.plugins.custom_scalar import layout_pb2  # type: ignore[import-untyped]
from torch import Tensor

from models.batch import IGNORE_INDEX
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from tests.models.small_models import packed
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of, run_here, trainer_of
from tests.system.runs import forked, lines, metrics, steps, write_run
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.loader import MicroBatchLoader
from trainer.errors import RunFailedError
from trainer.hardware.device import AsyncHostCopy, Stopwatch
from trainer.metrics.accumulator import MetricAccumulator, MetricLayout, position_bucket_names
from trainer.metrics.loggers import ConsoleLogger, format_duration, format_step
from trainer.metrics.trackers import (
    DASHBOARD,
    EXPERT_TAGS,
    TAGS,
    dashboard,
    events_folder,
    with_model,
)
from trainer.run.metrics_processor import MetricsProcessor
from trainer.step.trainer import StepMetrics, StepResult, Trainer
from trainer.storage.run_dir import RunDir

# The contract's list, in its order.
CONTRACT = """step, tokens, loss, grad_norm, lr, step_seconds, tokens_per_second, tokens_per_second_per_device,
tflops_per_device, mfu, hfu, data_wait_pct, memory_peak_gib, memory_reserved_gib, rss_gib"""
KEYS = [key.strip() for key in CONTRACT.replace("\n", " ").split(",")]
DOCUMENTED_EXTRAS = [
    "goodput_pct",
    "attention_imbalance",
    "dp_imbalance",
    "loss_by_position",
    "loss_by_shard",
    "stage",
]
DOCUMENTED_EXTRAS += ["sources"]
RECORD: dict[str, Any] = {
    "step": 20,
    "loss": 3.21449,
    "grad_norm": 0.8204,
    "lr": 9.1e-4,
    "tokens_per_second": 4812.4,
    "tflops_per_device": 0.0123,
    "mfu": None,
    "memory_peak_gib": None,
    "rss_gib": 0.33,
    "data_wait_pct": 0.26,
    "attention_imbalance": 1.26,
    "dp_imbalance": 1.0,
    "loss_by_shard": None,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 7 steps: `every` logs each step and has a peak FLOP/s, `third` logs every third
    step.
    """
    root = tmp_path_factory.mktemp("metrics")
    run = write_run(root)
    shared = ("--training.steps", "7", "--checkpoint.interval", "4", "--memory.recompute", "full")
    everything = ("--metrics.tensorboard", "true", "--metrics.peak_flops", "1e12")
    run_here(configured(run, root / "every", *shared, *everything))
    run_here(configured(run, root / "third", *shared, "--metrics.log_interval", "3"))
    run_here(
        configured(
            run, root / "tiled", "--training.steps", "1", "--memory.mlp_tile_mib", "1", *everything
        )
    )
    return root


def count_tokens_and_pairs(root: Path) -> list[tuple[int, int]]:
    """(tokens, attended pairs) of each step, by comparing every two tokens of a sequence."""
    dataset = dataset_of(configured(root / "run.toml", root / "every"))
    counts = []
    for index in range(7 * 6):
        sequence = dataset.read([index])
        documents = sequence.document_ids[0, : sequence.num_tokens]  # Padding is at the end.
        pairs = (documents[:, None] == documents[None, :]).tril().sum()
        counts.append((sequence.num_tokens, int(pairs)))
    steps = [counts[first : first + 6] for first in range(0, 7 * 6, 6)]
    return [(sum(tokens for tokens, _ in step), sum(pairs for _, pairs in step)) for step in steps]


def vector_of(layout: MetricLayout, **metrics: list[float]) -> Tensor:
    vector = torch.zeros(sum(layout.widths.values()), dtype=torch.float64)
    for name, values in metrics.items():
        layout.split(vector)[name].copy_(torch.tensor(values))
    return vector


def log_only_step(config: Config, trainer: Trainer, step_result: StepResult) -> None:
    folder = RunDir(config.output_dir)
    folder.create()
    with closing(MetricsProcessor(config, folder, trainer)) as processor:
        processor.record_step(step_result)
        processor.flush()
        processor.log_run_end()


# ---- the record


def test_a_record_has_the_contract_keys_and_the_documented_extras(root: Path) -> None:
    for name in ("every", "third"):
        for record in lines(root / name / "metrics.jsonl"):
            assert list(record) == KEYS + DOCUMENTED_EXTRAS


def test_a_record_is_strict_json_with_stable_types(root: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    for text in (root / "every" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(text, parse_constant=refuse)
        assert type(record["step"]) is type(record["tokens"]) is int
        assert all(type(record[key]) is float or record[key] is None for key in KEYS[2:])


def test_metrics_have_full_precision(root: Path) -> None:
    for values in metrics(root / "every", "loss", "grad_norm", "step_seconds", "lr"):
        for value in values:
            assert len(repr(value)) >= 10 or value == round(value, 10)
    assert all(len(repr(loss)) > 14 for (loss,) in metrics(root / "every", "loss"))


def test_device_metrics_are_null_on_a_cpu(root: Path) -> None:
    nulls = ("mfu", "hfu", "memory_peak_gib", "memory_reserved_gib")
    assert metrics(root / "third", *nulls) == [(None,) * 4] * 4
    assert metrics(root / "every", *nulls[2:]) == [(None, None)] * 7


def test_tokens_accumulate_over_the_run_without_padding(root: Path) -> None:
    expected = list(accumulate(tokens for tokens, _ in count_tokens_and_pairs(root)))
    assert [tokens for (tokens,) in metrics(root / "every", "tokens")] == expected
    assert expected[-1] < 7 * 6 * 64, "the data should have padding"


def test_mfu_and_hfu_match_an_explicit_count(root: Path) -> None:
    dim = 64
    heads = 4
    kv_heads = 2
    head_dim = 16
    ffn = 96
    vocabulary = 264
    layers = 2
    block = dim * head_dim * (2 * heads + 2 * kv_heads) + 3 * dim * ffn
    weights = layers * block + vocabulary * dim
    for record, (tokens, pairs) in zip(
        lines(root / "every" / "metrics.jsonl"), count_tokens_and_pairs(root), strict=True
    ):
        model_flops = 6 * weights * tokens + 12 * layers * heads * head_dim * pairs
        # Recomputed: all matmuls but the last; QKV twice, for attention and for its backward.
        matmuls = block - dim * ffn + dim * head_dim * (heads + 2 * kv_heads)
        again = 2 * layers * matmuls * tokens + (4 + 2) * layers * heads * head_dim * pairs
        assert record["tokens_per_second"] == pytest.approx(tokens / record["step_seconds"])
        assert record["tokens_per_second_per_device"] == record["tokens_per_second"]
        assert record["tflops_per_device"] == pytest.approx(
            model_flops / record["step_seconds"] / 1e12
        )
        assert record["mfu"] == pytest.approx(model_flops / record["step_seconds"] / 1e12)
        assert record["hfu"] == pytest.approx(
            (model_flops + again) / record["step_seconds"] / 1e12
        )
        assert 0 <= record["data_wait_pct"] <= 100
        assert 0.05 < record["rss_gib"] < 20


def test_hfu_counts_kept_attention_once(root: Path) -> None:
    (record,), (tokens, pairs) = (
        lines(root / "tiled" / "metrics.jsonl"),
        count_tokens_and_pairs(root)[0],
    )
    block = 64 * 16 * (2 * 4 + 2 * 2) + 2 * 64 * 96  # All matmuls but the last.
    again = 2 * 2 * block * tokens + 2 * 2 * 4 * 16 * pairs  # And attention scores, in two layers.
    assert record["hfu"] - record["mfu"] == pytest.approx(again / record["step_seconds"] / 1e12)


def test_loss_by_position_is_a_mean_over_its_targets(root: Path) -> None:
    for record in lines(root / "every" / "metrics.jsonl"):
        by_position = record["loss_by_position"]
        assert list(by_position) == position_bucket_names()
        # Sequences have 64 tokens, so every target is in the first bucket.
        assert by_position.pop("0-256") == pytest.approx(record["loss"])
        assert set(by_position.values()) == {None}


def test_one_rank_is_balanced_and_has_no_shard_losses(root: Path) -> None:
    assert metrics(root / "every", "attention_imbalance", "loss_by_shard") == [(1.0, None)] * 7


@pytest.mark.ranks
def test_attention_imbalance_matches_the_sequences_of_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    folder = tmp_path / "run"
    assert forked(run, folder, "--training.steps", "3", processes=2).statuses == [0, 0]
    dataset = dataset_of(configured(run, folder))
    measured = metrics(folder, "attention_imbalance", "dp_imbalance")
    options: dict[str, Any] = {"dp_size": 2, "global_batch_size": 6, "micro_batch_size": 1}
    loaders = [MicroBatchLoader(dataset, dp_rank=rank, **options) for rank in (0, 1)]
    model = configured(run, folder).model.build()
    work = partial(model.hardware_flops, recompute=configured(run, folder).memory.recompute)
    expected = []
    for first in range(0, 3 * 6, 6):
        dealt = [[dataset.read(part.indices) for part in loader.deal(first)] for loader in loaders]
        pairs = [[batch.num_computed_pairs for batch in of_rank] for of_rank in dealt]
        flops = [
            [work(tokens=batch.tokens.numel(), pairs=batch.num_computed_pairs) for batch in each]
            for each in dealt
        ]
        busiest = sum(map(max, zip(*flops, strict=True)))
        totals = [*map(sum, pairs)]
        expected.append((max(totals) / (sum(totals) / 2), busiest / (sum(map(sum, flops)) / 2)))
    for found, given in zip(zip(*measured, strict=True), zip(*expected, strict=True), strict=True):
        assert found == pytest.approx(given, rel=1e-12)
        assert max(found) > 1.001, "some sequences should have more attended pairs than others"
    log = (folder / "logs" / "rank-0.log").read_text()
    assert f"attn imbalance {measured[0][0]:.2f}  dp imbalance {measured[0][1]:.2f}  eta" in log
    assert re.search(r"data parallelism: dp imbalance 1\.\d\d in the next 3 steps", log)
    assert "cp rank" not in log


def test_a_nan_loss_is_null_in_metrics(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "1")
    with trainer_of(config) as trainer:
        with torch.no_grad():
            trainer.stage_modules[0].get_parameter("head.norm.weight").fill_(torch.nan)
        log_only_step(config, trainer, next(trainer.train_steps()))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (record["skipped"], record["loss"], record["grad_norm"]) == (True, None, None)
    assert set(record["loss_by_position"].values()) == {None}


def test_position_buckets_are_powers_of_four() -> None:
    assert position_bucket_names() == [
        "0-256",
        "256-1K",
        "1K-4K",
        "4K-16K",
        "16K-64K",
        "64K-256K",
        "256K-1M",
        "1M-",
    ]


# ---- several ranks


@dataclass(frozen=True)
class RankStep:
    """A rank's part of a step, by micro-batch: loss of each target, number of targets, computed
    pairs.
    """

    losses: list[float]
    targets: list[int]
    attended: list[int]


def measure(parts: list[RankStep], degrees: dict[str, int]) -> StepMetrics:
    """Runs on each rank; a micro-batch has 7 tokens and 11 attended pairs."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | degrees, rank=torch.distributed.get_rank())
    part = parts[mesh.rank]
    accumulator = MetricAccumulator(mesh, torch.device("cpu"))
    vector = accumulator.new_vector()
    for loss, targets, attended in zip(part.losses, part.targets, part.attended, strict=True):
        batch = replace(
            packed([24], targets=targets), num_tokens=7, num_pairs=11, num_computed_pairs=attended
        )
        accumulator.add(vector, torch.where(batch.labels != IGNORE_INDEX, loss, 0.0), batch)
    accumulator.all_reduce(vector)
    return StepResult(
        1, 0.1, 0, 0.0, Stopwatch(torch.device("cpu")), AsyncHostCopy(vector), accumulator.layout
    ).read()


def measure_on_ranks(*parts: RankStep, **degrees: int) -> StepMetrics:
    """The metrics, which must be the same on all ranks."""
    first, *others = run_ranks(measure, len(parts), [*parts], degrees)
    assert all(other == first for other in others)
    return first


@pytest.mark.ranks
def test_each_shard_of_a_sequence_has_its_own_loss() -> None:
    measured = measure_on_ranks(
        RankStep([1.0, 2.0], [4, 4], [100, 20]), RankStep([5.0, 5.0], [8, 16], [40, 40]), cp=2
    )
    assert measured.loss_by_shard == [1.5, 5.0]
    assert measured.loss == (4 * 1.0 + 4 * 2.0 + 24 * 5.0) / 32


@pytest.mark.ranks
def test_shard_losses_aggregate_over_dp_and_may_lack_targets() -> None:
    parts = [
        RankStep([loss], [targets], [1])
        for loss, targets in ((3.0, 2), (9.0, 0), (6.0, 4), (9.0, 0))
    ]
    measured = measure_on_ranks(*parts, dp_shard=2, cp=2)
    assert measured.loss_by_shard == [5.0, None]
    assert measured.loss == 5.0


def read_documents(lengths: list[list[int]], degrees: dict[str, int]) -> str:
    """The error if each rank reads documents of other lengths in its first micro-batch."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | degrees, rank=torch.distributed.get_rank())
    accumulator = MetricAccumulator(mesh, torch.device("cpu"))
    vector = accumulator.new_vector([packed(lengths[mesh.rank]), packed([24])])
    accumulator.all_reduce(vector)
    result = StepResult(
        7, 0.1, 0, 0.0, Stopwatch(torch.device("cpu")), AsyncHostCopy(vector), accumulator.layout
    )
    try:
        result.read()
    except RunFailedError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_cp_ranks_that_read_other_documents_are_named_on_all_ranks() -> None:
    cases = [
        ([[3, 21], [3, 21], [20, 4]], {"cp": 3}, "rank 2 of 3"),
        ([[3, 21], [3, 21], [3, 21]], {"cp": 3}, ""),
        ([[3, 21], [3, 21], [4, 20], [4, 20]], {"dp_shard": 2, "cp": 2}, ""),
        ([[3, 21], [3, 21], [4, 20], [20, 4]], {"dp_shard": 2, "cp": 2}, "rank 1 of 2"),
        ([[3, 21], [3, 21], [4, 20], [20, 4]], {"pp": 2, "cp": 2}, "rank 1 of 2"),
    ]
    for lengths, degrees, named in cases:
        message = (
            named and f"step 7: context-parallel {named} read other documents than the rest: "
        )
        for found in run_ranks(read_documents, len(lengths), lengths, degrees):
            assert found.startswith(message)
            assert bool(found) == bool(named)


@pytest.mark.ranks
def test_attention_imbalance_is_over_the_whole_step() -> None:
    # The busier rank differs by micro-batch; over both, 120 and 80.
    parts = [RankStep([1.0, 1.0], [1, 1], attended) for attended in ([100, 20], [10, 70])]
    measured = measure_on_ranks(*parts, dp_shard=2)
    assert measured.attention_imbalance == 1.2
    assert measured.loss_by_shard is None


@pytest.mark.ranks
def test_a_sequence_sharded_over_ranks_counts_once() -> None:
    measured = measure_on_ranks(*[RankStep([1.0, 1.0], [1, 1], [3, 3])] * 3, cp=3)
    assert (measured.tokens, measured.attended_pairs) == (14, 22)
    assert measured.attention_imbalance == 1.0


@pytest.mark.ranks
def test_the_last_pipeline_stage_provides_the_metrics() -> None:
    empty = RankStep([], [], [])
    measured = measure_on_ranks(
        empty, empty, RankStep([1.0], [1], [120]), RankStep([3.0], [3], [80]), pp=2, dp_shard=2
    )
    assert (measured.loss, measured.tokens) == (2.5, 14)
    assert measured.attention_imbalance == 1.2


def test_metric_slices_cover_the_vector_without_overlap() -> None:
    layout = MetricLayout(3)
    vector = list(map(float, range(sum(layout.widths.values()))))
    assert [value for values in layout.split(vector).values() for value in values] == vector
    assert [len(layout.split(vector)[f"{name}_by_shard"]) for name in ("loss", "targets")] == [
        3,
        3,
    ]


def test_shard_losses_reach_every_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(
        write_run(tmp_path),
        tmp_path / "run",
        "--training.steps",
        "1",
        "--metrics.tensorboard",
        "true",
    )
    layout = MetricLayout(3)
    vector = vector_of(
        layout,
        loss=[8.0],
        targets=[4.0],
        finite=[1.0],
        loss_by_shard=[6.0, 0.0, 2.0],
        targets_by_shard=[2.0, 0.0, 2.0],
    )
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.start()
    stopwatch.stop()
    with trainer_of(config) as trainer, caplog.at_level(logging.INFO, logger="trainer"):
        log_only_step(
            config, trainer, StepResult(1, 0.1, 0, 0.0, stopwatch, AsyncHostCopy(vector), layout)
        )
    assert metrics(tmp_path / "run", "loss", "loss_by_shard") == [(2.0, [3.0, None, 1.0])]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run"))
    events.Reload()
    shown = {
        tag: events.Scalars(tag)[0].value
        for tag in events.Tags()["scalars"]
        if tag.startswith("train_loss_by_shard")
    }
    assert shown == {"train_loss_by_shard/0": 3.0, "train_loss_by_shard/2": 1.0}
    assert "loss 2.0000  loss by cp rank 3.00 - 1.00  grad norm" in caplog.text
    assert "loss 2.000 -> 2.000 (by cp rank 3.00 - 1.00). Results in" in caplog.text


# ---- which steps


def test_the_first_every_nth_and_the_last_step_are_logged(root: Path) -> None:
    assert steps(root / "every") == [1, 2, 3, 4, 5, 6, 7]
    assert steps(root / "third") == [1, 3, 6, 7]


def test_exact_metrics_do_not_depend_on_the_log_interval(root: Path) -> None:
    exact = ("step", "tokens", "loss", "grad_norm", "lr")
    expected = [values for values in metrics(root / "every", *exact) if values[0] in (1, 3, 6, 7)]
    assert metrics(root / "third", *exact) == expected


def test_rates_cover_all_steps_since_the_previous_record(root: Path) -> None:
    tokens = [tokens for tokens, _ in count_tokens_and_pairs(root)]
    spans = [tokens[0:1], tokens[1:3], tokens[3:6], tokens[6:7]]
    for (rate, seconds), span in zip(
        metrics(root / "third", "tokens_per_second", "step_seconds"), spans, strict=True
    ):
        assert rate * seconds * len(span) == pytest.approx(sum(span))


def test_a_step_on_a_cpu_is_logged_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "2")
    folder = RunDir(config.output_dir)
    folder.create()
    with (
        trainer_of(config) as trainer,
        closing(MetricsProcessor(config, folder, trainer)) as processor,
    ):
        for step_result in trainer.train_steps():
            processor.record_step(step_result)
            assert steps(tmp_path / "run")[-1] == step_result.step


# ---- console


def test_the_console_has_a_line_per_step_and_a_short_start_up_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, logger="trainer"):
        run_here(configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "2"))
    first, second = (text for text in caplog.messages if text.startswith("step "))
    assert first.startswith("step 1/2  loss 5.")
    assert second.startswith("step 2/2  loss ")
    assert second.endswith("eta 0:00:00")
    assert caplog.messages[-1].startswith("done: all 2 steps; loss 5.")


@pytest.mark.ranks
def test_the_start_up_log_has_at_most_12_lines_and_no_zero_sizes(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    config.write_text(config.read_text() + '[memory]\nrecompute = "full"\n')
    for processes in (1, 2):
        done = forked(
            config, tmp_path / f"run-{processes}", "--training.steps=1", processes=processes
        )
        assert done.statuses == [0] * processes, done.said
        start_up = done.said.partition(" step 1/1 ")[0].splitlines()
        assert 4 <= len(start_up) <= 12, done.said
        assert not [
            line
            for line in start_up
            if re.search(r"\b0\.0+ [KMGT]iB|-0\.0+\b|\b(cp|tp|pp) 1\b", line)
        ]


def test_a_step_line_omits_unknown_metrics() -> None:
    assert format_step(RECORD, total_steps=100, eta_seconds=3_725.4, num_token_ranks=1) == (
        "step 20/100  loss 3.2145  grad norm 0.820  lr 9.10e-04  4,812 tok/s  0.0123 TFLOP/s  rss 337.9 MiB  "
        "data wait 0.3%  eta 1:02:05"
    )
    on_gpu = format_step(
        RECORD | {"mfu": 0.4123, "memory_peak_gib": 71.26},
        total_steps=100,
        eta_seconds=0,
        num_token_ranks=1,
    )
    assert "mfu 41.2%  peak mem 71.3 GiB  rss" in on_gpu
    without = RECORD | {"loss": None, "grad_norm": None}
    assert "loss -  grad norm -  lr" in format_step(
        without, total_steps=100, eta_seconds=0, num_token_ranks=1
    )


def test_a_step_line_of_several_ranks_has_load_balance_and_shard_losses() -> None:
    def line(**changes: Any) -> str:
        return format_step(RECORD | changes, total_steps=100, eta_seconds=0, num_token_ranks=2)

    assert line().endswith("data wait 0.3%  attn imbalance 1.26  eta 0:00:00")
    assert line(dp_imbalance=1.04).endswith("attn imbalance 1.26  dp imbalance 1.04  eta 0:00:00")
    assert "loss 3.2145  loss by cp rank 0.04 - 3.20  grad" in line(
        loss_by_shard=[0.0401, None, 3.2]
    )
    assert "loss by cp rank 0.01 to 0.15  grad" in line(
        loss_by_shard=[None, *(number / 100 for number in range(1, 16))]
    )
    assert "loss by cp rank - - -" in line(loss_by_shard=[None] * 3)


def test_the_eta_is_smoothed_and_ignores_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    logger = ConsoleLogger(100, num_token_ranks=1)
    with caplog.at_level(logging.INFO, logger="trainer"):
        for step, seconds in enumerate((60.0, 10.0, 20.0), start=1):
            logger.write(RECORD | {"step": step, "step_seconds": seconds})
    assert [line.rpartition("eta ")[2] for line in caplog.messages] == [
        format_duration(seconds) for seconds in (99 * 60, 98 * 10, 97 * 11)
    ]


@pytest.mark.parametrize(
    ("seconds", "written"), [(0, "0:00:00"), (59.6, "0:01:00"), (90_061, "25:01:01")]
)
def test_format_duration(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


# ---- TensorBoard


@pytest.fixture(scope="module")
def events(root: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(root / "every" / "tensorboard" / "run"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_tags(events: EventAccumulator) -> None:
    known = {tag for key, tag in TAGS.items() if not key.startswith("memory_")}
    saves = {f"train_checkpoint/{key}" for key in ("bytes", "seconds", "blocked_seconds")}
    assert set(events.Tags()["scalars"]) == known | saves | {
        "train_loss_by_position/0-256",
        "train_events/start",
        "train_events/end",
    }
    assert {"train/loss", "train/grad_norm", "train/lr", "perf/mfu", "perf/rss_gib"} <= known
    assert set(TAGS) == set(KEYS) - {"step"} | {
        "attention_imbalance",
        "dp_imbalance",
        "goodput_pct",
    }
    assert (TAGS["attention_imbalance"], TAGS["goodput_pct"]) == (
        "train_balance/attention_imbalance",
        "perf/goodput_pct",
    )


def test_tensorboard_agrees_with_metrics_jsonl(root: Path, events: EventAccumulator) -> None:
    for key in ("loss", "lr", "mfu", "tokens"):
        written = metrics(root / "every", "step", key)
        shown = [(point.step, point.value) for point in events.Scalars(TAGS[key])]
        assert [step for step, _ in shown] == [step for step, _ in written]
        for (_, ours), (_, theirs) in zip(written, shown, strict=True):
            assert math.isclose(ours, theirs, rel_tol=1e-6)


def test_the_first_two_groups_have_loss_throughput_mfu_and_memory(
    events: EventAccumulator,
) -> None:
    tags = {*events.Tags()["scalars"], *EXPERT_TAGS.values(), "validation/set", *TAGS.values()}
    groups = sorted({tag.partition("/")[0] for tag in tags})
    opened = {tag for tag in tags if tag.partition("/")[0] in groups[:2]}
    wanted = ("train/loss", "perf/tokens_per_second", "perf/mfu", "perf/memory_peak_gib")
    assert opened.issuperset(wanted)
    assert max(sum(tag.startswith(f"{group}/") for tag in opened) for group in groups[:2]) <= 12, (
        "a page of TensorBoard"
    )


def layout_of(events: EventAccumulator) -> dict[str, list[str]]:
    """The patterns of each chart that TensorBoard shows: those of the newest layout."""
    (content,) = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    layout = layout_pb2.Layout.FromString(content)
    return {
        chart.title: [*chart.multiline.tag]
        for category in layout.category
        for chart in category.chart
    }


def test_the_dashboard_has_no_empty_chart(events: EventAccumulator) -> None:
    written = events.Tags()["scalars"]
    for patterns in layout_of(events).values():
        assert all(any(re.fullmatch(pattern, tag) for tag in written) for pattern in patterns)
    alone = [
        "loss",
        "loss by position",
        "gradient norm",
        "utilisation",
        "tokens per second",
        "attention imbalance",
        "GiB",
    ]
    assert [*layout_of(events)] == alone
    tags = {
        *TAGS.values(),
        *EXPERT_TAGS.values(),
        "train_loss_by_shard/0",
        "train_loss_by_source/a",
        "validation/a",
    }
    charts = dashboard({*tags, "train_loss_by_position/0-256", "validation_context/a/16"})
    assert charts == DASHBOARD, "all charts, where all is written"


def test_tensorboard_has_the_configuration_as_text(root: Path, events: EventAccumulator) -> None:
    (content,) = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    text = content.decode().removeprefix("```toml\n").removesuffix("```")
    assert tomli.loads(text) == tomli.loads((root / "every" / "config.toml").read_text())


def test_no_tensorboard_folder_unless_enabled(root: Path) -> None:
    assert not (root / "third" / "tensorboard").exists()


def test_a_resumed_run_purges_tensorboard_steps_after_its_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    folder = tmp_path / "run"
    options = (
        "--metrics.tensorboard",
        "true",
        "--schedule.kind",
        "constant",
        "--checkpoint.interval",
        "2",
    )
    run_here(configured(run, folder, *options, "--training.steps", "4"))
    (folder / "checkpoints" / "step-4").rename(folder / "checkpoints" / ".tmp-step-4")
    run_here(configured(run, folder, *options, "--training.steps", "5"))
    accumulator = EventAccumulator(str(folder / "tensorboard" / "run"))
    accumulator.Reload()
    assert [point.step for point in accumulator.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert steps(folder) == [1, 2, 3, 4, 5]


def test_tensorboard_calls_a_run_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    assert events_folder(folder, "long_code") == folder / "long_code"
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation" / "events.out.tfevents.1").touch()
    assert events_folder(folder, "long_code") == folder / "long_code"
    (folder / "short_code").mkdir()
    (folder / "short_code" / "events.out.tfevents.1").touch()
    # Resumed under another name, the run stays one run of TensorBoard.
    assert events_folder(folder, "long_code") == folder / "short_code"
    # As versions without names wrote.
    (folder / "events.out.tfevents.1").touch()
    assert events_folder(folder, "long_code") == folder


def test_tensorboard_lists_a_run_by_its_name(root: Path) -> None:
    shown = EventMultiplexer().AddRunsFromDirectory(str(root / "every" / "tensorboard"))
    # The default of job.name.
    assert [*shown.Runs()] == ["run"]


def test_events_are_texts_in_tensorboard(events: EventAccumulator) -> None:
    assert text_of(events, "start") == "started on 1 rank"
    saves = events.Tensors("train_events/checkpoint/text_summary")
    assert [save.step for save in saves] == [4, 7]


def test_events_of_other_threads_and_of_the_launcher_reach_trackers(tmp_path: Path) -> None:
    options = ("--training.steps", "1", "--metrics.tensorboard", "true")
    config = configured(write_run(tmp_path), tmp_path / "run", *options)
    folder = RunDir(config.output_dir)
    folder.create()
    # As the launcher does, in another process.
    RunDir(folder.path).log_event("remote_damaged", url="s3://b/step-3", reason="cut short")
    uploaded = {"step": 1, "url": "s3://b", "bytes": 2048, "seconds": 1.5}
    upload = Thread(target=folder.log_event, args=("checkpoint_uploaded",), kwargs=uploaded)
    with (
        trainer_of(config) as trainer,
        closing(MetricsProcessor(config, folder, trainer)) as processor,
    ):
        processor.log_run_start(None)
        upload.start()
        upload.join()
    accumulator = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run"))
    accumulator.Reload()
    assert [text_of(accumulator, kind) for kind in ("remote_damaged", "checkpoint_uploaded")] == [
        "s3://b/step-3 is damaged: cut short",
        "checkpoint uploaded to s3://b: 2.0 KiB in 1.5 s",
    ]


def text_of(events: EventAccumulator, kind: str) -> str:
    (event,) = events.Tensors(f"train_events/{kind}/text_summary")
    (content,) = event.tensor_proto.string_val
    return str(content, "utf-8")


def test_trackers_are_given_the_sizes_that_a_preset_leaves_out() -> None:
    config = load(["--config", "llama3_8b", "--model.num_layers", "4"])
    model = config.model.build()
    given = with_model(config.model_dump(mode="json"), model)["model"]
    assert (given["size"], given["num_layers"], given["dim"]) == ("8b", 4, 4096)
    assert given["parameters"] == model.num_parameters
