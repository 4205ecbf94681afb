"""Options of mixtures of experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from models.layers import LayerKind

GROUP_ALIGNMENT = 8
"""Rows of which torch's grouped product needs a multiple: 16 bytes of bfloat16."""


def most_places(num_rows: int, num_experts: int) -> int:
    """Upper bound of rows with their padding to `GROUP_ALIGNMENT`, however experts divide them."""
    # A group gets up to GROUP_ALIGNMENT - 1 rows of padding, an empty one GROUP_ALIGNMENT.
    return num_rows + num_experts * GROUP_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The part of a model's configuration that only layers with experts read."""

    num_experts: int = 0
    top_k: int = 0
    """Experts of a token."""
    expert_dim: int = 0
    """Feed-forward dim of an expert."""
    shared_expert_dim: int = 0
    """Feed-forward dim of the expert that sees every token; 0: as the others."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How a logit becomes a score."""
    normalize_top_k: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    router_scaling: float = 1.0
    """Multiplies the weights of experts."""
    expert_groups: int = 1
    """Groups of experts; a token chooses among those of the best `top_k_groups` groups
    (DeepSeek-V3).
    """
    top_k_groups: int = 1

    def expert_problems(self, kinds: Sequence[LayerKind]) -> Iterator[str]:
        """Every broken rule, with its values."""
        if all(kind.feed_forward != "moe" for kind in kinds):
            for each in fields(ExpertConfig):
                if (value := getattr(self, each.name)) != each.default:
                    yield f'model.{each.name} = {value} is only used with model.feed_forward = "moe"'
            return
        values = {
            name: getattr(self, name)
            for name in ("num_experts", "top_k", "expert_dim", "router_scaling")
        }
        yield from (
            f"model.{name} = {value} must be above 0"
            for name, value in values.items()
            if not value > 0
        )
        if self.shared_expert_dim and not any(kind.shared_expert for kind in kinds):
            yield f"model.shared_expert_dim = {self.shared_expert_dim} is only used with model.shared_expert = true"
        if self.num_experts > 0:
            yield from self._choice_problems()

    def _choice_problems(self) -> Iterator[str]:
        """Every broken rule for the experts that a token may have."""
        experts = self.num_experts
        groups = self.expert_groups
        kept = self.top_k_groups
        if self.top_k > experts:
            yield f"model.top_k = {self.top_k} must be at most model.num_experts = {experts}"
        if groups < 1 or experts % groups:
            yield f"model.expert_groups = {groups} must divide model.num_experts = {experts}"
        elif not 1 <= kept <= groups:
            yield f"model.top_k_groups = {kept} must be from 1 to model.expert_groups = {groups}"
        elif experts >= self.top_k > experts // groups * kept:
            yield (
                f"model.top_k = {self.top_k} must be at most {experts // groups * kept}, the experts in "
                f"model.top_k_groups = {kept} of model.expert_groups = {groups} groups"
            )


EXPERT_FIELDS = tuple(each.name for each in fields(ExpertConfig))
