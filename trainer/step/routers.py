"""State of the expert routers between steps: loss weights, token counts, and the correction bias
that balances experts.

Counts are summed over all ranks and micro-batches of a step, so that they do not depend on the
mesh. A load-balance loss over the step would need them before its first backward pass, so its
gradient takes the load of the step before; the logged loss takes that of the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.config import ModelConfig
from models.moe import MixtureOfExperts
from models.router import statistics_length
from models.transformer import Transformer
from parallelisms.mesh.collectives import all_reduce
from trainer.config.sections import TrainingSection


class Routers:
    """Routers of this rank's pipeline stages.

    `tp_group`: set if tp ranks split the tokens of a sequence.
    """

    def __init__(
        self,
        stage_modules: Sequence[Transformer],
        section: TrainingSection,
        tp_group: ProcessGroup | None,
    ) -> None:
        self._section = section
        self._tp_group = tp_group
        self._steps = [module.router_step for module in stage_modules if module.expert_layers()]
        for step in self._steps:
            step.balance_loss = section.balance_loss
            step.z_loss = section.router_z_loss
            step.balances_sequences = section.balance_over == "sequence"
        self._layers: dict[int, MixtureOfExperts] = {}
        """Expert layers of this rank, by their index among all expert layers of the model."""
        self._places: Tensor | None = None
        """Their indices on the device: a list would be copied there in every step, for which the
        host would wait.
        """
        for module in stage_modules:
            places = {layer: place for place, layer in enumerate(expert_layers(module.config))}
            blocks = [(int(index), block.feed_forward) for index, block in module.blocks.items()]
            self._layers |= {
                places[index]: each for index, each in blocks if isinstance(each, MixtureOfExperts)
            }
        self._num_experts = stage_modules[0].config.num_experts
        self._own = torch.empty(0)
        """Statistics of the step under way, a row for each layer."""

    def begin_step(self, num_targets: Tensor) -> None:
        """Begins the statistics. `num_targets`: those of the global batch, over which losses are
        averaged.
        """
        for step in self._steps:
            step.num_targets = num_targets
        if self._layers:
            shape = len(self._layers), statistics_length(self._num_experts)
            self._own = torch.zeros(shape, dtype=torch.float64, device=num_targets.device)
            for layer, of_layer in zip(self._layers.values(), self._own, strict=True):
                layer.statistics = of_layer

    def end_step(self, sums: Tensor) -> None:
        """Writes this rank's statistics of the step to the rows [layer, ...] of its layers."""
        for step in self._steps:
            step.num_targets = None
        if not self._layers:
            return
        # Each tp rank routes its own tokens, but the metric vector is reduced once per tp group.
        if self._tp_group is not None:
            all_reduce(self._tp_group, self._own)
        # Other stages fill their own rows, so that the sum over ranks has every layer once.
        self._rows(sums).index_copy_(0, self._places_on(sums.device), self._own)

    def adjust(self, sums: Tensor, finite: Tensor) -> None:
        """Sets load and correction bias from the statistics of all ranks, unless the step is
        skipped.

        Without a host sync.
        """
        if not self._layers:
            return
        of_layers = self._rows(sums).index_select(0, self._places_on(sums.device))
        counts_LX = of_layers[:, : self._num_experts]
        mean_L1 = counts_LX.mean(-1, keepdim=True)
        # A tensor, not an `if`: the host must not wait to know whether the step is skipped.
        is_counted_L1 = finite & (mean_L1 > 0)
        loads = [layer.get_buffer("last_load") for layer in self._layers.values()]
        _write(loads, torch.where(is_counted_L1, counts_LX / mean_L1, torch.stack(loads)))
        if all("correction_bias" in layer._buffers for layer in self._layers.values()):
            biases = [layer.get_buffer("correction_bias") for layer in self._layers.values()]
            # Auxiliary-loss-free balancing (DeepSeek-V3): a fixed step up for experts below the
            # mean, down above.
            step_LX = self._section.correction_bias_rate * (mean_L1 - counts_LX).sign()
            _write(biases, torch.stack(biases) + torch.where(is_counted_L1, step_LX, 0))

    def _rows(self, sums: Tensor) -> Tensor:
        """[layers of the model, `statistics_length`]."""
        return sums.view(-1, statistics_length(self._num_experts))

    def _places_on(self, device: torch.device) -> Tensor:
        if self._places is None:
            self._places = torch.tensor([*self._layers], device=device)
        return self._places


def _write(buffers: Sequence[Tensor], rows: Tensor) -> None:
    for buffer, row in zip(buffers, rows, strict=True):
        buffer.copy_(row)


def expert_layers(model: ModelConfig) -> list[int]:
    """Indices of the layers that have experts."""
    return [layer for layer, kind in enumerate(model.layer_kinds) if kind.feed_forward == "moe"]


def router_metrics(
    model: ModelConfig, sums: Sequence[float], targets: float
) -> Mapping[str, object]:
    """Router metrics of a step, as means over layers, from the statistics of all routers; empty
    without experts.

    `expert_load` lists, for each layer, the tokens of every expert over their mean.
    """
    experts = model.num_experts
    width = statistics_length(model.num_experts)
    rows = [sums[start : start + width] for start in range(0, len(sums), width)]
    loads = []
    dead = 0
    balance = 0.0
    entropy = 0.0
    z = 0.0
    for row in rows:
        counts = row[:experts]
        shares = row[experts : 2 * experts]
        mean = sum(counts) / experts or 1.0
        loads.append([count / mean for count in counts])
        dead += sum(not count for count in counts)
        # The Switch loss: experts x sum of (fraction of tokens x mean probability); 1 if both are
        # uniform.
        weighted = zip(loads[-1], shares, strict=True)
        balance += sum(load * share for load, share in weighted) / max(1.0, targets)
        entropy += row[-2] / max(1.0, targets)
        z += row[-1] / max(1.0, targets)
    if not rows:
        return {}
    return {
        "balance_loss": balance / len(rows),
        "router_z_loss": z / len(rows),
        "router_entropy": entropy / len(rows),
        "expert_load_max": max(max(load) for load in loads),
        "dead_experts": dead,
        "expert_load": loads,
    }
