"""Pipeline parallelism: runs the micro-batches of a step through this rank's stages.

Ranks send the residual stream and its gradient in the order of `pipeline_schedules.ticks`. All of
them have the micro-batches already. A rank holds what it receives until a stage computes with it,
and what it sends until it is sent; of a stage's output only the autograd graph stays.

Shape suffixes: B sequences, S tokens on this rank, E width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.batch import Batch
from models.transformer import Transformer
from parallelisms import fsdp
from parallelisms.mesh import collectives
from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.pipeline_schedules import Action, Message, StreamKey, ticks


class Pipeline:
    """The stages of this rank under a schedule.

    `stage_modules` are the stages that `plan` assigns to this rank of `group`, already
    parallelized over the other mesh dimensions. `shape` [B, S, E] and `dtype` are those of the
    residual stream between stages. FSDP must not reshard after forward. Raises ValueError if the
    plan has problems or assigns other stages.
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
        rank_stages = plan.stages_of(group.rank())
        if problems := plan.problems():
            raise ValueError("; ".join(problems))
        if (given := tuple(sorted(stage_modules))) != rank_stages:
            raise ValueError(
                f"pipeline rank {group.rank()} must have stages {rank_stages}, not {given}"
            )
        self._plan = plan
        self._rank = group.rank()
        self._exchange = StreamExchange(group, device=device, shape=shape, dtype=dtype)
        self._stages = {
            stage: Stage(stage_modules[stage], stage, plan, self._exchange)
            for stage in rank_stages
        }

    def run(
        self,
        batches: Iterable[Batch],
        num_targets: Tensor,
        on_losses: Callable[[Tensor, Batch], None],
    ) -> None:
        """Accumulates the gradients of (sum of losses / `num_targets`) in the weights of this
        rank's stages.

        All pp ranks pass the same batches, each on its device. The rank of the last stage calls
        `on_losses` with the detached losses [B, S] of each batch. Raises ValueError if the number
        of batches differs from the plan.
        """
        micro_batches = [*batches]
        if len(micro_batches) != (needed := self._plan.num_micro_batches):
            raise ValueError(
                f"the pipeline plan needs {needed} micro-batches, not {len(micro_batches)}"
            )

        def scaled_loss(losses_BS: Tensor, batch: Batch) -> Tensor:
            on_losses(losses_BS.detach(), batch)
            return losses_BS.sum() / num_targets

        for tick in ticks(self._plan):
            if (action := tick.actions[self._rank]) is not None:
                self._stages[action.stage].run(
                    action, micro_batches[action.micro_batch], scaled_loss
                )
            # Every rank goes through the messages of all ranks in one order, so that each send
            # meets its receive.
            for message in tick.messages:
                self._exchange.transfer(message)
        self._exchange.finish()


