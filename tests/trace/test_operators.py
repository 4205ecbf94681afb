"""What a trace counts of single operators, beside counts by hand and torch's own fake tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from trainer.trace.attention_calls import attention_call, scratch_bytes
from trainer.trace.compiled import compiler_for
from trainer.trace.fake_kernels import FakeKernels
from trainer.trace.operators import OpCounterMode, StorageTracker
from trainer.trace.pieces import Allocation, ProductKey

aten = torch.ops.aten


def seen(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """Pairs, one by one; the last query sees the last key."""
    return sum(
        not causal
        or (key <= (own := query + keys - queries) and (window is None or key > own - window))
        for query in range(queries)
        for key in range(keys)
    )


def drawn_call(rng: random.Random) -> tuple[list[int], list[int], bool, int | None]:
    """Lengths of queries and keys of the sequences in a call, whether it is causal, and its
    window.
    """
    causal = rng.random() < 0.7
    queries = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
    keys = [length + rng.randint(0, 9) for length in queries]
    return queries, keys, causal, rng.choice((None, 1, 2, 7, 100)) if causal else None


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("seed", range(20))
def test_flops_of_a_varlen_call_are_those_of_its_pairs(seed: int) -> None:
    queries, keys, causal, window = drawn_call(random.Random(seed))
    q = torch.empty(sum(queries), 4, 16, device="meta")
    k = torch.empty(sum(keys), 2, 16, device="meta")
    lengths = (ends(queries), ends(keys), max(queries), max(keys))
    options = {} if window is None else {"window_size_left": window - 1}
    pairs = sum(
        seen(each, others, causal=causal, window=window)
        for each, others in zip(queries, keys, strict=True)
    )
    forward = attention_call(
        aten._flash_attention_forward, (q, k, k, *lengths, 0.0, causal, False), options
    )
    backward = attention_call(
        aten._flash_attention_backward,
        (q, q, k, k, q, q, *lengths, 0.0, causal, None, None),
        options,
    )
    assert forward is not None
    assert backward is not None
    assert forward.flops == 2 * 2 * 16 * 4 * pairs
    assert backward.flops == 2 * 5 * 16 * 4 * pairs


def test_scratch_is_that_of_the_pages_table() -> None:
    """docs/memory.md, per token and query head of width H = 64: FlashAttention 4 H + 4, cuDNN 6 H
    + 4; grouped 4 H more.
    """
    tokens = 4096
    heads = 8
    kv_heads = 2
    width = 64
    q, k = (
        torch.empty(tokens, each, width, dtype=torch.bfloat16, device="meta")
        for each in (heads, kv_heads)
    )
    lengths = (ends([tokens]), ends([tokens]), tokens, tokens)
    packed = (q, q, k, k, q, q, *lengths, 0.0, True, None, None)
    flash, deterministic = (
        scratch_bytes(aten._flash_attention_backward, packed, deterministic=each)
        for each in (False, True)
    )
    dense_q, dense_k = (x[None].transpose(1, 2) for x in (q, k))
    dense = (
        dense_q,
        dense_q,
        dense_k,
        dense_k,
        dense_q,
        dense_q,
        q,
        q,
        None,
        None,
        None,
        tokens,
        tokens,
        0.0,
        True,
    )
    cudnn = scratch_bytes(
        aten._scaled_dot_product_cudnn_attention_backward, dense, deterministic=False
    )
    padded = tokens + 128
    assert flash == heads * (padded * (4 * width + 4) + tokens * 4 * width)
    assert cudnn == heads * tokens * (6 * width + 4 + 4 * width)
    # As many sums of the gradient of queries as heads do not fill of 132 multiprocessors.
    assert deterministic - flash == 16 * heads * padded * 4 * width


OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y.T,
    "sum of products in float32": lambda x, y: torch.mm(x, y.T, out_dtype=torch.float32),
    "broadcast": lambda x, y: x[:, None] * y[None],
    "types": lambda x, _: x.float() + x,
    "reduction": lambda x, _: torch.linalg.vector_norm(
        x, dim=-1, keepdim=True, dtype=torch.float32
    ),
    "views": lambda x, _: x.view(3, 2, 8).transpose(0, 1)[1:].flatten(1),
    "several results": lambda x, _: x.split([1, 5]),
    "in place": lambda x, y: x.mul_(2).add_(y[:6]),
    "sort": lambda x, _: x.sort(dim=-1),
    "concatenation": lambda x, y: torch.cat([x, y]),
    "index": lambda x, _: x.index_select(0, x.new_zeros(4, dtype=torch.int64)),
    "fills": lambda x, _: (x.new_zeros(3, 2), torch.empty_like(x), torch.full((2,), 7.0)),
    "loss": lambda x, _: F.cross_entropy(x.float(), x.new_zeros(6, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_short_way_gives_what_torchs_fake_tensors_give(name: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def results(run: Callable[..., Any]) -> list[tuple[Any, ...]]:
        with mode:
            x = torch.empty(6, 8, dtype=torch.bfloat16)
            y = torch.empty(7, 8, dtype=torch.bfloat16)
        found = run(OPERATORS[name], x, y)
        tensors = [found] if isinstance(found, Tensor) else [*found]
        storages = [x.untyped_storage()._cdata, y.untyped_storage()._cdata]
        return [
            (
                each.shape,
                each.stride(),
                each.dtype,
                each.device,
                each.untyped_storage()._cdata in storages,
            )
            for each in tensors
        ]

    def as_torch(operator: Callable[..., Any], *inputs: Tensor) -> Any:
        with mode:
            return operator(*inputs)

    def short(operator: Callable[..., Any], *inputs: Tensor) -> Any:
        with OpCounterMode() as counter:
            counter._fakes = FakeKernels(mode)
            # The second call is laid out as the first was.
            operator(*inputs)
            return operator(*inputs)

    assert results(short) == results(as_torch)


def test_results_are_laid_out_as_those_of_an_equal_call() -> None:
    """1 and 1.0 are equal, but not to the type of the result."""
    with OpCounterMode():
        found = [torch.full((length,), number) for length in (3, 5) for number in (1, 1.0) * 2]
    assert [x.dtype for x in found] == [torch.int64, torch.float32] * 4
    assert [len(x) for x in found] == [3] * 4 + [5] * 4


# ---- compiled pieces


class Allocated(StorageTracker):
    """Shape and phase of every allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.found = list[tuple[tuple[int, ...], str]]()

    def add(self, x: Tensor, phase: str, operator: str) -> None:
        self.phase = phase
        super().add(x, phase, operator)

    def on_allocation(self, key: int, allocation: Allocation) -> None:
        del key
        if "empty" not in allocation.operator:
            self.found.append((allocation.shape, self.phase))


