"""Bytes of token dispatch that plans count, against those that ranks exchange."""

from __future__ import annotations

from collections import Counter
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
from trainer.plan.comm_volume import comm_volumes
from trainer.plan.memory_estimate import rank_memory
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

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


def exchanged(folder: Path, options: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of rows that this rank sends anywhere in a step, itself included, by size of a row;
    and what the plan counts.
    """
    config = configured(
        folder / "run.toml", folder / f"run-{distributed.get_rank()}", *MIXTURE, *options
    )
    sent: Counter[str] = Counter()
    original = collectives.all_to_all_tokens_async

    def counted(
        group: ProcessGroup, x: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Any:
        sent["tokens" if x.ndim > 1 else "weights of experts"] += (
            sum(send_counts) * x[:1].numel() * x.element_size()
        )
        return original(group, x, send_counts, receive_counts)

    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, dataset_of(config))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(collectives, "all_to_all_tokens_async", counted)
        next(trainer.train_steps())
    rank = rank_memory(config, world.size, 0, on_cpu=True)
    planned = dict[str, float]()
    for volume in comm_volumes(rank):
        if volume.kind == "all_to_all" and ("tokens" in volume.what or "experts" in volume.what):
            ranks = rank.ep if volume.channel == "ep" else rank.tp
            what = volume.what.partition(" of the shared")[0]
            planned[what] = planned.get(what, 0.0) + volume.bytes * ranks / (ranks - 1)
    return dict(sent), planned


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number in (0, 4) else pytest.mark.slow)
        for number, name in enumerate(CASES)
    ],
)
def test_plans_count_the_bytes_of_token_dispatch(name: str, tmp_path: Path) -> None:
    write_run(tmp_path)
    found = run_ranks(exchanged, 2, tmp_path, CASES[name])
    totals: Counter[str] = Counter()
    for sent, _ in found:
        totals.update(sent)
    planned = found[0][1]
    assert {what: total / 2 for what, total in totals.items()} == pytest.approx(planned)
