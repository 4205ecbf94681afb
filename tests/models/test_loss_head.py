"""The loss head, compared with torch's cross-entropy: values, gradients and memory.

Shape suffixes: B batch, S tokens, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import wide_products
from models.attention_core import LocalAttentionCore
from models.batch import IGNORE_INDEX
from models.loss_head import (
    IDENTITY,
    EagerSoftmax,
    LinearCrossEntropy,
    LogitTransform,
    LossHead,
    VocabShard,
)
from models.tiling import CompilePiece
from models.transformer import Transformer
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling
from parallelisms.fsdp import FSDPConfig
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.parallelize import parallelize
from tests.models.small_models import SMALL, TouchedElements
from trainer.trace.operators import fake_process_group

B = 2
S = 11
E = 6
V = 13
CHUNKS = [1, 5, 7, B * S, 1000]
COMPILED: CompilePiece = lru_cache(partial(torch.compile, fullgraph=True, backend="aot_eager"))
TRANSFORMS = {"plain": IDENTITY, "scaled": LogitTransform(2.0), "capped": LogitTransform(0.5, 3.0)}
T = TypeVar("T")
AllReduce = Callable[[Tensor], Tensor]


def linear_cross_entropy(
    x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor, chunk: int
) -> Tensor:
    losses_BS: Tensor = LinearCrossEntropy.apply(x_BSE, weight_VE, labels_BS, chunk, VocabShard())
    return losses_BS


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_BSE = torch.randn(B, S, E, generator=generator, dtype=torch.float64)
    weight_VE = torch.randn(V, E, generator=generator, dtype=torch.float64)
    labels_BS = torch.randint(V, (B, S), generator=generator)
    labels_BS[0, 3:6] = labels_BS[1, -1] = labels_BS[0, 0] = IGNORE_INDEX
    return x_BSE.to(dtype).requires_grad_(), weight_VE.to(dtype).requires_grad_(), labels_BS


def plain(x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor) -> Tensor:
    logits = (x_BSE @ weight_VE.T).flatten(0, 1)
    losses = F.cross_entropy(
        logits, labels_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view_as(labels_BS)


def transformed(
    x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor, transform: LogitTransform
) -> Tensor:
    """`plain`, of scaled and capped logits."""
    logits = (x_BSE @ weight_VE.T).flatten(0, 1) / transform.scaling
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    losses = F.cross_entropy(
        logits, labels_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view_as(labels_BS)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("compile_piece", [None, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("parts", [1, 2])
def test_losses_and_gradients_equal_torch_in_every_variant(
    compile_piece: CompilePiece | None, transform: LogitTransform, parts: int
) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    with torch.no_grad():
        weight_VE = torch.cat((weight_VE, weight_VE[:1] / 2))
    weight_VE.requires_grad_()
    rows = weight_VE.shape[0] // parts

    def run(
        part: int, all_reduce_max: AllReduce, all_reduce_sum: AllReduce
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = VocabShard(part * rows, parts, all_reduce_max, all_reduce_sum)
        mine_VE = weight_VE.detach()[part * rows : (part + 1) * rows].requires_grad_()
        # 22 tokens: the last chunk is shorter.
        losses_BS = LinearCrossEntropy.apply(
            x_BSE, mine_VE, labels_BS, 8, shard, None, transform, compile_piece
        )
        return losses_BS, *torch.autograd.grad(losses_BS.sum() / 17, (x_BSE, mine_VE))

    losses, grads_x, grads_weight = zip(*on_shards(parts, run), strict=True)
    expected_BS = transformed(x_BSE, weight_VE, labels_BS, transform)
    expected_x, expected_weight = torch.autograd.grad(expected_BS.sum() / 17, (x_BSE, weight_VE))
    for losses_BS in losses:
        torch.testing.assert_close(losses_BS, expected_BS, rtol=0, atol=1e-13)
    torch.testing.assert_close(sum(grads_x), expected_x, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.cat(grads_weight), expected_weight, rtol=0, atol=1e-14)


def test_compiled_label_outside_the_vocabulary_is_nan() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    labels_BS[0, 1] = V
    losses_BS = LinearCrossEntropy.apply(
        x_BSE, weight_VE, labels_BS, 8, VocabShard(), None, IDENTITY, COMPILED
    )
    assert losses_BS.isnan().nonzero().tolist() == [[0, 1]]
    assert all(
        grad.isnan().any() for grad in torch.autograd.grad(losses_BS.sum(), (x_BSE, weight_VE))
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_losses_and_gradients_equal_torch_for_any_chunk(chunk: int) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    ours = linear_cross_entropy(x_BSE, weight_VE, labels_BS, chunk)
    torchs = plain(x_BSE, weight_VE, labels_BS)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-13)
    leaves = (x_BSE, weight_VE)
    for found, expected in zip(
        torch.autograd.grad(ours.sum() / 17, leaves),
        torch.autograd.grad(torchs.sum() / 17, leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_gradients_equal_finite_differences() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, labels_BS, 5).sum() / 3, (x_BSE, weight_VE)
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_token_without_target_has_zero_loss_and_gradient(chunk: int) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, chunk)
    (dx,) = torch.autograd.grad(losses_BS.sum(), x_BSE)
    assert torch.equal(losses_BS != 0, labels_BS != IGNORE_INDEX)
    assert torch.equal((dx != 0).any(-1), labels_BS != IGNORE_INDEX)


@pytest.mark.parametrize("label", [-1, None, 10**6], ids=str)
def test_label_outside_the_vocabulary_is_nan(label: int | None) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    labels_BS = labels_BS.clone()
    labels_BS[0, 1] = weight_VE.shape[0] if label is None else label
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 2)
    assert losses_BS.isnan().nonzero().tolist() == [[0, 1]]
    losses_BS.sum().backward()
    assert x_BSE.grad is not None
    assert weight_VE.grad is not None
    assert x_BSE.grad[0, 1].isnan().all()
    assert weight_VE.grad.isnan().all()


def test_batch_without_targets_has_zero_losses_and_gradients() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, torch.full_like(labels_BS, IGNORE_INDEX), 5)
    dx, dweight = torch.autograd.grad(losses_BS.sum() / 7, (x_BSE, weight_VE))
    assert losses_BS.count_nonzero() == dx.count_nonzero() == dweight.count_nonzero() == 0


def test_common_target_weight_scales_gradients_whatever_other_tokens_have() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    leaves = (x_BSE, weight_VE)
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    odd = torch.where(labels_BS == IGNORE_INDEX, 3.0, 0.25)
    expected = torch.autograd.grad(
        plain(x_BSE, weight_VE, labels_BS), leaves, torch.full_like(losses_BS, 0.25)
    )
    for found, gradient in zip(
        torch.autograd.grad(losses_BS, leaves, odd.double()), expected, strict=True
    ):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13)


def test_unequal_target_weights_make_every_gradient_nan() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    weights = torch.ones_like(losses_BS)
    weights[1, 0] = 2
    assert all(
        grad.isnan().all() for grad in torch.autograd.grad(losses_BS, (x_BSE, weight_VE), weights)
    )


def test_nan_loss_is_not_masked() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    with torch.no_grad():
        x_BSE[1, 2] = torch.nan
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    assert losses_BS.sum().isnan()
    assert all(g.isnan().any() for g in torch.autograd.grad(losses_BS.sum(), (x_BSE, weight_VE)))


def test_extreme_logits_do_not_overflow() -> None:
    x_BSE, weight_VE, labels_BS = inputs(torch.float32)
    found = linear_cross_entropy(x_BSE * 1e4, weight_VE, labels_BS, 5)
    exact = plain(x_BSE.double() * 1e4, weight_VE.double(), labels_BS)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-1)


def test_bfloat16_inputs_give_float32_losses_and_close_gradients() -> None:
    x_BSE, weight_VE, labels_BS = inputs(torch.bfloat16)
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    assert losses_BS.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (x_BSE, weight_VE)]
    expected_BS = plain(exact[0], exact[1], labels_BS)
    torch.testing.assert_close(losses_BS.double(), expected_BS, rtol=0, atol=0.05)
    found = torch.autograd.grad(losses_BS.sum() / 17, (x_BSE, weight_VE))
    expected = torch.autograd.grad(expected_BS.sum() / 17, exact)
    for ours, gradient in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - gradient).abs().max() < 0.02 * gradient.abs().max()


def test_no_grad_gives_the_same_losses_with_one_matrix_product() -> None:
    head = LossHead(SMALL)
    x_BSE = torch.randn(B, S, SMALL.dim)
    labels_BS = inputs()[2]
    torch.nn.init.ones_(head.norm.weight)
    with AllocationRecorder() as training:
        losses_BS = head(x_BSE, labels_BS)
    with torch.no_grad(), AllocationRecorder() as evaluation:
        assert torch.equal(head(x_BSE, labels_BS), losses_BS)
    assert (training.products, evaluation.products) == (3, 1)


aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_)


class AllocationRecorder(TorchDispatchMode):
    """Records the largest tensor allocated and the number of matrix products."""

    elements = 0
    products = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        out = function(*arguments, **(options or {}))
        self.products += function.overloadpacket in PRODUCTS
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


def test_full_logits_are_never_allocated() -> None:
    tokens = 64
    width = 2
    vocab_size = 1 << 16
    chunk = 4
    head = LossHead(replace(SMALL, dim=width, vocab_size=vocab_size), chunk_mib=1)
    torch.nn.init.ones_(head.norm.weight)
    labels_BS = torch.randint(vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with AllocationRecorder() as seen:
        head(torch.randn(1, tokens, width, requires_grad=True), labels_BS).sum().backward()
    # 1 MiB of float32 logits: four tokens.
    assert seen.elements == chunk * vocab_size
    assert seen.products == 3 * tokens // chunk


def test_chunk_is_at_least_one_token() -> None:
    head = LossHead(replace(SMALL, vocab_size=1 << 19), chunk_mib=1)
    torch.nn.init.ones_(head.norm.weight)
    with AllocationRecorder() as seen:
        head(torch.randn(1, 3, SMALL.dim), torch.tensor([[1, 2, 3]]))
    assert seen.products == 3 * 3


def test_head_normalizes_before_projecting() -> None:
    head = LossHead(SMALL).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head.norm.weight.copy_(torch.rand(SMALL.dim, generator=generator, dtype=torch.float64))
    x_BSE = torch.randn(B, S, SMALL.dim, generator=generator, dtype=torch.float64)
    labels_BS = inputs()[2]
    normed = F.rms_norm(x_BSE, (SMALL.dim,), head.norm.weight, SMALL.norm_eps)
    torch.testing.assert_close(
        head(x_BSE, labels_BS), plain(normed, head.proj.weight, labels_BS), rtol=0, atol=1e-13
    )


# ---- correct predictions


def on_shards(parts: int, run: Callable[[int, AllReduce, AllReduce], T]) -> list[T]:
    """Results of `run(part, all_reduce_max, all_reduce_sum)` for each part of the vocabulary.

    Every part runs again for each all-reduce, with the results of those before it.
    """
    reduced: list[Tensor] = []
    while True:
        operands: list[list[tuple[str, Tensor]]] = [[] for _ in range(parts)]

        def reduce(part: int, kind: str, x: Tensor) -> Tensor:
            operands[part].append((kind, x.clone()))  # noqa: B023 - called before the next round
            index = len(operands[part]) - 1  # noqa: B023
            return x.copy_(reduced[index]) if index < len(reduced) else x

        results = [
            run(part, partial(reduce, part, "max"), partial(reduce, part, "sum"))
            for part in range(parts)
        ]
        index = len(reduced)
        if index == len(operands[0]):
            return results
        stacked = torch.stack([of_part[index][1] for of_part in operands])
        reduced.append(stacked.sum(0) if operands[0][index][0] == "sum" else stacked.amax(0))


def correct_by_shards(
    x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor, *, chunk: int, parts: int = 1
) -> Tensor:
    """[B, S] with a vocabulary of `parts` shards, whose all-reduces are simulated; all shards must
    agree.
    """
    size = weight_VE.shape[0] // parts

    def run(part: int, all_reduce_max: AllReduce, all_reduce_sum: AllReduce) -> Tensor:
        correct_BS = torch.zeros_like(labels_BS)
        shard = VocabShard(part * size, parts, all_reduce_max, all_reduce_sum)
        mine_VE = weight_VE.detach()[part * size : (part + 1) * size]
        LinearCrossEntropy.apply(x_BSE.detach(), mine_VE, labels_BS, chunk, shard, correct_BS)
        return correct_BS

    first, *others = on_shards(parts, run)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_correct_means_argmax_for_any_vocabulary_sharding(chunk: int, parts: int) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    # Every logit but one is there twice: ties.
    weight_VE = torch.cat([weight_VE.detach()] * 2)[: 12 + 12]
    likeliest_BS = (x_BSE.detach() @ weight_VE.T).argmax(-1)
    labels_BS = labels_BS.where(
        (torch.arange(S) % 2 == 0) | (labels_BS == IGNORE_INDEX), likeliest_BS
    )
    expected_BS = (likeliest_BS == labels_BS).long()
    assert 5 < int(expected_BS.sum()) < labels_BS.numel() - 5
    assert torch.equal(
        correct_by_shards(x_BSE, weight_VE, labels_BS, chunk=chunk, parts=parts), expected_BS
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_argmax_tie_goes_to_the_lowest_token(parts: int) -> None:
    labels_BS = torch.arange(4).view(1, 4)
    equal = correct_by_shards(
        torch.ones(1, 4, 2), torch.ones(4, 2), labels_BS, chunk=3, parts=parts
    )
    assert equal.tolist() == [[1, 0, 0, 0]]


def test_head_reports_correct_only_if_asked() -> None:
    torch.manual_seed(0)
    head = LossHead(replace(SMALL, vocab_size=V, dim=E), chunk_mib=0)
    x_BSE, _, labels_BS = inputs(torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        alone_BS = head(x_BSE, labels_BS)
        head.reports_correct = True
        losses_BS, hits_BS = head(x_BSE, labels_BS).unbind(-1)
        logits_BSV = head.norm(x_BSE) @ head.proj.weight.T
    assert torch.equal(alone_BS, losses_BS)
    assert torch.equal(hits_BS, (logits_BSV.argmax(-1) == labels_BS).float())


# ---- compilation


def test_only_training_compiles_the_softmax() -> None:
    compiled: list[str] = []

    def compile_piece(piece: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(piece.__name__)
        return piece

    head = LossHead(SMALL)
    x_BSE = torch.randn(B, S, SMALL.dim)
    labels_BS = inputs()[2]
    torch.nn.init.ones_(head.norm.weight)
    head.compile_piece = compile_piece
    with torch.no_grad():
        evaluated_BS = head(x_BSE, labels_BS)
    assert compiled == []
    torch.testing.assert_close(head(x_BSE, labels_BS), evaluated_BS)
    assert compiled == ["row_statistics", "softmax_gradient"]


def test_a_compiled_model_compiles_its_loss_head() -> None:
    with torch.device("meta"):
        model = Transformer(SMALL)
    with fake_process_group(0, 1):
        parallelize(
            model,
            Mesh("cpu", dict.fromkeys(AXES, 1), rank=0),
            core=LocalAttentionCore(),
            recompute_config=RecomputeConfig("full", tiling=Tiling(compile=COMPILED)),
            fsdp_config=FSDPConfig(
                param_dtype=torch.float32, reduce_dtype=torch.float32, reshard_after_forward=True
            ),
            compiled=True,
        )
    assert model.head is not None
    assert model.head.compile_piece is COMPILED


# ---- passes over the logits


@pytest.mark.usefixtures("products_as_on_cuda")
def test_wide_products_round_neither_logits_nor_the_sum_of_the_weight_gradient() -> None:
    x_BSE, weight_VE, labels_BS = inputs(torch.bfloat16)
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    exact = [x.detach().double().requires_grad_() for x in (x_BSE, weight_VE)]
    expected_BS = plain(exact[0], exact[1], labels_BS)
    torch.testing.assert_close(losses_BS.double(), expected_BS, rtol=0, atol=2e-6)
    for ours, right in zip(
        torch.autograd.grad(losses_BS.sum() / 17, (x_BSE, weight_VE)),
        torch.autograd.grad(expected_BS.sum() / 17, exact),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - right).abs().max() < 0.006 * right.abs().max()


def test_eager_passes_move_30_bytes_for_each_float32_logit_of_a_16_bit_gradient() -> None:
    """The maximum reads 4, subtraction and exponential move 8 each, the sum reads 4, the gradient
    moves 4 + 2.
    """
    softmax = EagerSoftmax(torch.rand(3, 4096), torch.tensor([[5], [-1], [7]]), IDENTITY)
    with TouchedElements(3 * 4096) as seen:
        softmax.statistics()
        softmax.gradient(torch.rand(3, 1), torch.bfloat16)
    assert seen.by_dtype == {torch.float32: 7 * 3 * 4096, torch.bfloat16: 3 * 4096}


def test_only_16_bit_tensors_on_cuda_have_products_in_float32() -> None:
    with FakeTensorMode():
        x_CE, weight_VE = (torch.empty(n, 8, device="cuda", dtype=torch.bfloat16) for n in (7, 32))
        assert wide_products.products_are_wide(x_CE)
        assert not wide_products.products_are_wide(x_CE.float())
        assert wide_products.wide_product(x_CE, weight_VE).dtype == torch.float32
    assert not wide_products.products_are_wide(torch.empty(1, dtype=torch.bfloat16))


def test_products_are_added_up_by_an_overload_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which knows the overloads of CUDA."""
    monkeypatch.setattr(wide_products, "products_are_wide", lambda _: True)
    x_CE, grad_CV, total_VE = (
        torch.empty(shape, device="meta", dtype=dtype)
        for shape, dtype in (
            ((7, 8), torch.bfloat16),
            ((7, 32), torch.bfloat16),
            ((32, 8), torch.float32),
        )
    )
    with OverloadRecorder() as seen:
        wide_products.add_weight_grad(total_VE, grad_CV, x_CE)
    assert seen.overloads == [aten.addmm.dtype_out]


class OverloadRecorder(TorchDispatchMode):
    """Records what is called, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.overloads: list[Any] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        if not function.is_view:
            self.overloads.append(function)
        return function(*arguments, **(options or {}))
