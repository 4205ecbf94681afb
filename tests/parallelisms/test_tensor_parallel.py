"""Tensor parallelism equals one process in float64: weights, losses, gradients and norms."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, distributed

from models import tiling
from models.config import ModelConfig
from models.tiling import CompilePiece, eager
from models.transformer import Transformer
from parallelisms import activation_checkpoint, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.init_weights import initialize, local_ranges
from parallelisms.mesh.collectives import all_reduce, full_tensor, to_local
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES, tensor_parallel_problems
from tests.models.other_kinds import MIXED_KINDS, other_kinds
from tests.models.small_models import MIXED, SMALL, feed_forward_tokens, packed
from tests.parallelisms.parallel_models import concat_batches
from tests.ranks import run_ranks
from trainer.config.sections import OptimizerSection
from trainer.step.optimizer import Optimizer

# Two KV heads, so four ranks replicate them. 44 tokens in the vocabulary: the shards of tp = 2 are
# not divisible by 3.
CONFIG = replace(SMALL, vocab_size=44, num_heads=8, num_kv_heads=2, head_dim=2)
TIED = replace(CONFIG, tie_embeddings=True)
FOUR = replace(CONFIG, num_kv_heads=4)
NORMED = replace(MIXED, vocab_size=44, num_heads=8, num_kv_heads=4)
KINDS = replace(MIXED_KINDS, vocab_size=44, num_heads=8, num_kv_heads=4, head_dim=2)
# Fewer KV heads than 4 ranks.
FEW = replace(NORMED, num_layers=2, nope_every=2, num_kv_heads=2, qkv_bias=True)
DOCUMENTS = [[9, 1, 14], [24], [3, 21], [8] * 3]
TARGETS = {count: 24 * count - sum(map(len, DOCUMENTS[:count])) for count in (3, 4)}


@dataclass(frozen=True)
class Case:
    sizes: tuple[tuple[str, int], ...] = ()
    config: ModelConfig = CONFIG
    sequence_parallel: bool = True
    loss_parallel: bool = True
    compiled: bool = False
    policy: activation_checkpoint.RecomputePolicy = "none"
    blocks_per_checkpoint: int = 1
    head_groups: int = 1
    tiled: bool = False
    offload: bool = False
    num_sequences: int = 4

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{size}" for axis, size in self.sizes)
        named = {
            "tied": self.config.tie_embeddings,
            "normed": self.config.qk_norm,
            "biased": self.config.qkv_bias,
            "kinds": bool(self.config.layers),
            "no-sequence-parallel": not self.sequence_parallel,
            "no-loss-parallel": not self.loss_parallel,
            "compiled": self.compiled,
            self.policy: self.policy != "none",
            f"checkpoint-{self.blocks_per_checkpoint}": self.blocks_per_checkpoint > 1,
            f"groups-{self.head_groups}": self.head_groups > 1,
            "tiled": self.tiled,
            "host": self.offload,
        }
        return " ".join([axes, *(name for name, is_so in named.items() if is_so)])


@dataclass
class Outcome:
    initial: dict[str, Tensor]
    losses: Tensor
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def train(case: Case) -> Outcome:
    with other_kinds():
        return train_kinds(case)


def train_kinds(case: Case) -> Outcome:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    double = torch.float64
    with torch.device("meta"):
        model = Transformer(case.config, loss_chunk_mib=1).to(double)
    if model.head is not None:
        # One token at a time, so that there are many chunks.
        model.head.chunk_mib = 0
    tensor_parallel.apply(
        model,
        mesh.tp_mesh,
        sequence_parallel=case.sequence_parallel,
        loss_parallel=case.loss_parallel,
    )
    compile_piece: CompilePiece = eager
    if case.compiled:
        warnings.simplefilter("ignore")
        compile_piece = compiler(backend="aot_eager")
    if case.compiled and case.policy == "none":
        for block in model.transformer_blocks():
            block.compile(fullgraph=True, backend="aot_eager")
    if case.compiled:
        model.compile_pieces(compile_piece)
    # The bytes of a tile cover the tokens of all tp ranks.
    tile = (
        6 * tiling.bytes_per_token(case.config.dim, case.config.ffn_dim, 8) if case.tiled else None
    )
    activation_checkpoint.apply(
        model,
        RecomputeConfig(
            case.policy,
            blocks_per_checkpoint=case.blocks_per_checkpoint,
            tiling=Tiling(case.head_groups, tile, compile_piece),
        ),
    )
    if mesh.size > 1:
        fsdp_config = fsdp.FSDPConfig(
            param_dtype=double,
            reduce_dtype=double,
            reshard_after_forward=True,
            cpu_offload=case.offload,
        )
        fsdp.apply(model, mesh.fsdp_mesh, fsdp_config)
    initialize(model, seed=0, device=torch.device("cpu"))
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
        # The test gathers in an inefficient order.
    )
    initial = {
        name: full_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
            if name.endswith(".bias"):
                to_local(parameter).copy_(torch.tensor(local_ranges(parameter)[0]).sin())
    per_rank = case.num_sequences // mesh.dp_degree
    first = mesh.dp_rank * per_rank
    batch = concat_batches(
        [packed(DOCUMENTS[i], seed=i, vocab_size=44) for i in range(first, first + per_rank)]
    )
    losses = model(batch)
    (losses.sum() / TARGETS[case.num_sequences]).backward()
    optimizer = Optimizer(
        [model], OptimizerSection(max_grad_norm=0.1), all_reduce=partial(all_reduce, None)
    )
    gradients = {
        name: full_tensor(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    norm, _ = optimizer.step(1e-2)
    weights = {
        name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()
    }
    return Outcome(initial, losses.detach(), gradients, float(norm), weights)


@cache
def single_process(config: ModelConfig, num_sequences: int) -> Outcome:
    return run_ranks(train, 1, Case(config=config, num_sequences=num_sequences))[0]


RECOMPUTE_OPTIONS: list[tuple[activation_checkpoint.RecomputePolicy, int, bool]] = [
    ("full", 1, False),
    ("keep_attention", 2, True),
]
TP2 = (("tp", 2),)
TP4 = (("tp", 4),)
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
        for config, sequence, loss in (
            (CONFIG, True, True),
            (CONFIG, False, False),
            (TIED, True, False),
        )
    ),
    Case(TP2, policy="full"),
    Case(TP2, loss_parallel=False, policy="full"),
    Case((("dp_replicate", 2), ("tp", 2)), compiled=True),
    Case(TP2, policy="keep_attention", sequence_parallel=False),
    Case(TP4, policy="keep_attention", compiled=True),
    Case((("dp_shard", 3), ("tp", 2)), num_sequences=3),
    Case((("dp_shard", 2), ("tp", 2)), TIED, loss_parallel=False),
    Case((("dp_shard", 2), ("tp", 2)), compiled=True, policy="full"),
    Case((("dp_shard", 2), ("tp", 2)), offload=True),
    Case((("dp_replicate", 2), ("tp", 2)), sequence_parallel=False),
    Case((("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))),
    Case(TP2, policy="keep_attention", tiled=True),
    Case(TP2, sequence_parallel=False, policy="full", tiled=True),
    Case(TP4, policy="keep_attention", compiled=True, tiled=True),
    Case((("dp_shard", 2), ("tp", 2)), policy="full", tiled=True),
    *(
        Case(
            TP2,
            FOUR,
            sequence,
            policy=policy,
            head_groups=2,
            blocks_per_checkpoint=every,
            tiled=tiled,
        )
        for sequence in (True, False)
        for policy, every, tiled in RECOMPUTE_OPTIONS
    ),
    Case(
        (("dp_shard", 2), ("tp", 2)),
        FOUR,
        policy="keep_attention",
        head_groups=2,
        blocks_per_checkpoint=2,
        tiled=True,
    ),
    Case(TP4, FEW),
    Case(TP4, FEW, sequence_parallel=False, policy="full"),
    Case(TP2, NORMED, sequence_parallel=False),
    Case(TP2, replace(FOUR, qkv_bias=True), policy="keep_attention", head_groups=2, tiled=True),
    Case(TP2, KINDS),
    Case(
        (("dp_shard", 2), ("tp", 2)),
        KINDS,
        policy="keep_attention",
        blocks_per_checkpoint=2,
        tiled=True,
    ),
    Case(TP2, KINDS, sequence_parallel=False, policy="full"),
    Case(TP2, NORMED, compiled=True, policy="full", head_groups=2, tiled=True),
    Case((("dp_shard", 2), ("tp", 2)), NORMED, policy="keep_attention", head_groups=2, tiled=True),
]


# Slow to compile, or made of pairs of features that other cases cover.
SLOW = [
    *(Case(TP2, TIED, sequence, loss) for sequence in (True, False) for loss in (True, False)),
    *(Case(TP4, CONFIG, sequence, loss) for sequence in (True, False) for loss in (True, False)),
    *(
        Case(
            TP2,
            FOUR,
            sequence_parallel=False,
            policy=policy,
            head_groups=2,
            blocks_per_checkpoint=every,
            tiled=tiled,
        )
        for policy, every, tiled in RECOMPUTE_OPTIONS
    ),
    Case(TP2, loss_parallel=False, policy="full"),
    Case((("dp_shard", 2), ("tp", 2)), policy="full", tiled=True),
    Case(
        (("dp_shard", 2), ("tp", 2)),
        FOUR,
        policy="keep_attention",
        head_groups=2,
        blocks_per_checkpoint=2,
        tiled=True,
    ),
    Case((("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))),
    Case((("dp_shard", 3), ("tp", 2)), num_sequences=3),
    *(case for case in CASES if case.compiled and case.config != NORMED),
]


def together() -> list[ParameterSet]:
    """Groups of cases for one set of ranks, so that DTensor derives its shardings once; each
    compiled case alone.
    """
    groups: dict[str, list[Case]] = {}
    for case in CASES:
        # Four ranks are those of the random configurations.
        pace = "slow " * (case in SLOW or case.compiled or case.ranks == 4)
        groups.setdefault(
            f"{pace}{case}" if case.compiled else f"{pace}on {case.ranks}", []
        ).append(case)
    return [
        pytest.param(cases, id=name, marks=[pytest.mark.slow] * name.startswith("slow"))
        for name, cases in groups.items()
    ]


def train_each(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("cases", together())
def test_every_case_equals_one_process(cases: list[Case]) -> None:
    for case, *by_rank in zip(
        cases, *run_ranks(train_each, cases[0].ranks, cases, timeout=240), strict=True
    ):
        expected = single_process(case.config, case.num_sequences)
        for rank, found in enumerate(by_rank):
            data_ranks = len(expected.losses) // len(found.losses)
            of_rank = expected.losses.chunk(data_ranks)[rank // (case.ranks // data_ranks)]
            torch.testing.assert_close(
                found.losses, of_rank, rtol=1e-13, atol=1e-13, msg=f"losses of {case}"
            )
            assert found.norm == pytest.approx(expected.norm, rel=1e-13), case
            for name, tensor_ in expected.initial.items():
                assert torch.equal(found.initial[name], tensor_), (case, name)
            require_close(found.gradients, expected.gradients, case)
            require_close(found.weights, expected.weights, case)


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], case: Case) -> None:
    assert found.keys() == expected.keys(), case
    for name, tensor_ in expected.items():
        largest = float(tensor_.abs().max())
        torch.testing.assert_close(
            found[name], tensor_, rtol=0, atol=1e-12 * largest, msg=f"{name} of {case}"
        )


def local_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    with torch.device("meta"):
        model = Transformer(case.config)
    tensor_parallel.apply(
        model,
        mesh.tp_mesh,
        sequence_parallel=case.sequence_parallel,
        loss_parallel=case.loss_parallel,
    )
    return {name: tuple(to_local(parameter).shape) for name, parameter in model.named_parameters()}


@pytest.mark.ranks
def test_each_rank_holds_its_shard_of_every_matrix() -> None:
    local = run_ranks(local_shapes, 2, Case(TP2))[0]
    block = {
        name.removeprefix("blocks.0."): shape
        for name, shape in local.items()
        if name.startswith("blocks.0.")
    }
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
    assert run_ranks(local_shapes, 2, Case(TP2, NORMED))[0][
        "blocks.0.attention.q_norm.weight"
    ] == (6,)
    assert local["embed.weight"] == local["head.proj.weight"] == (22, 16)
    assert run_ranks(local_shapes, 2, Case(TP2, loss_parallel=False))[0]["head.proj.weight"] == (
        44,
        16,
    )


def residual_shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the residual stream at the block inputs."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | dict(case.sizes), rank=distributed.get_rank())
    model = Transformer(case.config).double()
    tensor_parallel.apply(
        model,
        mesh.tp_mesh,
        sequence_parallel=case.sequence_parallel,
        loss_parallel=case.loss_parallel,
    )
    shapes: list[tuple[int, ...]] = []
    for block in model.transformer_blocks():
        block.register_forward_pre_hook(
            lambda _, arguments: shapes.append(tuple(arguments[0].shape))
        )
    model(packed([24], vocab_size=44))
    return shapes


@pytest.mark.ranks
def test_sequence_parallelism_shards_the_tokens_of_the_residual_stream() -> None:
    assert run_ranks(residual_shapes, 2, Case(TP2))[0] == [(1, 12, 16)] * 2
    assert (
        run_ranks(residual_shapes, 2, Case(TP2, sequence_parallel=False))[0] == [(1, 24, 16)] * 2
    )


def largest_tile(sequence: bool) -> int:  # noqa: FBT001
    """The largest feed-forward tile in tokens of all ranks, with 24 tokens and bytes for 6."""
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    model = Transformer(CONFIG).double()
    tile_tokens: list[int] = []

    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=sequence, loss_parallel=True)
    # A rank computes its shard of the FFN width.
    tile_bytes = 6 * tiling.bytes_per_token(CONFIG.dim, CONFIG.ffn_dim // 2, 8)
    activation_checkpoint.apply(
        model,
        RecomputeConfig(
            "full", tiling=Tiling(tile_bytes=tile_bytes, compile=feed_forward_tokens(tile_tokens))
        ),
    )
    model(packed([24], vocab_size=44)).sum().backward()
    return max(tile_tokens)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", [True, False])
def test_tile_bytes_cover_the_tokens_of_all_ranks(*, sequence: bool) -> None:
    assert run_ranks(largest_tile, 2, sequence) == [6, 6]


def test_problems_name_values_and_divisors() -> None:
    problems = partial(tensor_parallel_problems, CONFIG)
    assert problems(1) == problems(2) == problems(4) == []
    assert problems(3) == [
        "parallelism.tp = 3 must divide model.num_heads = 8",
        "parallelism.tp = 3 must divide model.ffn_dim = 20",
        "parallelism.tp = 3 must divide model.vocab_size = 44",
        "parallelism.tp = 3 must divide model.num_kv_heads = 2 or be a multiple of it (replicated KV heads)",
    ]
    assert len(problems(8)) == 2
    assert len(problems(8, replicate_vocab=True)) == 1


# ---- async TP


def async_tp_matches() -> list[tuple[int, int]]:
    """Per graph: matrix products after an all-gather, and matrix products before a
    reduce-scatter.
    """
    warnings.simplefilter("ignore")
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph, micro_pipeline_tp, post_grad

    found: list[tuple[int, int]] = []

    def count_matches(module: torch.fx.GraphModule, _: object) -> Any:
        joint_graph.joint_graph_passes(module)
        post_grad.view_to_reshape(module)
        gathers = micro_pipeline_tp.find_all_gather_patterns(module.graph)
        scatters = micro_pipeline_tp.find_reduce_scatter_patterns(module.graph)
        after = [micro_pipeline_tp._find_consumer_matmuls(gather.res_node) for gather in gathers]
        before = [
            micro_pipeline_tp._find_producer_matmul(scatter.input_node) for scatter in scatters
        ]
        found.append((sum(map(len, after)), sum(product is not None for product in before)))
        return make_boxed_func(module.forward)

    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    model = Transformer(replace(CONFIG, num_layers=1)).double()
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=True, loss_parallel=True)
    backend = aot_autograd(
        fw_compiler=count_matches, bw_compiler=count_matches, decompositions=select_decomp_table()
    )
    for block in model.transformer_blocks():
        block.compile(fullgraph=True, backend=backend)
    for lengths in ([24],), ([9, 15], [24]):
        model(packed(*lengths, vocab_size=44)).sum().backward()
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_compiler_matches_the_patterns_of_async_tp() -> None:
    """With torch's private passes for async TP: fails when they change."""
    one_sequence, one_sequence_backward, two_sequences, _ = run_ranks(async_tp_matches, 2)[0]
    assert one_sequence == two_sequences == (5, 2)
    # In backward the input of the reduce-scatter is a sum of products, which the passes do not
    # match.
    assert one_sequence_backward[0] >= 2


