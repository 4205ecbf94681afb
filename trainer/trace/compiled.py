"""Compiled pieces of a model, as far as memory goes: what the compiler saves, and what its kernels
write.

The compiler's own partition of forward and backward decides what is saved. Its kernels are not
run: a rule says what they write to memory. Operators that are not fused (products, kernels,
collectives) read and write tensors; everything between them stays in registers, but for what the
graph returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from models.moe import MixtureOfExperts
from models.transformer import TransformerBlock, default_block_forward
from parallelisms.mesh.collectives import to_local
from trainer.trace.operators import OpCounterMode
from trainer.trace.replay import NotRepeatableError, Replay, noted
from trainer.trace.traffic import nbytes, tensors_of

aten = torch.ops.aten
APART = {
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.baddbmm,
    aten._grouped_mm,
    aten.index_copy,
    aten.embedding,
}
"""Operators of torch that are not fused."""
PLAIN = (int, float, str, type(None))
TENSOR = object()
"""Marks a tensor's place among constants."""


class FusedKernels(fx.Interpreter):
    """Runs a graph whose intermediate results take no memory unless an operator that is not fused
    needs or gives them.
    """

    def __init__(self, module: fx.GraphModule, counter: OpCounterMode) -> None:
        super().__init__(module)
        self._counter = counter
        self._written = {node for node in module.graph.nodes if self._is_written(node)}
        self._read = set[fx.Node]()
        """Nodes that earlier neighbours of the same kernel have read."""
        self.user_to_last_uses = self._freed_after_kernels(module.graph)
        apart = [node.target.overloadpacket for node in module.graph.nodes if is_apart(node)]
        # Attention and collectives count by themselves.
        self._is_repeatable = all(each in APART for each in apart)
        self._replay: Replay | None = None

    def _freed_after_kernels(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        """A kernel has what it reads until it has written everything: what neighbours fuse lives
        until the last of them.
        """
        found = dict[fx.Node, list[fx.Node]]()
        waiting = list[fx.Node]()
        for node in graph.nodes:
            waiting += self.user_to_last_uses.get(node, [])
            if is_apart(node) or is_apart(node.next) or node.next.op == "output":
                found[node] = waiting
                waiting = []
        return found

    def _is_written(self, node: fx.Node) -> bool:
        return is_apart(node) or any(user.op == "output" or is_apart(user) for user in node.users)

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function" or is_apart(node):
            self._read.clear()
            return super().run_node(node)
        with self._counter.without_allocations():
            result = super().run_node(node)
        if not self._counter.allocates:  # It is compiled, not run.
            return result
        # A fused kernel reads each input once, however many of its nodes use it.
        read = {each for each in node.all_input_nodes if self._is_in_memory(each)} - self._read
        moved = [*(self.env[each] for each in read), *([result] if node in self._written else [])]
        self._counter.count_traffic(nbytes(tensors_of(moved)), kernels=not self._read)
        self._read |= read
        if node in self._written:
            self._counter.note_allocations(result, f"compiled {node.name}")
        return result

    def replayed(self, arguments: list[Any]) -> Any:
        """Runs the graph as its first run did; the list of arguments is emptied."""
        if not self._is_repeatable or not self._counter.allocates:
            return self.interpreted(arguments)
        try:
            self._replay = self._replay or self._noted(arguments)
        except NotRepeatableError:
            self._is_repeatable = False
            return self.interpreted(arguments)
        return self._replay.run(arguments)

    def _noted(self, arguments: Sequence[Any]) -> Replay:
        def run_nodes(begin: Callable[[fx.Node], None]) -> dict[fx.Node, Any]:
            self._read.clear()
            self.env = dict(zip(self.graph.find_nodes(op="placeholder"), arguments, strict=True))
            for node in self.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    begin(node)
                    self.env[node] = self.run_node(node)
            return self.env

        try:
            return noted(self._counter, self.graph, arguments, run_nodes, self.user_to_last_uses)
        finally:
            self.env = {}

    def interpreted(self, arguments: list[Any]) -> Any:
        results = self.boxed_run(arguments)
        # The interpreter would keep the last results alive until the next run.
        self.env = {}
        return results

    def _is_in_memory(self, node: fx.Node) -> bool:
        return node.op == "placeholder" or node in self._written


def is_apart(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in APART or target.namespace not in ("aten", "prims")


Graphs = dict[Any, Callable[..., Any]]
"""Compiled pieces, by everything that their code depends on."""
SHARED_GRAPHS = Graphs()
"""Pieces of blocks depend on nothing but their arguments, so all traces of a process share them; but
for those that name a process group.
"""
MAX_SHARED_GRAPHS = 500
"""They keep the modules that they were compiled with."""
_running = list[Callable[[fx.GraphModule], FusedKernels]]()
"""The kernels of a graph in the trace that runs; the process group admits one trace at a time."""


def run_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs the graph by the kernels of the current trace. AOTAutograd names the arguments."""
    del example_inputs

    def run(arguments: list[Any]) -> Any:
        # The list is emptied, so that arguments live no longer than they must.
        return _running[-1](gm).replayed(arguments)

    # Tells AOTAutograd that arguments come in a list, which the graph may empty.
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiler_for(
    counter: OpCounterMode, graphs: Graphs | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A stand-in for `torch.compile` that runs graphs by `FusedKernels`."""
    own = Graphs()
    shared = own if graphs is None else graphs
    kernels = partial(FusedKernels, counter=counter)
    _running[:] = [cache(kernels)]

    def compile_piece(piece: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            leaves, spec = pytree.tree_flatten(args)
            tensors = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
            # Grad mode decides whether the graph saves anything: one graph for either.
            key = (piece, spec, torch.is_grad_enabled(), *map(_signature, leaves))
            known = own if key in own else shared
            if key not in known:
                with counter.without_allocations():
                    compiled, names_group = _compiled(piece, leaves, spec)
                # A process group ends with its trace.
                known = own if names_group else shared
                known[key] = compiled
            return known[key](*tensors)

        return run

    return compile_piece


@contextmanager
def compiled_with(counter: OpCounterMode) -> Iterator[None]:
    """Compiles pieces and whole blocks of the trainer for a trace, in place of `torch.compile`."""
    compile_whole = compiler_for(counter)
    run_block = compile_whole(block_with)
    run_sublayer = compile_whole(sublayer_with)
    if len(SHARED_GRAPHS) > MAX_SHARED_GRAPHS:
        SHARED_GRAPHS.clear()
    compile_piece = compiler_for(counter, SHARED_GRAPHS)

    def forward(block: TransformerBlock, *inputs: Tensor) -> Tensor:
        return cast(Tensor, run_block(block, _local_parameters(block), *inputs))

    def forward_of_experts(block: TransformerBlock, x_BSE: Tensor, *inputs: Tensor) -> Tensor:
        """Sublayers compile by themselves, but for the mixture, which `torch.compile` leaves as
        written. Its norm and residual connection run as written here, too.
        """
        for place, sublayer in enumerate(block.sublayers):
            x_BSE = (
                sublayer(x_BSE, *inputs)
                if isinstance(sublayer.module, MixtureOfExperts)
                else run_sublayer(block, place, _local_parameters(block), x_BSE, *inputs)
            )
        return x_BSE

    def compile_block(block: TransformerBlock, **_: Any) -> None:
        has_experts = any(isinstance(each, MixtureOfExperts) for each in block.modules())
        block.forward_fn = forward_of_experts if has_experts else forward

    with (
        patch("trainer.step.build.compiler", lambda: compile_piece),
        patch.object(TransformerBlock, "compile", compile_block),
    ):
        yield


def _local_parameters(block: TransformerBlock) -> dict[str, Tensor]:
    """Local tensors of the block's parameters, some of which are DTensors."""
    return {name: to_local(parameter) for name, parameter in block.named_parameters()}


def block_with(block: TransformerBlock, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    """The output of a block as a function of its parameters."""
    with _reparametrize_module(block, parameters):
        return default_block_forward(block, *inputs)


def sublayer_with(
    block: TransformerBlock, place: int, parameters: dict[str, Tensor], *inputs: Tensor
) -> Tensor:
    """The output of a block's sublayer as a function of the block's parameters."""
    with _reparametrize_module(block, parameters):
        return block.sublayers[place](*inputs)


def _signature(leaf: Any) -> Any:
    """The guard of an argument: modules that are alike share compiled code."""
    if isinstance(leaf, FakeTensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    # Of real integers, which control flow depends on.
    if isinstance(leaf, Tensor):
        return id(leaf)
    if isinstance(leaf, PLAIN) or not hasattr(leaf, "__dict__"):
        return leaf
    # A layer's kind, a frozen dataclass, tells those with a window from those without.
    values = (
        (name, value if _is_frozen(value) else _signature(value))
        for name, value in vars(leaf).items()
        if isinstance(value, (*PLAIN, nn.Module)) or _is_frozen(value)
    )
    modules = ((name, str(each)) for name, each in getattr(leaf, "_modules", {}).items())
    return type(leaf), *values, *modules


def _is_frozen(value: Any) -> bool:
    return is_dataclass(value) and cast(Any, value).__dataclass_params__.frozen


def _compiled(
    piece: Callable[..., Any], leaves: Sequence[Any], spec: Any
) -> tuple[Callable[..., Any], bool]:
    """The piece as a function of its tensors, with other leaves as constants, and whether its graph
    names a process group.
    """
    targets = set[str]()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        targets.update(str(node.target) for node in gm.graph.nodes)
        return run_graph(gm, example_inputs)

    constants = [TENSOR if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]

    def function(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        given = [next(rest) if leaf is TENSOR else leaf for leaf in constants]
        return piece(*pytree.tree_unflatten(given, spec))

    # The partitioner and the decompositions of Inductor, so that the graph saves what a compiled
    # run saves.
    compiled = aot_function(
        function,
        compile_graph,
        compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    given = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    # The graph keeps what it is traced with. The first call also runs it, and what a piece makes
    # by itself, such as a mask, must be fake there, too.
    with (
        _disable_current_modes(),
        given[0].fake_mode,
        patch("torch.compiler.is_compiling", lambda: True),
    ):
        compiled(*map(_like, given))
    return cast(Callable[..., Any], compiled), "_c10d_functional" in " ".join(targets)


def _like(x: FakeTensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)
