"""The start-up check of compilation: the gradients of compiled blocks are those of eager ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import rope
from parallelisms import compile_check
from parallelisms.activation_checkpoint import RecomputePolicy
from tests.models.small_models import NORMED, SMALL
from trainer import build
from trainer.config.parse import load
from trainer.errors import RankFailedError

RUN = ["--data.corpus=copy", "--training.compile=true", "--memory.recompute=none"]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    compile_check._wrong_gradients.cache_clear()


@pytest.fixture
def lost_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation loses the gradient of the rotation, as it did with torch 2.11."""
    rotate = rope.apply_rotary_emb

    def detached(x_BSNH: Tensor, cos_sin_2BS1F: Tensor) -> Tensor:
        return rotate(x_BSNH.detach() if torch.compiler.is_compiling() else x_BSNH, cos_sin_2BS1F)

    monkeypatch.setattr(rope, "apply_rotary_emb", detached)


@pytest.mark.parametrize("policy", ["none", "keep_attention"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(policy: RecomputePolicy) -> None:
    compile_check.verify_compilation(NORMED, policy)


@pytest.mark.usefixtures("lost_gradients")
def test_lost_gradients_are_named() -> None:
    lost = r"torch \S+ gives compiled blocks other gradients: .*q_proj.weight \(off by 1 of its norm\), .*k_proj.weight"
    with pytest.raises(ValueError, match=lost):
        compile_check.verify_compilation(SMALL, "none")


@pytest.mark.usefixtures("lost_gradients")
def test_a_run_does_not_start_with_them() -> None:
    with pytest.raises(RankFailedError, match=r"training\.compile = true does not work here: torch .*q_proj"):
        build.require_right_compilation(load(RUN))
