"""Defaults, validation and documentation of the configuration sections."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from benchmarks import config_pages
from models.rope_scaling import rope_summary
from trainer.config import checks, help_text, summary
from trainer.config.job_config import Config
from trainer.config.model import LayerSection, ModelSection
from trainer.config.parse import CONFIG_DIR, all_sections, load, repeated_tables, section_keys
from trainer.config.summary import parallelism_summary
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.launch.launcher import format_problems, load_and_validate
from trainer.trace.answers import traced_rank_steps

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_CONFIGS = {
    "llama3_8b": 8,
    "llama3_1b": 8,
    "llama2_7b_32k": 8,
    "llama3_8b_128k": 8,
    "llama3_1b_1m_1gpu": 1,
    "llama3_8b_1m": 32,
    "llama3_8b_1m_8gpu": 8,
    "llama3_70b_128k": 64,
    "llama3_405b_128k": 4096,
    "qwen25_7b_128k": 8,
    "mistral_7b_128k": 8,
    "gemma3_4b_128k": 8,
    "qwen3_30b_a3b_1m": 8,
    "gpt_oss_20b_128k": 8,
    "prolong_8b_512k": 32,
    "llama31_8b_128k": 64,
    "ultralong_8b_1m": 32,
}
LAPTOP_CONFIGS = {"debug", "debug_1m", "debug_moe", "debug_window", "copy", "stages_debug"}


def warnings(config: Config, world_size: int) -> list[str]:
    return [*summary.warnings(config, world_size)]


def configured(**values: dict[str, object]) -> Config:
    return Config.model_validate(values)


def test_the_default_configuration_is_valid() -> None:
    assert checks.problems(Config(), 1) == []
    assert checks.problems(Config(), 8) == []


PROBLEMS: list[tuple[dict[str, dict[str, object]], int, str]] = [
    ({"model": {"family": "gpt"}}, 2, 'model.family = "gpt" is unknown; there are llama2, llama3'),
    (
        {"model": {"size": "9b"}},
        2,
        'model.size = "9b" is unknown; family "llama3" has debug, 8b, 70b',
    ),
    (
        {"model": {"num_heads": 6}},
        2,
        "model.num_heads = 6 must be a multiple of model.num_kv_heads = 4",
    ),
    ({"model": {"head_dim": 33}}, 2, "model.head_dim = 33 must be even"),
    (
        {"tokenizer": {"path": "x"}},
        2,
        'tokenizer.path = "x" is not used by tokenizer.kind = "byte"; set tokenizer.kind to "tiktoken"',
    ),
    (
        {"tokenizer": {"eos": "<e>"}},
        2,
        'tokenizer.eos is not used by tokenizer.kind = "byte", only by "tiktoken"',
    ),
    ({"tokenizer": {"kind": "tiktoken"}}, 2, 'tokenizer.kind = "tiktoken" needs tokenizer.path'),
    ({"tokenizer": {"kind": "tiktoken", "path": "no"}}, 2, 'tokenizer.path = "no" is not a file'),
    ({"tokenizer": {"kind": "tiktoken", "path": "n" * 5000}}, 2, "is not a file"),
    ({"data": {"corpus": "no/where"}}, 2, 'data.corpus = "no/where" is neither'),
    ({"data": {"corpus": "n" * 5000}}, 2, "is neither"),
    ({"parallelism": {"dp_shard": 4}}, 2, "needs 4 processes, but the world size is 2"),
    ({"parallelism": {"dp_replicate": 2}}, 3, "needs 2 processes, but the world size is 3"),
    ({"parallelism": {"tp": 3}}, 3, "parallelism.tp = 3 must divide model.num_heads = 8"),
    (
        {"parallelism": {"pp": 2}, "training": {"global_batch_size": 1}},
        2,
        'parallelism.pp_schedule = "1F1B" needs at least 2, the number of stages (parallelism.pp = 2)',
    ),
    (
        {"data": {"corpus": "no"}},
        2,
        'data.corpus = "no" is neither "python-stdlib", "copy", a dataset ("hf:NAME"), nor an',
    ),
    (
        {"training": {"global_batch_size": 6, "micro_batch_size": 4}},
        2,
        "training.global_batch_size = 6 must be a multiple of training.micro_batch_size = 4",
    ),
    (
        {"training": {"dtype": "float64"}, "memory": {"optimizer_dtype": "bfloat16"}},
        1,
        'memory.optimizer_dtype = "bfloat16" contradicts training.dtype = "float64"',
    ),
    (
        {"optimizer": {"betas": (0.9, 0.999)}, "memory": {"optimizer_dtype": "bfloat16"}},
        1,
        "optimizer.betas up to 0.99, not 0.999: bfloat16 rounds smaller changes away",
    ),
    (
        {"training": {"steps": 5}, "profiler": {"trace_step": 5, "trace_steps": 2}},
        1,
        "profiler.trace_step = 5 and profiler.trace_steps = 2 must end by training.steps = 5",
    ),
]


@pytest.mark.parametrize(("values", "world", "problem"), PROBLEMS)
def test_a_problem_names_its_keys_their_values_and_the_rule(
    values: dict[str, dict[str, object]], world: int, problem: str
) -> None:
    assert any(problem in found for found in checks.problems(configured(**values), world))


@pytest.fixture(scope="module")
def used_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint."""
    return shutil.copytree(
        ROOT / "tests" / "fixtures" / "run_5676d2a", tmp_path_factory.mktemp("used") / "run"
    )


