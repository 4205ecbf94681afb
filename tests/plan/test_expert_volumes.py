"""Bytes of token dispatch that traces count, against those that ranks exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from parallelisms.mesh import collectives
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of
from tests.system.runs import write_run
from trainer.config.job_config import Config
from trainer.step.process_group import World
from trainer.step.trainer import Trainer
from trainer.trace.record import trace_pp_ranks

MIXTURE = (
    *(
        "--model.feed_forward=moe",
        "--model.num_experts=4",
        "--model.top_k=2",
        "--model.expert_dim=16",
    ),
    *("--training.dtype=float32", "--training.global_batch_size=2", "--training.seq_len=2048"),
)
CASES = {
    "autograd": ("--parallelism.ep=2", "--memory.recompute=none"),
    "recomputed": ("--parallelism.ep=2", "--parallelism.cp=2", "--memory.recompute=full"),
    "shared expert": (
        "--parallelism.ep=2",
        "--memory.recompute=keep_attention",
        "--model.shared_expert=true",
    ),
    "tensor parallel": ("--parallelism.tp=2", "--memory.recompute=full"),
    "shared expert, tensor parallel": (
        "--parallelism.tp=2",
        "--memory.recompute=full",
        "--model.shared_expert=true",
    ),
}


def exchanged(folder: Path, options: tuple[str, ...]) -> tuple[int, Config]:
    """Bytes of rows that this rank sends anywhere in a step, itself included."""
    config = configured(
        folder / "run.toml", folder / f"run-{distributed.get_rank()}", *MIXTURE, *options
    )
    sent = 0
    original = collectives.all_to_all_tokens_async

    def counted(
        group: ProcessGroup, x: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Any:
        nonlocal sent
        sent += sum(send_counts) * x[:1].numel() * x.element_size()
        return original(group, x, send_counts, receive_counts)

    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, dataset_of(config))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(collectives, "all_to_all_tokens_async", counted)
        next(trainer.train_steps())
    return sent, config


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number in (0, 4) else pytest.mark.slow)
        for number, name in enumerate(CASES)
    ],
)
def test_traces_count_the_bytes_of_token_dispatch(name: str, tmp_path: Path) -> None:
    """Without what a rank sends to itself, and with as many rows on every rank."""
    write_run(tmp_path)
    found = run_ranks(exchanged, 2, tmp_path, CASES[name])
    total = sum(sent for sent, _ in found)
    (step,) = trace_pp_ranks(found[0][1], 2)
    work = step.whole.work
    traced = sum(
        work.sent_bytes[channel, "all_to_all", phase]
        for channel, kind, phase in work.calls
        if kind == "all_to_all" and channel in ("ep", "tp")
    )
    assert 2 * traced == pytest.approx(total / 2)
