"""Which attention kernel takes a block: by what kernels can do, by length and window, and with the
same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models import attention_op, kernels
from models.attention_core import LocalAttentionCore
from models.kernel_choice import (
    CUDNN_AND_FLASH,
    KERNEL_LIMITS,
    LENGTHS_PER_OCTAVE,
    AttentionNeeds,
    auto_choices,
    describe,
    kernel_for,
    planned_length,
    problems,
)
from models.score_blocks import ScoreBlock, ScoreBlocks
from models.score_pairs import Scores
from tests.models.test_kernel_check import varlen_backward, varlen_forward

HOPPER = AttentionNeeds(dtype="bfloat16", head_dim=128, generation="hopper")
BY_NAME = {field: getattr(HOPPER, field) for field in HOPPER.__dataclass_fields__}


def needs(**changed: Any) -> AttentionNeeds:
    return AttentionNeeds(**BY_NAME | changed)


@pytest.mark.parametrize(
    ("changed", "best"),
    [
        ({}, CUDNN_AND_FLASH),
        ({"generation": "blackwell", "head_dim": 64}, CUDNN_AND_FLASH),
        ({"generation": "ampere"}, "flash"),
        ({"generation": "cdna"}, "flash"),
        ({"generation": None}, "flash"),
        ({"deterministic": True}, "flash"),
        ({"head_dim": 264}, "efficient"),
        ({"head_dim": 100}, "plain"),
        ({"dtype": "float32"}, "efficient"),
        ({"dtype": "float64"}, "plain"),
        ({"softcap": 50.0}, "plain"),
    ],
)
def test_auto_takes_the_fastest_choice_that_can_do_it(changed: dict[str, Any], best: str) -> None:
    assert auto_choices(needs(**changed))[0] == best


def test_auto_has_a_next_choice_for_each_that_fails_on_the_device() -> None:
    assert auto_choices(HOPPER) == [CUDNN_AND_FLASH, "flash", "efficient", "plain"]
    assert auto_choices(HOPPER, ["fa4", "cudnn", "flash"])[:2] == ["fa4", CUDNN_AND_FLASH]
    assert auto_choices(HOPPER, ["flash", "cudnn"])[:2] == ["flash", CUDNN_AND_FLASH]
    assert auto_choices(needs(head_dim=192), ["fa4", "flash"])[0] == "flash"


@pytest.mark.parametrize(
    ("choice", "changed", "message"),
    [
        (
            "fa3",
            {"generation": "blackwell"},
            'training.attention = "fa3" runs on hopper devices, not on blackwell',
        ),
        (
            "cudnn",
            {"generation": "cdna"},
            "runs on ampere, ampere rtx, ada, hopper, blackwell, blackwell rtx devices, not on cdna",
        ),
        (
            "cudnn",
            {"head_dim": 256, "generation": "ampere"},
            "trains no heads of 129 to 256 dimensions on ampere devices, but head_dim = 256",
        ),
        ("fa4", {"head_dim": 192}, "supports heads of at most 128 dimensions, not head_dim = 192"),
        (
            "flash",
            {"head_dim": 100},
            "supports heads of a multiple of 8 dimensions, not head_dim = 100",
        ),
        (
            "cudnn",
            {"deterministic": True},
            "is not deterministic, but training.deterministic = true",
        ),
        (
            "flash",
            {"dtype": "float32"},
            'supports bfloat16 or float16, not training.dtype = "float32"',
        ),
        (
            "flash",
            {"softcap": 50.0},
            'attention kernel "flash" has no soft-capped scores (softcap = 50.0)',
        ),
    ],
)
def test_a_kernel_that_cannot_do_it_is_named_with_the_rule(
    choice: str, changed: dict[str, Any], message: str
) -> None:
    (problem,) = problems(choice, needs(**changed))
    assert message in problem


CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_dim", range(8, 265, 8))
def test_heads_that_torch_refuses_on_a_device_are_refused(
    head_dim: int, capability: tuple[int, int]
) -> None:
    """By `check_cudnn_tensor_shapes` and the check of flash's gradients in torch's sdp_utils.cpp."""
    cudnn_takes = head_dim <= (256 if capability == (9, 0) else 128)
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    flash_takes = head_dim <= 256 and not (is_small and 192 < head_dim <= 224)
    asked = needs(head_dim=head_dim, generation=kernels.GENERATIONS[capability])
    assert (not [*problems("cudnn", asked)]) == cudnn_takes
    assert (not [*problems("flash", asked)]) == flash_takes


def test_a_choice_of_two_kernels_has_the_problems_of_both() -> None:
    assert len([*problems(CUDNN_AND_FLASH, needs(dtype="float32"))]) == 2
    assert not [*problems(CUDNN_AND_FLASH, HOPPER)]


def test_long_blocks_take_cudnn_and_windows_and_short_ones_flash() -> None:
    assert kernel_for(CUDNN_AND_FLASH, tokens=4096) == "cudnn"
    assert kernel_for(CUDNN_AND_FLASH, tokens=4095) == "flash"
    assert kernel_for(CUDNN_AND_FLASH, tokens=1 << 20, window=1024) == "flash"
    assert kernel_for("efficient", tokens=10) == "efficient"
    assert describe("flash") == "flash"
    assert "cudnn for blocks of 4,096 tokens or more" in describe(CUDNN_AND_FLASH)


def test_an_octave_of_lengths_has_sixteen_plans_each_a_sixteenth_longer_at_most() -> None:
    for start in (64, 4096):
        lengths = {planned_length(length) for length in range(start, 2 * start)}
        assert len(lengths - {start}) == LENGTHS_PER_OCTAVE
    assert all(
        0 <= planned_length(length) - length <= length / LENGTHS_PER_OCTAVE
        for length in range(1, 10_000)
    )
    assert [planned_length(length) for length in (1, 31, 33, 4097, 1 << 20)] == [
        1,
        31,
        34,
        4352,
        1 << 20,
    ]


# ---- blocks of two kernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(kernel, queries) of the calls of both kernels, which compute on the CPU; blocks of 16
    tokens are long.
    """
    found = list[tuple[str, int]]()
    forward, backward = kernels.DENSE_KERNELS["cpu"]

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Tensor, *inputs: Any) -> Any:
            found.append((name, q.shape[2] if name == "cudnn" else len(q)))
            return function(q, *inputs)

        return run

    monkeypatch.setattr("models.score_blocks.LONG_TOKENS", 16)
    monkeypatch.setattr(
        kernels,
        "select_kernel",
        lambda _, kernel, **__: kernel if kernel in (CUDNN_AND_FLASH, "flash") else "plain",
    )
    monkeypatch.setattr(kernels, "_flash_forward", recorded("flash", varlen_forward))
    monkeypatch.setattr(kernels, "_flash_backward", varlen_backward)
    monkeypatch.setitem(kernels.DENSE_KERNELS, "cudnn", (recorded("cudnn", forward), backward))
    return found


