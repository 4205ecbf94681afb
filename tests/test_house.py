"""The house: imports point down and never round, one door to each dependency, and nothing grows
too large to read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("models", "parallelisms", "trainer", "train")
PACKAGE = ROOT / "packages/attention"
BELOW = {
    "models": {"models"},
    "parallelisms": {"models", "parallelisms"},
    "longhaul_attention": {"models", "parallelisms", "longhaul_attention"},
    "trainer": {"models", "parallelisms", "trainer"},
    "train": {"models", "parallelisms", "trainer"},
}
PRODUCT = sorted(
    [ROOT / "train.py", *(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))]
)
FILES = [*PRODUCT, *sorted((PACKAGE / "longhaul_attention").rglob("*.py"))]
NAMES = {
    path: ".".join(
        path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").parts
    ).removesuffix(".__init__")
    for path in FILES
}
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# Who may name a package outside the standard library; torch is everybody's.
DOORS = {
    "accelerate": {"longhaul_attention.huggingface_trainer"},
    "datasets": {"trainer.data.hf_datasets"},
    "jinja2": {"trainer.plan.html"},
    "mlflow": {"trainer.metrics.tracker_clients"},
    "numpy": set[str](),
    # In functions: not everybody has it.
    "obstore": {"trainer.storage.object_store"},
    "pyarrow": {"trainer.data.open_file"},
    "pydantic": {
        "trainer.storage.artifact",
        "trainer.storage.lease",
        "trainer.storage.lineage",
        "trainer.storage.manifest",
        "trainer.storage.run_id",
        "trainer.checkpoint.memory_folder",
        "trainer.storage.train_state",
        "trainer.config.data",
        "trainer.config.model",
        "trainer.data.packing",
        "trainer.data.remote_shard",
        "trainer.data.token_dataset",
        "trainer.config.parse",
        "trainer.config.sections",
        "trainer.config.slurm",
        "trainer.config.training_stages",
        "trainer.evaluation.load_checkpoint",
        "trainer.hardware.device_specs",
        "trainer.metrics.prediction",
        "trainer.storage.exit_markers",
    },
    "pydantic_core": {"trainer.config.parse", "trainer.hardware.device_specs"},
    "pydantic_settings": {"trainer.config.parse"},
    "rich": {
        "trainer.commands",
        "trainer.data.prepare.report",
        "trainer.storage.progress",
        "trainer.plan.console",
    },
    "safetensors": {"models.hf", "models.hf_write", "trainer.selfcheck.finish"},
    "sentencepiece": {"trainer.data.sentencepiece_tokenizer"},
    "tensorboard": set[str](),
    "tiktoken": {"trainer.data.byte_level_bpe", "trainer.data.tiktoken_tokenizer"},
    "tokenizers": {"trainer.data.huggingface_tokenizer"},
    "tomli": {"trainer.config.parse", "trainer.hardware.spec_tables"},
    "torchdata": {"trainer.data.packed_loader", "trainer.data.reader"},
    "trackio": {"trainer.metrics.tracker_clients"},
    "wandb": {"trainer.metrics.tracker_clients"},
    # In functions, but for generation: not everybody who imports the package has it.
    "transformers": {
        "longhaul_attention.parallel_model",
        "longhaul_attention.__main__",
        "longhaul_attention.generation",
        "longhaul_attention.huggingface",
    },
}
# What makes ranks wait for each other. Tensors go through one file.
COLLECTIVES = {
    "all_reduce": {"parallelisms.mesh.collectives"},
    "barrier": {"parallelisms.mesh.collectives", "longhaul_attention.__main__"},
    "init_process_group": {
        "trainer.step.process_group",
        "trainer.trace.operators",
        "longhaul_attention.__main__",
    },
    "destroy_process_group": {
        "trainer.step.process_group",
        "trainer.trace.operators",
        "longhaul_attention.__main__",
    },
    "new_group": {"trainer.step.process_group", "parallelisms.mesh.mesh"},
}
OTHER_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
PICKLING = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
"""A rank that unpickles runs what it is sent; so do `dcp.save`, and `dcp.load` without
`no_dist`.
"""
# Reads that wait for a device, or of boundaries and what follows from them, which is on the host
# by contract.
WAITS = {
    "models.batch": {"require_ascending"},
    # The counts of experts: once per layer, in the forward pass, where they are not padded or
    # leave the rank.
    "models.dispatch": {"own_rows"},
    "parallelisms.expert_parallel": {"_route", "_places"},
    "models.score_blocks": {"__init__", "blocks", "host_varlen_batches", "short_and_long"},
    "parallelisms.context.attention_plan": {"halo_received"},
    "parallelisms.context.batch_layout": {
        "_chunks",
        "pairs_before",
        "pairs_by_document",
        "pairs_per_rank",
    },
    "parallelisms.mesh.collectives": {"_pad_to_longest", "max_over_ranks"},  # values of the host
    # the end of a prompt, which is on the host
    "trainer.generate": {"generate"},
    "trainer.hardware.device": {"seconds", "read"},
    "trainer.hardware.node_checks": {"links"},  # before a run
    "trainer.metrics.accumulator": {"new_vector"},
    "trainer.step.rerun": {"_observe", "_loss"},  # with training.deterministic only
    "trainer.step.trainer": {"train_state"},
}
DIRECT = {"item", "tolist", "synchronize"}
HOT = (
    "models.",
    "parallelisms.",
    "trainer.hardware.",
    "trainer.metrics.",
    "trainer.run.",
    "trainer.step.",
)
"""Rooms whose code runs in a step, besides the files of `trainer` itself."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, also inside functions; `from a import b` gives both a and
    a.b.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls(tree: ast.AST) -> Iterator[str]:
    """The last part of the name of everything that is called: `barrier` of
    `distributed.barrier()`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id


def torch_calls(tree: ast.AST) -> Iterator[str]:
    """The same, of calls of torch's own functions: `parallelisms.mesh.collectives` gives its
    functions torch's names.
    """
    from_torch = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch"
        for alias in node.names
    } | {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in from_torch:
            yield from calls(ast.Expression(node))


def local_imports(path: Path) -> set[str]:
    """Our own modules that a file imports; `from package import name` counts the package only if
    name is no module.
    """
    ours = set(NAMES.values())
    found = {name for name in imports(TREES[path]) if name in ours}
    # The package of a module that is imported from it is not itself what was asked for.
    deeper = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    asked = {
        node.module
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{alias.name}" not in ours for alias in node.names)
    }
    return {name for name in found if name not in deeper or name in asked}


# ---- floors


def test_imports_point_down() -> None:
    upward = {
        (NAMES[path], name)
        for path in FILES
        for name in imports(TREES[path])
        if name.partition(".")[0] in BELOW
        and name.partition(".")[0] not in BELOW[NAMES[path].partition(".")[0]]
    }
    assert upward == set()


def test_nothing_imports_in_a_circle() -> None:
    graph = {NAMES[path]: local_imports(path) - {NAMES[path]} for path in FILES}
    assert sum(map(len, graph.values())) > 50, "the imports were not found"
    TopologicalSorter(graph).prepare()  # Raises CycleError naming the circle.


def room(module: str) -> str:
    """The folder of a module, or the module itself where it lies in none; models are one room."""
    package, *inner = module.split(".")
    if package == "models":
        return package
    return (
        ".".join([package, *inner[:1]]) if len(inner) > 1 or package != "parallelisms" else package
    )


def test_rooms_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in PRODUCT:
        own = room(NAMES[path])
        graph.setdefault(own, set()).update({room(name) for name in local_imports(path)} - {own})
    assert {"models", "parallelisms.context", "trainer.step", "train"} <= graph.keys()
    TopologicalSorter(graph).prepare()  # Raises CycleError naming the circle.


def annotated_names(tree: ast.AST) -> Iterator[str]:
    """The names in annotations of parameters and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield from (
                each.id for each in ast.walk(node.annotation) if isinstance(each, ast.Name)
            )


