"""A training step of another library, for the GPU benchmark: a process that loads none of
Longhaul's code.

    python -m benchmarks.rival_step CASE     a JSON object: library, device, sizes, tokens, recompute, compile, steps

Prints a line of JSON: version, whether the head is tied, seconds of each step and peak memory.
torchtitan 0.2.2 runs its own trainer; its head is never tied to the embedding, and it prefers the
attention kernel of cuDNN. transformers runs its Llama under autocast over float32 weights with
AdamW, on cuDNN as well. Its loss is taken over chunks of tokens, because logits of a long sequence
do not fit.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import metadata
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.torchtitan_cpu import RandomTokens, use_cpu

WARMUPS = 2
CHUNK = 2048
"""Tokens whose logits exist at a time in the step of transformers."""


class StepClock:
    """Seconds of each step, and the memory at which steps after warm-up peak."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._seconds = list[float]()

    def time(self, step: Callable[[], object]) -> None:
        if self._on_gpu and len(self._seconds) == WARMUPS:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - begin)

    def answer(self, version: str, head: str) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() / (1 << 30) if self._on_gpu else None
        return {
            "version": version,
            "head": head,
            "seconds": self._seconds[WARMUPS:],
            "peak_gib": peak,
        }


def transformers_step(asked: dict[str, Any]) -> dict[str, Any]:
    library: Any = importlib.import_module("transformers")
    sizes = asked["sizes"]
    tokens = asked["tokens"]
    config = library.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["ffn_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        tie_word_embeddings=sizes["tie_embeddings"],
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
    )
    device = asked["device"]
    with torch.device(device):
        net = library.LlamaForCausalLM(config).float().train()
        words = torch.randint(sizes["vocab_size"], (1, tokens))
    if asked["recompute"] == "full":
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if asked["compile"]:
        net.model.compile()
    adamw = torch.optim.AdamW(net.parameters(), fused=True)
    backend = SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.MATH

    def chunk_loss(hidden_CE: Tensor, labels_C: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            net.lm_head(hidden_CE).float(), labels_C, reduction="sum"
        )

    def step() -> None:
        with torch.autocast(device, torch.bfloat16), sdpa_kernel([backend]):
            hidden_SE = net.model(input_ids=words, use_cache=False).last_hidden_state[0, :-1]
            chunks = zip(hidden_SE.split(CHUNK), words[0, 1:].split(CHUNK), strict=True)
            losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
            (torch.stack(losses).sum() / (tokens - 1)).backward()
        adamw.step()
        adamw.zero_grad()

    clock = StepClock(device)
    for _ in range(WARMUPS + asked["steps"]):
        clock.time(step)
    return clock.answer(library.__version__, "tied" if sizes["tie_embeddings"] else "untied")


def torchtitan_step(asked: dict[str, Any]) -> dict[str, Any]:
    on_gpu = asked["device"] == "cuda"
    if not on_gpu:
        use_cpu()
    # Text is not read, and the package of text corpora takes seconds to import.
    sys.modules |= {"datasets": MagicMock(), "datasets.distributed": MagicMock()}
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ |= world | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    names = ("config", "models.llama3", "protocols.train_spec", "train")
    config, llama3, train_spec, train = (
        importlib.import_module(f"torchtitan.{name}") for name in names
    )
    sizes = asked["sizes"]
    tokens = asked["tokens"]
    default_width = int(2 * 4 * sizes["dim"] / 3)
    spec = llama3.get_train_spec()
    spec.model_args = {
        "rival": llama3.TransformerModelArgs(
            dim=sizes["dim"],
            n_layers=sizes["num_layers"],
            n_heads=sizes["num_heads"],
            n_kv_heads=sizes["num_kv_heads"],
            vocab_size=sizes["vocab_size"],
            ffn_dim_multiplier=sizes["ffn_dim"] / default_width,
            multiple_of=32,
            rope_theta=500_000,
        )
    }
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: RandomTokens(sizes["vocab_size"], 1, tokens)
    train_spec._extra_train_specs["rival"] = spec
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        chosen = {
            "job.dump_folder": folder,
            "model.name": "rival",
            "model.flavor": "rival",
            "training.seq_len": tokens,
            "training.local_batch_size": 1,
            "training.steps": WARMUPS + asked["steps"],
            "training.mixed_precision_param": "bfloat16" if on_gpu else "float32",
            "activation_checkpoint.mode": asked["recompute"],
            "metrics.log_freq": 1000,
        }
        words = [f"--{key}={value}" for key, value in chosen.items()]
        trainer = train.Trainer(
            config.ConfigManager().parse_args([*words, *["--compile.enable"] * asked["compile"]])
        )
        clock = StepClock(asked["device"])
        train_step = trainer.train_step
        trainer.train_step = lambda reading: clock.time(lambda: train_step(reading))
        trainer.train()
        trainer.close()
    return clock.answer(metadata.version("torchtitan"), "untied")


STEPS_OF = {"transformers": transformers_step, "torchtitan": torchtitan_step}


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(STEPS_OF[case["library"]](case)) + "\n")