class StreamExchange:
    """Residual streams and their gradients on the way between stages."""

    def __init__(
        self,
        group: ProcessGroup,
        *,
        device: torch.device,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._group = group
        self._device = device
        self._shape = shape
        self._dtype = dtype
        self._arrived: dict[StreamKey, Callable[[], Tensor]] = {}
        self._sent: dict[int, Callable[[], Tensor]] = {}
        """The latest message to each rank."""

    def put(self, key: StreamKey, x_BSE: Tensor) -> None:
        self._arrived[key] = lambda: x_BSE

    def take(self, key: StreamKey) -> Tensor:
        return self._arrived.pop(key)()

    def transfer(self, message: Message) -> None:
        """Starts to send or to receive a message from or to this rank; ignores others."""
        if message.source == self._group.rank():
            # Waiting for the message before frees its buffer: at most one per rank is in flight.
            if message.target in self._sent:
                self._sent.pop(message.target)()
            sending = collectives.send_async(
                self.take(message.key), self._group, to=message.target
            )
            self._sent[message.target] = sending.wait
        elif message.target == self._group.rank():
            buffer_BSE = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            receiving = collectives.receive_async(
                self._group, buffer=buffer_BSE, source=message.source
            )
            self._arrived[message.key] = receiving.wait

    def finish(self) -> None:
        """Waits for the messages sent."""
        while self._sent:
            self._sent.popitem()[1]()


class Stage:
    """One stage of the model: what it computes for each micro-batch of a step."""

    def __init__(
        self, module: Transformer, stage: int, plan: PipelinePlan, exchange: StreamExchange
    ) -> None:
        self._module = module
        self._stage = stage
        self._exchange = exchange
        self._num_stages = plan.num_stages
        self._num_micro_batches = plan.num_micro_batches
        self._reduces_per_micro_batch = plan.reduces_per_micro_batch
        self._roots: dict[int, Tensor] = {}
        """A scalar of each micro-batch whose backward pass is due: where autograd starts."""

    def run(
        self, action: Action, batch: Batch, scaled_loss: Callable[[Tensor, Batch], Tensor]
    ) -> None:
        number = action.micro_batch
        if action.kind == "F":
            self._roots[number] = self._forward(number, batch, scaled_loss)
            return
        # Gradients are reduced once per step, or after each micro-batch, which keeps only their
        # shards.
        is_last = number == self._num_micro_batches - 1
        fsdp.set_gradient_reduction(self._module, reduces=is_last or self._reduces_per_micro_batch)
        self._roots.pop(number).backward()
        if is_last:
            fsdp.reshard(self._module)

    def _forward(
        self, number: int, batch: Batch, scaled_loss: Callable[[Tensor, Batch], Tensor]
    ) -> Tensor:
        exchange = self._exchange
        stage = self._stage
        x_BSE = None
        if stage > 0:
            received_BSE = exchange.take(("F", stage, number))
            put_grad = partial(exchange.put, ("B", stage - 1, number))
            x_BSE = StageInput.apply(torch.empty(0, requires_grad=True), received_BSE, put_grad)
            del received_BSE
        out_BSE = self._module(batch, x_BSE)
        if stage == self._num_stages - 1:
            return scaled_loss(out_BSE, batch)
        # Detached, so that the next rank's input has no graph; the backward pass resumes at the
        # root.
        exchange.put(("F", stage + 1, number), out_BSE.detach())
        root: Tensor = StageOutput.apply(out_BSE, partial(exchange.take, ("B", stage, number)))
        return root


class StageInput(torch.autograd.Function):
    """The received residual stream; in the backward pass, passes its gradient on.

    Unlike a leaf of autograd it does not stay alive until then. `anchor` makes autograd compute
    the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x_BSE: Tensor, put_grad: Callable[[Tensor], None]
    ) -> Tensor:
        del anchor
        ctx.put_grad = put_grad
        return x_BSE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.put_grad(grads[0])
        return None, None, None


class StageOutput(torch.autograd.Function):
    """A scalar whose backward pass starts with the received gradient of the stage's output."""

    @staticmethod
    def forward(ctx: Any, out_BSE: Tensor, take_grad: Callable[[], Tensor]) -> Tensor:
        # A scalar, from which autograd can start without a gradient.
        ctx.take_grad = take_grad
        return out_BSE.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del grads
        return ctx.take_grad(), None


def pipeline_forward(
    stage_modules: Mapping[int, Transformer],
    plan: PipelinePlan,
    group: ProcessGroup,
    batch: Batch,
    *,
    tp: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Runs one batch forward through all stages; returns its losses [B, S] on the rank of the last
    stage, else None.

    `dtype` is that of the residual stream, whose tokens are sharded over `tp` ranks. A rank
    returns as soon as it has sent its output.
    """
    batch_size, tokens = batch.tokens.shape
    for stage in plan.stages_of(group.rank()):
        module = stage_modules[stage]
        x_BSE = None
        if stage > 0:
            shape = (batch_size, tokens // tp, module.config.dim)
            buffer = torch.empty(shape, dtype=dtype, device=batch.tokens.device)
            x_BSE = collectives.receive(group, buffer=buffer, source=plan.stage_ranks[stage - 1])
        out: Tensor = module(batch, x_BSE)
        if stage == plan.num_stages - 1:
            return out
        collectives.send(out, group, to=plan.stage_ranks[stage + 1])
    return None
