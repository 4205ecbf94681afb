"""What is written about an update: names, values, and which updates."""

from __future__ import annotations

import json
import logging
import math
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import layout_pb2  # type: ignore[import-untyped]
from torch import Tensor

from models.batch import IGNORE_INDEX
from parallelisms.mesh import Mesh
from parallelisms.parallel_dims import AXES
from tests.models.small_models import packed
from tests.ranks import run_ranks
from tests.system.in_process import configured, rows_of, run_here, trainer_of
from tests.system.runs import forked, lines, metrics, steps, write_run
from trainer.checkpoint.run_dir import RunDir
from trainer.config.job_config import Config
from trainer.hardware.device import AsyncHostCopy, Stopwatch
from trainer.metrics.loggers import TENSORBOARD_TAGS, format_duration, format_step
from trainer.metrics.metrics import MetricsProcessor
from trainer.metrics.step_metrics import MetricAccumulator, MetricLayout, position_bucket_names
from trainer.trainer import StepMetrics, StepResult, Trainer

# The contract's list, in its order.
CONTRACT = """step, tokens, loss, grad_norm, lr, step_seconds, tokens_per_second, tokens_per_second_per_device,
tflops_per_device, mfu, hfu, data_wait_pct, memory_peak_gib, memory_reserved_gib, rss_gib"""
KEYS = [key.strip() for key in CONTRACT.replace("\n", " ").split(",")]
DOCUMENTED_EXTRAS = ["goodput_pct", "attention_imbalance", "loss_by_position", "loss_by_shard", "stage", "sources"]
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
    "loss_by_shard": None,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 7 updates: `every`, which logs each and knows a peak, and `third`, which logs every third."""
    root = tmp_path_factory.mktemp("metrics")
    run = write_run(root)
    shared = ("--training.steps", "7", "--checkpoint.interval", "4", "--memory.recompute", "full")
    everything = ("--metrics.tensorboard", "true", "--metrics.peak_flops", "1e12")
    run_here(configured(run, root / "every", *shared, *everything))
    run_here(configured(run, root / "third", *shared, "--metrics.log_interval", "3"))
    run_here(configured(run, root / "tiled", "--training.steps", "1", "--memory.mlp_tile_mib", "1", *everything))
    return root


def amounts(root: Path) -> list[tuple[int, int]]:
    """(tokens, pairs of a query and a key) of each update, by looking at every two tokens of a row."""
    rows = rows_of(configured(root / "run.toml", root / "every"))
    counted = []
    for number in range(7 * 6):
        row = rows.read([number])
        documents = row.document_ids[0, : row.num_tokens]  # Padding is at the end.
        pairs = (documents[:, None] == documents[None, :]).tril().sum()
        counted.append((row.num_tokens, int(pairs)))
    updates = [counted[first : first + 6] for first in range(0, 7 * 6, 6)]
    return [(sum(tokens for tokens, _ in rows), sum(pairs for _, pairs in rows)) for rows in updates]


def vector_of(slots: MetricLayout, **numbers: list[float]) -> Tensor:
    vector = torch.zeros(sum(slots.widths.values()), dtype=torch.float64)
    for name, values in numbers.items():
        slots.split(vector)[name].copy_(torch.tensor(values))
    return vector


def write(config: Config, trainer: Trainer, update: StepResult) -> None:
    """A run's numbers, were this its only update."""
    folder = RunDir(config.output_dir)
    folder.create()
    with closing(MetricsProcessor(config, folder, trainer, resumed_from=None)) as written:
        written.record_step(update)
        written.flush()
        written.log_run_end()


# ---- the record


def test_a_record_has_the_keys_of_the_contract_and_the_documented_ones(root: Path) -> None:
    for name in ("every", "third"):
        for record in lines(root / name / "metrics.jsonl"):
            assert list(record) == KEYS + DOCUMENTED_EXTRAS


