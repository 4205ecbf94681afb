"""The workload of benchmarks/cpu_step.py in torchtitan 0.2.2, on a CPU; runs in an environment of
its own.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 torchtitan==0.2.2
    python -m benchmarks.cpu_step --rival 'VENV/bin/python benchmarks/torchtitan_cpu.py'

torchtitan's own trainer, model, optimizer and metrics run unchanged. It knows no CPU, so this
replaces what asks for the device: its detection, memory statistics, `barrier(device_ids=...)` and
kernels of experts in triton. Tokens are random, which costs it nothing for reading. Prints the
line of JSON that cpu_step reads.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

STARTED = time.time()


class NoDevice:
    """In place of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "get_device_name": "cpu",
            "current_device": 0,
            "get_device_properties": SimpleNamespace(total_memory=1),
            "memory_stats": {},
        }
        return lambda *_, **__: answers.get(name)


class RandomTokens:
    """In place of torchtitan's text loader."""

    def __init__(self, vocab_size: int, batch: int, seq_len: int) -> None:
        self.shape = (batch, seq_len + 1)
        self.vocab_size = vocab_size

    def __iter__(self) -> Iterator[Any]:
        import torch

        while True:
            tokens = torch.randint(self.vocab_size, self.shape)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def use_cpu() -> None:
    """Before torchtitan is imported."""
    import torch
    from torch import distributed

    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda _: NoDevice()
    barrier = distributed.barrier
    vars(distributed)["barrier"] = functools.wraps(barrier)(lambda group=None, **_: barrier(group))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("steps", 6),
        ("seq-len", 2048),
        ("batch", 2),
        ("layers", 6),
        ("dim", 256),
        ("vocab", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    options = parser.parse_args()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    use_cpu()
    import torch

    config, llama3, train_spec, train = (
        import_module(f"torchtitan.{name}")
        for name in ("config", "models.llama3", "protocols.train_spec", "train")
    )

    torch.set_num_threads(1)
    heads = options.dim // 32
    model = llama3.TransformerModelArgs(
        dim=options.dim,
        n_layers=options.layers,
        n_heads=heads,
        vocab_size=options.vocab,
        rope_theta=500_000,
    )
    spec = llama3.get_train_spec()
    spec.model_args = {"cpu": model}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: RandomTokens(
        options.vocab, options.batch, options.seq_len
    )
    train_spec._extra_train_specs["cpu"] = spec
    ends = list[tuple[float, float]]()

    class Timed(train.Trainer):  # type: ignore[misc, name-defined]
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            ends.append((time.process_time(), time.time()))

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        chosen = {
            "job.dump_folder": folder,
            "model.name": "cpu",
            "model.flavor": "cpu",
            "training.seq_len": options.seq_len,
            "training.local_batch_size": options.batch,
            "training.steps": options.steps,
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": options.recompute,
            "metrics.log_freq": 1,
        }
        trainer = Timed(
            config.ConfigManager().parse_args(
                [f"--{key}={value}" for key, value in chosen.items()]
            )
        )
        trainer.train()
        trainer.close()
    seconds = [after[0] - before[0] for before, after in pairwise(ends)]
    result = {
        "cpu_s_per_step": median(seconds[1:]),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_step_done_s": ends[0][1] - STARTED,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
