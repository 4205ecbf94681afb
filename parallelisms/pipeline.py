"""Pipeline parallelism: runs the micro-batches of a step through this rank's stages.

The schedules are torch's: GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), zero bubble
(Qi et al., 2023) and DualPipeV (DeepSeek-V3, 2024). Ranks send the residual stream and its gradient. All ranks have
the micro-batches already, so the schedule only passes their index.

Shape suffixes: B sequences, S tokens on this rank, E width of the residual stream.
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
from parallelisms.fsdp import fsdp_modules
from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan


class Pipeline:
    """The stages of this rank under a schedule.

    `stage_modules` are the stages that `plan` assigns to this rank of `group`, already parallelized over the other
    mesh dimensions. `shape` [B, S, E] and `dtype` are those of the residual stream between stages. FSDP must not
    reshard after forward: schedules that split the backward would lose gradients. Raises ValueError if the plan has
    problems or assigns other stages.
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
        # A slow import that runs without a pipeline do not need.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        rank_stages = plan.stages_of(group.rank())
        if problems := plan.problems():
            raise ValueError("; ".join(problems))
        if (given := tuple(sorted(stage_modules))) != rank_stages:
            raise ValueError(f"pipeline rank {group.rank()} must have stages {rank_stages}, not {given}")
        self._stage_modules, self._plan = stage_modules, plan
        # Without them torch infers shapes by running the stages, with their collectives, on the meta device.
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
        for stage in stages:
            _sum_in_reduce_dtype(stage)
        self._schedule: Any = get_schedule_class(plan.schedule)(
            stages[0] if plan.schedule in SINGLE_STAGE_SCHEDULES else stages,
            plan.num_micro_batches,
            loss_fn=lambda loss, _: loss,
            # The loss is already divided by the global number of targets.
            scale_grads=False,
        )

    def run(self, batches: Iterable[Batch], num_targets: Tensor, on_losses: Callable[[Tensor, Batch], None]) -> None:
        """Accumulates the gradients of (sum of losses / `num_targets`) in the weights of this rank's stages.

        All pp ranks pass the same batches, each on its device. The rank of the last stage calls `on_losses` with the
        detached losses [B, S] of each batch. Raises ValueError if the number of batches differs from the plan.
        """
        micro_batches = [*batches]
        if len(micro_batches) != (needed := self._plan.num_micro_batches):
            raise ValueError(f"the pipeline plan needs {needed} micro-batches, not {len(micro_batches)}")

        def pre_forward_hook(_: nn.Module, received: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (micro_batches[int(kwargs["index"])], *received), {}

        def forward_hook(_: nn.Module, received: tuple[Any, ...], losses_BS: Tensor) -> Tensor:
            on_losses(losses_BS.detach(), received[0])
            return losses_BS.sum() / num_targets

        with ExitStack() as hooks:
            for stage, module in self._stage_modules.items():
                # Before FSDP's hook, which would move the index to the device, where reading it blocks.
                hooks.enter_context(module.register_forward_pre_hook(pre_forward_hook, prepend=True, with_kwargs=True))
                if stage == self._plan.num_stages - 1:
                    hooks.enter_context(module.register_forward_hook(forward_hook))
            indices = torch.arange(len(micro_batches))
            self._schedule.step(index=indices, target=indices, return_outputs=False)


def _sum_in_reduce_dtype(stage: Any) -> None:
    """A split backward adds weight gradients in the compute dtype, until FSDP's next `post_backward`: runs it each time."""
    backward_weight = stage.backward_weight_one_chunk

    def backward_weight_one_chunk(*args: Any, **options: Any) -> None:
        backward_weight(*args, **options)
        for unit in fsdp_modules(stage.submod):
            if (param_group := unit._get_fsdp_state()._fsdp_param_group) is not None:
                param_group.post_backward()

    stage.backward_weight_one_chunk = backward_weight_one_chunk


def pipeline_forward(
    stage_modules: Mapping[int, Transformer],
    plan: PipelinePlan,
    group: ProcessGroup,
    batch: Batch,
    *,
    tp: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Runs one batch forward through all stages; returns its losses [B, S] on the rank of the last stage, else None.

    `dtype` is that of the residual stream, whose tokens are sharded over `tp` ranks. A rank returns as soon as it has
    sent its output.
    """
    x_BSE: Tensor | None = None
    for stage in range(plan.num_stages):
        previous_rank, stage_rank = plan.stage_ranks[max(0, stage - 1)], plan.stage_ranks[stage]
        if previous_rank != stage_rank and group.rank() == previous_rank and x_BSE is not None:
            collectives.send(x_BSE, group, to=stage_rank)
        if group.rank() != stage_rank:
            x_BSE = None
            continue
        if previous_rank != stage_rank:
            batch_size, tokens = batch.tokens.shape
            shape = (batch_size, tokens // tp, stage_modules[stage].config.dim)
            buffer = torch.empty(shape, dtype=dtype, device=batch.tokens.device)
            x_BSE = collectives.receive(group, buffer=buffer, source=previous_rank)
        x_BSE = stage_modules[stage](batch, x_BSE)
    return x_BSE