def test_a_record_is_json_without_surprises(root: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    for text in (root / "every" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(text, parse_constant=refuse)
        assert type(record["step"]) is type(record["tokens"]) is int
        assert all(type(record[key]) is float or record[key] is None for key in KEYS[2:])


def test_numbers_are_written_at_full_precision(root: Path) -> None:
    for values in metrics(root / "every", "loss", "grad_norm", "step_seconds", "lr"):
        for value in values:
            assert len(repr(value)) >= 10 or value == round(value, 10)
    assert all(len(repr(loss)) > 14 for (loss,) in metrics(root / "every", "loss"))


def test_what_a_cpu_does_not_have_is_null(root: Path) -> None:
    nulls = ("mfu", "hfu", "memory_peak_gib", "memory_reserved_gib")
    assert metrics(root / "third", *nulls) == [(None,) * 4] * 4
    assert metrics(root / "every", *nulls[2:]) == [(None, None)] * 7


def test_tokens_are_counted_without_padding_since_the_run_began(root: Path) -> None:
    counted = list(accumulate(tokens for tokens, _ in amounts(root)))
    assert [tokens for (tokens,) in metrics(root / "every", "tokens")] == counted
    assert counted[-1] < 7 * 6 * 64, "there should be padding"


def test_mfu_is_the_hand_count(root: Path) -> None:
    dim, heads, kv_heads, head_dim, ffn, vocabulary, layers = 64, 4, 2, 16, 96, 264, 2
    block = dim * head_dim * (2 * heads + 2 * kv_heads) + 3 * dim * ffn
    weights = layers * block + vocabulary * dim
    for record, (tokens, pairs) in zip(lines(root / "every" / "metrics.jsonl"), amounts(root), strict=True):
        model_flops = 6 * weights * tokens + 12 * layers * heads * head_dim * pairs
        # All products but the last; queries, keys and values twice, for attention and for its backward pass.
        products = block - dim * ffn + dim * head_dim * (heads + 2 * kv_heads)
        again = 2 * layers * products * tokens + (4 + 2) * layers * heads * head_dim * pairs
        assert record["tokens_per_second"] == pytest.approx(tokens / record["step_seconds"])
        assert record["tokens_per_second_per_device"] == record["tokens_per_second"]
        assert record["tflops_per_device"] == pytest.approx(model_flops / record["step_seconds"] / 1e12)
        assert record["mfu"] == pytest.approx(model_flops / record["step_seconds"] / 1e12)
        assert record["hfu"] == pytest.approx((model_flops + again) / record["step_seconds"] / 1e12)
        assert 0 <= record["data_wait_pct"] <= 100
        assert 0.05 < record["rss_gib"] < 20


def test_hfu_counts_attention_once_where_it_is_kept(root: Path) -> None:
    (record,), (tokens, pairs) = lines(root / "tiled" / "metrics.jsonl"), amounts(root)[0]
    block = 64 * 16 * (2 * 4 + 2 * 2) + 2 * 64 * 96  # All products but the last.
    again = 2 * 2 * block * tokens + 2 * 2 * 4 * 16 * pairs  # And scores, in two layers.
    assert record["hfu"] - record["mfu"] == pytest.approx(again / record["step_seconds"] / 1e12)


def test_losses_by_position_are_means_over_their_targets(root: Path) -> None:
    for record in lines(root / "every" / "metrics.jsonl"):
        by_position = record["loss_by_position"]
        assert list(by_position) == position_bucket_names()
        # Rows are 64 long, so every target is in the first bucket.
        assert by_position.pop("0-256") == pytest.approx(record["loss"])
        assert set(by_position.values()) == {None}


def test_one_process_has_nothing_to_balance_and_shares_no_row(root: Path) -> None:
    assert metrics(root / "every", "attention_imbalance", "loss_by_shard") == [(1.0, None)] * 7


@pytest.mark.ranks
def test_imbalance_of_a_run_is_that_of_the_rows_its_ranks_took(tmp_path: Path) -> None:
    run, folder = write_run(tmp_path), tmp_path / "run"
    assert forked(run, folder, "--training.steps", "3", processes=2).statuses == [0, 0]
    rows = rows_of(configured(run, folder))
    measured = [imbalance for (imbalance,) in metrics(folder, "attention_imbalance")]
    expected = []
    for first in range(0, 3 * 6, 6):
        mine, theirs = (rows.read(range(first + rank, first + 6, 2)).num_computed_pairs for rank in (0, 1))
        expected.append(max(mine, theirs) / ((mine + theirs) / 2))
    assert measured == pytest.approx(expected, rel=1e-15)
    assert max(measured) > 1.01, "some rows should hold more pairs than others"
    said = (folder / "logs" / "rank-0.log").read_text()
    assert f"imbalance {measured[0]:.2f}  left" in said
    assert "shards" not in said


def test_a_loss_that_is_not_a_number_is_null_wherever_it_is_told(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "1")
    with trainer_of(config) as trainer:
        with torch.no_grad():
            trainer.stage_modules[0].get_parameter("head.norm.weight").fill_(torch.nan)
        write(config, trainer, next(trainer.train_steps()))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (record["skipped"], record["loss"], record["grad_norm"]) == (True, None, None)
    assert set(record["loss_by_position"].values()) == {None}


def test_positions_are_named_by_powers_of_four() -> None:
    assert position_bucket_names() == ["0-256", "256-1K", "1K-4K", "4K-16K", "16K-64K", "64K-256K", "256K-1M", "1M-"]


# ---- ranks that share rows


@dataclass(frozen=True)
class Share:
    """What one rank has of an update: a loss for each of its micro-batches' targets, and how many pairs it attends."""

    losses: list[float]
    targets: list[int]
    attended: list[int]


def measure(shares: list[Share], degrees: dict[str, int]) -> StepMetrics:
    """An update of these ranks, each of which has its share of rows that hold 7 tokens and 11 pairs a micro-batch."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | degrees, rank=torch.distributed.get_rank())
    share = shares[mesh.rank]
    tally = MetricAccumulator(mesh, torch.device("cpu"))
    vector = tally.new_vector()
    for loss, targets, attended in zip(share.losses, share.targets, share.attended, strict=True):
        batch = replace(packed([24], targets=targets), num_tokens=7, num_pairs=11, num_computed_pairs=attended)
        tally.add(vector, torch.where(batch.labels != IGNORE_INDEX, loss, 0.0), batch)
    tally.all_reduce(vector)
    return StepResult(1, 0.1, 0, 0.0, Stopwatch(torch.device("cpu")), AsyncHostCopy(vector), tally.layout).read()


def shared(shares: list[Share], **degrees: int) -> StepMetrics:
    """What all ranks measured alike."""
    first, *others = run_ranks(measure, len(shares), shares, degrees)
    assert all(other == first for other in others)
    return first


@pytest.mark.ranks
def test_each_shard_of_a_row_has_a_loss_of_its_own() -> None:
    measured = shared([Share([1.0, 2.0], [4, 4], [100, 20]), Share([5.0, 5.0], [8, 16], [40, 40])], cp=2)
    assert measured.loss_by_shard == [1.5, 5.0]
    assert measured.loss == (4 * 1.0 + 4 * 2.0 + 24 * 5.0) / 32


@pytest.mark.ranks
def test_a_shard_is_the_same_place_of_all_rows_and_may_have_no_target() -> None:
    shares = [Share([3.0], [2], [1]), Share([9.0], [0], [1]), Share([6.0], [4], [1]), Share([9.0], [0], [1])]
    measured = shared(shares, dp_shard=2, cp=2)
    assert measured.loss_by_shard == [5.0, None]
    assert measured.loss == 5.0


@pytest.mark.ranks
def test_the_busiest_rank_is_that_of_the_whole_update() -> None:
    # Whoever is busier in one micro-batch is less so in the other; over both, 120 and 80.
    measured = shared([Share([1.0, 1.0], [1, 1], [100, 20]), Share([1.0, 1.0], [1, 1], [10, 70])], dp_shard=2)
    assert measured.attention_imbalance == 1.2
    assert measured.loss_by_shard is None


@pytest.mark.ranks
def test_a_row_that_ranks_share_is_counted_once() -> None:
    measured = shared([Share([1.0, 1.0], [1, 1], [3, 3])] * 3, cp=3)
    assert (measured.tokens, measured.attended_pairs) == (14, 22)
    assert measured.attention_imbalance == 1.0


@pytest.mark.ranks
def test_of_a_pipeline_the_last_stage_measures_for_all() -> None:
    nothing = Share([], [], [])
    measured = shared([nothing, nothing, Share([1.0], [1], [120]), Share([3.0], [3], [80])], pp=2, dp_shard=2)
    assert (measured.loss, measured.tokens) == (2.5, 14)
    assert measured.attention_imbalance == 1.2


def test_every_number_has_a_slot_of_its_own() -> None:
    slots = MetricLayout(3)
    vector = list(map(float, range(sum(slots.widths.values()))))
    assert [number for part in slots.split(vector).values() for number in part] == vector
    assert [len(slots.split(vector)[f"{name}_by_shard"]) for name in ("loss", "targets")] == [3, 3]


def test_losses_of_shards_are_told_wherever_a_loss_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "1", "--metrics.tensorboard", "true")
    slots = MetricLayout(3)
    vector = vector_of(
        slots, loss=[8.0], targets=[4.0], finite=[1.0], loss_by_shard=[6.0, 0.0, 2.0], targets_by_shard=[2.0, 0.0, 2.0]
    )
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.start()
    stopwatch.stop()
    with trainer_of(config) as trainer, caplog.at_level(logging.INFO, logger="trainer"):
        write(config, trainer, StepResult(1, 0.1, 0, 0.0, stopwatch, AsyncHostCopy(vector), slots))
    assert metrics(tmp_path / "run", "loss", "loss_by_shard") == [(2.0, [3.0, None, 1.0])]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"] if tag.startswith("loss_by")}
    assert shown == {"loss_by_shard/0": 3.0, "loss_by_shard/2": 1.0}
    assert "loss 2.0000  shards 3.00 - 1.00  grad" in caplog.text
    assert "loss 2.000 -> 2.000 (shards 3.00 - 1.00). Everything is in" in caplog.text


# ---- which updates


def test_the_first_every_nth_and_the_last_update_are_logged(root: Path) -> None:
    assert steps(root / "every") == [1, 2, 3, 4, 5, 6, 7]
    assert steps(root / "third") == [1, 3, 6, 7]


def test_what_is_logged_does_not_depend_on_how_often(root: Path) -> None:
    exact = ("step", "tokens", "loss", "grad_norm", "lr")
    kept = [values for values in metrics(root / "every", *exact) if values[0] in (1, 3, 6, 7)]
    assert metrics(root / "third", *exact) == kept


def test_rates_are_over_all_updates_since_the_line_before(root: Path) -> None:
    tokens = [tokens for tokens, _ in amounts(root)]
    spans = [tokens[0:1], tokens[1:3], tokens[3:6], tokens[6:7]]
    for (rate, seconds), span in zip(metrics(root / "third", "tokens_per_second", "step_seconds"), spans, strict=True):
        assert rate * seconds * len(span) == pytest.approx(sum(span))


def test_nobody_waits_for_an_update_that_a_cpu_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "2")
    folder = RunDir(config.output_dir)
    folder.create()
    with (
        trainer_of(config) as trainer,
        closing(MetricsProcessor(config, folder, trainer, resumed_from=None)) as written,
    ):
        for update in trainer.train_steps():
            written.record_step(update)
            assert steps(tmp_path / "run")[-1] == update.step


# ---- for people


def test_a_line_can_be_read(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="trainer"):
        run_here(configured(write_run(tmp_path), tmp_path / "run", "--training.steps", "2"))
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name in ("trainer.metrics", "trainer.metrics.loggers")
    ]
    assert any(text.startswith("update 1/2  loss 5.") for text in said)
    assert any(text.startswith("update 2/2  loss ") and text.endswith("left 0:00:00") for text in said)
    assert said[-1].startswith("done: all 2 updates; loss 5.")


def test_a_line_has_what_is_known_and_no_more() -> None:
    assert format_step(RECORD, total_steps=100, eta_seconds=3_725.4, num_token_ranks=1) == (
        "update 20/100  loss 3.2145  grad 0.820  lr 9.10e-04  4,812 tok/s  0.0123 TFLOP/s  rss 0.33 GiB  data 0.3%  "
        "left 1:02:05"
    )
    on_gpu = format_step(
        RECORD | {"mfu": 0.4123, "memory_peak_gib": 71.26}, total_steps=100, eta_seconds=0, num_token_ranks=1
    )
    assert "mfu 41.2%  gpu 71.3 GiB  rss" in on_gpu
    without = RECORD | {"loss": None, "grad_norm": None}
    assert "loss -  grad -  lr" in format_step(without, total_steps=100, eta_seconds=0, num_token_ranks=1)


def test_a_line_of_several_ranks_says_how_they_share() -> None:
    def told(**changes: Any) -> str:
        return format_step(RECORD | changes, total_steps=100, eta_seconds=0, num_token_ranks=2)

    assert told().endswith("data 0.3%  imbalance 1.26  left 0:00:00")
    assert "loss 3.2145  shards 0.04 - 3.20  grad" in told(loss_by_shard=[0.0401, None, 3.2])
    assert "shards 0.01 to 0.15  grad" in told(loss_by_shard=[None, *(number / 100 for number in range(1, 16))])
    assert "shards - - -" in told(loss_by_shard=[None] * 3)


@pytest.mark.parametrize(("seconds", "written"), [(0, "0:00:00"), (59.6, "0:01:00"), (90_061, "25:01:01")])
def test_a_duration_is_hours_minutes_and_seconds(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


# ---- TensorBoard


@pytest.fixture(scope="module")
def events(root: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(root / "every" / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tags_are_groups_and_names(events: EventAccumulator) -> None:
    known = {tag for key, tag in TENSORBOARD_TAGS.items() if not key.startswith("memory_")}
    saves = {"checkpoint/bytes", "checkpoint/seconds", "checkpoint/blocked_seconds"}
    assert set(events.Tags()["scalars"]) == known | {"position/0-256"} | saves
    assert {"train/loss", "train/grad_norm", "train/lr", "perf/mfu", "memory/rss_gib"} <= known
    assert set(TENSORBOARD_TAGS) == set(KEYS) - {"step"} | {"attention_imbalance", "goodput_pct"}
    assert (TENSORBOARD_TAGS["attention_imbalance"], TENSORBOARD_TAGS["goodput_pct"]) == (
        "perf/attention_imbalance",
        "perf/goodput_pct",
    )


def test_tensorboard_shows_what_the_file_says(root: Path, events: EventAccumulator) -> None:
    for key in ("loss", "lr", "mfu", "tokens"):
        written = metrics(root / "every", "step", key)
        shown = [(point.step, point.value) for point in events.Scalars(TENSORBOARD_TAGS[key])]
        assert [step for step, _ in shown] == [step for step, _ in written]
        for (_, ours), (_, theirs) in zip(written, shown, strict=True):
            assert math.isclose(ours, theirs, rel_tol=1e-6)


def test_the_dashboard_names_tags_that_exist(events: EventAccumulator) -> None:
    (content,) = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    layout = layout_pb2.Layout.FromString(content)
    assert [category.title for category in layout.category] == ["training", "validation", "performance"]
    shown = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    groups = ("position", "loss_by_shard", "loss_by_source", "memory", "validation", "validation_context")
    assert set(shown) - {f"{group}/.*" for group in groups} <= set(TENSORBOARD_TAGS.values())
    assert {"train/loss", "train/grad_norm", "perf/mfu", "position/.*", "loss_by_shard/.*"} <= set(shown)


def test_the_configuration_is_shown_as_text(root: Path, events: EventAccumulator) -> None:
    (content,) = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    text = content.decode().removeprefix("```toml\n").removesuffix("```")
    assert tomli.loads(text) == tomli.loads((root / "every" / "config.toml").read_text())


def test_without_tensorboard_there_is_no_folder(root: Path) -> None:
    assert not (root / "third" / "tensorboard").exists()


def test_a_resumed_run_hides_what_its_earlier_life_wrote_too_much(tmp_path: Path) -> None:
    run, folder = write_run(tmp_path), tmp_path / "run"
    options = ("--metrics.tensorboard", "true", "--schedule.kind", "constant", "--checkpoint.interval", "2")
    run_here(configured(run, folder, *options, "--training.steps", "4"))
    (folder / "checkpoints" / "step-4").rename(folder / "checkpoints" / ".tmp-step-4")
    run_here(configured(run, folder, *options, "--training.steps", "5"))
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    assert [point.step for point in accumulator.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert steps(folder) == [1, 2, 3, 4, 5]
