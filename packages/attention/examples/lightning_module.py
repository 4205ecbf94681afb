"""Lightning: its Trainer starts the ranks, and a LightningModule shards the batch.

python lightning_module.py
"""

import lightning
import tiny
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from longhaul_attention import ContextParallel, register_transformers


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.model(register_transformers())

    def setup(self, stage):
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        self.cp = ContextParallel(mesh, method="ring")

    def training_step(self, batch, number):
        loss = self.model(**self.cp.shard_batch(batch)).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    batch = tiny.packed(tiny.documents())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        precision="64-true",
        max_steps=1,
        use_distributed_sampler=False,  # All ranks share each sequence.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    with tiny.recorded(module.model) as proof:
        trainer.fit(module, DataLoader([batch], batch_size=None))
    proof.loss = float(trainer.callback_metrics["loss"])
    proof.check("Lightning", batch)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
