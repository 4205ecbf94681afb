"""Parameter counts compared with published ones, and FLOPs compared with torch's counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import tiling
from models.config import ModelConfig
from models.layers import LayerKind
from models.presets import FAMILIES
from models.rope_config import RopeConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling
from tests.models.small_models import BIASED, NORMED, SMALL, TIED, packed, small_model

PUBLISHED = {
    ("llama2", "7b"): 6_738_415_616,
    ("llama2", "13b"): 13_015_864_320,
    ("llama2", "70b"): 68_976_648_192,
    ("llama3", "8b"): 8_030_261_248,
    ("llama3", "70b"): 70_553_706_496,
    ("llama3.1", "8b"): 8_030_261_248,
    ("llama3.1", "70b"): 70_553_706_496,
    ("llama3.1", "405b"): 405_853_388_800,
    ("llama3.2", "1b"): 1_235_814_400,
    ("llama3.2", "3b"): 3_212_749_824,
    ("qwen2.5", "0.5b"): 494_032_768,
    ("qwen2.5", "1.5b"): 1_543_714_304,
    ("qwen2.5", "3b"): 3_085_938_688,
    ("qwen2.5", "7b"): 7_615_616_512,
    ("qwen2.5", "14b"): 14_770_033_664,
    ("qwen2.5", "32b"): 32_763_876_352,
    ("qwen2.5", "72b"): 72_706_203_648,
    ("qwen3", "0.6b"): 596_049_920,
    ("qwen3", "1.7b"): 1_720_574_976,
    ("qwen3", "4b"): 4_022_468_096,
    ("qwen3", "8b"): 8_190_735_360,
    ("qwen3", "14b"): 14_768_307_200,
    ("qwen3", "32b"): 32_762_123_264,
    ("mistral", "7b-v0.1"): 7_241_732_096,
    ("mistral", "7b"): 7_248_023_552,
    ("mistral", "nemo-12b"): 12_247_782_400,
    ("mistral", "small-22b"): 22_247_282_688,
    ("mistral", "small-24b"): 23_572_403_200,
    ("olmo2", "1b"): 1_484_916_736,
    ("olmo2", "7b"): 7_298_617_344,
    ("olmo2", "13b"): 13_716_198_400,
    ("olmo2", "32b"): 32_234_279_936,
    ("olmo3", "7b"): 7_298_011_136,
    ("olmo3", "32b"): 32_233_522_176,
    ("smollm3", "3b"): 3_075_098_624,
    ("gemma3", "1b"): 999_885_952,
    ("gemma3", "4b"): 3_880_263_168,  # Of gemma3, the language model's.
    ("gemma3", "12b"): 11_766_034_176,
    ("gemma3", "27b"): 27_009_346_304,
    ("qwen3_moe", "30b-a3b"): 30_532_122_624,
    ("qwen3_moe", "235b-a22b"): 235_093_634_560,
    ("mixtral", "8x7b"): 46_702_792_704,
    ("mixtral", "8x22b"): 140_630_071_296,
    ("olmoe", "1b-7b"): 6_919_161_856,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
    ("glm4_moe", "4.5"): 352_797_814_784,
    ("glm4_moe", "4.5-air"): 106_852_245_504,
}
DEBUG_FAMILIES = ["llama3", "qwen2.5", "qwen3", "gemma3", "qwen3_moe"]
PRESETS = [(family, size) for family, sizes in FAMILIES.items() for size in sizes]


@pytest.mark.parametrize(("family", "size"), PUBLISHED)
def test_parameter_count_is_the_published_one(family: str, size: str) -> None:
    assert FAMILIES[family][size].num_parameters == PUBLISHED[family, size]


@pytest.mark.parametrize(
    ("family", "size", "billions"),
    [
        ("qwen3_moe", "30b-a3b", 3.35),
        ("qwen3_moe", "235b-a22b", 22.2),
        ("mixtral", "8x7b", 12.9),
        ("mixtral", "8x22b", 39.2),
        ("olmoe", "1b-7b", 1.28),
        # Published without the input embedding: 3.61 and 5.13.
        ("gpt_oss", "20b", 3.61 + 0.58),
        ("gpt_oss", "120b", 5.13 + 0.58),
        ("glm4_moe", "4.5-air", 13.4),
    ],
)
def test_active_parameters_are_the_published_ones(family: str, size: str, billions: float) -> None:
    assert FAMILIES[family][size].num_active_parameters / 1e9 == pytest.approx(billions, rel=0.004)


@pytest.mark.parametrize(("family", "size"), PRESETS)
def test_model_has_the_parameter_count_of_its_config(family: str, size: str) -> None:
    config = FAMILIES[family][size]
    assert config.problems() == []
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters


def test_every_preset_except_debug_has_a_published_count() -> None:
    assert {*PRESETS} - {*PUBLISHED} == {(family, "debug") for family in DEBUG_FAMILIES}


@pytest.mark.parametrize("family", DEBUG_FAMILIES)
def test_debug_models_are_divisible_by_eight_ranks(family: str) -> None:
    config = FAMILIES[family]["debug"]
    assert all(
        size % 8 == 0 for size in (config.vocab_size, config.dim, config.num_heads, config.ffn_dim)
    )
    assert (config.num_layers >= 4, config.num_kv_heads) == (True, 4)
    options = config.common_options
    assert (options["qk_norm"], options["qkv_bias"]) == (
        family in ("qwen3", "gemma3", "qwen3_moe"),
        family == "qwen2.5",
    )
    assert config.tie_embeddings == (family not in ("llama3", "qwen3_moe"))


@pytest.mark.parametrize("size", ["1b", "3b"])
def test_small_llama_3_2_models_tie_embeddings_and_scale_rope_by_32(size: str) -> None:
    config = FAMILIES["llama3.2"][size]
    assert config.tie_embeddings
    assert config.rope == RopeConfig(
        kind="llama3", theta=500_000.0, factor=32.0, original_length=8192
    )


def test_qwen3_has_qk_norm_and_ties_embeddings_of_small_models() -> None:
    sizes = {size: config for size, config in FAMILIES["qwen3"].items() if size != "debug"}
    assert {size for size, config in sizes.items() if config.tie_embeddings} == {
        "0.6b",
        "1.7b",
        "4b",
    }
    for config in sizes.values():
        assert (config.norm_eps, config.rope, config.qk_norm) == (
            1e-6,
            RopeConfig(theta=1e6),
            True,
        )
        assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (151_936, 128, 8)


def test_qwen2_5_has_biases_and_ties_embeddings_of_small_models() -> None:
    sizes = {size: config for size, config in FAMILIES["qwen2.5"].items() if size != "debug"}
    assert {size for size, config in sizes.items() if config.tie_embeddings} == {
        "0.5b",
        "1.5b",
        "3b",
    }
    for size, config in sizes.items():
        assert (config.rope, config.qkv_bias, config.qk_norm) == (
            RopeConfig(theta=1e6),
            True,
            False,
        )
        assert config.vocab_size == (151_936 if config.tie_embeddings else 152_064)
        assert config.norm_eps == (1e-5 if size in ("14b", "32b", "72b") else 1e-6)
        assert config.dim == config.num_heads * config.head_dim


def test_llama_3_1_differs_from_llama_3_in_rope_only() -> None:
    stretched = RopeConfig(
        kind="llama3",
        theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_length=8192,
    )
    for size in ("8b", "70b"):
        assert FAMILIES["llama3.1"][size] == replace(FAMILIES["llama3"][size], rope=stretched)


def test_flops_equal_a_manual_count() -> None:
    config = ModelConfig(
        vocab_size=7, dim=2, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=5
    )
    # per block: q 2x8, k 2x4, v 2x4, o 8x2, three of 2x5; head 7x2
    assert config.products[LayerKind()].every == 16 + 8 + 8 + 16 + 30
    assert config.matrix_parameters == 3 * 78 + 14
    # one document of 4 tokens: 1 + 2 + 3 + 4 pairs; a pair costs 2 products of 8 multiply-adds, 3
    # times, in 3 layers
    assert config.flops(tokens=4, pairs=10) == 6 * 248 * 4 + 10 * (2 * 8 * 2) * 3 * 3
    assert replace(config, tie_embeddings=True).flops(tokens=4, pairs=10) == config.flops(
        tokens=4, pairs=10
    )


def flops_of_addition(_: object, left: torch.Size, right: torch.Size, **__: object) -> int:
    """FLOPs of addmm_, which torch's counter lacks."""
    return 2 * left[0] * left[1] * right[1]