@pytest.mark.parametrize(("values", "world", "problem"), PROBLEMS)
@pytest.mark.parametrize("kind", ["fresh", "used"])
def test_the_launcher_reports_every_problem_on_fresh_and_used_run_folders(
    used_folder: Path,
    tmp_path: Path,
    values: dict[str, dict[str, object]],
    world: int,
    problem: str,
    kind: str,
) -> None:
    folder = used_folder if kind == "used" else tmp_path / "run"
    options = [
        f"--{section}.{key}={json.dumps(value) if isinstance(value, tuple) else value}"
        for section, keys in values.items()
        for key, value in keys.items()
    ]
    _, _, problems = load_and_validate(
        [f"--job.output_dir={folder}", *options], {"NGPU": str(world)}
    )
    assert any(problem in found for found in problems)


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        (
            {"cp": 4, "cp_method": "hybrid", "cp_ulysses": 3},
            [
                "parallelism.cp_ulysses = 3 must divide cp = 4",
                'parallelism.cp_method = "hybrid" splits heads over 3 ranks, which must divide the 8 query heads of a rank',
            ],
        ),
        (
            {"cp": 3, "cp_method": "ulysses"},
            [
                'parallelism.cp_method = "ulysses" splits heads over 3 ranks, which must divide the 8 query heads of a rank'
            ],
        ),
        (
            {"cp": 4, "cp_method": "ring", "cp_layout": "balanced"},
            [
                'parallelism.cp_layout = "balanced" is not supported by cp_method = "ring"; '
                'use "doc_headtail", "headtail", "contiguous"'
            ],
        ),
        (
            {"cp": 4, "cp_method": "ulysses", "cp_layout": "headtail"},
            [
                'parallelism.cp_layout = "headtail" is not supported by cp_method = "ulysses"; use "contiguous"'
            ],
        ),
        (
            {"cp": 4, "cp_method": "ring", "cp_ulysses": 2, "cp_outer_method": "ring"},
            [
                'parallelism.cp_ulysses = 2 is only used with cp_method = "hybrid", not "ring"',
                'parallelism.cp_outer_method = "ring" is only used with cp_method = "hybrid", not "ring"',
            ],
        ),
        (
            {
                "cp": 4,
                "cp_method": "hybrid",
                "cp_ulysses": 2,
                "cp_outer_method": "alltoall",
                "cp_layout": "headtail",
            },
            [],
        ),
        ({"cp_method": "ring", "cp_layout": "headtail"}, []),
        # One rank shares nothing: the keys of a run on many may stay.
        ({"cp_ulysses": 2}, []),
    ],
)
def test_a_problem_of_context_parallelism_names_its_key(
    section: dict[str, object], problems: list[str]
) -> None:
    config = configured(parallelism=section)
    assert checks.problems(config, config.parallelism.cp) == problems


@pytest.mark.parametrize(
    ("kernel", "dtype", "supported"),
    [
        ("flash", "float32", "bfloat16 or float16"),
        ("cudnn", "float64", "bfloat16 or float16"),
        ("fa3", "float32", "bfloat16 or float16"),
        ("fa4", "float32", "bfloat16 or float16"),
        ("efficient", "float64", "bfloat16 or float16 or float32"),
    ],
)
def test_a_kernel_without_support_for_the_dtype_is_an_error(
    kernel: str, dtype: str, supported: str
) -> None:
    config = configured(training={"attention": kernel, "dtype": dtype})
    assert checks.problems(config, 1) == [
        f'training.attention = "{kernel}" supports {supported}, not training.dtype = "{dtype}"'
    ]
    assert (
        checks.problems(configured(training={"attention": kernel, "dtype": "bfloat16"}), 1) == []
    )


def test_an_invalid_model_hides_problems_of_its_heads_on_the_mesh() -> None:
    config = configured(model={"num_heads": 6}, parallelism={"cp": 4, "cp_method": "ulysses"})
    assert checks.problems(config, 4) == [
        "model.num_heads = 6 must be a multiple of model.num_kv_heads = 4"
    ]


@pytest.mark.parametrize(
    ("values", "world", "problem"),
    [
        (
            {"parallelism": {"pp": 2}, "model": {"tie_embeddings": True}},
            2,
            "tie_embeddings needs parallelism.pp = 1",
        ),
        ({"parallelism": {"pp": 4}}, 16, "give each dp rank 2 micro-batches per step"),
        (
            {"parallelism": {"pp": 2, "pp_layers": [4, 4]}},
            2,
            "pp_layers sums to 8, which must be model.num_layers = 4",
        ),
        (
            {"parallelism": {"pp": 2, "pp_stages_per_rank": 2}},
            2,
            "pp_stages_per_rank = 2 must be 1",
        ),
        (
            {"parallelism": {"tp": 2}, "model": {"vocab_size": 265}},
            2,
            "must divide model.vocab_size = 265",
        ),
        (
            {"parallelism": {"tp": 2, "loss_parallel": False}, "model": {"vocab_size": 265}},
            2,
            # The embedding's rows are shared all the same.
            "must divide model.vocab_size = 265",
        ),
        (
            {"parallelism": {"async_tp": True}, "training": {"compile": False}},
            1,
            "needs parallelism.tp above 1 and training.compile = true",
        ),
        (
            {
                "parallelism": {"async_tp": True, "tp": 2},
                "training": {"compile": True},
                "distributed": {"through_host": True},
            },
            2,
            "parallelism.async_tp = true needs distributed.through_host = false",
        ),
    ],
)
def test_an_unsupported_mesh_is_an_error(
    values: dict[str, dict[str, object]], world: int, problem: str
) -> None:
    (found,) = checks.problems(configured(**values), world)
    assert problem in found


