"""Pipeline parallelism: this rank's stages, and the micro-batches of an update through them.

The schedules are torch's: GPipe (Huang et al., 2019), 1F1B and its interleaved form (Narayanan et al., 2021), zero
bubble (Qi et al., 2023) and DualPipeV (DeepSeek-V3, 2024). Between ranks travel the residual stream and its gradient.
Everything else about a micro-batch is known to all of them, so the schedule carries its number and nothing more.

Shape suffixes: B rows, S tokens on this rank, E width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from models.batch import Batch
from models.transformer import Transformer
from parallelisms import collectives
from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan


class Pipeline:
    """The stages of this rank, in the order of a schedule.

    `parts` are the parts of the model that `plan` gives to this rank of `group`, by stage, spread over all other axes.
    `shape` [B, S, E] and `dtype` are those of the residual stream that leaves a stage. Weights that FSDP shards must
    stay gathered after the forward pass: schedules that go back twice would lose gradients. Raises ValueError if the
    plan has problems, or other parts.
    """

    def __init__(
        self,
        stage_modules: Mapping[int, Transformer],
        plan: PipelinePlan,
        group: ProcessGroup,
        *,
        device: torch.device,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        # Imported here: it takes a while, and runs without stages do without.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        rank_stages = plan.stages_of(group.rank())
        if problems := plan.problems():
            raise ValueError("; ".join(problems))
        if tuple(sorted(stage_modules)) != rank_stages:
            raise ValueError(
                f"rank {group.rank()} of the pipeline has stages {rank_stages}, not {tuple(sorted(stage_modules))}"
            )
        self._stage_modules, self._plan = stage_modules, plan
        # Said in advance: else torch would run the parts, with their collectives, on nothing to find out.
        residual_BSE = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="meta")
        stages = [
            PipelineStage(
                stage_modules[stage],
                stage,
                plan.num_stages,
                device,
                input_args=() if stage == 0 else residual_BSE,
                output_args=loss if stage == plan.num_stages - 1 else residual_BSE,
                group=group,
            )
            for stage in rank_stages
        ]
        self._schedule: Any = get_schedule_class(plan.schedule)(
            stages[0] if plan.schedule in SINGLE_STAGE_SCHEDULES else stages,
            plan.num_micro_batches,
            loss_fn=_identity_loss,
            # By default gradients are divided by the number of micro-batches; the loss already is a mean.
            scale_grads=False,
        )

    def run(self, batches: Iterable[Batch], num_targets: Tensor, on_losses: Callable[[Tensor, Batch], None]) -> None:
        """Adds the gradients of the sum of all losses over `targets` to the weights of this rank's stages.

        All ranks of the pipeline hand in the same batches, on their devices. Where the last stage is, `record` gets
        the losses [B, S] of each, without graph. Raises ValueError if they are not as many as planned.
        """
        micro_batches = [*batches]
        if len(micro_batches) != self._plan.num_micro_batches:
            raise ValueError(
                f"{len(micro_batches)} micro-batches were given; the pipeline runs {self._plan.num_micro_batches}"
            )

        def pre_forward_hook(
            _: nn.Module, received: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            return (micro_batches[int(options["number"])], *received), {}

        def forward_hook(_: nn.Module, received: tuple[Any, ...], losses_BS: Tensor) -> Tensor:
            on_losses(losses_BS.detach(), received[0])
            return losses_BS.sum() / num_targets

        with ExitStack() as hooks:
            for stage, part in self._stage_modules.items():
                # Before FSDP's hook, which would move the number to the device, where reading it waits.
                hooks.enter_context(part.register_forward_pre_hook(pre_forward_hook, prepend=True, with_kwargs=True))
                if stage == self._plan.num_stages - 1:
                    hooks.enter_context(part.register_forward_hook(forward_hook))
            indices = torch.arange(len(micro_batches))
            self._schedule.step(number=indices, target=indices, return_outputs=False)


def pipeline_forward(
    stage_modules: Mapping[int, Transformer],
    plan: PipelinePlan,
    group: ProcessGroup,
    batch: Batch,
    *,
    shared_by: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """One batch through all stages, forward only: its losses [B, S] where the last stage is.

    `dtype` is that of the residual stream, whose tokens so many ranks share. A rank goes on with the next batch once it has handed this one on.
    """
    x_BSE: Tensor | None = None
    for stage in range(plan.num_stages):
        previous_rank, stage_rank = plan.rank_of(max(0, stage - 1)), plan.rank_of(stage)
        if previous_rank != stage_rank and group.rank() == previous_rank and x_BSE is not None:
            collectives.send(x_BSE, group, to=stage_rank)
        if group.rank() != stage_rank:
            x_BSE = None
            continue
        if previous_rank != stage_rank:
            batch_size, tokens = batch.tokens.shape
            shape = (batch_size, tokens // shared_by, stage_modules[stage].config.dim)
            buffer = torch.empty(shape, dtype=dtype, device=batch.tokens.device)
            x_BSE = collectives.receive(group, buffer=buffer, source=previous_rank)
        x_BSE = stage_modules[stage](batch, x_BSE)
    return x_BSE


def _identity_loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss
