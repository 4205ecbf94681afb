"""The loss head, compared with torch's cross-entropy: values, gradients and memory.

Shape suffixes: B batch, S tokens, E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.batch import IGNORE_INDEX
from models.loss_head import LinearCrossEntropy, LossHead, VocabShard
from tests.models.small_models import SMALL

B, S, E, V = 2, 11, 6, 13
CHUNKS = [1, 5, 7, B * S, 1000]


def linear_cross_entropy(x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor, chunk: int) -> Tensor:
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
    losses = F.cross_entropy(logits, labels_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
    return losses.view_as(labels_BS)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_losses_and_gradients_equal_torch_for_any_chunk(chunk: int) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    ours, torchs = linear_cross_entropy(x_BSE, weight_VE, labels_BS, chunk), plain(x_BSE, weight_VE, labels_BS)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-13)
    leaves = (x_BSE, weight_VE)
    for found, expected in zip(
        torch.autograd.grad(ours.sum() / 17, leaves), torch.autograd.grad(torchs.sum() / 17, leaves), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_gradients_equal_finite_differences() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, labels_BS, 5).sum() / 3, (x_BSE, weight_VE))


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
    expected = torch.autograd.grad(plain(x_BSE, weight_VE, labels_BS), leaves, torch.full_like(losses_BS, 0.25))
    for found, gradient in zip(torch.autograd.grad(losses_BS, leaves, odd.double()), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13)


def test_unequal_target_weights_make_every_gradient_nan() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    losses_BS = linear_cross_entropy(x_BSE, weight_VE, labels_BS, 5)
    weights = torch.ones_like(losses_BS)
    weights[1, 0] = 2
    assert all(grad.isnan().all() for grad in torch.autograd.grad(losses_BS, (x_BSE, weight_VE), weights))


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
    head, x_BSE, labels_BS = LossHead(SMALL), torch.randn(B, S, SMALL.dim), inputs()[2]
    torch.nn.init.ones_(head.norm.weight)
    with AllocationRecorder() as training:
        losses_BS = head(x_BSE, labels_BS)
    with torch.no_grad(), AllocationRecorder() as evaluation:
        assert torch.equal(head(x_BSE, labels_BS), losses_BS)
    assert (training.products, evaluation.products) == (3, 1)


class AllocationRecorder(TorchDispatchMode):
    """Records the largest tensor allocated and the number of matrix products."""

    elements = 0
    products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        out = function(*arguments, **(options or {}))
        self.products += function.overloadpacket is torch.ops.aten.mm
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_full_logits_are_never_allocated() -> None:
    tokens, width, vocab_size, chunk = 64, 2, 1 << 16, 4
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
    torch.testing.assert_close(head(x_BSE, labels_BS), plain(normed, head.proj.weight, labels_BS), rtol=0, atol=1e-13)


# ---- correct predictions


def correct_by_shards(x_BSE: Tensor, weight_VE: Tensor, labels_BS: Tensor, *, chunk: int, parts: int = 1) -> Tensor:
    """[B, S] with a vocabulary of `parts` shards, whose all-reduces are simulated; all shards must agree."""
    size = weight_VE.shape[0] // parts
    waiting: list[Tensor] = []

    def run(part: int, numbers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One shard whose all-reduces return the given values, and the operand of its next all-reduce."""
        given, asked = iter(numbers), list[Tensor]()

        def exchange(x: Tensor) -> Tensor:
            asked.append(x.clone())
            return next(given, x)

        found_BS = torch.zeros_like(labels_BS)
        vocabulary = VocabShard(vocab_start_index=part * size, all_reduce_max=exchange, all_reduce_sum=exchange)
        mine_VE = weight_VE.detach()[part * size : (part + 1) * size]
        LinearCrossEntropy.apply(x_BSE.detach(), mine_VE, labels_BS, chunk, vocabulary, found_BS)
        return found_BS, asked

    for _ in range(3 * -(-labels_BS.numel() // chunk)):
        asked = [run(part, waiting)[1][len(waiting)] for part in range(parts)]
        is_sum = len(waiting) % 3 == 2  # In every chunk: the highest, the first of the highest, sums.
        together = torch.stack(asked)
        waiting.append(together.sum(0) if is_sum else together.amax(0))
    found = [run(part, waiting)[0] for part in range(parts)]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_correct_means_argmax_for_any_vocabulary_sharding(chunk: int, parts: int) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    weight_VE = torch.cat([weight_VE.detach()] * 2)[: 12 + 12]  # Every logit but one is there twice: ties.
    likeliest_BS = (x_BSE.detach() @ weight_VE.T).argmax(-1)
    labels_BS = labels_BS.where((torch.arange(S) % 2 == 0) | (labels_BS == IGNORE_INDEX), likeliest_BS)
    expected_BS = (likeliest_BS == labels_BS).long()
    assert 5 < int(expected_BS.sum()) < labels_BS.numel() - 5
    assert torch.equal(correct_by_shards(x_BSE, weight_VE, labels_BS, chunk=chunk, parts=parts), expected_BS)


@pytest.mark.parametrize("parts", [1, 2])
def test_argmax_tie_goes_to_the_lowest_token(parts: int) -> None:
    labels_BS = torch.arange(4).view(1, 4)
    equal = correct_by_shards(torch.ones(1, 4, 2), torch.ones(4, 2), labels_BS, chunk=3, parts=parts)
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
