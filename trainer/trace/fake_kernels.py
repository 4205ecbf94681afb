"""Runs operators of torch on fake tensors, several times as fast as FakeTensorMode does. Relies on private APIs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

CPU = torch.device("cpu")
UNKNOWN = object()


class Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class FakeKernels:
    """Runs operators on fake tensors of the CPU.

    What an operator only writes to is its result. New tensors are laid out as those of its last call with such
    arguments. What follows from shapes alone is asked of the meta kernels. The rest, and what they do not know, takes
    the way of FakeTensorMode.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._unknown = set[Any]()
        """Operators that have no such kernel."""
        self._layouts: dict[Hashable, Any] = {}
        """Of the results of calls that allocate all of them."""

    def run(self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensors`: those among the arguments."""
        if func.namespace != "aten":
            return self._ask_mode(func, args, kwargs)
        is_fake = all(isinstance(x, FakeTensor) and x.fake_device == CPU for x in tensors)
        if is_fake and (written := _written(func)) is not None:
            return _like(written, [args[place] if isinstance(place, int) else kwargs[place] for place in written])
        if not is_fake or not _allocates_all(func):
            return self._ask(func, tensors, args, kwargs, is_fake=is_fake)
        # The default dtype matters to what has no tensors.
        call = func, torch.get_default_dtype(), _signature(args), _signature((*kwargs.items(),))
        if (layouts := self._layouts.get(call, UNKNOWN)) is not UNKNOWN:
            return _mapped(self._new, layouts)
        result = self._ask(func, tensors, args, kwargs, is_fake=is_fake)
        if _are_new(_leaves(result), tensors):
            self._layouts[call] = _mapped(_layout, result)
        return result

    def _new(self, layout: Layout) -> Tensor:
        elements = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
        return FakeTensor(self._mode, elements, CPU)

    def _ask(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_fake: bool
    ) -> Any:
        if tensors and is_fake and func not in self._unknown and kwargs.get("device") is None:
            try:
                with in_kernel_invocation_manager(self._mode):
                    result = func(*args, **kwargs)
            except (NotImplementedError, RuntimeError):
                self._unknown.add(func)
            else:
                return self._wrapped(result)
        return self._ask_mode(func, args, kwargs)

    def _ask_mode(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._mode:
            return func(*args, **kwargs)

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, FakeTensor) or not isinstance(result, Tensor | list | tuple):
            return result
        if isinstance(result, Tensor):
            return FakeTensor(self._mode, result, CPU)
        return type(result)(map(self._wrapped, result))


@cache
def _written(func: Any) -> tuple[int | str, ...] | None:
    """The arguments that are the results of what only writes to them; None for other operators."""
    schema = func._schema
    if not schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return None
    given = {
        tuple(argument.alias_info.before_set): argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    results = [
        None if each.alias_info is None else given.get((*each.alias_info.before_set,)) for each in schema.returns
    ]
    return None if None in results else tuple(each for each in results if each is not None)


@cache
def _allocates_all(func: Any) -> bool:
    return not func._schema.is_mutable and all(value.alias_info is None for value in func._schema.returns)


def _like(written: Sequence[Any], results: list[Any]) -> Any:
    if len(written) < 2:
        return results[0] if results else None
    return tuple(results)


def _signature(values: Sequence[Any]) -> Hashable:
    """What the layouts of an operator's results depend on. 1, 1.0 and True differ."""
    return tuple(map(_signature_of, values))


def _signature_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _layout(value)
    if isinstance(value, list | tuple):
        return _signature(value)
    return type(value), value


def _layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype)


def _are_new(results: Sequence[Any], arguments: Sequence[Tensor]) -> bool:
    """Whether each result is a tensor with a storage of its own."""
    if not results or not all(isinstance(x, FakeTensor) and x.fake_device == CPU for x in results):
        return False
    storages = [x.untyped_storage()._cdata for x in (*results, *arguments)]
    return len({*storages[: len(results)]}) == len(results) and not {*storages[: len(results)]} & {
        *storages[len(results) :]
    }


def _leaves(result: Any) -> list[Any]:
    if not isinstance(result, list | tuple):
        return [result]
    return [leaf for each in result for leaf in _leaves(each)]


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """Of one tensor or layout, or of each in a list or tuple."""
    if isinstance(result, Tensor | Layout):
        return function(result)
    return type(result)(_mapped(function, each) for each in result)
