"""What the estimator says that a block saves, against the tensors that autograd saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import rope
from models.config import ModelConfig
from models.transformer import TransformerBlock
from trainer.memory.block import BlockMemory
from trainer.trace.tensors import total_bytes


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_saves_as_many_bytes_as_the_estimator_counts(*, qk_norm: bool) -> None:
    config = ModelConfig(
        vocab_size=8,
        dim=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=96,
        qk_norm=qk_norm,
    )
    tokens = 16
    block = TransformerBlock(config).bfloat16()
    x_BSE = torch.randn(1, tokens, config.dim, dtype=torch.bfloat16)
    rotation = rope.cos_sin_table(
        config.rope, config.head_dim, torch.arange(tokens)[None], torch.float32
    )
    saved: dict[int, Tensor] = {}

    def record(x: Tensor) -> Tensor:
        if x.is_floating_point():
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        block(x_BSE, rotation, torch.tensor([[0, tokens]], dtype=torch.int32))
    for given in (rotation, *block.parameters()):
        saved.pop(given.untyped_storage().data_ptr(), None)
    found = sum(x.untyped_storage().nbytes() for x in saved.values())
    assert found == total_bytes(
        BlockMemory(config, config.layer_kinds[0], tokens=tokens).saved("none")
    )


def test_a_tile_holds_equally_many_tokens_of_each_sequence() -> None:
    config = ModelConfig(
        vocab_size=8, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=96
    )
    three_tokens = 3 * 2 * (2 * 96 + 2 * 96 + 64)
    block = BlockMemory(config, config.layer_kinds[0], tokens=16, mlp_tile_bytes=three_tokens)
    assert (block.num_tiles(), block.num_tiles(2)) == (6, 8)