def test_the_whole_configuration_and_the_run_folder_stay_where_they_are_read() -> None:
    taken = [
        (room(NAMES[path]), name) for path in PRODUCT for name in annotated_names(TREES[path])
    ]
    with_config = {place for place, name in taken if name in ("Config", "Recipe")}
    assert "trainer.plan" in with_config
    assert {
        place
        for place in with_config
        if place.startswith(("models", "parallelisms", "trainer.metrics"))
    } == set()
    assert len({place for place, name in taken if name == "RunDir"}) <= 6


def test_models_need_torch_and_nothing_else() -> None:
    allowed = sys.stdlib_module_names | {"torch", "models"}
    needed = {
        (NAMES[path], name)
        for path in FILES
        if NAMES[path].partition(".")[0] == "models" and NAMES[path] not in DOORS["safetensors"]
        for name in imports(TREES[path])
        if name.partition(".")[0] not in allowed
    }
    assert needed == set()
    ranks = {
        name for path in FILES if NAMES[path].startswith("models") for name in imports(TREES[path])
    }
    assert not any(name.startswith("torch.distributed") for name in ranks), (
        "a model does not know of ranks"
    )


WITHOUT_TORCH = (
    "trainer.config.job_config",
    "trainer.plan.memory_options",
    "trainer.plan.suggestions",
    "trainer.launch.predict",
    "trainer.config.parse",
    "trainer.storage.run_dir",
    "trainer.hf",
    "trainer.checkpoint.initial_weights",
    "trainer.launch.launcher",
    "trainer.plan.search",
    "trainer.checkpoint.__main__",
    "trainer.selfcheck.__main__",
    "trainer.plan.console",
    "trainer.plan.html",
    "trainer.slurm.__main__",
    "trainer.new.compose",
    "trainer.watch.__main__",
    "models.config",
    "trainer.trace.answers",
    "parallelisms.mesh.message_bytes",
    "parallelisms.mesh.parallel_dims",
    "parallelisms.mesh.pipeline_plan",
    "parallelisms.mesh.process_groups",
)


