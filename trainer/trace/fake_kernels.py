"""Runs operators of torch on fake tensors, several times as fast as FakeTensorMode does.

Relies on private APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from trainer.trace.operator_facts import facts_of

CPU = torch.device("cpu")
UNKNOWN = object()


class Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class FakeKernels:
    """Runs operators on fake tensors of the CPU.

    What an operator only writes to is its result. New tensors are laid out as those of its last
    call with such arguments. What follows from shapes alone is asked of the meta kernels. The
    rest, and what they do not know, takes the way of FakeTensorMode.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._unknown = set[Any]()
        """Operators that have no such kernel."""
        self._layouts: dict[Hashable, Any] = {}
        """Layouts of the results of calls that allocate all of them."""
        self._attributes = vars(FakeTensor(mode, torch.empty(0, device="meta"), CPU))

    def run(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`tensors`: those among the arguments."""
        # From cheap to dear: results that are arguments, known layouts, meta kernels,
        # FakeTensorMode.
        facts = facts_of(func)
        if not facts.is_known:
            return self._ask_mode(func, args, kwargs)
        is_fake = all(isinstance(x, FakeTensor) and x.fake_device == CPU for x in tensors)
        if is_fake and facts.written is not None:
            return facts.results_written(args, kwargs)
        if not facts.only_allocates or not all(map(_has_known_layout, tensors)):
            return self._ask(func, tensors, args, kwargs, is_fake=is_fake)
        # The default dtype matters to what has no tensors.
        call = (
            id(func),
            torch.get_default_dtype(),
            _signature(args),
            _signature((*kwargs.items(),)),
        )
        if (layouts := self._layouts.get(call, UNKNOWN)) is not UNKNOWN:
            return _mapped(self.new, layouts)
        result = self._ask(func, tensors, args, kwargs, is_fake=is_fake)
        if _are_new(_leaves(result), tensors):
            self._layouts[call] = _mapped(layout_of, result)
        return result

    def new(self, layout: Layout) -> Tensor:
        return self._fake(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
        )

    def _fake(self, elements: Tensor) -> Tensor:
        """A fake tensor as FakeTensor makes it, without a look at every option."""
        options: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": CPU}
        found: Tensor = Tensor._make_subclass(FakeTensor, elements, **options)
        vars(found).update(self._attributes)
        return found

    def _ask(
        self,
        func: Any,
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_fake: bool,
    ) -> Any:
        if tensors and is_fake and func not in self._unknown and kwargs.get("device") is None:
            try:
                # Inside it fake tensors pass for meta tensors, so the meta kernel runs without
                # FakeTensorMode.
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
            return self._fake(result)
        return type(result)(map(self._wrapped, result))


def _has_known_layout(x: Tensor) -> bool:
    """A scalar may be a number, which follows other rules of types."""
    return isinstance(x, FakeTensor) or (x.dtype != torch.bool and x.ndim > 0)


def _signature(values: Sequence[Any]) -> Hashable:
    """Key of everything that the layouts of an operator's results depend on. 1, 1.0 and True
    differ.
    """
    return tuple(map(_signature_of, values))


def _signature_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return type(value), layout_of(value)
    if isinstance(value, list | tuple):
        return _signature(value)
    return type(value), value


def layout_of(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype)


def _are_new(results: Sequence[Any], arguments: Sequence[Tensor]) -> bool:
    """Whether each result is a tensor with a storage of its own."""
    if not results or not all(isinstance(x, FakeTensor) and x.fake_device == CPU for x in results):
        return False
    # A result that shares a storage cannot be made from a known layout.
    of_results = {x.untyped_storage()._cdata for x in results}
    of_arguments = {x.untyped_storage()._cdata for x in arguments}
    return len(of_results) == len(results) and of_results.isdisjoint(of_arguments)


def _leaves(result: Any) -> list[Any]:
    if not isinstance(result, list | tuple):
        return [result]
    return [leaf for each in result for leaf in _leaves(each)]


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """`function` of one tensor or layout, or of each in a list or tuple."""
    if isinstance(result, Tensor | Layout):
        return function(result)
    return type(result)(_mapped(function, each) for each in result)
