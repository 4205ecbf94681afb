"""Rules for the options of layers with experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import ModelConfig

EXPERT_FIELDS = (
    *("num_experts", "top_k", "expert_dim", "shared_expert_dim", "router", "normalize_top_k", "router_scaling"),
    *("expert_groups", "top_k_groups"),
)
"""Those of `ModelConfig` that only layers with experts read."""


def expert_problems(model: ModelConfig) -> Iterator[str]:
    """Every broken rule, with its values."""
    default = type(model)
    if not model.has_experts:
        unused = [name for name in EXPERT_FIELDS if getattr(model, name) != getattr(default, name)]
        yield from (f'model.{name} is only used with model.feed_forward = "moe"' for name in unused)
        return
    values = {name: getattr(model, name) for name in ("num_experts", "top_k", "expert_dim")}
    yield from (f"model.{name} = {value} must be above 0" for name, value in values.items() if value < 1)
    if model.shared_expert_dim and not any(kind.shared_expert for kind in model.kinds):
        yield f"model.shared_expert_dim = {model.shared_expert_dim} is only used with model.shared_expert = true"
    if model.num_experts > 0:
        yield from _choice_problems(model)


def _choice_problems(model: ModelConfig) -> Iterator[str]:
    """Of the experts that a token may have."""
    experts, groups, kept = model.num_experts, model.expert_groups, model.top_k_groups
    if model.top_k > experts:
        yield f"model.top_k = {model.top_k} must be at most model.num_experts = {experts}"
    if groups < 1 or experts % groups:
        yield f"model.expert_groups = {groups} must divide model.num_experts = {experts}"
    elif not 1 <= kept <= groups:
        yield f"model.top_k_groups = {kept} must be from 1 to model.expert_groups = {groups}"
    elif experts >= model.top_k > experts // groups * kept:
        yield (
            f"model.top_k = {model.top_k} must be at most {experts // groups * kept}, the experts in "
            f"model.top_k_groups = {kept} of model.expert_groups = {groups} groups"
        )