def test_supported_neighbours_of_unsupported_meshes_are_valid() -> None:
    whole: dict[str, object] = {"vocab_size": 265, "tie_embeddings": True}
    assert (
        checks.problems(configured(model=whole, parallelism={"tp": 2, "loss_parallel": False}), 2)
        == []
    )
    assert (
        checks.problems(configured(parallelism={"pp": 4}, training={"global_batch_size": 16}), 16)
        == []
    )
    (uneven,) = checks.problems(
        configured(
            parallelism={"pp": 2}, training={"global_batch_size": 2, "micro_batch_size": 4}
        ),
        2,
    )
    assert "must be a multiple of training.micro_batch_size" in uneven


def test_sequences_are_padded_only_for_ranks_that_shard_tokens() -> None:
    odd: dict[str, object] = {"seq_len": 63}
    assert (
        "63 is not a multiple of 2 (tp = 2)"
        in warnings(configured(parallelism={"tp": 2}, training=odd), 2)[0]
    )
    assert (
        warnings(configured(parallelism={"tp": 2, "sequence_parallel": False}, training=odd), 2)
        == []
    )
    assert (
        "63 is not a multiple of 8 (cp = 2, tp = 4)"
        in warnings(
            configured(parallelism={"cp": 2, "tp": 4, "cp_method": "ring"}, training=odd), 8
        )[0]
    )


def test_pipeline_keys_without_a_pipeline_give_a_warning() -> None:
    assert warnings(configured(parallelism={"pp_layers": [1, 3], "pp_stages_per_rank": 2}), 1) == [
        "parallelism.pp_layers is not used with parallelism.pp = 1",
        "parallelism.pp_stages_per_rank is not used with parallelism.pp = 1",
    ]


def test_pipeline_stages_balance_the_cost_of_the_output_projection() -> None:
    wide = configured(model={"vocab_size": 32768, "num_layers": 8}, parallelism={"pp": 2})
    assert wide.pipeline_plan(2).embed_cost == wide.pipeline_plan(2).head_cost > 5
    heavy = configured(
        model={"vocab_size": 32768, "num_layers": 8}, parallelism={"pp": 4}
    ).pipeline_plan(4)
    assert heavy.blocks_per_stage[0] == heavy.blocks_per_stage[-1] == 0


def test_heads_that_tp_does_not_divide_are_reported_once() -> None:
    heads: dict[str, object] = {"num_heads": 18, "num_kv_heads": 9}
    config = configured(model=heads, parallelism={"cp": 2, "tp": 2, "cp_method": "ulysses"})
    assert checks.problems(config, 4) == [
        "parallelism.tp = 2 must divide model.num_kv_heads = 9 or be a multiple of it (replicated KV heads)",
    ]


@pytest.mark.parametrize(
    ("values", "cp", "summary"),
    [
        (
            {},
            16,
            "hybrid (8 x 2, allgather across), layout balanced "
            "(auto: cp 16 spans nodes of 8 ranks; 8 of them divide the heads)",
        ),
        (
            {"parallelism": {"ranks_per_node": 2}, "data": {"packing": "single"}},
            8,
            "hybrid (2 x 4, ring across), layout doc_headtail "
            "(auto: cp 8 spans nodes of 2 ranks; 2 of them divide the heads)",
        ),
        (
            {},
            4,
            "ulysses (4 ranks), layout contiguous (auto: 8 heads are divisible by 4 ranks; packed documents)",
        ),
        (
            {"data": {"mask": "none"}},
            2,
            "ulysses (2 ranks), layout contiguous "
            "(auto: 8 heads are divisible by 2 ranks; one document per sequence, fewer bytes than KV)",
        ),
        (
            {},
            3,
            "allgather (3 ranks), layout balanced "
            "(auto: 8 heads are not divisible by 3 ranks; packed documents balance best with all-gather)",
        ),
        (
            {"data": {"corpus": "copy"}},
            3,
            "allgather (3 ranks), layout balanced (auto: 8 heads are not divisible by 3 ranks; "
            "one document per sequence; all-gather needs 0.0 GiB per layer)",
        ),
        (
            {
                "model": {"num_kv_heads": 1},
                "data": {"packing": "single"},
                "training": {"seq_len": 3 * 2**19},
            },
            2,
            "allgather (2 ranks), layout balanced (auto: one document per sequence; all-gather needs 1.1 GiB per layer)",
        ),
        (
            {"data": {"packing": "single"}, "training": {"seq_len": 2**20, "micro_batch_size": 2}},
            3,
            "ring (3 ranks), layout doc_headtail (auto: 8 heads are not divisible by 3 ranks; "
            "one document per sequence; all-gather needs 6.0 GiB per layer, more than 4 GiB)",
        ),
    ],
)
def test_auto_chooses_the_cp_method_by_ranks_heads_documents_and_memory(
    values: dict[str, dict[str, object]], cp: int, summary: str
) -> None:
    section = {**values.get("parallelism", {}), "cp": cp}
    config = configured(**{**values, "parallelism": section})
    assert checks.problems(config, cp) == []
    assert config.context_plan().summary() == summary