TILE = 5 * tiling.bytes_per_token(SMALL.dim, SMALL.ffn_dim, 8)  # Five tokens, in double precision.


@pytest.mark.parametrize(
    "config", [pytest.param(TIED, marks=pytest.mark.slow), replace(BIASED, qk_norm=True)]
)
@pytest.mark.parametrize(
    ("policy", "every", "pieces"),
    [
        ("none", 1, Tiling()),
        ("full", 1, Tiling(head_groups=2, tile_bytes=TILE)),
        ("keep_attention", 2, Tiling()),
        ("keep_attention", 3, Tiling(head_groups=2, tile_bytes=TILE)),
    ],
)
def test_flops_outside_attention_equal_torchs_count(
    config: ModelConfig, policy: activation_checkpoint.RecomputePolicy, every: int, pieces: Tiling
) -> None:
    config = replace(config, num_layers=5)
    model = small_model(config)
    batch = packed([5, 7, 4], [9, 6, 1])
    activation_checkpoint.apply(
        model, RecomputeConfig(policy, blocks_per_checkpoint=every, tiling=pieces)
    )
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: flops_of_addition}
    ) as counter:
        model(batch).sum().backward()
    executed = config.hardware_flops(
        tokens=batch.num_tokens, pairs=0, recompute=policy, blocks_per_checkpoint=every
    )
    assert counter.get_total_flops() == executed
    assert (executed == config.flops(tokens=batch.num_tokens, pairs=0)) == (policy == "none")


