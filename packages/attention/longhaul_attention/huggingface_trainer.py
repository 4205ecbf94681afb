"""Trainers of Hugging Face: `share_batches` for loops of accelerate's, and a mixin for transformers' Trainer and TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longhaul_attention.context_parallel import ContextParallel


def share_batches(loader: Any, cp: ContextParallel) -> Any:
    """Deals the ranks that share a sequence the same batches of a DataLoader that accelerate has prepared; returns it.

    These ranks are neighbours. Order, resumption and epochs are those of fewer processes. Raises ValueError for a DataLoader
    that is dealt in another way.
    """
    if cp.plan.cp == 1:
        return loader
    parts: list[Any] = [
        part
        for part in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
        if hasattr(part, "num_processes") and hasattr(part, "process_index")
    ]
    if len(parts) != 1 or parts[0].num_processes % cp.plan.cp:
        raise ValueError(
            f"{type(loader).__name__} deals no batches to multiples of {cp.plan.cp} processes: give a DataLoader as accelerate "
            "prepares it, with dispatch_batches = False"
        )
    parts[0].num_processes //= cp.plan.cp
    parts[0].process_index //= cp.plan.cp
    # What accelerate would cut off a last batch counts per process; its size is then unknown, and nothing is cut.
    loader._drop_last = True
    return loader


class ContextParallelTrainer:
    """Stands before `transformers.Trainer`, or a trainer built on it, among the bases of a class:

        class MyTrainer(ContextParallelTrainer, SFTTrainer): ...
        trainer = MyTrainer(model, arguments, train_dataset=dataset, cp=cp)

    Batches are sharded behind the collator, and their losses are those of all ranks, in training and evaluation. Raises
    ValueError for arguments that need whole sequences on a rank.
    """

    args: Any
    data_collator: Callable[..., Any]

    def __init__(self, *arguments: Any, cp: ContextParallel, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cp = cp
        needs = {
            "average_tokens_across_devices = True": self.args.average_tokens_across_devices,
            "label_smoothing_factor = 0": not self.args.label_smoothing_factor,
            "no compute_metrics, which would see logits of a rank's tokens": getattr(self, "compute_metrics", None)
            is None,
        }
        if missing := [name for name, given in needs.items() if not given]:
            raise ValueError(f"a trainer whose ranks share sequences needs {'; '.join(missing)}")
        self._collate_whole = self.data_collator
        self.data_collator = self._collate

    def _collate(self, examples: Any) -> dict[str, Any]:
        return self.cp.shard_batch(self._collate_whole(examples))

    def get_train_dataloader(self) -> Any:
        return share_batches(self._super.get_train_dataloader(), self.cp)

    def get_eval_dataloader(self, *arguments: Any) -> Any:
        return self._evaluated(self._super.get_eval_dataloader(*arguments))

    def get_test_dataloader(self, *arguments: Any) -> Any:
        return self._evaluated(self._super.get_test_dataloader(*arguments))

    def _evaluated(self, loader: Any) -> Any:
        share_batches(loader, self.cp)
        together, rows = self.args.eval_batch_size * (self.args.world_size // self.cp.plan.cp), len(loader.dataset)
        if self.args.world_size > self.cp.plan.cp and rows % together:
            raise ValueError(
                f"{rows} evaluation sequences are no multiple of the {together} that all groups take at a time: some would be "
                "counted twice"
            )
        return loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: Any = None, num_items_in_batch: Tensor | None = None
    ) -> Any:
        if num_items_in_batch is None:  # Evaluation: trainers then take the mean over the targets of a rank.
            num_items_in_batch = inputs["num_items_in_batch"] * self.args.world_size
        return self._super.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def _super(self) -> Any:
        """The trainer that this stands before."""
        return super()
