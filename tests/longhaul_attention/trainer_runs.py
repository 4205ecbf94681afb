"""A run of transformers' Trainer or TRL's SFTTrainer on shuffled, packed or padded rows, with evaluation and a checkpoint.

    torchrun --nproc-per-node 4 -m tests.longhaul_attention.trainer_runs OUTPUT trainer|sft --cp 4 [--stop 4 | --resume]

Writes the logged losses, gradient norms and evaluation losses of each step.
"""

from __future__ import annotations

import argparse
import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, ContextParallelTrainer, register_transformers


def rows(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 60, (count,), generator=generator)
    return [torch.randint(3, 64, (int(length),), generator=generator).tolist() for length in lengths]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(example["input_ids"]) for example in examples)
    tokens = torch.tensor([example["input_ids"] + [2] * (width - len(example["input_ids"])) for example in examples])
    mask = torch.tensor([[int(i < len(example["input_ids"])) for i in range(width)] for example in examples])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("kind", choices=["trainer", "sft"])
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--stop", type=int, default=6)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    transformers, trl = import_module("transformers"), import_module("trl")

    given: dict[str, Any] = {
        "per_device_train_batch_size": 1 if options.kind == "sft" else 2,
        "per_device_eval_batch_size": 1 if options.kind == "sft" else 2, "gradient_accumulation_steps": 2,
        "max_steps": options.stop, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 4, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False, "seed": 1,
    }  # fmt: skip
    arguments: Any = (trl.SFTConfig if options.kind == "sft" else transformers.TrainingArguments)(
        str(options.output.parent / "run"), **given
    )
    implementation = register_transformers() if options.cp > 1 else "sdpa"
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, use_cache=False, attn_implementation=implementation,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).double()
    train, held_out = (Dataset.from_dict({"input_ids": rows(*each)}) for each in ((26, 0), (8, 1)))
    more: dict[str, Any] = {"train_dataset": train, "eval_dataset": held_out}
    kind: Any = transformers.Trainer
    if options.kind == "sft":
        words = {str(number): number for number in range(64)}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="1", pad_token="2"
        )
        arguments.packing, arguments.max_length = True, 128
        kind, more["processing_class"] = trl.SFTTrainer, tokenizer
    else:
        more["data_collator"] = padded
    if options.cp > 1:
        ranks = distributed.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // options.cp, options.cp), mesh_dim_names=("dp", "cp"))["cp"]
        kind = type("Sharded", (ContextParallelTrainer, kind), {})
        more["cp"] = ContextParallel(mesh, method="ring")
    trainer = kind(model, arguments, **more)
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        kept = {
            "loss": "loss",
            "grad_norm": "grad_norm",
            "eval_loss": "eval_loss",
            "eval_mean_token_accuracy": "accuracy",
        }
        found = [
            (entry["step"], name, entry[key])
            for entry in trainer.state.log_history
            for key, name in kept.items()
            if key in entry
        ]
        options.output.write_text(json.dumps(found))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
