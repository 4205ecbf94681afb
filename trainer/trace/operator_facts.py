"""Facts about the results of an operator of torch, from its schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch


class OperatorFacts:
    """Facts about one overload, found once."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.name = str(func.overloadpacket)
        is_aten = func.namespace == "aten"
        self.is_known = is_aten or func.namespace == "_c10d_functional"
        """Whether what the schema says is all that the operator does."""
        returns = [value.alias_info for value in func._schema.returns]
        self.returns_views = any(returns)
        """Whether some result is an argument or a view of one."""
        self.is_view = self.returns_views and not func._schema.is_mutable and None not in returns
        """Whether it only makes views."""
        self.allocates = None in returns
        """Whether a result is neither an argument nor a view of one."""
        self.only_allocates = not func._schema.is_mutable and not self.returns_views
        """Whether allocating its results is all it does. Their shapes follow from those of the
        arguments.
        """
        self.only_allocates &= torch.Tag.dynamic_output_shape not in func.tags
        self.is_composite = is_aten and bool(
            func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        )

    @cached_property
    def writes(self) -> tuple[int | str, ...]:
        """The arguments that it writes to: their places, or the names of those that have none."""
        return tuple(place for place, _ in self._writes)

    @cached_property
    def _writes(self) -> list[tuple[int | str, tuple[str, ...]]]:
        """(place or name, aliases) of the arguments that it writes to. Lists have no aliases."""
        return [
            (argument.name if argument.kwarg_only else place, _aliases(argument))
            for place, argument in enumerate(self._func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    @cached_property
    def written(self) -> tuple[int | str, ...] | None:
        """The arguments that are the results of what only writes to them; None for other
        operators.
        """
        schema = self._func._schema
        if not schema.is_mutable or torch.Tag.inplace_view in self._func.tags:
            return None
        places = {aliases: place for place, aliases in self._writes}
        results = [places.get(_aliases(value)) for value in schema.returns]
        # A result that is no written argument is new, so the operator does more than write.
        return None if None in results else tuple(each for each in results if each is not None)

    def results_written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of what only writes to its arguments."""
        results = [
            args[place] if isinstance(place, int) else kwargs[place]
            for place in self.written or ()
        ]
        if len(results) < 2:
            return results[0] if results else None
        return tuple(results)


def _aliases(value: Any) -> tuple[str, ...]:
    return () if value.alias_info is None else tuple(value.alias_info.before_set)


_facts: dict[int, OperatorFacts] = {}


def facts_of(func: Any) -> OperatorFacts:
    # Operators live as long as the process, and take long to hash.
    found = _facts.get(id(func))
    if found is None:
        found = _facts[id(func)] = OperatorFacts(func)
    return found
