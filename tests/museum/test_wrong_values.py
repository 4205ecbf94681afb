"""Every key of every released config.json, with every kind of wrong value: the same model, with a
line, or refused by name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.hf import HuggingFaceError, read_config
from models.hf_family import UNUSED_KEYS
from models.hf_rope import DIALECTS
from tests.museum.releases import READ, Release

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 1.5, 10**30, float("nan"), float("inf")),
    *("", "x", "4096", [], [1], ["x"], [None], [[]], {}, {"x": 1}, {"rope_type": "x"}),
)
WITHOUT_EFFECT = {
    *(
        "use_sliding_window",
        "max_window_layers",
        "sliding_window",
        "sliding_window_pattern",
        "is_decoder",
    ),
    *("original_max_position_embeddings", "rope_scaling", "rope_parameters"),
}
"""Keys that others switch off: a window of no layer, the length of no scaling."""
SAMPLE = 1200


def wrong_values(release: Release) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(key, value, what changes in config.json), also for the keys of a rope."""
    for key, value in release.text_config.items():
        yield from ((key, wrong, {key: wrong}) for wrong in WRONG)
        if key in DIALECTS and isinstance(value, dict):
            yield from (
                (inner, wrong, {key: value | {inner: wrong}}) for inner in value for wrong in WRONG
            )


def check(release: Release, key: str, wrong: Any, changes: dict[str, Any]) -> None:
    try:
        model = release.read(**changes)
        remarks = release.remarks(**changes)
    except HuggingFaceError as error:
        assert [problem for problem in error.problems if key in problem], (
            release.name,
            changes,
            error.problems,
        )
        return
    is_changed = any(release.text_config[top] != value for top, value in changes.items())
    must_be_stated = is_changed and wrong is not None and key not in UNUSED_KEYS | WITHOUT_EFFECT
    if model == release.read() and must_be_stated:
        assert [line for line in remarks if key in line], (release.name, changes)


def test_a_sample_of_wrong_values_is_read_or_refused_by_name() -> None:
    draw = random.Random(0)
    cases = [(release, *case) for release in READ.values() for case in wrong_values(release)]
    for case in draw.sample(cases, SAMPLE):
        check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_every_wrong_value_is_read_or_refused_by_name(name: str) -> None:
    for case in wrong_values(READ[name]):
        check(READ[name], *case)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ('"hidden_size": 8, "hidden_size": 16', "hidden_size is stated twice: 8 and 16"),
        ('"rms_norm_eps": NaN', "NaN is not a number"),
        ('"rope_theta": -Infinity', "-Infinity is not a number"),
    ],
)
def test_json_that_says_two_things_or_no_number_is_refused(
    changes: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", {changes}}}')
    with pytest.raises(HuggingFaceError, match=f"config.json is not valid JSON: {problem}"):
        read_config(tmp_path)


def test_a_key_that_is_stated_twice_alike_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"_name_or_path": "a", "_name_or_path": "a", "hidden_size": 8}'
    )
    assert read_config(tmp_path) == {"_name_or_path": "a", "hidden_size": 8}


THETA = {"rope_type": "default", "rope_theta": 5.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "meta-llama/Meta-Llama-3-8B-Instruct",
            {"rope_parameters": THETA},
            "rope_theta = 500000.0 and rope_parameters.rope_theta = 5.0 disagree",
        ),
        (
            "meta-llama/Meta-Llama-3-8B-Instruct",
            {"rope_scaling": LINEAR | {"rope_theta": 7}},
            "rope_theta = 500000.0 and rope_scaling.rope_theta = 7 disagree",
        ),
        (
            "meta-llama/Meta-Llama-3.1-8B",
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings = 4096 and rope_scaling.original_max_position_embeddings = 8192 disagree",
        ),
        (
            "meta-llama/Meta-Llama-3-8B-Instruct",
            {"rope_scaling": LINEAR | {"type": "yarn"}},
            'rope_scaling.type = "yarn" and rope_scaling.rope_type = "linear" disagree',
        ),
        (
            "google/gemma-3-27b-it",
            {"rope_scaling": None, "rope_parameters": {"full_attention": THETA, "sliding_attention": THETA}},
            "rope_local_base_freq = 10000.0 and rope_parameters.sliding_attention.rope_theta = 5.0 disagree",
        ),
        (
            "openai/gpt-oss-20b",
            {"num_hidden_layers": 23},
            "must have num_hidden_layers = 23 items",
        ),
        ("Qwen/Qwen2.5-7B", {"num_attention_heads": 30}, "hidden_size / num_attention_heads = 3584 / 30"),
        ("Qwen/Qwen3-8B", {"num_key_value_heads": 5}, "num_attention_heads = 32 must be a multiple of num_key_value_heads = 5"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_itself_is_named_by_its_keys(
    name: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(HuggingFaceError) as caught:
        READ[name].read(**changes)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        (
            {"eos_token_id": [2, 32000]},
            "ignored: eos_token_id = [2, 32000]: not in the vocabulary of 32000",
        ),
        ({"pad_token_id": -1}, "ignored: pad_token_id = -1: not in the vocabulary of 32000"),
        (
            {"dtype": "float16"},
            'ignored: dtype = "float16" and torch_dtype = "bfloat16" disagree: weights are read in',
        ),
    ],
)
def test_what_contradicts_and_is_not_needed_is_read_with_a_line(
    changes: dict[str, Any], remark: str
) -> None:
    release = READ["mistralai/Mixtral-8x7B-v0.1"]
    assert release.read(**changes) == release.read()
    assert [line for line in release.remarks(**changes) if line.startswith(remark)], json.dumps(
        release.remarks(**changes)
    )