def test_a_context_plan_has_the_heads_and_node_size_of_one_tp_rank() -> None:
    plan = configured(parallelism={"tp": 8, "cp": 2, "ranks_per_node": 4}).context_plan()
    assert (plan.heads, plan.kv_heads, plan.ranks_per_node) == (1, 1, 1)
    plan = configured(
        parallelism={"tp": 2, "cp": 2}, training={"micro_batch_size": 2}
    ).context_plan()
    assert (plan.heads, plan.kv_heads, plan.ranks_per_node) == (4, 2, 4)
    assert (plan.head_dim, plan.seq_len) == (32, 2 * 2048)


def test_sequences_that_cp_does_not_divide_give_a_warning() -> None:
    def remarks(seq_len: int, **section: object) -> list[str]:
        return warnings(configured(training={"seq_len": seq_len}, parallelism=section), 1)

    assert remarks(512, cp=3) == [
        "training.seq_len = 512 is not a multiple of 6 (cp = 3): every sequence is padded by 4 tokens"
    ]
    assert remarks(511, cp=2) == [
        "training.seq_len = 511 is not a multiple of 2 (cp = 2): every sequence is padded by 1 token"
    ]
    assert remarks(510, cp=2) == []
    assert remarks(511, cp_method="ring") == [], "one rank holds its rows as they are"


def test_copy_period_is_below_the_sequence_length() -> None:
    def problems(seq_len: int = 64, **data: object) -> list[str]:
        return checks.problems(configured(data=data, training={"seq_len": seq_len}), 1)

    assert problems(corpus="copy", copy_period=63) == []
    assert problems(corpus="copy", copy_period=64) == [
        "data.copy_period = 64 must be below training.seq_len = 64"
    ]
    assert problems(copy_period=64) == [
        'data.copy_period = 64 is only used with data.corpus = "copy", not "python-stdlib"'
    ]


def test_a_corpus_at_a_url_is_read_by_no_workers() -> None:
    url = "s3://bucket/corpus"
    places: list[dict[str, object]] = [{"corpus": url}, {"sources": {"far": {"path": url}}}]
    for data in places:
        (problem,) = checks.data_section_problems(configured(data=data | {"workers": 2}).data)
        assert "data.workers = 2 must be 0 with a corpus at a URL" in problem
        assert [*checks.data_section_problems(configured(data=data).data)] == []


def test_the_copy_corpus_needs_no_tokenizer() -> None:
    small: dict[str, object] = {"vocab_size": 16}
    assert checks.problems(configured(model=small), 1) == [
        'model.vocab_size = 16 must be at least 264, the vocabulary size of tokenizer.kind = "byte"'
    ]
    assert checks.problems(configured(model=small, data={"corpus": "copy"}), 1) == []
    assert (
        checks.problems(
            load(["--config", "llama3_8b", "--data.corpus", "copy"]), CLUSTER_CONFIGS["llama3_8b"]
        )
        == []
    )


def test_a_folder_named_copy_is_reached_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert checks.problems(configured(data={"corpus": "./copy"}), 1)[0].startswith(
        'data.corpus = "./copy" is neither'
    )
    (tmp_path / "copy").mkdir()
    assert checks.problems(configured(data={"corpus": "./copy"}), 1) == []


NEEDS = 'needs memory.recompute = "full" or "keep_attention": with "none" autograd saves all activations'
NOT_FULL = 'needs memory.recompute = "keep_attention", not "full"'


@pytest.mark.parametrize(
    ("memory", "problems"),
    [
        ({"recompute": "none"}, []),
        ({"recompute": "none", "offload": "inputs"}, [f'memory.offload = "inputs" {NEEDS}']),
        (
            {"recompute": "none", "blocks_per_checkpoint": 2},
            [f"memory.blocks_per_checkpoint = 2 {NEEDS}"],
        ),
        ({"recompute": "none", "head_groups": 2}, [f"memory.head_groups = 2 {NEEDS}"]),
        ({"recompute": "none", "mlp_tile_mib": 64}, [f"memory.mlp_tile_mib = 64 {NEEDS}"]),
        (
            {
                "recompute": "none",
                "head_groups": 2,
                "mlp_tile_mib": 64,
                "blocks_per_checkpoint": 3,
            },
            [
                f"memory.blocks_per_checkpoint = 3 {NEEDS}",
                f"memory.head_groups = 2 {NEEDS}",
                f"memory.mlp_tile_mib = 64 {NEEDS}",
            ],
        ),
        ({"recompute": "full", "offload": "inputs", "head_groups": 2, "mlp_tile_mib": 64}, []),
        (
            {"recompute": "full", "offload": "inputs_and_attention"},
            [f'memory.offload = "inputs_and_attention" {NOT_FULL}'],
        ),
        (
            {"recompute": "full", "blocks_per_checkpoint": 2},
            [f"memory.blocks_per_checkpoint = 2 {NOT_FULL}"],
        ),
        (
            {"recompute": "full", "blocks_per_checkpoint": 2, "offload": "inputs_and_attention"},
            [
                f'memory.offload = "inputs_and_attention" {NOT_FULL}',
                f"memory.blocks_per_checkpoint = 2 {NOT_FULL}",
            ],
        ),
        (
            {"host_budget_gib": 4.0},
            ['memory.host_budget_gib = 4.0 is not used with memory.offload = "none"'],
        ),
        ({"host_budget_gib": 4.0, "offload": "inputs"}, []),
        (
            {
                "offload": "inputs_and_attention",
                "blocks_per_checkpoint": 4,
                "head_groups": 4,
                "mlp_tile_mib": 1,
            },
            [],
        ),
    ],
)
def test_memory_options_need_a_matching_recompute_policy(
    memory: dict[str, object], problems: list[str]
) -> None:
    for compiled in (False, True):
        assert (
            checks.problems(configured(memory=memory, training={"compile": compiled}), 1)
            == problems
        )


