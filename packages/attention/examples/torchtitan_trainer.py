"""torchtitan 0.2.2's trainer on the ranks of its own "cp" mesh, with packed documents.

torchrun --nproc-per-node 4 torchtitan_trainer.py
"""

import tempfile

import torchtitan_on_cpu as titan

titan.use_cpu()

import torch
from torch import nn
from torchtitan.train import Trainer

from longhaul_attention import ContextParallel


class Attention(nn.Module):
    """Takes the place of a block's inner attention; the trainer sets the documents of each batch."""

    def __init__(self, cp):
        super().__init__()
        self.cp, self.documents = cp, None

    def forward(self, q, k, v, **_):
        return self.cp.attention(*(x.transpose(1, 2) for x in (q, k, v)), self.documents).transpose(1, 2)


class ContextParallelTrainer(Trainer):
    def __init__(self, config):
        super().__init__(config)
        self.cp = ContextParallel(self.parallel_dims.get_mesh("cp"), method="ring")
        self.attentions = [Attention(self.cp) for part in self.model_parts for _ in part.layers]
        blocks = [block for part in self.model_parts for block in part.layers.values()]
        for block, attention in zip(blocks, self.attentions, strict=True):
            block.attention.inner_attention = attention

    def post_dataloading_process(self, input_dict, labels):
        tokens = input_dict["input"]
        ends = (tokens[0] == titan.EOS).nonzero().flatten() + 1  # A document ends with EOS.
        boundaries = torch.cat((ends.new_zeros(1), ends, ends.new_tensor([tokens.shape[1]]))).unique()
        shard = self.cp.shard_batch({"input_ids": tokens, "shift_labels": labels}, boundaries)
        for attention in self.attentions:
            attention.documents = shard["documents"]
        return shard["input_ids"], shard["shift_labels"], {"positions": shard["position_ids"]}, {}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContextParallelTrainer(titan.config(folder, ranks=4))
        titan.prove(trainer)
        trainer.close()


if __name__ == "__main__":
    main()