def test_configurations_are_checked_and_planned_without_torch() -> None:
    code = f"""if True:
        import importlib, sys
        for module in {WITHOUT_TORCH}:
            importlib.import_module(module)
            if loaded := {{"torch", "numpy"}} & set(sys.modules):
                sys.exit(f"{{module}} imports {{loaded}}")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- doors


def test_every_dependency_has_its_doors() -> None:
    known = sys.stdlib_module_names | set(BELOW) | {"torch"} | set(DOORS)
    found: dict[str, set[str]] = {package: set() for package in DOORS}
    for path in FILES:
        for package in {name.partition(".")[0] for name in imports(TREES[path])}:
            assert package in known, f"{NAMES[path]} imports {package}"
            if package in found:
                found[package].add(NAMES[path])
    assert {
        package: modules - DOORS[package]
        for package, modules in found.items()
        if modules - DOORS[package]
    } == {}


def test_ranks_wait_for_each_other_in_few_places() -> None:
    wrong = {
        (NAMES[path], name)
        for path in FILES
        for name in torch_calls(TREES[path])
        if (name in COLLECTIVES and NAMES[path] not in COLLECTIVES[name])
        or (name in OTHER_COLLECTIVES and NAMES[path] != "parallelisms.mesh.collectives")
    }
    assert wrong == set()


def test_no_rank_unpickles_what_another_sent() -> None:
    wrong = [
        (NAMES[path], ast.unparse(node.func))
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func).rpartition(".")[2] in PICKLING
            or ast.unparse(node.func) in ("dcp.save", "dcp.async_save")
            or (
                ast.unparse(node.func) == "dcp.load"
                and "no_dist" not in {each.arg for each in node.keywords}
            )
        )
    ]
    assert wrong == []


def test_numbers_leave_the_device_in_few_places() -> None:
    """In what runs inside an update, on tensors of the step: models, parallelisms, and the
    trainer's loop.
    """
    hot = [
        path for path in FILES if NAMES[path].startswith(HOT) or path.parent == ROOT / "trainer"
    ]
    wrong = {
        (NAMES[path], function.name, name)
        for path in hot
        for function in functions(TREES[path])
        for name in calls(function)
        if name in DIRECT and function.name not in WAITS.get(NAMES[path], set())
    }
    assert wrong == set()


# ---- sizes and manners


MAX_FILE_LINES = 600
CLOSURE_FILES = 159
"""Files that `import train` reaches by any import statement."""
MAX_NODES = 363_150
"""Nodes of the syntax trees of models, parallelisms, trainer and train.py, which no formatting
changes; docs/architecture.md says why there are more than planned.
"""
MAX_NODES_PER_LINE = 9.6
MIN_COMMENTS = 0.03
"""Share of the lines that are comments."""
FRAGMENT = re.compile(r"\s*(Of|What|Those|That|As|Also)\b")
"""How a docstring begins that does not stand without the name of what it describes."""


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    """Texts that stand alone, of modules, classes, functions and attributes."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def left_out(tree: ast.Module) -> list[ast.stmt]:
    """Imports and docstrings, which are no program."""
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [*imported, *docstrings(tree)]


def count_nodes(tree: ast.Module) -> int:
    return sum(1 for _ in ast.walk(tree)) - sum(
        1 for statement in left_out(tree) for _ in ast.walk(statement)
    )


