"""Out of memory on one rank ends that rank with advice, without waiting for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import RankError, run_ranks
from tests.system.runs import arguments, write_run
from trainer.config.parse import load
from trainer.launch.predict import predict
from trainer.storage.artifact import write_artifact
from trainer.storage.run_dir import RunDir


def train_until_out_of_memory(argv: list[str], failing_rank: int) -> None:
    import trainer.run.train_loop as loop
    from tests.build_datasets import build_blended_dataset
    from trainer.data.tokenizer import ByteTokenizer
    from trainer.resilience.preemption import Preemption
    from trainer.resilience.signals import SignalHandler
    from trainer.step.process_group import World

    class FailingTrainer(loop.Trainer):  # type: ignore[name-defined, misc]
        def train_step(self, *args: Any) -> Tensor:
            if self.step == 3 and self.world.rank == failing_rank:
                raise torch.OutOfMemoryError("tried to allocate 9 GiB")
            values: Tensor = super().train_step(*args)
            return values

    vars(loop)["Trainer"] = FailingTrainer
    config = load(argv)
    folder = RunDir(config.output_dir)
    folder.create()
    dataset = build_blended_dataset(
        config.data, ByteTokenizer(), seq_len=config.training.seq_len, seed=0
    )
    world = World(
        torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu")
    )
    preemption = Preemption(config, SignalHandler(), is_leader=world.rank == 0)
    stage = config.training_stages[0]
    loop.train(
        config, stage, folder, world, dataset=dataset, validation_sets=[], preemption=preemption
    )


@pytest.mark.ranks
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_out_of_memory_fails_at_once(tmp_path: Path, failing_rank: int) -> None:
    argv = arguments(write_run(tmp_path), tmp_path / "run")
    folder = RunDir(tmp_path / "run")
    folder.create()
    write_artifact(folder.prediction_path, predict(load(argv), 2, num_nodes=1))
    with pytest.raises(RankError) as caught:
        run_ranks(train_until_out_of_memory, 2, argv, failing_rank, timeout=30)
    assert "out of device memory: tried to allocate 9 GiB" in str(caught.value)
    assert " may free memory" in str(caught.value)