def test_default_memory_options_save_attention_outputs() -> None:
    memory = Config().memory
    assert (memory.recompute, memory.offload, memory.blocks_per_checkpoint) == (
        "keep_attention",
        "none",
        1,
    )
    assert (memory.head_groups, memory.mlp_tile_mib) == (1, None)


@pytest.mark.parametrize(
    ("groups", "parallelism", "problem"),
    [
        (4, {}, None),
        (3, {}, "memory.head_groups = 3 must divide the 4 KV heads of a rank"),
        (8, {}, "memory.head_groups = 8 must divide the 4 KV heads of a rank"),
        (2, {"tp": 2}, None),
        (
            4,
            {"tp": 2},
            "memory.head_groups = 4 must divide the 2 KV heads of a rank (model.num_kv_heads / ",
        ),
        (2, {"tp": 4}, "memory.head_groups = 2 must divide the 1 KV heads of a rank"),
        (4, {"cp": 2, "cp_method": "ring"}, None),
        (4, {"cp": 2, "cp_method": "ulysses"}, None),
        (2, {"cp": 4, "cp_method": "ulysses"}, None),
        (
            4,
            {"cp": 4, "cp_method": "ulysses"},
            "memory.head_groups = 4 leaves 2 query heads per group, which 4 ranks cannot divide "
            '(parallelism.cp_method = "ulysses")',
        ),
        (
            4,
            {"cp": 8, "cp_method": "hybrid", "cp_ulysses": 4},
            "memory.head_groups = 4 leaves 2 query heads per group, which 4 ranks cannot divide",
        ),
        (4, {"cp": 4, "cp_method": "hybrid", "cp_ulysses": 2}, None),
    ],
)
def test_head_groups_divide_the_kv_heads_of_a_rank(
    groups: int, parallelism: dict[str, object], problem: str | None
) -> None:
    world = int(str(parallelism.get("cp", 1))) * int(str(parallelism.get("tp", 1)))
    config = configured(memory={"head_groups": groups}, parallelism=parallelism)
    found = checks.problems(config, world)
    assert found == [] if problem is None else len(found) == 1
    assert problem is None or found[0].startswith(problem)


def test_a_problem_names_the_flags_that_set_its_keys() -> None:
    argv = ["--model.size", "9000b", "--training.steps=3"]
    _, cluster, problems = load_and_validate(argv, {"NGPU": "1"})
    text = format_problems(problems, argv, cluster)
    assert text.startswith('error: model.size = "9000b" is unknown; ')
    assert text.splitlines()[0].endswith(" (set by --model.size)")


@pytest.mark.parametrize("key", ["job.output_dir", "data.cache_dir"])
def test_a_url_is_not_a_folder(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--{key} s3://bucket/run must be a local or mounted path, not a URL"
    ):
        load([f"--{key}", "s3://bucket/run"])


def test_all_problems_are_reported_together() -> None:
    config = configured(
        model={"size": "9b"},
        data={"corpus": "no"},
        parallelism={"dp_shard": 3},
        training={"micro_batch_size": 3},
    )
    assert len(checks.problems(config, 2)) == 4
    wrong = {
        "tp": 2,
        "cp": 4,
        "cp_method": "ring",
        "cp_layout": "balanced",
        "cp_ulysses": 2,
        "cp_outer_method": "ring",
    }
    assert len(checks.problems(configured(data={"copy_period": 1}, parallelism=wrong), 2)) == 5


def test_empty_micro_batches_give_a_warning() -> None:
    config = configured(training={"global_batch_size": 4, "micro_batch_size": 2})
    assert warnings(config, 2) == []
    assert "1 of 3 are empty in every step" in warnings(config, 3)[0]


def test_a_replica_check_without_copies_gives_a_warning() -> None:
    checked: dict[str, object] = {"replica_check_interval": 10}
    without: list[dict[str, object]] = [{"dp_shard": 4}, {"cp": 4}, {"pp": 2, "dp_shard": 2}]
    with_copies: list[dict[str, object]] = [{"dp_replicate": 2}, {"tp": 2, "dp_shard": 2}]
    for parallelism in without:
        (said,) = warnings(configured(health=checked, parallelism=parallelism), 4)
        assert said.startswith(
            "health.replica_check_interval compares nothing: dp_replicate = 1 and tp = 1"
        )
        assert warnings(configured(parallelism=parallelism), 4) == []
    for parallelism in with_copies:
        assert warnings(configured(health=checked, parallelism=parallelism), 4) == []