def inputs(tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8), (tokens, 4, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("lengths", [(40, 5, 71, 1, 33), (70,), (16, 15, 17), (3, 4), (129, 130)])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_in_two_kernels_have_the_results_of_one(
    calls: list[tuple[str, int]], lengths: tuple[int, ...], window: int | None
) -> None:
    """The last block has no tokens behind it to fill its call up; the others have those of the
    next document.
    """
    total = sum(lengths)
    q, k, v, grad = inputs(total)
    boundaries = torch.tensor([[0, *torch.tensor(lengths).cumsum(0).tolist()]], dtype=torch.int32)
    blocks = attention_op.document_blocks(boundaries, 1, total, Scores(window))
    found = []
    for kernel in ("plain", CUDNN_AND_FLASH):
        out, lse = attention_op.forward(q, k, v, blocks, kernel=kernel)
        found.append(
            (out, lse, *attention_op.backward(grad, q, k, v, out, lse, blocks, kernel=kernel))
        )
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    long = sorted(planned_length(length) for length in lengths if length >= 16 and window is None)
    assert sorted(count for name, count in calls if name == "cudnn") == long
    assert sum(count for name, count in calls if name == "flash") == total - sum(
        length for length in lengths if length >= 16 and window is None
    )


def test_rectangles_take_cudnn_only_at_lengths_that_have_plans(
    calls: list[tuple[str, int]],
) -> None:
    q, k, v, _ = inputs(200)
    rectangles = [(0, 64, 0, 32), (64, 97, 32, 64), (97, 161, 64, 97), (161, 170, 100, 164)]
    blocks = ScoreBlocks(rectangles)
    outputs = {
        name: [*kernels.attend_blocks(q, k, v, blocks, kernel=name)]
        for name in ("plain", CUDNN_AND_FLASH)
    }
    assert [count for name, count in calls if name == "cudnn"] == [64]
    assert [count for name, count in calls if name == "flash"] == [33 + 64 + 9]
    merged = []
    for parts in outputs.values():
        out = torch.zeros_like(q)
        for queries, part, _ in parts:
            out[queries] = part
        merged.append(out)
    torch.testing.assert_close(*merged, rtol=0, atol=1e-12)


def test_flipped_blocks_never_take_cudnn(calls: list[tuple[str, int]]) -> None:
    q, k, v, _ = inputs(64)
    blocks = ScoreBlocks([ScoreBlock(0, 64, 0, 64, "flipped")])
    assert len([*kernels.attend_blocks(q, k, v, blocks, kernel=CUDNN_AND_FLASH)]) == 1
    assert calls == [("flash", 64)]


def test_preparing_a_batch_makes_the_calls_of_both_kernels_ready(
    calls: list[tuple[str, int]],
) -> None:
    boundaries = torch.tensor([[0, 40, 45]], dtype=torch.int32)
    blocks = LocalAttentionCore(CUDNN_AND_FLASH).prepare(boundaries)
    assert isinstance(blocks, ScoreBlocks)
    short, long = blocks.short_and_long
    assert "host_varlen_batches" in vars(short)
    assert "blocks" in vars(long)
    assert not calls


def test_every_kernel_has_limits() -> None:
    assert {*KERNEL_LIMITS} == {"flash", "cudnn", "efficient", "plain", "fa3", "fa4"}
