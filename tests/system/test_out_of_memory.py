"""Memory that runs out on one rank ends the run with a message, and does not wait for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import RankError, run_ranks
from tests.system.runs import arguments, write_run


def train_until_one_rank_is_full(argv: list[str], full: int) -> None:
    import trainer.train_loop as loop
    from tests.build_datasets import build_blended_dataset
    from trainer.checkpoint.run_dir import RunDir
    from trainer.config.parse import load
    from trainer.data.tokenizer import ByteTokenizer
    from trainer.distributed import World
    from trainer.resilience.preemption import Preemption
    from trainer.resilience.signals import SignalHandler

    class Filling(loop.Trainer):  # type: ignore[name-defined, misc]
        def train_step(self, *given: Any) -> Tensor:
            if self.step == 3 and self.world.rank == full:
                raise torch.OutOfMemoryError("tried to allocate 9 GiB")
            numbers: Tensor = super().train_step(*given)
            return numbers

    vars(loop)["Trainer"] = Filling
    config = load(argv)
    folder = RunDir(config.output_dir)
    folder.create()
    rows = build_blended_dataset(config.data, ByteTokenizer(), seq_len=config.training.seq_len, seed=0)
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    stops = Preemption(config, SignalHandler(), is_leader=world.rank == 0)
    loop.train(config, config.training_stages[0], folder, world, datasets=[rows], validation_sets=[], preemption=stops)


@pytest.mark.ranks
@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_without_memory_says_so_at_once(tmp_path: Path, full: int) -> None:
    argv = arguments(write_run(tmp_path), tmp_path / "run")
    with pytest.raises(RankError) as caught:
        run_ranks(train_until_one_rank_is_full, 2, argv, full, timeout=30)
    assert "out of device memory: tried to allocate 9 GiB" in str(caught.value)
    assert " would free " in str(caught.value)
