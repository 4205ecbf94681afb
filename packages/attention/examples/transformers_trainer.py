"""transformers' Trainer: a class in front of it, and the model's attention.

torchrun --nproc-per-node 4 transformers_trainer.py
"""

import tempfile

import tiny
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from longhaul_attention import ContextParallel, ContextParallelTrainer, register_transformers


class ShardedTrainer(ContextParallelTrainer, Trainer):
    """Trainer, for ranks that share sequences."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=len(tiny.LENGTHS), **tiny.ARGUMENTS
        )
        cp = ContextParallel(
            init_device_mesh("cpu", (distributed.get_world_size(),)), method="allgather"
        )
        flatten = DataCollatorWithFlattening()
        seen = []

        def collate(examples):
            seen.append([example["input_ids"] for example in examples])
            return flatten(examples)

        dataset = [{"input_ids": text} for text in tiny.documents()]
        model = tiny.model(register_transformers())
        trainer = ShardedTrainer(
            model, arguments, train_dataset=dataset, data_collator=collate, cp=cp
        )
        with tiny.recorded(model) as proof:
            proof.loss = trainer.train().training_loss
        proof.check("transformers Trainer", tiny.packed(seen[0]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