def test_private_torch_apis_of_async_tp_exist() -> None:
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    assert torch._inductor.config._micro_pipeline_tp is False
    assert callable(_symmetric_memory.enable_symm_mem_for_group)


def losses_outside_the_vocabulary(config: ModelConfig, *, loss_parallel: bool) -> list[int]:
    """Losses that are NaN, of four tokens, for a label and for a token past the last one, and for
    a negative label.
    """
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    with torch.device("meta"):
        model = Transformer(config).double()
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=True, loss_parallel=loss_parallel)
    initialize(model, seed=0, device=torch.device("cpu"))
    found = []
    for name, value in (
        ("labels", config.vocab_size),
        ("tokens", config.vocab_size),
        ("labels", -1),
    ):
        batch = packed([4])
        getattr(batch, name)[0, -2] = value
        losses_BS = model(batch)
        losses_BS.sum().backward()
        grads = [
            to_local(weight.grad).sum() for weight in model.parameters() if weight.grad is not None
        ]
        assert torch.stack(grads).isnan().any()
        found.append(int(losses_BS.isnan().sum()))
    return found


@pytest.mark.ranks
def test_labels_and_tokens_outside_the_vocabulary_never_train() -> None:
    for tied, loss_parallel in ((False, True), (True, True)):
        config = replace(CONFIG, tie_embeddings=tied)
        for found in run_ranks(
            partial(losses_outside_the_vocabulary, loss_parallel=loss_parallel), 2, config
        ):
            # Attention multiplies a NaN with zero for the tokens before it, too.
            assert found == [1, 4, 1]


def apply_to(config: ModelConfig) -> str:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, rank=distributed.get_rank())
    with torch.device("meta"):
        model = Transformer(config)
    with pytest.raises(ValueError, match=r"^parallelism.tp") as raised:
        tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=True, loss_parallel=True)
    return str(raised.value)


@pytest.mark.ranks
def test_a_model_that_the_ranks_do_not_divide_is_refused() -> None:
    config = replace(CONFIG, vocab_size=45, num_heads=3, num_kv_heads=3, ffn_dim=33)
    expected = "; ".join(tensor_parallel_problems(config, 2))
    assert run_ranks(apply_to, 2, config) == [expected] * 2
