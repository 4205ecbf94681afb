"""For the proof of torchtitan_trainer.py: torchtitan 0.2.2 without a GPU, with a tiny model and
given documents.

It knows no CPU, so this replaces what asks for the device: its detection, memory statistics,
`barrier(device_ids=...)` and the triton kernels of experts.
"""

import functools
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

EOS = 1
VOCABULARY = 64
LENGTHS = (37, 5, 90, 1, 59)


class NoDevice:
    """In place of `torch.cuda`."""

    def __getattr__(self, name):
        properties = SimpleNamespace(total_memory=1)
        answers = {
            "get_device_name": "cpu",
            "current_device": 0,
            "get_device_properties": properties,
            "memory_stats": {},
        }
        return lambda *_, **__: answers.get(name)


def use_cpu() -> None:
    """Before torchtitan is imported."""
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: NoDevice()
    barrier = distributed.barrier
    distributed.barrier = functools.wraps(barrier)(lambda group=None, **_: barrier(group))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a packed sequence, whose documents end with EOS."""
    generator = torch.Generator().manual_seed(1)
    texts = [
        [*torch.randint(2, VOCABULARY, (length - 1,), generator=generator).tolist(), EOS]
        for length in LENGTHS
    ]
    tokens = torch.tensor([[token for text in texts for token in text]])
    return tokens, F.pad(tokens[:, 1:], (0, 1), value=-100)


class OneBatch:
    """In place of torchtitan's data loader."""

    def __iter__(self):
        while True:
            tokens, labels = batch()
            yield {"input": tokens}, labels

    def state_dict(self):
        return {}


def config(folder: str, ranks: int):
    """Of a run of two steps with a model of two layers."""
    from torchtitan.config import ConfigManager
    from torchtitan.models import llama3
    from torchtitan.protocols import train_spec

    spec = llama3.get_train_spec()
    spec.model_args = {
        "tiny": llama3.TransformerModelArgs(
            dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY
        )
    }
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: OneBatch()
    train_spec._extra_train_specs["tiny"] = spec
    chosen = {
        "job.dump_folder": folder, "model.name": "tiny", "model.flavor": "tiny", "training.seq_len": sum(LENGTHS),
        "training.local_batch_size": 1, "training.steps": 1, "training.mixed_precision_param": "float32",
        "training.max_norm": 1e9, "parallelism.context_parallel_degree": ranks, "metrics.log_freq": 1,
    }  # fmt: skip
    return ConfigManager().parse_args([f"--{key}={value}" for key, value in chosen.items()])


def one_process(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of torchtitan's unchanged model, which is given one document at a
    time.
    """
    tokens, labels = batch()
    parts = zip(tokens.split(LENGTHS, 1), labels.split(LENGTHS, 1), strict=True)
    losses = [
        F.cross_entropy(model(part)[0].float(), label[0], reduction="sum") for part, label in parts
    ]
    loss = sum(losses) / (labels != -100).sum()
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.named_parameters()}


def prove(trainer) -> None:
    """Trains a step.

    Raises AssertionError unless its loss and gradients are those of one process.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    (model,), grads, losses = trainer.model_parts, {}, []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no scaled sum, with which FSDP divides by 1.
            module.set_force_sum_reduction_for_comms(True)
    reference = type(model)(model.model_args)
    reference.load_state_dict(
        {bare(name): full(value) for name, value in model.state_dict().items()}
    )
    expected_loss, expected = one_process(reference)
    forward_backward = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **given: (
        losses.append(forward_backward(**given)) or losses[-1]
    )
    hook = register_optimizer_step_post_hook(
        lambda *_: grads.update(
            {bare(name): full(parameter.grad) for name, parameter in model.named_parameters()}
        )
    )
    trainer.train()
    hook.remove()
    loss = losses[0].detach().clone()
    distributed.all_reduce(loss)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    error = max(
        float((grads[name] - grad).abs().max()) / largest for name, grad in expected.items()
    )
    error = max(error, abs(float(loss) - expected_loss) / expected_loss)
    assert error < 1e-5, (
        f"torchtitan: loss {float(loss)} against {expected_loss}, largest error {error:.1e}"
    )
    if distributed.get_rank() == 0:
        print(
            f"torchtitan: loss {float(loss):.6f}, largest error of loss and gradients {error:.0e} of one process",
            flush=True,
        )


def bare(name: str) -> str:
    """Of a parameter, without the wrapper of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def full(x: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a sharded tensor."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
