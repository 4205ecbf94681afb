"""Rope frequencies: compared with transformers (bitwise in float32) and with published values;
validation rules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import rope, rope_scaling
from models.presets import FAMILIES
from models.rope_config import RopeConfig
from tests.models.rope_configs import KINDS, LONG
from tests.models.small_models import SMALL

YARN = KINDS["yarn"]
LONGROPE = KINDS["longrope"]
CONFIGS = {
    **KINDS,
    "llama3.2": FAMILIES["llama3.2"]["1b"].rope,
    "llama3, other bounds": replace(KINDS["llama3"], low_freq_factor=2.0, high_freq_factor=16.0),
    "yarn, bounds between indices": replace(YARN, truncate=False, beta_fast=4.0),
    "yarn, bounds that meet": replace(YARN, beta_fast=1e5, beta_slow=1350.0),
    "yarn, as DeepSeek": replace(
        YARN, theta=10_000.0, factor=40.0, original_length=4096, attention_factor=1.369
    ),
    "longrope, as told": replace(LONGROPE, attention_factor=1.19),
}
ROWS = [("short", 4096), ("long", 4097)]


def theirs(config: RopeConfig, *, seq_len: int) -> tuple[Tensor, Tensor]:
    """Transformers' frequencies, and cosine and sine of the first and last positions of a
    sequence.
    """
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    names = {"short_factors": "short_factor", "long_factors": "long_factor"}
    names["original_length"] = "original_max_position_embeddings"
    given: dict[str, Any] = {"rope_type": config.kind, "rope_theta": config.theta}
    for key in (
        "factor",
        *names,
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    ):
        given[names.get(key, key)] = getattr(config, key)
    for key in ("short_factor", "long_factor"):
        given[key] = list(given[key])
    if config.attention_factor is not None:
        given["attention_factor"] = config.attention_factor
    if config.kind == "default":
        given = {"rope_type": "default", "rope_theta": config.theta}
    module = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=128, max_position_embeddings=131072, rope_parameters=given)
    )
    table = torch.stack(module(torch.ones(1), positions(seq_len)))
    return module.inv_freq, table[..., :64].unsqueeze(3)


def positions(seq_len: int) -> Tensor:
    return torch.cat([torch.arange(64), torch.arange(seq_len - 64, seq_len)]).view(2, 64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "seq_len"), ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_rope_kind_equals_hugging_face(name: str, row: str, seq_len: int) -> None:
    """Bitwise with `precision = "float32"`; within float32 rounding otherwise."""
    del row
    config = CONFIGS[name]
    frequencies, table = theirs(config, seq_len=seq_len)
    single = replace(config, precision="float32")
    assert torch.equal(rope.rope_frequencies(single, 128, seq_len=seq_len), frequencies)
    assert torch.equal(
        rope.cos_sin_table(single, 128, positions(seq_len), torch.float32, seq_len=seq_len), table
    )
    assert (
        rope.cos_sin_table(single, 128, positions(seq_len), torch.float64, seq_len=seq_len).dtype
        == torch.float64
    )
    exact = torch.tensor(
        rope_scaling.frequencies(config, 128, seq_len=seq_len), dtype=torch.float64
    )
    torch.testing.assert_close(exact, frequencies.double(), rtol=1e-6, atol=0)
    rounded = rope.cos_sin_table(config, 128, positions(seq_len), torch.float32, seq_len=seq_len)
    torch.testing.assert_close(rounded, table, rtol=0, atol=2e-3)
    assert not torch.equal(rounded, table)


def test_yarn_interpolates_between_two_indices_and_applies_its_attention_factor() -> None:
    assert rope_scaling.yarn_ramp_bounds(YARN, 128) == (18, 35)
    assert rope_scaling.attention_factor(YARN) == pytest.approx(1.2079, abs=5e-5)
    assert rope_scaling.attention_factor(replace(YARN, attention_factor=1.5)) == 1.5
    shares = [
        found / plain
        for found, plain in zip(
            rope_scaling.frequencies(YARN, 128, seq_len=1),
            rope_scaling.frequencies(KINDS["default"], 128, seq_len=1),
            strict=True,
        )
    ]
    assert shares[:19] == [1.0] * 19
    assert shares[35:] == pytest.approx([1 / 8] * 29)
    assert shares[20] == pytest.approx(1 - 2 / 17 * 7 / 8)
    low, high = rope_scaling.yarn_ramp_bounds(replace(YARN, truncate=False), 128)
    assert (18 < low < 19, 34 < high < 35) == (True, True)


def test_longrope_uses_long_factors_for_long_sequences_and_the_paper_s_attention_factor() -> None:
    assert rope_scaling.attention_factor(LONGROPE) == pytest.approx(
        math.sqrt(1 + math.log(32) / math.log(4096))
    )
    short, long = (
        rope_scaling.frequencies(LONGROPE, 128, seq_len=length) for length in (4096, 4097)
    )
    assert long[1] * LONG[1] == pytest.approx(short[1] * 1.01)
    assert rope_scaling.frequencies(LONGROPE, 128, seq_len=1 << 20) == long


def test_cosine_of_position_zero_is_the_attention_factor() -> None:
    for config in (YARN, LONGROPE):
        for precision in ("float64", "float32"):
            table = rope.cos_sin_table(
                replace(config, precision=precision), 128, torch.zeros(1, 1), torch.float64
            )
            torch.testing.assert_close(
                table[0], torch.full_like(table[0], rope_scaling.attention_factor(config))
            )
            assert table[1].count_nonzero() == 0


def test_rope_summary() -> None:
    assert rope_scaling.rope_summary(replace(SMALL, head_dim=128, rope=YARN), 65_536) == (
        "rope yarn: theta 500,000, longest wavelength 20,473,564 tokens for training.seq_len = 65,536, "
        "29 of 64 frequencies complete no rotation, attention factor 1.2079"
    )
    rope_4 = replace(SMALL, head_dim=4, nope_every=2, rope=RopeConfig(theta=100.0))
    assert rope_scaling.rope_summary(rope_4, 62) == (
        "rope default: theta 100, longest wavelength 63 tokens for training.seq_len = 62, "
        "1 of 2 frequencies complete no rotation, attention factor 1.0000; no rope in 1 of 2 layers"
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(YARN, theta=1.0), ["model.rope.theta = 1.0 must be above 1"]),
        (replace(YARN, factor=1.0), ["model.rope.factor = 1.0 must be above 1"]),
        (replace(YARN, original_length=1), ["model.rope.original_length = 1 must be above 1"]),
        (
            replace(YARN, attention_factor=0.0),
            ["model.rope.attention_factor = 0.0 must be above 0"],
        ),
        (
            replace(YARN, beta_slow=32.0),
            ["model.rope.beta_slow = 32.0 must be below model.rope.beta_fast = 32.0"],
        ),
        (replace(YARN, low_freq_factor=9.0), []),
        (
            replace(LONGROPE, long_factors=(), short_factors=(-1.0,) * 64),
            [
                "model.rope.short_factors holds -1.0; every factor must be above 0",
                "model.rope.long_factors has 0 values, and must have 64: half of model.head_dim = 128",
            ],
        ),
        (
            replace(KINDS["llama3"], factor=0.5, low_freq_factor=4.0),
            [
                "model.rope.factor = 0.5 must be above 1",
                "model.rope.low_freq_factor = 4.0 must be below model.rope.high_freq_factor = 4.0",
            ],
        ),
    ],
)
def test_every_broken_rule_is_reported_with_its_values(
    config: RopeConfig, said: list[str]
) -> None:
    found = [problem.partition(" for model.rope.kind")[0] for problem in config.problems(128)]
    assert found == said


def test_unused_keys_are_reported_with_the_kinds_that_use_them() -> None:
    assert YARN.unused_keys(["kind", "theta", "precision", "factor", "truncate"]) == []
    assert KINDS["linear"].unused_keys(["factor", "beta_fast", "attention_factor"]) == [
        'model.rope.beta_fast is only used with model.rope.kind = "yarn", not "linear"',
        'model.rope.attention_factor is only used with model.rope.kind = "yarn" or "longrope", not "linear"',
    ]