def code_lines(path: Path) -> int:
    """Lines with program: no blank ones, comments, docstrings and imports."""
    skipped = {
        number
        for node in left_out(TREES[path])
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    return sum(
        bool(line) and not line.startswith("#") and number not in skipped for number, line in lines
    )


def test_a_file_has_one_subject() -> None:
    lengths = {NAMES[path]: len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_the_product_stays_small_and_a_line_has_one_idea() -> None:
    nodes = sum(count_nodes(TREES[path]) for path in PRODUCT)
    assert nodes <= MAX_NODES
    assert nodes / sum(map(code_lines, PRODUCT)) <= MAX_NODES_PER_LINE


def test_comments_say_why() -> None:
    lines = [line.strip() for path in PRODUCT for line in path.read_text().splitlines()]
    assert sum(line.startswith("#") for line in lines) >= MIN_COMMENTS * len(lines)


def test_docstrings_are_sentences() -> None:
    fragments = [
        (NAMES[path], node.lineno)
        for path in FILES
        for node in docstrings(TREES[path])
        if FRAGMENT.match(str(ast.literal_eval(node.value)))
    ]
    assert fragments == []


def is_read(target: ast.expr, values: list[ast.expr]) -> bool:
    """Whether values read a name of a target: as in a swap, they must be evaluated first."""
    names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return any(
        isinstance(node, ast.Name) and node.id in names
        for value in values
        for node in ast.walk(value)
    )


def test_values_that_do_not_depend_on_each_other_are_assigned_on_lines_of_their_own() -> None:
    pairs = [
        (NAMES[path], node.lineno)
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and not any(isinstance(each, ast.Starred) for each in node.value.elts)
        and not any(
            is_read(target, node.value.elts[index + 1 :])
            for index, target in enumerate(node.targets[0].elts)
        )
    ]
    assert pairs == []


def test_no_text_is_multiplied_by_a_condition() -> None:
    """`"text" * condition` says in arithmetic what `if` says in words."""
    factors = [
        (NAMES[path], node.lineno)
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(
            isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        and any(
            isinstance(side, ast.Compare | ast.BoolOp) or is_flag(side)
            for side in (node.left, node.right)
        )
    ]
    assert factors == []


def is_flag(node: ast.expr) -> bool:
    """Whether an expression is named as what is true or false."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return bool(re.match(r"(is|has|needs)_", name))


def reached(name: str) -> set[str]:
    """Modules that an import of this one reaches, with the packages that hold them."""
    found = set[str]()
    waiting = [name]
    paths = {module: path for path, module in NAMES.items()}
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            for target in imports(TREES[paths[module]]):
                parts = target.split(".")
                waiting += [
                    each for n in range(len(parts)) if (each := ".".join(parts[: n + 1])) in paths
                ]
    return found


def test_training_reaches_few_files() -> None:
    closure = reached("train")
    assert {"models.kernels", "parallelisms.context.ring", "trainer.data.packing"} <= closure
    assert len(closure) <= CLOSURE_FILES


def test_training_needs_no_planner_and_no_corpus_preparation() -> None:
    rooms = (
        "trainer.plan",
        "trainer.trace",
        "trainer.data.prepare",
        "trainer.checkpoint.export_weights",
        "trainer.data.hf_tokenizer",
        "trainer.slurm",
        "trainer.launch",
    )
    closure = reached("train")
    assert {name for name in closure if name.startswith(rooms)} == set()
    assert (
        not {"models.hf_config", "models.decode", "trainer.config.parse", "trainer.data.tokenizer"}
        & closure
    )


def test_every_function_fits_on_a_screen() -> None:
    long = {
        (NAMES[path], function.name): (function.end_lineno or 0) - function.lineno + 1
        for path in FILES
        for function in functions(TREES[path])
    }
    assert {name: length for name, length in long.items() if length > 60} == {}


MAX_PARAMETERS = 8


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """All names, besides that of the object, the class or the context in which the function
    runs.
    """
    given = function.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [
        each.arg for each in names if each is not None and each.arg not in ("self", "cls", "ctx")
    ]


def test_what_travels_together_is_one_object() -> None:
    files = [
        path
        for path in FILES
        if NAMES[path].startswith(("models.", "parallelisms.", "trainer.step."))
    ]
    counts = {
        (NAMES[path], function.name): len(parameters(function))
        for path in files
        for function in functions(TREES[path])
    }
    assert len(counts) > 500, "the functions were not found"
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}


def test_nothing_is_printed_and_nothing_left_for_later() -> None:
    assert [NAMES[path] for path in FILES if "print" in calls(TREES[path])] == [
        "longhaul_attention.__main__"
    ]
    later = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")
    everything = [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *ROOT.glob("*.sh"),
        *(ROOT / "train_configs").glob("*.toml"),
    ]
    assert [path for path in everything if any(word in path.read_text() for word in later)] == []


def test_the_environment_is_read_where_processes_begin() -> None:
    readers = {
        NAMES[path]
        for path in FILES
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers <= {
        "train",
        "trainer.launch.launcher",
        "trainer.launch.restarts",
        "trainer.launch.workers",
        "trainer.hardware.node_checks",
        "trainer.metrics.tracker_clients",
        "trainer.new.__main__",
        "trainer.preflight",
        "trainer.resilience.signals",
        "trainer.step.planner",
        "trainer.step.process_group",
        "trainer.step.store",
        "trainer.slurm.torchrun_agent",
        # A variable of the library that it does not read beside options of ours.
        "trainer.storage.object_store",
        "trainer.trace.answers",
        "longhaul_attention.__main__",
    }


def test_every_module_says_what_it_is() -> None:
    assert [NAMES[path] for path in FILES if not ast.get_docstring(TREES[path])] == []
