"""Whole batches, padded and sharded: what the parts that ranks read from disk must equal."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from models.batch import IGNORE_INDEX, Batch
from parallelisms.context.context_parallel import ContextParallel


def shard_batch(core: ContextParallel, batch: Batch) -> Batch:
    """The tokens of this rank, of a batch that is padded first; the boundaries stay those of the
    full sequences.
    """
    batch = pad_batch(batch, core.seq_len_divisor)
    return replace(
        batch.map_tokens(lambda x_BT: core.shard(x_BT, batch.boundaries)),
        num_computed_pairs=core.attention_pairs(batch.boundaries),
    )


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """Pads every sequence to a length divisible by `multiple`, with one more document that has no
    labels.
    """
    batch_size, seq_len = batch.tokens.shape
    num_padding = -seq_len % multiple
    if not num_padding:
        return batch
    padding_id = batch.document_ids[:, -1:] + 1
    new_end = torch.full_like(batch.boundaries[:, :1], seq_len + num_padding)
    return replace(
        batch,
        tokens=F.pad(batch.tokens, (0, num_padding)),
        labels=F.pad(batch.labels, (0, num_padding), value=IGNORE_INDEX),
        positions=torch.cat(
            [batch.positions, torch.arange(num_padding).expand(batch_size, -1)], dim=1
        ),
        document_ids=torch.cat([batch.document_ids, padding_id.expand(-1, num_padding)], dim=1),
        boundaries=torch.cat([batch.boundaries, new_end], dim=1),
        num_computed_pairs=batch.num_computed_pairs
        + batch_size * num_padding * (num_padding + 1) // 2,
    )