def test_a_warmup_as_long_as_the_run_gives_a_warning() -> None:
    assert warnings(configured(training={"steps": 6}, schedule={"warmup_steps": 5}), 1) == []
    assert (
        "learning rate never reaches its peak"
        in warnings(configured(training={"steps": 5}, schedule={"warmup_steps": 5}), 1)[0]
    )


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"layers": ({},), "window": 5},
            "model.window is not used beside model.layers: set it there",
        ),
        (
            {"layers": ({},), "nope_every": 2},
            "model.nope_every is not used beside model.layers: set it there",
        ),
        ({"model_type": "foo"}, 'model.model_type = "foo" is unknown; there are llama, qwen2'),
    ],
)
def test_model_keys_that_would_do_nothing_are_refused(model: dict[str, Any], problem: str) -> None:
    (found,) = ModelSection(**model).problems()
    assert found.startswith(problem)


@pytest.mark.parametrize("layer", [{"repeat": 10**9}, {"window": 2**63}, {"window": 0}])
def test_layers_are_bounded_before_they_are_counted(layer: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        LayerSection(**layer)


def test_a_pattern_longer_than_the_model_is_said() -> None:
    config = configured(model={"layers": [{"repeat": 7, "window": 5}, {}], "num_layers": 4})
    assert (
        "model.layers states 8 layers, of which model.num_layers = 4 uses the first 4"
        in warnings(config, 1)
    )
    assert len(config.model.build().layers) == 4


def test_model_keys_default_to_the_preset() -> None:
    preset = configured(model={"family": "llama3.1", "size": "8b"}).model.build()
    model = configured(
        model={"family": "llama3.1", "size": "8b", "num_layers": 2, "rope": {"factor": 2.0}}
    ).model.build()
    assert (model.num_layers, model.rope.factor) == (2, 2.0)
    assert (model.dim, model.rope.theta, model.rope.kind) == (
        preset.dim,
        preset.rope.theta,
        preset.rope.kind,
    )


def test_all_rope_problems_are_reported_together() -> None:
    options = "--model.rope.kind longrope --model.rope.long_factors 2,3 --model.rope.beta_fast 8 --model.rope.theta 1e6"
    assert checks.problems(load([*options.split(), "--data.corpus", "copy"]), 1) == [
        'model.rope.beta_fast is only used with model.rope.kind = "yarn", not "longrope"',
        'model.rope.factor = 1.0 must be above 1 for model.rope.kind = "longrope"',
        "model.rope.short_factors has 0 values, and must have 16: half of model.head_dim = 32",
        "model.rope.long_factors has 2 values, and must have 16: half of model.head_dim = 32",
    ]


def test_the_parallelism_summary_describes_the_rotary_embedding() -> None:
    config = load(
        [
            "--model.rope.kind",
            "yarn",
            "--model.rope.factor",
            "8",
            "--model.nope_every",
            "4",
            "--training.seq_len",
            "64",
        ]
    )
    assert parallelism_summary(config, 1) == [rope_summary(config.model.build(), 64)]
    assert parallelism_summary(config, 1)[0].startswith("rope yarn: theta 500,000, ")
    assert parallelism_summary(config, 1)[0].endswith(
        "attention factor 1.2079; no rope in 1 of 4 layers"
    )
    preset = load(["--model.family", "qwen3"]).model.build()
    assert (preset.qk_norm, preset.nope_every, preset.rope.kind) == (True, None, "default")
    assert not load(["--model.family", "qwen3", "--model.qk_norm", "false"]).model.build().qk_norm
    assert load(["--model.family", "qwen2.5"]).model.build().qkv_bias
    assert load(["--model.qkv_bias", "true"]).model.build().qkv_bias


def test_debug_runs_at_any_number_of_processes_up_to_eight() -> None:
    config = load([])
    assert all(checks.problems(config, world) == [] for world in range(1, 9))


def test_debug_supports_any_cp_degree_up_to_eight() -> None:
    chosen = {}
    for world in range(1, 9):
        config = load(["--parallelism.cp", str(world)])
        assert checks.problems(config, world) == []
        chosen[world] = config.context_plan().resolved_method
    assert [world for world, method in chosen.items() if method == "ulysses"] == [1, 2, 4, 8]
    assert [world for world, method in chosen.items() if method == "allgather"] == [3, 5, 7]
    assert chosen[6] == "hybrid"


def test_debug_accepts_the_smallest_parity_run() -> None:
    options = "--training.seq_len 512 --training.global_batch_size 4 --training.micro_batch_size 1 --training.dtype float64"
    assert checks.problems(load(options.split()), 4) == []


def test_debug_runs_for_any_number_of_steps() -> None:
    assert checks.problems(load(["--training.steps", "1"]), 2) == []


def test_debug_states_no_degree_and_divides_by_eight() -> None:
    config = load(["--config", "debug"])
    model = config.model.build()
    assert "[parallelism]" not in (CONFIG_DIR / "debug.toml").read_text()
    assert (model.num_heads, model.num_kv_heads, model.vocab_size % 8) == (8, 4, 0)
    assert model.num_layers >= 4
    assert not config.training.compile


def test_every_shipped_configuration_is_listed_here() -> None:
    assert {path.stem for path in CONFIG_DIR.glob("*.toml")} == {*LAPTOP_CONFIGS, *CLUSTER_CONFIGS}


def test_debug_1m_needs_two_processes_and_no_file() -> None:
    config = load(["--config", "debug_1m"])
    assert checks.problems(config, 2) == []
    assert warnings(config, 2) == []
    assert (config.training.seq_len, config.parallelism.cp) == (1 << 20, 2)
    assert (config.data.documents, config.data.max_document, config.data.mask) == (
        "file",
        16_384,
        "document",
    )


@pytest.mark.slow
def test_debug_1m_fits_a_laptop() -> None:
    (step,) = traced_rank_steps(load(["--config", "debug_1m"]), 2, on_gpu=False)
    assert step.memory.device_bytes < 2 * GIB


def test_copy_repeats_tokens_of_another_rank() -> None:
    config = load(["--config", "copy"])
    assert checks.problems(config, 4) == []
    assert warnings(config, 4) == []
    period = config.data.copy_period
    chunk = config.training.seq_len // (2 * config.parallelism.cp)
    assert period is not None
    assert (
        period % chunk,
        config.context_plan().resolved_layout,
        config.context_plan().rotate_method,
    ) == (
        0,
        "doc_headtail",
        "ring",
    )
    holders = [0, 1, 2, 3, 3, 2, 1, 0]
    back = period // chunk
    assert all(
        holders[at] != holders[before] for at in range(8) for before in range(at - back, -1, -back)
    )


@pytest.mark.parametrize(("name", "world"), CLUSTER_CONFIGS.items())
def test_a_cluster_configuration_states_every_degree_and_needs_only_files(
    name: str, world: int
) -> None:
    config = load(["--config", name])
    assert all(stage.config.parallelism.dp_shard is not None for stage in config.training_stages)
    corpora = [f"data.sources.{source}.path" for source in config.data.sources] or ["data.corpus"]
    assert [problem.split(" = ")[0] for problem in checks.problems(config, world)] == [
        "tokenizer.path",
        *corpora,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CLUSTER_CONFIGS)[-3:])