def allocated(piece: Callable[..., Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """By a compiled piece of two tensors [64, 32], forward and backward."""
    storages = Allocated()
    counter = OpCounterMode(storages)
    with counter.enable():
        x, y = (torch.empty(64, 32).requires_grad_() for _ in range(2))
        counter.phase = "forward"
        out = compiler_for(counter)(piece)(x, y)
        counter.phase = "backward"
        torch.autograd.grad(out, [x, y], torch.empty_like(out))
    return storages.found


def test_what_kernels_fuse_takes_no_memory() -> None:
    """A gate writes its product, and the gradients of its two inputs."""
    found = allocated(lambda x, y: F.silu(x) * y)
    assert found == [((64, 32), "forward"), *[((64, 32), "backward")] * 2]


def test_products_read_and_write_memory_in_a_compiled_piece() -> None:
    """The square is written for the product, which is one of the results."""
    found = allocated(lambda x, y: (x * x) @ y.T)
    assert sorted(shape for shape, phase in found if phase == "forward") == [(64, 32), (64, 64)]


def test_a_mask_of_all_pairs_of_tokens_takes_no_memory_of_the_host() -> None:
    """32 GiB of real integers, in a compiled piece too."""
    tokens = 1 << 16

    def within(x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(tokens)
        near = places[:, None] - places < 64
        return x.sum() * near.any() + y.sum()

    counter = OpCounterMode()
    with counter.enable():
        places = torch.arange(tokens)
        assert not isinstance(places, FakeTensor), "control flow may depend on it"
        assert isinstance(places[:, None] - places, FakeTensor)
    assert allocated(within)


def test_an_operator_does_not_read_what_it_only_writes_to() -> None:
    counter = OpCounterMode()
    with counter.enable():
        x, y, z = (torch.empty(1024) for _ in range(3))
        torch.mul(x, y, out=z)
    assert counter.work.moved_bytes.total() == 3 * x.nbytes


def test_a_copy_of_numbers_onto_themselves_moves_nothing() -> None:
    """`x[i] += y` ends with one."""
    counter = OpCounterMode()
    with counter.enable():
        x, y = torch.empty(2, 1024), torch.empty(1024)
        x[0] += y
        assert counter.work.moved_bytes.total() == 3 * y.nbytes
        x[0] = x[1]
    assert counter.work.moved_bytes.total() == 5 * y.nbytes


def test_a_product_that_is_added_to_a_sum_reads_and_writes_the_sum() -> None:
    """A bias is no sum: it is read beside the product."""
    counter = OpCounterMode()
    with counter.enable():
        x, weight, total = (torch.empty(64, 64) for _ in range(3))
        torch.addmm(total[0], x, weight)
        assert counter.work.moved_bytes.total() == 0
        total.addmm_(x, weight)
    assert counter.work.moved_bytes.total() == 2 * total.nbytes


def test_products_of_groups_are_told_from_single_ones() -> None:
    counter = OpCounterMode()
    with counter.enable():
        rows = torch.empty(64, 32, dtype=torch.bfloat16)
        weights = torch.empty(2, 32, 32, dtype=torch.bfloat16)
        rows @ weights[0]
        F.grouped_mm(rows, weights, offs=torch.tensor([32, 64], dtype=torch.int32))
    assert counter.work.products == {
        ProductKey("setup", 32): 2 * 64 * 32 * 32,
        ProductKey("setup", 32, is_grouped=True): 2 * 64 * 32 * 32,
    }
