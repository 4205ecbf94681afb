"""TRL's SFTTrainer with packing, on ranks that share each packed sequence.

torchrun --nproc-per-node 4 trl_sft.py
"""

import tempfile

import tiny
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from longhaul_attention import ContextParallel, ContextParallelTrainer, register_transformers


class ShardedSFTTrainer(ContextParallelTrainer, SFTTrainer):
    """SFTTrainer, for ranks that share sequences."""


def main() -> None:
    words = {str(number): number for number in range(tiny.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="1", pad_token="2"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            packing=True,
            max_length=sum(tiny.LENGTHS),
            per_device_train_batch_size=1,
            **tiny.ARGUMENTS,
        )
        cp = ContextParallel(
            init_device_mesh("cpu", (distributed.get_world_size(),)), method="allgather"
        )
        dataset = Dataset.from_dict({"input_ids": tiny.documents()})
        model = tiny.model(register_transformers())
        trainer = ShardedSFTTrainer(
            model, arguments, train_dataset=dataset, processing_class=tokenizer, cp=cp
        )
        # One packed sequence.
        whole = [trainer.data_collator([row]) for row in trainer.train_dataset]
        with tiny.recorded(model) as proof:
            proof.loss = trainer.train().training_loss
        proof.check(
            "TRL SFTTrainer",
            {key: whole[0][key] for key in ("input_ids", "position_ids", "labels")},
        )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