def test_every_recipe_stage_fits_its_devices(name: str) -> None:
    for stage in load(["--config", name]).training_stages:
        config = with_attention_choice(stage.config, load_device("h100-80gb"))
        for step in traced_rank_steps(config, CLUSTER_CONFIGS[name]):
            assert step.memory.device_bytes < 80 * GIB, str(stage)


def test_recipes_match_the_publications() -> None:
    prolong, llama31, ultralong = (load(["--config", name]) for name in list(CLUSTER_CONFIGS)[-3:])
    assert [stage.config.training.seq_len for stage in prolong.training_stages] == [
        65_536,
        524_288,
    ]
    assert [stage.config.model.build().rope.theta for stage in prolong.training_stages] == [
        8e6,
        1.28e8,
    ]
    assert [
        round(sum(item.weight for item in stage.config.data.mix), 9)
        for stage in prolong.training_stages
    ] == [1, 1]
    lengths = [stage.config.training.seq_len for stage in llama31.training_stages]
    assert (len(lengths), lengths[0], lengths[-1]) == (6, 8_192, 131_072)
    assert sum(stage.tokens or 0 for stage in llama31.stage) == 800e9
    assert {stage.config.model.build().rope.kind for stage in llama31.training_stages} == {
        "llama3"
    }
    (only,) = ultralong.training_stages
    rope = only.config.model.build().rope
    assert (rope.kind, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 128, 4, 1)
    assert (only.config.data.mask, only.config.training.seq_len) == ("none", 1 << 20)


def test_validation_imports_no_torch() -> None:
    code = "import sys, trainer.config.help_text; from trainer.config import checks, parse; checks.problems(parse.load([]), 2); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pydantic" in done.stdout.split()
    assert "torch" not in done.stdout.split()


def test_every_key_has_a_description() -> None:
    assert not [
        f"{section}.{key}"
        for section, owner in all_sections().items()
        for key in section_keys(section)
        if not owner.fields_by_key()[key].description
    ]


def test_a_key_may_be_absent_only_if_that_is_its_default() -> None:
    """Else the resolved file, which leaves absent keys out, would not say what it means."""
    for section, owner in all_sections().items():
        for key in section_keys(section):
            if type(None) in get_args(owner.fields_by_key()[key].annotation):
                assert owner.fields_by_key()[key].default is None, f"{section}.{key}"


def test_help_has_every_key_and_fits_its_width() -> None:
    text = help_text.render_keys()
    assert all(
        f"--{section}.{key}  " in text
        for section in all_sections()
        for key in section_keys(section)
    )
    assert all(f"\n[{section}]  " in text for section in all_sections())
    assert all(
        f"\n{heading}  " in text
        for heading in ("[data.sources.NAME]", "[[data.mix]]", "[[stage]]")
    )
    assert all(
        f"\n  {key}  " in text
        for owner in repeated_tables().values()
        for key in owner.fields_by_key()
    )
    assert max(map(len, text.splitlines())) <= help_text.WIDTH


def test_docs_format_types_and_ranges() -> None:
    owners = [all_sections()[section] for section in ("training", "optimizer", "job")]
    kinds = {
        key.name: key.type_name
        for owner in owners
        for key in help_text.document_keys(owner, [*owner.fields_by_key()])
    }
    assert kinds["seq_len"] == 'integer >= 2 | "128K"'
    assert kinds["dtype"] == '"bfloat16" | "float32" | "float64"'
    assert kinds["betas"] == "[number >= 0 < 1, number >= 0 < 1]"
    assert kinds["compile"] == 'true or false | "auto"'
    assert kinds["output_dir"] == "path"


