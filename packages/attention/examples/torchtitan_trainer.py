"""torchtitan 0.2.2's trainer on the ranks of its own "cp" mesh, with packed documents.

torchrun --nproc-per-node 4 torchtitan_trainer.py
"""

import tempfile

import torchtitan_on_cpu as titan

titan.use_cpu()

import torch
from torch import nn
from torch.nn import functional as F
from torchtitan.train import Trainer

from longhaul_attention import ContextParallel


class Attention(nn.Module):
    """Takes the place of a block's inner attention; the trainer sets the documents of each
    batch.
    """

    def __init__(self, cp):
        super().__init__()
        self.cp = cp
        self.documents = None

    def forward(self, q, k, v, **_):
        return self.cp.attention(
            *(x.transpose(1, 2) for x in (q, k, v)), self.documents
        ).transpose(1, 2)


class ContextParallelTrainer(Trainer):
    def __init__(self, config):
        assert not config.validation.enable, "torchtitan's validator shards batches itself"
        super().__init__(config)
        # torchtitan sums gradients over the ranks, and divides losses by all targets.
        self.cp = ContextParallel(self.parallel_dims.get_optional_mesh("cp"), method="ring")
        blocks = [block for part in self.model_parts for block in part.layers.values()]
        self.attentions = [Attention(self.cp) for _ in blocks]
        for block, attention in zip(blocks, self.attentions, strict=True):
            block.attention.inner_attention = attention

    def post_dataloading_process(self, input_dict, labels):
        tokens = input_dict["input"]
        # A document ends with EOS.
        starts = F.pad(tokens[:, :-1] == titan.EOS, (1, 0), value=True)
        positions = (places := torch.arange(tokens.shape[1])) - (places * starts).cummax(1).values
        shard = self.cp.shard_batch(
            {"input_ids": tokens, "shift_labels": labels, "position_ids": positions}
        )
        for attention in self.attentions:
            attention.documents = shard["documents"]
        return shard["input_ids"], shard["shift_labels"], {"positions": shard["position_ids"]}, {}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContextParallelTrainer(titan.config(folder, ranks=4))
        titan.prove(trainer)
        trainer.close()
