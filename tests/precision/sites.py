"""Where the product adds up tensors, found in its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted(
        path
        for folder in ("models", "parallelisms", "trainer/step")
        for path in (ROOT / folder).rglob("*.py")
    ),
    ROOT / "trainer" / "metrics" / "accumulator.py",
    *sorted((ROOT / "trainer" / "evaluation").glob("*.py")),
    ROOT / "trainer" / "run" / "validation.py",
]
SUMS = {
    *(
        "sum",
        "nansum",
        "mean",
        "nanmean",
        "cumsum",
        "embedding_bag",
        "logsumexp",
        "logaddexp",
        "vector_norm",
        "get_total_norm",
        "lerp",
        "lerp_",
    ),
    *(
        "add_",
        "addmm",
        "addmm_",
        "addmv_",
        "baddbmm",
        "addcmul_",
        "index_add",
        "index_add_",
        "scatter_add_",
        "einsum",
    ),
    *(
        "all_reduce",
        "all_reduce_functional",
        "reduce_scatter",
        "reduce_scatter_async",
        "reduce_scatter_tensor",
    ),
    *(
        "reduce_scatter_tokens",
        "_reduce_scatter_single",
        "embedding_dense_backward",
        "fully_shard",
    ),
}


def sums_of(node: ast.AST) -> Iterator[str]:
    """The sums in a function, without those in functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.AugAssign) and isinstance(child.op, ast.Add):
            # Lists and counters are no sums of tensors.
            if not isinstance(child.value, ast.List | ast.ListComp | ast.Constant):
                yield "+="
        elif isinstance(child, ast.Assign) and _is_running_sum(child):
            yield "+"
        elif ast.unparse(child) == "torch.add":
            yield "add"
        elif (
            isinstance(child, ast.Attribute)
            and child.attr in SUMS
            and not isinstance(child.ctx, ast.Store)
        ):
            yield child.attr
        elif isinstance(child, ast.Name) and child.id in SUMS:
            yield child.id
        yield from sums_of(child)


def _is_running_sum(assigned: ast.Assign) -> bool:
    """`name = name + ...` or the other way round."""
    (target, *_), value = assigned.targets, assigned.value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    return ast.unparse(target) in (ast.unparse(value.left), ast.unparse(value.right))


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}.{child.name}", child
            yield from functions(child, f"{prefix}.{child.name}")
        else:
            yield from functions(child, prefix)


def imported_packages(tree: ast.Module) -> set[str]:
    names = [name for node in tree.body if isinstance(node, ast.Import) for name in node.names]
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*(each.name for each in names), *modules)}


def accumulation_sites() -> dict[str, str]:
    """The sums of every function of a module that imports torch, by name."""
    found = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        if "torch" not in imported_packages(tree):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, function in [(module, tree), *functions(tree, module)]:
            if sums := " ".join(sorted(sums_of(function))):
                found[name] = sums
    return found