def test_the_json_schema_forbids_unknown_keys_and_null() -> None:
    schema = json.loads(config_pages.render_json_schema())
    assert all(
        part["additionalProperties"] is False for part in [schema, *schema["$defs"].values()]
    )
    assert schema["$defs"]["ParallelismSection"]["properties"]["dp_shard"]["type"] == "integer"
    assert "null" not in config_pages.render_json_schema()


def test_the_generated_pages_are_up_to_date() -> None:
    assert config_pages.stale_pages() == {}, "run python -m benchmarks.config_pages"


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_file_names_the_schema_for_editors(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("#:schema ")
    assert (path.parent / first.removeprefix("#:schema ")).is_file()


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_file_passes_the_same_checks_once_resolved(path: Path, tmp_path: Path) -> None:
    config = load(["--config", path.stem])
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    again = load(["--config", str(tmp_path / "resolved.toml")])
    assert checks.stage_problems(again) == []
    assert checks.problems(again, 64) == checks.problems(config, 64)
    assert again.training_stages == config.training_stages


# ---- validation


def validated(data: Mapping[str, object] | None = None, **one: object) -> list[str]:
    return checks.problems(
        Recipe.model_validate({"data": dict(data or {}), "validation": {"sets": {"one": one}}}), 1
    )


def test_validation_sets_are_validated() -> None:
    assert validated(seq_len=4096) == validated(seq_len=[64, 4096], tail=64) == []
    said = 'validation.sets.one: source = "web" is not one of corpus, books'
    books = {"sources": {"books": {"path": "python-stdlib"}}, "mix": [{"source": "books"}]}
    assert validated(books, seq_len=64, source="web") == [said]
    assert validated(seq_len=[64, 32]) == ["validation.sets.one: seq_len = [64, 32] must ascend"]
    assert validated(seq_len=[64, 64]) == ["validation.sets.one: seq_len = [64, 64] must ascend"]
    too_long = "validation.sets.one: tail = 65 must be at most 64, the shortest of seq_len"
    assert validated(seq_len=[64, 128], tail=65) == [too_long]
    assert validated(seq_len=64, tail=8) == [
        "validation.sets.one: tail = 8 is only used with several lengths in seq_len"
    ]
    assert validated({"corpus": "copy"}, seq_len=64) == [
        'validation.sets.one: source = "corpus" is the synthetic "copy" corpus, which has no documents to hold out'
    ]


def test_the_tail_is_the_shortest_length_or_2048() -> None:
    def targets(*seq_len: int) -> int:
        made = configured(validation={"sets": {"one": {"seq_len": seq_len}}})
        return made.validation.sets["one"].target_tokens

    assert (targets(64, 128), targets(2048, 4096), targets(4096, 65_536)) == (64, 2048, 2048)


def test_a_source_can_be_for_validation_only() -> None:
    only = {"sources": {"books": {"path": "python-stdlib"}}}
    assert validated(only, seq_len=64, source="books") == []
    assert validated(only, seq_len=64) == [
        "data.sources.books: no mix and no validation set uses this source"
    ]
    gone = {"sources": {"books": {"path": "/nowhere"}}}
    assert validated(gone, seq_len=64, source="books")[0].startswith(
        'data.sources.books.path = "/nowhere" is neither'
    )


def test_a_training_corpus_cannot_be_held_out_with_other_document_settings() -> None:
    sources = {
        "train": {"path": "docs"},
        "judge": {"path": "docs"},
        "whole": {"path": "docs", "documents": "folder"},
    }
    two = {"mix": [{"source": "train"}]}
    alike = two | {"sources": {name: sources[name] for name in ("train", "judge")}}
    other = two | {"sources": {name: sources[name] for name in ("train", "whole")}}
    assert validated(alike, seq_len=64, source="judge") == []
    (said,) = validated(other, seq_len=64, source="whole")
    assert said.startswith(
        'validation.sets.one: source = "whole" is the corpus of "train", which training splits'
    )
    # A stage without a mix trains on the corpus of [data].
    config = Recipe.model_validate(
        {
            "data": {
                "corpus": "docs",
                "sources": {name: sources[name] for name in ("train", "whole")},
            },
            "validation": {"sets": {"one": {"seq_len": 64, "source": "whole"}}},
            "stage": [
                {"name": "a", "seq_len": 64, "steps": 1, "mix": [{"source": "train"}]},
                {"name": "b", "seq_len": 64, "steps": 1},
            ],
        }
    )
    assert [problem.partition(", ")[0] for problem in checks.stage_problems(config)] == [
        'validation.sets.one: source = "whole" is the corpus of "corpus"',
        'validation.sets.one: source = "whole" is the corpus of "train"',
    ]


def test_validating_on_training_documents_gives_a_warning() -> None:
    one: dict[str, object] = {"sets": {"one": {"seq_len": 64}}}
    said = "validation.sets.one validates on training documents: data.holdout = 0"
    assert said in warnings(configured(validation=one), 1)
    assert said not in warnings(configured(validation=one, data={"holdout": 0.1}), 1)


def test_holdout_needs_unsplit_documents_and_text() -> None:
    said = checks.problems(configured(data={"holdout": 0.1, "max_document": 64}), 1)
    assert said[0].startswith(
        "data.holdout = 0.1 with data.max_document = 64 would split documents"
    )
    assert checks.problems(configured(data={"holdout": 0.1, "corpus": "copy"}), 1) == [
        'data.holdout = 0.1 needs documents; data.corpus = "copy" has none'
    ]