@pytest.mark.parametrize("policy", ["none", "full", "keep_attention"])
@pytest.mark.parametrize(
    "config",
    [NORMED, FAMILIES["llama2"]["7b"], FAMILIES["llama3"]["8b"], FAMILIES["qwen3"]["32b"]],
)
def test_hardware_flops_follow_the_closed_formula(config: ModelConfig, policy: str) -> None:
    ffn, out, keys = (
        config.dim * size for size in (config.ffn_dim, config.sizes["Q"], config.sizes["K"])
    )
    every = 2 * out + 2 * keys + 3 * ffn
    qkv = out + 2 * keys
    recomputed = {"none": 0, "full": every - ffn + qkv, "keep_attention": every - ffn}[policy]
    if policy != "none":
        recomputed += (out + keys) * config.qk_norm
    layers = config.num_layers
    products = 3 * (layers * every + config.vocab_size * config.dim) + layers * recomputed
    assert config.hardware_flops(tokens=1, pairs=0, recompute=policy) == 2 * products
    if policy != "none":
        more = config.hardware_flops(
            tokens=1, pairs=0, recompute=policy, blocks_per_checkpoint=layers
        )
        assert more == 2 * (products + (layers - 1) * (out + 3 * ffn))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_a_rank_multiplies_by_its_part_of_each_matrix(tp: int) -> None:
    config = FAMILIES["qwen3"]["32b"]
    ffn = config.dim * config.ffn_dim // tp
    out = config.dim * config.sizes["Q"] // tp
    keys = config.dim * config.head_dim * max(1, config.num_kv_heads // tp)
    every = 2 * out + 2 * keys + 3 * ffn
    assert config.products_of(config.layer_kinds[0], tp) == (
        every,
        every - ffn + out + keys,
        out + 2 * keys,
    )


def test_hardware_flops_of_attention_are_3_5_forward_passes_and_4_5_with_recomputation() -> None:
    forward = 4 * SMALL.num_layers * SMALL.num_heads * SMALL.head_dim * 100
    assert SMALL.flops(tokens=0, pairs=100) == 3 * forward
    assert SMALL.hardware_flops(tokens=0, pairs=100, recompute="none") == 3.5 * forward
    assert SMALL.hardware_flops(tokens=0, pairs=100, recompute="full") == 4.5 * forward


def test_flops_of_llama_3_8b_equal_the_documented_value() -> None:
    config = FAMILIES["llama3"]["8b"]
    for length, gigaflops in ((8 << 10, 51.5), (32 << 10, 70.8), (128 << 10, 148)):
        per_token = config.flops(tokens=1, pairs=(length + 1) / 2)
        assert per_token / 1e9 == pytest.approx(gigaflops, rel=5e-3)


def test_invalid_config_is_reported_with_its_values() -> None:
    assert SMALL.problems() == []
    rope = RopeConfig(kind="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)
    broken = replace(SMALL, num_heads=5, num_kv_heads=2, head_dim=7, rope=rope)
    assert broken.problems() == [
        "model.rope.low_freq_factor = 4.0 must be below model.rope.high_freq_factor = 4.0",
        "model.head_dim = 7 must be even: rotary embedding rotates pairs",
        "model.num_heads = 5 must be a multiple of model.num_kv_heads = 2",
    ]
