"""A reduced run keeps the code paths of the full run and fits eight processes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from pathlib import Path

import pytest

from parallelisms.mesh.context_plan import ContextPlan, kv_head_repeats
from parallelisms.mesh.parallel_dims import AXES
from tests.models.other_kinds import other_kinds
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import CONFIG_DIR, load
from trainer.errors import ConfigError
from trainer.selfcheck.__main__ import default_world_size
from trainer.selfcheck.shrink import (
    ReducedRun,
    cover_axis_pairs,
    fold_mesh,
    reduce_run,
    reduced_heads,
    write_sample_documents,
)

RUNS = {path.stem: load(["--config", path.stem]) for path in sorted(CONFIG_DIR.glob("*.toml"))}
STAGES = {
    f"{name} {stage.name}".strip(): stage.config
    for name, run in RUNS.items()
    for stage in run.training_stages
}
SCHEDULES = {"1F1B": None, "GPipe": None, "Interleaved1F1B": 3}
Shrink = Callable[..., ReducedRun]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    write_sample_documents(folder)
    return folder


@pytest.fixture
def small(folder: Path) -> Shrink:
    def of(world_size: int | None = None, /, **values: dict[str, object]) -> ReducedRun:
        config = Config.model_validate(values)
        return reduce_run(config, world_size or default_world_size(config), folder)

    return of


# ---- every shipped configuration


@pytest.mark.parametrize("name", STAGES)
def test_a_shipped_run_fits_and_covers_every_pair_of_mesh_dimensions(
    name: str, folder: Path
) -> None:
    config = STAGES[name]
    world_size = default_world_size(config)
    made = reduce_run(config, world_size, folder)
    assert checks.problems(made.reference.config, 1) == []
    for mesh_case in made.mesh_cases:
        assert mesh_case.launch.world_size <= 8
        assert checks.problems(mesh_case.launch.config, mesh_case.launch.world_size) == []
    axes = [axis for axis, size in config.parallelism.degrees(world_size).items() if size > 1]
    meshes = [
        mesh_case.launch.config.parallelism.degrees(mesh_case.launch.world_size)
        for mesh_case in made.mesh_cases
    ]
    for some in (*combinations(axes, 1), *combinations(axes, 2)):
        assert any(all(mesh[axis] > 1 for axis in some) for mesh in meshes), some


@pytest.mark.parametrize("name", STAGES)
def test_a_reduced_shipped_run_keeps_its_methods(name: str, folder: Path) -> None:
    config = STAGES[name]
    plan = config.context_plan()
    model = config.model.build()
    for mesh_case in reduce_run(config, default_world_size(config), folder).mesh_cases:
        kept = mesh_case.launch.config.context_plan()
        few = mesh_case.launch.config.model.build()
        if kept.cp > 1:
            assert (kept.resolved_method, kept.resolved_layout, kept.rotate_method) == (
                plan.resolved_method,
                plan.resolved_layout,
                plan.rotate_method,
            )
            assert kv_head_repeats(kept.ulysses_degree, kept.kv_heads) <= kv_head_repeats(
                plan.ulysses_degree, plan.kv_heads
            )
        if mesh_case.launch.config.parallelism.pp > 1:
            assert (
                mesh_case.launch.config.parallelism.pp_schedule == config.parallelism.pp_schedule
            )
        assert mesh_case.launch.config.memory.recompute == config.memory.recompute
        assert mesh_case.launch.config.training.compile == config.training.compile
        assert mesh_case.launch.config.data.packing == config.data.packing
        assert (few.tie_embeddings, few.rope) == (model.tie_embeddings, model.rope)
        assert (few.num_heads > few.num_kv_heads) == (model.num_heads > model.num_kv_heads)
        assert mesh_case.launch.config.training.dtype == "float64"


def test_the_description_of_thousands_of_ranks_is_short(folder: Path) -> None:
    config = STAGES["llama3_405b_128k"]
    made = reduce_run(config, default_world_size(config), folder)
    assert made.description[0] == "mesh    pp 16 -> 2, dp_shard 2, cp 16 -> 2, tp 8 -> 2"
    assert "num_layers 126 -> 14" in made.description[1]
    assert "seq_len 131,072 -> 192" in made.description[2]
    assert "pp_schedule Interleaved1F1B; cp_method allgather (16 ranks)" in made.description[3]
    assert max(len(line) for text in made.description for line in text.splitlines()) <= 110


# ---- mesh


def test_each_mesh_dimension_folds_to_two_ranks() -> None:
    degrees = dict(zip(AXES, (16, 1, 3, 8, 4), strict=True))
    plan = ContextPlan(cp=8, method="allgather", heads=8, kv_heads=8)
    assert list(fold_mesh(degrees, plan).values()) == [2, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("plan", "others", "cp"),
    [
        (ContextPlan(cp=8, method="hybrid", cp_ulysses=4, heads=8, kv_heads=8), 2, 4),
        (ContextPlan(cp=8, method="hybrid", cp_ulysses=8, heads=8, kv_heads=8), 2, 2),
        (ContextPlan(cp=8, method="ulysses", heads=8, kv_heads=8), 1, 2),
        (ContextPlan(cp=8, method="ring", heads=8, kv_heads=8), 2, 4),
        (ContextPlan(cp=8, method="ring", heads=8, kv_heads=8), 4, 2),
        (ContextPlan(cp=3, method="ring", heads=8, kv_heads=8), 1, 2),
        (ContextPlan(cp=1, method="hybrid", cp_ulysses=2, heads=8, kv_heads=8), 2, 1),
    ],
)
def test_hybrid_folds_to_two_by_two_and_a_ring_to_four_if_they_fit(
    plan: ContextPlan, others: int, cp: int
) -> None:
    degrees = dict.fromkeys(AXES, 1) | {
        "cp": plan.cp,
        "tp": min(2, others),
        "pp": max(1, others // 2),
    }
    assert fold_mesh(degrees, plan)["cp"] == cp


@pytest.mark.parametrize(("cp", "sets"), [(2, 4), (4, 7)])
def test_few_axis_sets_cover_all_pairs_of_five_axes(cp: int, sets: int) -> None:
    folded = dict.fromkeys(AXES, 2) | {"cp": cp}
    found = cover_axis_pairs(folded)
    assert len(found) == sets
    assert all(prod(folded[axis] for axis in axes) <= 8 for axes in found)
    for pair in combinations(AXES, 2):
        assert any(set(pair) <= set(axes) for axes in found)


def test_a_single_rank_is_compared_with_itself_uncompiled(small: Shrink) -> None:
    made = small(1, training={"compile": True}, memory={"recompute": "full"})
    (mesh_case,) = made.mesh_cases
    assert (mesh_case.name, mesh_case.launch.world_size) == ("one rank", 1)
    assert (
        mesh_case.launch.config.training.compile,
        mesh_case.launch.config.memory.recompute,
    ) == (True, "full")
    assert (made.reference.config.training.compile, made.reference.config.memory.recompute) == (
        False,
        "none",
    )


def test_the_choices_of_auto_on_the_full_mesh_are_kept(small: Shrink) -> None:
    ring = {"packing": "single", "documents": "file"}
    long = {"seq_len": 1 << 20}
    (made,) = small(
        parallelism={"cp": 16, "ranks_per_node": 4, "dp_shard": 1}, data=ring, training=long
    ).mesh_cases
    whole = Config.model_validate(
        {"parallelism": {"cp": 16, "ranks_per_node": 4}, "data": ring, "training": long}
    )
    assert (
        whole.context_plan().resolved_method
        == made.launch.config.parallelism.cp_method
        == "hybrid"
    )
    assert made.launch.config.parallelism.cp_outer_method == whole.context_plan().rotate_method


# ---- model and sequences


def test_reduced_heads_keep_their_divisibility() -> None:
    for tp in (1, 2, 4, 8, 16):
        for ulysses in (1, 2, 4, 8):
            for key in (1, 2, 4, 8, 32):
                for query in (key, 4 * key, 16 * key):
                    if query % (tp * ulysses) or (key % tp and tp % key):
                        continue
                    ranks = min(2, tp)
                    exchanging = min(2, ulysses)
                    few_query, few_key = reduced_heads(query, key, tp=tp, ulysses=ulysses)
                    assert few_query <= 16
                    assert few_query % few_key == few_query % (ranks * exchanging) == 0
                    assert (few_key < ranks) == (key < tp)
                    assert (few_query > few_key) == (query > key)
                    of_rank = max(1, key // tp)
                    few_of_rank = max(1, few_key // ranks)
                    assert (few_of_rank % exchanging > 0) == (of_rank % ulysses > 0)


@pytest.mark.parametrize(
    ("seq_len", "short"), [(1 << 20, 192), ((1 << 20) - 2, 191), (100, 95), (64, 64)]
)
def test_padding_of_sequences_is_kept(seq_len: int, short: int, small: Shrink) -> None:
    made = small(
        parallelism={"cp": 4, "cp_method": "ring", "dp_shard": 1}, training={"seq_len": seq_len}
    )
    (mesh_case,) = made.mesh_cases
    assert mesh_case.launch.config.training.seq_len == short
    assert (short % mesh_case.launch.config.context_plan().seq_len_divisor > 0) == (short % 2 > 0)


@pytest.mark.parametrize(
    ("rows", "micro", "few"),
    [(64, 1, 8), (16, 1, 4), (63, 1, 7), (15, 1, 3), (128, 4, 16), (120, 8, 6)],
)
def test_empty_micro_batches_are_kept(rows: int, micro: int, few: int, small: Shrink) -> None:
    training = {"global_batch_size": rows, "micro_batch_size": micro}
    made = small(parallelism={"dp_replicate": 2, "dp_shard": 8}, training=training)
    assert made.reference.config.training.global_batch_size == few
    total, each = made.mesh_cases[0].launch.config.micro_batches(4)
    assert (total < 4 * each) == (rows // micro % 16 > 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [64, 63])
def test_every_pipeline_schedule_gets_enough_micro_batches(
    schedule: str, rows: int, small: Shrink
) -> None:
    mesh = {
        "pp": 4,
        "dp_shard": 4,
        "tp": 2,
        "pp_schedule": schedule,
        "pp_stages_per_rank": SCHEDULES[schedule],
    }
    made = small(parallelism=mesh, model={"num_layers": 40}, training={"global_batch_size": rows})
    assert [mesh_case.name for mesh_case in made.mesh_cases] == ["pp 2 x dp_shard 2 x tp 2"]
    plan = made.mesh_cases[0].launch.config.pipeline_plan(8)
    assert (plan.schedule, plan.num_layers) == (schedule, sum(plan.blocks_per_stage))
    assert plan.num_micro_batches == 4


@pytest.mark.parametrize(
    ("layers", "few"),
    [
        ((3, 4, 4, 3), (1, 1)),
        ((3, 4, 4, 4), (1, 2)),
        ((0, 7, 7, 1), (0, 1)),
        ((0, 7, 7, 0), (1, 1)),
    ],
)
def test_pipeline_stages_keep_their_relative_sizes(
    layers: tuple[int, ...], few: tuple[int, ...], small: Shrink
) -> None:
    mesh = {"pp": 4, "dp_shard": 1, "pp_layers": layers}
    (mesh_case,) = small(parallelism=mesh, model={"num_layers": sum(layers)}).mesh_cases
    assert mesh_case.launch.config.parallelism.pp_layers == few


def test_each_kind_of_layer_is_kept(small: Shrink) -> None:
    """Kinds of an extension among them, and also with fewer pipeline stages than kinds."""
    with other_kinds():
        layers = [
            {"mixer": "shift", "feed_forward": "squared"},
            {"norms": "uneven"},
            {"mixer": "shift"},
        ]
        model = {"num_layers": 8, "layers": layers}
        for mesh in ({"dp_shard": 2}, {"pp": 2, "dp_shard": 1}):
            for mesh_case in small(2, model=model, parallelism=mesh).mesh_cases:
                kinds = mesh_case.launch.config.model.build().kinds
                assert [(each.mixer, each.feed_forward, each.norms) for each in kinds] == [
                    ("shift", "squared", "pre"),
                    ("attention", "gated", "uneven"),
                    ("shift", "gated", "pre"),
                ]


def test_nope_layers_and_longrope_factors_are_kept(small: Shrink) -> None:
    rope = {"kind": "longrope", "factor": 8.0, "original_length": 1024}
    rope |= {key: [1.5] * 16 for key in ("short_factors", "long_factors")}
    for seq_len, is_longer in ((1024, False), (2048, True)):
        made = (
            small(model={"nope_every": 4, "rope": rope}, training={"seq_len": seq_len})
            .mesh_cases[0]
            .launch.config
        )
        model = made.model.build()
        length = made.training.seq_len
        assert (length > model.rope.original_length) == is_longer
        assert model.layer_kinds[-1].rope == "none"


def test_the_copy_task_keeps_its_period(small: Shrink) -> None:
    values = {"corpus": "copy", "copy_period": 1024}
    (mesh_case,) = small(
        data=values, model={"vocab_size": 63}, training={"seq_len": 4096}
    ).mesh_cases
    assert (mesh_case.launch.config.data.corpus, mesh_case.launch.config.data.copy_period) == (
        "copy",
        48,
    )
    assert mesh_case.launch.config.model.vocab_size == 62


# ---- invalid runs


def test_only_corpus_and_tokenizer_may_be_missing(small: Shrink) -> None:
    missing = {
        "data": {"corpus": "no/where"},
        "tokenizer": {"kind": "tiktoken", "path": "no/tokenizer.model"},
    }
    assert small(2, **missing).mesh_cases[0].name == "dp_shard 2"
    with pytest.raises(ConfigError) as raised:
        small(
            2,
            parallelism={"tp": 3, "dp_shard": 1},
            tokenizer={"kind": "tiktoken"},
            data={"corpus": "no/where"},
        )
    assert [problem.split(",")[0] for problem in raised.value.problems] == [
        'tokenizer.kind = "tiktoken" needs tokenizer.path',
        "the mesh pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 3 needs 3 processes",
        "parallelism.tp = 3 must divide model.num_heads = 8",
        "parallelism.tp = 3 must divide model.ffn_dim = 704",
        "parallelism.tp = 3 must divide model.num_kv_heads = 4 or be a multiple of it (replicated KV heads)",
    ]


def test_sample_documents_have_very_different_lengths(folder: Path, tmp_path: Path) -> None:
    texts = {path.name: path.read_text() for path in folder.rglob("*.txt")}
    lengths = sorted(map(len, texts.values()))
    assert lengths[0] < 8
    assert lengths[-1] > 2 * 192
    assert sum(lengths) > 3 * 16 * 192
    write_sample_documents(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.rglob("*.txt")} == texts
