"""A graph that ran once, as what it allocates, frees and counts: a further run repeats that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor, fx

from trainer.trace.fake_kernels import Layout, layout_of
from trainer.trace.operators import OpCounterMode
from trainer.trace.traffic import tensors_of


class Allocated(NamedTuple):
    """A storage."""

    number: int
    layout: Layout
    operator: str


@dataclass
class Step:
    """The memory and the counts of one node."""

    allocated: list[Allocated] = field(default_factory=list)
    counts: list[Callable[[], None]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Numbers of the storages that nothing needs after it."""


class Result(NamedTuple):
    """A tensor that a graph returns, from an argument or from a storage of its own."""

    place: int | None
    """Place of the argument; None: it is from no argument."""
    storage: int
    view: Layout | None
    """None: the argument or the storage as it is."""
    offset: int
    """Elements from the first one to that of the view."""


class NotRepeatableError(Exception):
    """A graph does what a replay cannot repeat."""


class Notes:
    """Notes what the nodes of a graph do, in place of doing it."""

    def __init__(self, counter: OpCounterMode) -> None:
        self._counter = counter
        self.step = Step()
        self._kept = list[Tensor]()
        """No two storages have the same address while both live."""
        self._numbers = dict[int, int]()

    @contextmanager
    def taken(self) -> Iterator[None]:
        counter = self._counter
        with (
            patch.object(counter, "count_product", partial(self._count, counter.count_product)),
            patch.object(counter, "count_traffic", partial(self._count, counter.count_traffic)),
            patch.object(counter.storages, "add", self._allocate),
        ):
            yield

    def add(self, x: Tensor) -> int:
        """The number of a storage, known or new."""
        self._kept.append(x)
        return self._numbers.setdefault(x.untyped_storage()._cdata, len(self._numbers))

    def number(self, x: Tensor) -> int | None:
        """The number of a storage; None for what takes no memory."""
        return self._numbers.get(x.untyped_storage()._cdata)

    def _count(self, count: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.step.counts.append(partial(count, *args, **kwargs))

    def _allocate(self, x: Tensor, phase: str, operator: str) -> None:
        del phase
        if self.number(x) is None:
            # Of a view of something larger, the layout does not tell the storage.
            if x.untyped_storage().nbytes() != x.nbytes:
                raise NotRepeatableError
            self.step.allocated.append(Allocated(self.add(x), layout_of(x), operator))


class Replay:
    """Repeats what a graph did when `noted` ran it."""

    def __init__(
        self,
        counter: OpCounterMode,
        storages: Mapping[int, int],
        steps: Sequence[Step],
        results: Sequence[Any],
    ) -> None:
        """`storages`: of the arguments that are tensors, by place. `results`: with a `Result` for
        each tensor.
        """
        self._counter = counter
        self._storages = storages
        self._steps = [step for step in steps if step != Step()]
        self._results = results

    def run(self, arguments: list[Any]) -> Any:
        """Empties the list of arguments."""
        storages = self._counter.storages
        given = {place: arguments[place] for place in self._storages}
        arguments.clear()
        own = dict[int, Tensor]()
        for step in self._steps:
            for number, layout, operator in step.allocated:
                own[number] = self._counter.new(layout)
                storages.add(own[number], self._counter.phase, operator)
            for count in step.counts:
                count()
            for number in step.freed:
                own.pop(number, None)
                for place in [each for each in given if self._storages[each] == number]:
                    del given[place]
        return [
            _returned(each, own[each.storage] if each.place is None else given[each.place])
            if isinstance(each, Result)
            else each
            for each in self._results
        ]


def _returned(result: Result, whole: Tensor) -> Tensor:
    if result.view is None:
        return whole
    offset = whole.storage_offset() + result.offset
    return whole.as_strided(result.view.shape, result.view.stride, offset)


def noted(
    counter: OpCounterMode,
    graph: fx.Graph,
    arguments: Sequence[Any],
    run_nodes: Callable[[Callable[[fx.Node], None]], Mapping[fx.Node, Any]],
    freed_after: Mapping[fx.Node, Sequence[fx.Node]],
) -> Replay:
    """Runs a graph without counting it.

    `run_nodes` calls its argument before every node, and returns the results of all.
    `freed_after`: the nodes whose results are freed after each. Raises NotRepeatableError.
    """
    notes = Notes(counter)
    storages = {place: notes.add(x) for place, x in enumerate(arguments) if isinstance(x, Tensor)}
    steps = dict[fx.Node, Step]()

    def begin(node: fx.Node) -> None:
        notes.step = steps[node] = Step()

    with notes.taken():
        results = run_nodes(begin)
    _note_freed(notes, results, steps, freed_after)
    layouts = {each.number: each.layout for step in steps.values() for each in step.allocated}
    inputs = {x: place for place, x in enumerate(graph.find_nodes(op="placeholder"))}

    def returned(node: Any) -> Any:
        x = results[node] if isinstance(node, fx.Node) else node
        if not isinstance(x, Tensor):
            return x
        number = notes.number(x)
        if number in layouts:
            return Result(None, number, *_view(x, layouts[number], 0))
        sharing = (place for place, each in storages.items() if each == number)
        place = inputs.get(node, next(sharing))
        whole = arguments[place]
        return Result(place, storages[place], *_view(x, layout_of(whole), whole.storage_offset()))

    (output,) = graph.find_nodes(op="output")
    return Replay(counter, storages, [*steps.values()], [*map(returned, output.args[0])])


def _note_freed(
    notes: Notes,
    results: Mapping[fx.Node, Any],
    steps: Mapping[fx.Node, Step],
    freed_after: Mapping[fx.Node, Sequence[fx.Node]],
) -> None:
    """Frees every storage after the last node that frees a result in it."""
    end = len(steps)
    last = dict[int, int]()
    freed = dict[fx.Node, int]()
    for place, (node, step) in enumerate(steps.items()):
        freed |= dict.fromkeys(freed_after.get(node, ()), place)
        last |= {each.number: place for each in step.allocated}
    for node, value in results.items():
        for number in map(notes.number, tensors_of((value,))):
            if number is not None:
                last[number] = max(last.get(number, 0), freed.get(node, end))
    in_order = [*steps.values()]
    for number, place in last.items():
        if place < end:
            in_order[place].freed.append(number)


def _view(x: Tensor, whole: Layout, offset: int) -> tuple[Layout | None, int]:
    """How x looks at a tensor of this layout that starts at `offset` of its storage."""
    layout = layout_of(x)
    if layout.dtype != whole.dtype:
        raise NotRepeatableError
    distance = int(x.storage_offset()) - offset
    return (None, 0) if (layout, distance) == (whole, 0) else (layout, distance)
