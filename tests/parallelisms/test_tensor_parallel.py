"""A model cut over tp ranks is the model of one process: weights, losses, gradients and norms, in double precision."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from models import tiling
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops
from parallelisms.collectives import all_reduce, full_tensor, to_local
from parallelisms.init_weights import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallel_dims import AXES, tensor_parallel_problems
from tests.models.small_models import MIXED, SMALL, packed
from tests.parallelisms.parallel_models import joined
from tests.ranks import run_ranks
from trainer.config.job_config import OptimizerSection
from trainer.optim.optimizer import Optimizer

# Two key/value heads: four ranks share them. 44 rows of the vocabulary: three FSDP ranks do not divide those of two.
CONFIG = replace(SMALL, vocab_size=44, num_heads=8, num_kv_heads=2, head_dim=2)
TIED = replace(CONFIG, tie_embeddings=True)
FOUR = replace(CONFIG, num_kv_heads=4)
NORMED = replace(MIXED, vocab_size=44, num_heads=8, num_kv_heads=4)
FEW = replace(NORMED, num_layers=2, nope_every=2, num_kv_heads=2)  # Fewer key heads than four ranks.
ROWS = [[9, 1, 14], [24], [3, 21], [8] * 3]
TARGETS = {rows: 24 * rows - sum(map(len, ROWS[:rows])) for rows in (3, 4)}


@dataclass(frozen=True)
class Case:
    sizes: tuple[tuple[str, int], ...] = ()
    config: ModelConfig = CONFIG
    sequence: bool = True
    loss: bool = True
    compiled: bool = False
    policy: activation_checkpoint.RecomputePolicy = "none"
    every: int = 1
    groups: int = 1
    tiled: bool = False
    offload: bool = False
    rows: int = 4

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{size}" for axis, size in self.sizes)
        named = {
            "tied": self.config.tie_embeddings,
            "normed": self.config.qk_norm,
            "tokens-whole": not self.sequence,
            "loss-whole": not self.loss,
            "compiled": self.compiled,
            self.policy: self.policy != "none",
            f"every-{self.every}": self.every > 1,
            f"groups-{self.groups}": self.groups > 1,
            "tiled": self.tiled,
            "host": self.offload,
        }
        return " ".join([axes, *(name for name, is_so in named.items() if is_so)])


@dataclass
class Found:
    initial: dict[str, Tensor]
    losses: Tensor
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def train(case: Case) -> Found:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    double = torch.float64
    with torch.device("meta"):
        model = Transformer(case.config, loss_chunk_mib=1).to(double)
    if model.head is not None:
        model.head.chunk_mib = 0  # One token at a time, so that there are many chunks.
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=case.sequence, loss_parallel=case.loss)
    bodies = TileOps()
    if case.compiled:
        warnings.simplefilter("ignore")
        bodies = compile_tile_ops(backend="aot_eager")
    if case.compiled and case.policy == "none":
        for block in model.layers():
            block.compile(fullgraph=True, backend="aot_eager")
    # Some tokens in a tile: what it may take is shared among the ranks' tokens.
    tile = 6 * tiling.bytes_per_token(case.config.dim, case.config.ffn_dim, 8) if case.tiled else None
    activation_checkpoint.apply(
        model, RecomputeConfig(case.policy, blocks_per_checkpoint=case.every, tiling=Tiling(case.groups, tile, bodies))
    )
    if mesh.size > 1:
        fsdp.apply(
            model,
            mesh.fsdp_mesh,
            param_dtype=double,
            reduce_dtype=double,
            reshard_after_forward=True,
            cpu_offload=case.offload,
        )
    initialize(model, seed=0, device=torch.device("cpu"))
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # Gathered for the test only.
    initial = {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    each = case.rows // mesh.dp_degree
    first = mesh.dp_rank * each
    batch = joined([packed(ROWS[row], seed=row, vocab_size=44) for row in range(first, first + each)])
    losses = model(batch)
    (losses.sum() / TARGETS[case.rows]).backward()
    optimizer = Optimizer([model], OptimizerSection(max_grad_norm=0.1), all_reduce=partial(all_reduce, None))
    gradients = {
        name: full_tensor(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    norm, _ = optimizer.step(1e-2)
    weights = {name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    return Found(initial, losses.detach(), gradients, float(norm), weights)


@cache
def alone(config: ModelConfig, rows: int) -> Found:
    return run_ranks(train, 1, Case(config=config, rows=rows))[0]


PIECES: list[tuple[activation_checkpoint.RecomputePolicy, int, bool]] = [
    ("full", 1, False),
    ("keep_attention", 2, True),
]
TP2, TP4 = (("tp", 2),), (("tp", 4),)
CASES = [
    *(
        Case(sizes, config, sequence, loss)
        for sizes in (TP2, TP4)
        for config in (CONFIG, TIED)
        for sequence in (True, False)
        for loss in (True, False)
    ),
    *(
        Case(TP4, config, sequence, loss, compiled=True)
        for config, sequence, loss in ((CONFIG, True, True), (CONFIG, False, False), (TIED, True, False))
    ),
    Case(TP2, policy="full"),
    Case(TP2, loss=False, policy="full"),
    Case((("dp_replicate", 2), ("tp", 2)), compiled=True),
    Case(TP2, policy="keep_attention", sequence=False),
    Case(TP4, policy="keep_attention", compiled=True),
    Case((("dp_shard", 3), ("tp", 2)), rows=3),
    Case((("dp_shard", 2), ("tp", 2)), TIED, loss=False),
    Case((("dp_shard", 2), ("tp", 2)), compiled=True, policy="full"),
    Case((("dp_shard", 2), ("tp", 2)), offload=True),
    Case((("dp_replicate", 2), ("tp", 2)), sequence=False),
    Case((("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))),
    Case(TP2, policy="keep_attention", tiled=True),
    Case(TP2, sequence=False, policy="full", tiled=True),
    Case(TP4, policy="keep_attention", compiled=True, tiled=True),
    Case((("dp_shard", 2), ("tp", 2)), policy="full", tiled=True),
    *(
        Case(TP2, FOUR, sequence, policy=policy, groups=2, every=every, tiled=tiled)
        for sequence in (True, False)
        for policy, every, tiled in PIECES
    ),
    Case((("dp_shard", 2), ("tp", 2)), FOUR, policy="keep_attention", groups=2, every=2, tiled=True),
    Case(TP4, FEW),
    Case(TP4, FEW, sequence=False, policy="full"),
    Case(TP2, NORMED, sequence=False),
    Case(TP2, NORMED, compiled=True, policy="full", groups=2, tiled=True),
    Case((("dp_shard", 2), ("tp", 2)), NORMED, policy="keep_attention", groups=2, tiled=True),
]


# Each takes a compiler many seconds, and what it would show others show that are compiled; or is one more of a kind.
SLOW = [
    *(Case(TP2, TIED, sequence, loss) for sequence in (True, False) for loss in (True, False)),
    *(Case(TP4, CONFIG, sequence, loss) for sequence in (True, False) for loss in (True, False)),
    *(
        Case(TP2, FOUR, sequence=False, policy=policy, groups=2, every=every, tiled=tiled)
        for policy, every, tiled in PIECES
    ),
    Case(TP4, CONFIG, compiled=True),
    Case(TP4, CONFIG, sequence=False, loss=False, compiled=True),
    Case(TP4, policy="keep_attention", compiled=True, tiled=True),
    Case(TP4, TIED, loss=False, compiled=True),
    Case((("dp_replicate", 2), ("tp", 2)), compiled=True),
    Case(TP4, policy="keep_attention", compiled=True),
    Case((("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))),
    Case((("dp_shard", 2), ("tp", 2)), compiled=True, policy="full"),
    Case((("dp_shard", 3), ("tp", 2)), rows=3),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES], ids=str
)
def test_every_cut_is_one_process(case: Case) -> None:
    expected = alone(case.config, case.rows)
    for rank, found in enumerate(run_ranks(train, case.ranks, case)):
        data_ranks = len(expected.losses) // len(found.losses)
        of_rank = expected.losses.chunk(data_ranks)[rank // (case.ranks // data_ranks)]
        torch.testing.assert_close(found.losses, of_rank, rtol=1e-13, atol=1e-13)
        assert found.norm == pytest.approx(expected.norm, rel=1e-13)
        for name, tensor_ in expected.initial.items():
            assert torch.equal(found.initial[name], tensor_), name
        for mine, theirs in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
            assert mine.keys() == theirs.keys()
            for name, tensor_ in theirs.items():
                largest = float(tensor_.abs().max())
                torch.testing.assert_close(mine[name], tensor_, rtol=0, atol=1e-12 * largest, msg=name)


def shares(case: Case) -> dict[str, tuple[int, ...]]:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    with torch.device("meta"):
        model = Transformer(case.config)
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=case.sequence, loss_parallel=case.loss)
    return {name: tuple(to_local(parameter).shape) for name, parameter in model.named_parameters()}


@pytest.mark.ranks
def test_a_rank_holds_its_part_of_every_matrix() -> None:
    held = run_ranks(shares, 2, Case(TP2))[0]
    block = {name.removeprefix("blocks.0."): shape for name, shape in held.items() if name.startswith("blocks.0.")}
    assert block == {
        "attention_norm.weight": (16,),
        "attention.q_proj.weight": (8, 16),
        "attention.k_proj.weight": (2, 16),
        "attention.v_proj.weight": (2, 16),
        "attention.o_proj.weight": (16, 8),
        "ffn_norm.weight": (16,),
        "feed_forward.gate_proj.weight": (10, 16),
        "feed_forward.up_proj.weight": (10, 16),
        "feed_forward.down_proj.weight": (16, 10),
    }
    assert run_ranks(shares, 2, Case(TP2, NORMED))[0]["blocks.0.attention.q_norm.weight"] == (6,)
    assert held["embed.weight"] == held["head.proj.weight"] == (22, 16)
    assert run_ranks(shares, 2, Case(TP2, loss=False))[0]["head.proj.weight"] == (44, 16)


def kept(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the residual stream that enter blocks."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    model = Transformer(case.config).double()
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=case.sequence, loss_parallel=case.loss)
    shapes: list[tuple[int, ...]] = []
    for block in model.layers():
        block.register_forward_pre_hook(lambda _, arguments: shapes.append(tuple(arguments[0].shape)))
    model(packed([24], vocab_size=44))
    return shapes


@pytest.mark.ranks
def test_sequence_parallelism_shares_the_tokens_of_the_residual_stream() -> None:
    assert run_ranks(kept, 2, Case(TP2))[0] == [(1, 12, 16)] * 2
    assert run_ranks(kept, 2, Case(TP2, sequence=False))[0] == [(1, 24, 16)] * 2


def largest_tile(sequence: bool) -> int:  # noqa: FBT001
    """Tokens of all ranks that a feed-forward meets at a time, of 24, where six of them have room."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    model, met = Transformer(CONFIG).double(), []

    def feed(x_BCE: Tensor, *weights: Tensor, activation: str) -> Tensor:
        met.append(x_BCE.shape[1])
        return tiling.feed_forward(x_BCE, *weights, activation=activation)

    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=sequence, loss_parallel=True)
    # What a rank computes of a token is its part of the inner width.
    room = 6 * tiling.bytes_per_token(CONFIG.dim, CONFIG.ffn_dim // 2, 8)
    activation_checkpoint.apply(
        model, RecomputeConfig("full", tiling=Tiling(tile_bytes=room, ops=TileOps(feed_forward=feed)))
    )
    model(packed([24], vocab_size=44)).sum().backward()
    return max(met)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", [True, False])
def test_a_tile_has_room_for_the_tokens_of_all_ranks(*, sequence: bool) -> None:
    assert run_ranks(largest_tile, 2, sequence) == [6, 6]


def test_what_does_not_divide_is_said_with_its_numbers() -> None:
    problems = partial(tensor_parallel_problems, heads=8, kv_heads=2, ffn_dim=20, vocab_size=44)
    assert problems(1) == problems(2) == problems(4) == []
    assert problems(3) == [
        "parallelism.tp = 3 must divide model.num_heads = 8",
        "parallelism.tp = 3 must divide model.ffn_dim = 20",
        "parallelism.tp = 3 must divide model.vocab_size = 44",
        "parallelism.tp = 3 must divide model.num_kv_heads = 2, or be a multiple of it: each rank then has one of "
        "them, as its neighbours do",
    ]
    assert len(problems(8)) == 2
    assert len(problems(8, replicated_vocabulary=True)) == 1


# ---- what a compiler sees


def recognised() -> list[tuple[int, int]]:
    """Per graph: matrix products that follow a gathering of tokens, and those that a scattered sum follows."""
    warnings.simplefilter("ignore")
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph, micro_pipeline_tp, post_grad

    found: list[tuple[int, int]] = []

    def look(module: torch.fx.GraphModule, _: object) -> Any:
        joint_graph.joint_graph_passes(module)
        post_grad.view_to_reshape(module)
        gathers = micro_pipeline_tp.find_all_gather_patterns(module.graph)
        scatters = micro_pipeline_tp.find_reduce_scatter_patterns(module.graph)
        after = [micro_pipeline_tp._find_consumer_matmuls(gather.res_node) for gather in gathers]
        before = [micro_pipeline_tp._find_producer_matmul(scatter.input_node) for scatter in scatters]
        found.append((sum(map(len, after)), sum(product is not None for product in before)))
        return make_boxed_func(module.forward)

    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    model = Transformer(replace(CONFIG, num_layers=1)).double()
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=True, loss_parallel=True)
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, decompositions=select_decomp_table())
    for block in model.layers():
        block.compile(fullgraph=True, backend=backend)
    for lengths in ([24],), ([9, 15], [24]):
        model(packed(*lengths, vocab_size=44)).sum().backward()
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_the_compiler_knows_the_exchanges_that_it_can_overlap() -> None:
    """By torch's own passes for async TP, which are private: this says when they change."""
    one_row, one_row_backward, rows, _ = run_ranks(recognised, 2)[0]
    assert one_row == rows == (5, 2)
    # Backward, a sum of several products is scattered, which those passes leave alone.
    assert one_row_backward[0] >= 2


def test_what_overlaps_exchanges_still_exists() -> None:
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    assert torch._inductor.config._micro_pipeline_tp is False
    assert callable(_symmetric_memory.enable_symm_mem_for_group)
