"""`ContextParallelTrainer`: a mixin for transformers' Trainer and those that are built on it, such
as TRL's.
"""

from __future__ import annotations

from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longhaul_attention.context_parallel import ContextParallel
from longhaul_attention.group_loader import NUM_ROWS, group_of, regrouped
from longhaul_attention.parallel_model import gathers_logits, has_causal_head, parallelize
from longhaul_attention.trainer_arguments import argument_problems
from models.batch import IGNORE_INDEX


class ContextParallelTrainer:
    """Stands before `transformers.Trainer`, or a trainer built on it, among the bases of a class:

        class MyTrainer(ContextParallelTrainer, SFTTrainer): ...
        trainer = MyTrainer(model, arguments, train_dataset=dataset, cp=cp)

    Ranks that share sequences are given the same batches, those of one process; the model shards
    them and gathers what it returns, so that losses of tokens, sequences and pairs, metrics and
    predictions are computed from whole sequences. Raises ValueError for arguments that are not
    exact.
    """

    args: Any
    accelerator: Any
    model: Any

    def __init__(self, *arguments: Any, cp: ContextParallel, **options: Any) -> None:
        self.cp = cp
        self._num_groups, self._group = group_of(cp)
        self._is_uneven = WeakKeyDictionary[Any, bool]()
        """Whether a loader's last batch has fewer rows for some groups than for others."""
        self._reads_uneven = False
        self._loss_of_rows = 0.0
        self._rows_evaluated = 0
        self._rows_of_groups = list[int]()
        super().__init__(*arguments, **options)
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                parallelize(model, cp)

    def create_accelerator_and_postprocess(self) -> None:
        if problems := [*argument_problems(self.args, self._num_groups)]:
            raise ValueError(f"a trainer whose ranks share sequences: {'; '.join(problems)}")
        self._super.create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_data_loader

    # ---- batches

    def _prepare_data_loader(self, loader: Any, device_placement: Any = None, **_: Any) -> Any:
        """Prepares a loader in place of accelerate, which would deal every rank rows of its own."""
        from accelerate.data_loader import prepare_data_loader

        rows = getattr(loader, "dataset", ())
        together = (loader.batch_size or 1) * self._num_groups
        is_even = loader.drop_last or (hasattr(rows, "__len__") and len(rows) % together == 0)
        # For accelerate it is one process, so that it does not deal the rows once more.
        prepared = prepare_data_loader(
            regrouped(loader, groups=self._num_groups, group=self._group, counts_rows=True),
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.accelerator.device_placement
            if device_placement is None
            else device_placement,
            rng_types=[*self.accelerator.rng_types],
            dispatch_batches=False,
            use_seedable_sampler=self.accelerator.use_seedable_sampler,
            data_seed=self.accelerator.dataloader_config.data_seed,
            non_blocking=self.accelerator.non_blocking,
        )
        self._is_uneven[prepared] = self._num_groups > 1 and not is_even
        return prepared

    def get_train_dataloader(self) -> Any:
        loader = self._super.get_train_dataloader()
        self._reads_uneven = self._is_uneven[loader]
        return loader

    # ---- what trainers count once for every rank

    def get_tp_size(self) -> int:
        """Number of ranks that see the same batch: trainers count targets once for each."""
        return int(self._super.get_tp_size()) * self.cp.plan.cp

    @property
    def _tp_size(self) -> int:
        """TRL's divisor of the tokens that it counts on all ranks; it has no public name."""
        return self._tp_size_without_cp * self.cp.plan.cp

    @_tp_size.setter
    def _tp_size(self, size: int) -> None:
        self._tp_size_without_cp = size

    def floating_point_ops(self, inputs: Any) -> Any:
        return self._super.floating_point_ops(inputs) // self.cp.plan.cp

    # ---- losses

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: Any = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        inputs.pop(NUM_ROWS, None)
        labels = inputs.get("labels")
        if self._num_groups > 1 and (
            labels is None or (self.model.training and not has_causal_head(self.model))
        ):
            self._require_even_rows(labels)
            # It would scale the mean of a group's rows by the number of groups.
            num_items_in_batch = None
        # The mean of this group's targets: `prediction_step` weighs groups.
        if not self.model.training:
            num_items_in_batch = None
        return self._super.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _require_even_rows(self, labels: Tensor | None) -> None:
        if labels is not None and labels.ndim != 1:
            raise ValueError(
                f"labels {list(labels.shape)} of a head that takes the mean over the tokens of its own rows: with "
                f"{self._num_groups} groups of ranks it is not that of all rows; give all ranks to one group"
            )
        if self._reads_uneven:
            raise ValueError(
                f"losses of sequences need rows that the batches of {self._num_groups} groups divide: the last batch of an "
                "epoch would weigh its rows otherwise than one process does (dataloader_drop_last=True, or other batches)"
            )

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: Any,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        rows = int(inputs.pop(NUM_ROWS))
        weight = _num_targets(inputs)
        with gathers_logits(model, when=not prediction_loss_only):
            loss, logits, labels = self._super.prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
        self._add_loss(loss, rows if weight is None else weight, rows)
        return None, logits, labels

    def _add_loss(self, loss: Tensor | None, weight: float, rows: int) -> None:
        """Adds the loss of a batch of all groups: its sum over their targets, divided by their
        number, weighed by its rows as one process does.
        """
        value = 0.0 if loss is None or not weight else float(loss)
        parts = torch.tensor(
            [[value * weight, weight, rows]], dtype=torch.float64, device=self.args.device
        )
        # One of each group's neighbouring ranks, which all have the same numbers.
        by_group = self.accelerator.gather(parts)[:: self.cp.plan.cp].cpu()
        self._rows_of_groups = by_group[:, 2].long().tolist()
        total, weights, all_rows = by_group.sum(0).tolist()
        if (
            loss is not None
            and weights
            and (isfinite(total) or not self.args.logging_nan_inf_filter)
        ):
            self._loss_of_rows += total / weights * all_rows
            self._rows_evaluated += int(all_rows)

    def evaluation_loop(
        self, dataloader: Any, *arguments: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> Any:
        self._loss_of_rows = 0.0
        self._rows_evaluated = 0
        self.gather_function = self._gather_rows
        in_training = self._reads_uneven
        self._reads_uneven = self._is_uneven[dataloader]
        output = self._super.evaluation_loop(
            dataloader, *arguments, metric_key_prefix=metric_key_prefix, **options
        )
        self._reads_uneven = in_training
        if self._rows_evaluated:
            output.metrics[f"{metric_key_prefix}_loss"] = self._loss_of_rows / self._rows_evaluated
        return output

    def _gather_rows(self, values: Any) -> Any:
        """The rows of all groups, each once, in the order of one process."""
        if isinstance(values, tuple | list):
            return type(values)(self._gather_rows(each) for each in values)
        if self._num_groups == 1:
            return values
        if len(values) != max(1, self._rows_of_groups[self._group]):
            raise ValueError(
                f"predictions of {len(values)} rows for {self._rows_of_groups[self._group]}: a collator that joins rows leaves none to gather"
            )
        # `gather` needs equal lengths: rows of smaller groups are padded, and the padding is cut
        # off.
        most = max(1, *self._rows_of_groups)
        padded = torch.cat((values, values.new_zeros(most - len(values), *values.shape[1:])))
        by_group = self.accelerator.gather(padded).unflatten(0, (-1, most))[:: self.cp.plan.cp]
        return torch.cat(
            [rows[:count] for rows, count in zip(by_group, self._rows_of_groups, strict=True)]
        )

    @property
    def _super(self) -> Any:
        """The trainer that this stands before."""
        return super()


def _num_targets(inputs: Any) -> int | None:
    """Number of targets of a batch whose labels are those of tokens; else None."""
    labels = inputs.get("labels")
    if labels is None or labels.ndim != 2:
        return None
    return int((inputs.get("shift_labels", labels[:, 1:]) != IGNORE_INDEX).sum())
