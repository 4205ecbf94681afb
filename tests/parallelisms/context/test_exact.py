"""Every method, layout, head count and document layout against a dense masked softmax on one rank,
in float64.

Shape suffixes: B batch, T tokens of the full sequence, N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, count, cycle, pairwise, takewhile
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.collectives import all_reduce
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, ROTATE_METHODS
from tests.models.dense_attention import dense, inputs, run
from tests.models.small_models import starts
from tests.parallelisms.context.cores import build_core
from tests.ranks import run_ranks

HEADS = {"MHA": (4, 4), "GQA": (8, 2), "one key/value head": (8, 1), "three of them": (6, 3)}
Case = tuple[str, dict[str, Any], tuple[int, int]]


def documents(tokens: int, window: int) -> dict[str, Tensor]:
    """Batches of two sequences; all but the first batch have different documents in each."""
    odd = [3, 37, 35, 1, 49, 62]
    around = [length for length in (window - 1, window, window + 1, 1, 2 * window) if length]
    return {
        "one document": starts([tokens], [tokens]),
        "odd lengths, and one": starts([*odd, tokens - sum(odd)], [tokens], width=9),
        "one that spans ranks, short ones": starts([tokens - 12, 12], [1] * 7 + [tokens - 9, 2]),
        "many alike": starts([12] * (tokens // 12), [tokens - 5, 5], width=tokens // 12 + 1),
        "around the window": starts(
            filled(around, tokens), filled(around[::-1], tokens), width=tokens + 1
        ),
    }


def filled(lengths: list[int], tokens: int) -> list[int]:
    """Documents of these lengths, again and again, the last one shortened."""
    ends = [0, *takewhile(tokens.__gt__, accumulate(cycle(lengths))), tokens]
    return [end - start for start, end in pairwise(ends)]


def cases(ranks: int) -> Iterator[Case]:
    """(name, arguments, mesh) of every method, layout and head count that these ranks support."""
    for rotation in ROTATE_METHODS:
        for layout in LAYOUTS_BY_ROTATE_METHOD[rotation]:
            yield f"{rotation} {layout}", {"method": rotation, "layout": layout}, (ranks, 0)
    yield "ulysses", {"method": "ulysses"}, (ranks, 0)
    for ulysses in (2, 4):
        if ranks % ulysses == 0 and ranks > ulysses:
            for rotation in ROTATE_METHODS:
                mesh = (ranks // ulysses, ulysses)
                yield (
                    f"hybrid {mesh} {rotation}",
                    {"method": "hybrid", "outer_method": rotation},
                    mesh,
                )


def errors(tokens: int, every: int, scores: dict[str, Any], *, has_sink: bool) -> dict[str, float]:
    """The largest error of output and gradients, by case; `scores` are a window and a soft cap.

    `every`: one case in so many.
    """
    ranks = distributed.get_world_size()
    found = {}
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    number = count()
    for kind, heads in HEADS.items():
        for name, boundaries_BD in documents(tokens, scores.get("window") or 12).items():
            given = [*inputs(boundaries_BD, heads)]
            if has_sink:
                given.append(
                    torch.linspace(-1, 2, heads[0], dtype=torch.float64, requires_grad=True)
                )
            expected = list[Tensor]()
            for method, arguments, shape in cases(ranks):
                if next(number) % every:
                    continue
                expected = expected or run(partial(dense, **scores), given, boundaries_BD)[:-1]
                if shape not in meshes:
                    meshes[shape] = init_device_mesh("cpu", shape if shape[1] else shape[:1])
                if (arguments["method"] == "ulysses" and heads[0] % ranks) or (
                    shape[1] and heads[0] % shape[1]
                ):
                    continue
                core = build_core(
                    meshes[shape], heads=heads[0], kv_heads=heads[1], **arguments, **scores
                )
                ours = shared(core, given, boundaries_BD)
                differences = (
                    abs(a - b).max().item() for a, b in zip(ours, expected, strict=True)
                )
                found[f"{method}, {kind}, {name}"] = max(differences)
    return found


def shared(core: ContextParallel, given: Sequence[Tensor], boundaries_BD: Tensor) -> list[Tensor]:
    """Output and gradients of sharded attention, unsharded, for the output gradient of `run`; the
    sink's is summed.
    """
    q, k, v = (core.shard(x.detach(), boundaries_BD).requires_grad_() for x in given[:3])
    sinks = [x.detach().clone().requires_grad_() for x in given[3:]]
    out = core(q, k, v, boundaries_BD, *sinks)
    weights = torch.randn(
        given[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    grads = torch.autograd.grad(
        out, (q, k, v, *sinks), core.shard(weights.to(out.dtype), boundaries_BD)
    )
    sharded = [core.gather(x.detach(), boundaries_BD) for x in (out, *grads[:3])]
    return sharded + [all_reduce(None, x) for x in grads[3:]]


SCORES: dict[str, tuple[dict[str, Any], bool]] = {
    "full": ({}, False),
    "sink": ({}, True),
    "window 1": ({"window": 1}, False),
    "window 5, sink": ({"window": 5}, True),
    "window 12": ({"window": 12}, False),
    "window 50": ({"window": 50}, False),
    "window 191, sink": ({"window": 191}, True),
    "soft cap, window 20, sink": ({"window": 20, "softcap": 2.0}, True),
}
"""By name: window and soft cap, and whether there is a sink."""


@pytest.mark.ranks
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("ranks", "every"),
    [(1, 48), *(pytest.param(ranks, 1, marks=pytest.mark.slow) for ranks in (1, 2, 3, 4, 8))],
)
def test_every_cp_method_is_exact(ranks: int, every: int, scores: str) -> None:
    require_exact(ranks, every, scores)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "scores"), [*zip(cycle((3, 4)), SCORES, strict=False)])
def test_a_sample_over_several_ranks_is_exact(ranks: int, scores: str) -> None:
    require_exact(ranks, 37, scores)


def require_exact(ranks: int, every: int, scores: str) -> None:
    options, has_sink = SCORES[scores]
    by_rank = run_ranks(
        partial(errors, has_sink=has_sink), ranks, 192, every, options, timeout=480
    )
    assert all(set(found) == set(by_rank[0]) for found in by_rank)
    assert len(by_rank[0]) >= 160 // every
    assert {name: error for name, error in by_rank[0].items() if not error <= 1e-12} == {}


def rounding_errors(dtype: torch.dtype, method: str) -> list[tuple[float, float]]:
    """(context-parallel error, single-rank error) of output and gradients, both against
    float64.
    """
    boundaries_BD = starts([101, 3, 152], [256])
    narrow = inputs(boundaries_BD, (4, 2), dtype, head_dim=32)
    wide: Any = tuple(x.detach().double().requires_grad_() for x in narrow)
    *exact, _ = run(dense, wide, boundaries_BD)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    # `balanced` splits short documents, and kernels round every part.
    layout = {"layout": "headtail"} if method == "allgather" else {}
    core = build_core(mesh, method=method, heads=4, kv_heads=2, **layout)
    ours = shared(core, narrow, boundaries_BD)
    alone = shared(SingleRank(), narrow, boundaries_BD)  # type: ignore[arg-type]
    return [
        (abs(a.double() - b).max().item(), abs(c.double() - b).max().item())
        for a, b, c in zip(ours, exact, alone, strict=True)
    ]


class SingleRank:
    """The same interface on one rank."""

    def shard(self, x: Tensor, boundaries_BD: Tensor) -> Tensor:
        del boundaries_BD
        return x.clone()

    gather = shard

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, boundaries_BD: Tensor) -> Tensor:
        from models import attention_op

        out: Tensor = attention_op.attention(q, k, v, boundaries_BD)[0]
        return out


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_bfloat16_error_is_at_most_twice_that_of_one_rank(method: str) -> None:
    for ours, alone in run_ranks(rounding_errors, 4, torch.bfloat16, method)[0]:
        assert 0 < ours <= 2 * alone
