"""TRL's DPOTrainer: pairs of long answers, each shared by all ranks, and a loss of whole
sequences.

torchrun --nproc-per-node 4 trl_dpo.py
"""

import tempfile

import tiny
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from longhaul_attention import ContextParallel, ContextParallelTrainer, register_transformers


class ShardedDPOTrainer(ContextParallelTrainer, DPOTrainer):
    """DPOTrainer, for ranks that share sequences."""


def train(folder: str, trainer: type, attention: str, **options: object) -> tiny.Proof:
    by_word = Tokenizer(
        models.WordLevel({str(number): number for number in range(tiny.VOCABULARY)})
    )
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="1", pad_token="2")
    texts = [" ".join(map(str, text)) for text in tiny.documents()]
    rows = [
        {"prompt": " 5 6 ", "chosen": texts[0], "rejected": texts[2]},
        {"prompt": " 7 ", "chosen": texts[4], "rejected": texts[1]},
    ]
    arguments = DPOConfig(folder, per_device_train_batch_size=2, **tiny.ARGUMENTS)
    model = tiny.model(attention)
    reference = tiny.model(attention)
    made = trainer(
        model,
        reference,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **options,
    )
    with tiny.recorded(model) as proof:
        proof.loss = made.train().training_loss
    return proof


def main() -> None:
    distributed.init_process_group("gloo")
    cp = ContextParallel(init_device_mesh("cpu", (distributed.get_world_size(),)), method="ring")
    with tempfile.TemporaryDirectory() as folder:
        proof = train(folder, ShardedDPOTrainer, register_transformers(), cp=cp)
        # All ranks given the same rows, each alone: the gradients of one process, averaged.
        alone = train(folder, DPOTrainer, "eager")
    proof.compare("TRL DPOTrainer", alone.loss, alone.grads)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
