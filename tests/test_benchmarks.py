"""Every script in benchmarks/ runs at toy size, and none reaches into our modules in a way that a
rename would break.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import context_parallel, published, scaling
from benchmarks.doc_tables import DOCS, TABLES, regenerated
from benchmarks.pages import replace_block
from parallelisms.mesh.shard_layout import SeqLayout
from tests.ranks import context

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[1]
OURS = {"models", "parallelisms", "trainer", "train"}
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
LIBRARIES = {
    "counted",
    "gpu_bench",
    "gpu_jobs",
    "gpu_kernels",
    "gpu_parity",
    "gpu_product",
    "gpu_rivals",
    "gpu_steps",
    "pages",
    "published_nvidia",
    "published_row",
    "rival_step",
    "storm_faults",
    "storm_nodes",
    "storm_run",
    "torchtitan_cpu",
}
"""Modules that other scripts import, and those that run in an environment or a process of their
own.
"""
QUICK = {
    "balance": "--documents 10000",
    "config_pages": "--check",
    "cpu_floor": "--steps 3 --seq-len 64 --layers 1",
    "context_parallel": "--tokens 256 --cp 2 --heads 2 1 --width 8 --rounds 1 --methods ring",
    "data": "rows --rounds 1 --seq-len 65536",
    "doc_tables": "--check --untraced",
    "growth": "--toy",
    "loss_curve": "{tmp}/metrics.jsonl {tmp}/loss.svg",
    "measured": "--check",
    "moments": "--steps 3",
    "museum": "--check",
    "plans": "--folder {tmp} debug",
    "replicas": "--mib 1 --rounds 1",
}
SLOW = {
    "storm": "--faults 1 --only save",
    "attention_package": "--rounds 1 --tokens 20000",
    "checkpoint": "--params-millions 0.2 --saves 1 --ranks 1 --folder {tmp}",
    "compare_commits": "HEAD HEAD --runs one_process",
    "cpu_pairs": ". --pairs 2 --rehearse --only full",
    "cpu_step": "--rounds 1 --rehearse",
    "data": "prepare --vocab-size 512 --rounds 1 --corpus {tmp}/corpus",
    "dry_run": "--config debug --world-size 1",
    "faults": "recovery --only launcher",
    "gpu": "--rehearse --only flash --out {tmp}",
    "long_context": "--steps 2 --copy-steps 2 --folder {tmp} --svg {tmp}/context.svg",
    "memory": "one bytes `full` 1024",
    "moe_block": "--rounds 1 --steps 1 --tokens 16",
    "memory_grid": "--cases 2 --seed 0 --jobs 1",
    "packing_runs": "time . --rounds 1 --steps 3",
    "published": "",
    "remote_storm": "--only overwritten",
    "rough_plans": "2 llama3_1b",
    "random_cases": "--cases 2 --max-processes 2 --records {tmp}/records.json",
    "scaling": "--toy",
    "searches": "debug:2",
    "tokenizer_loading": "--tokens 2000 --rounds 1",
    "traced_plans": "debug",
    "traced_rows": "benchmarks/measured/2026-11-26-h200.jsonl",
    "traced_steps": "budget",
}


def inputs(folder: Path) -> dict[str, str]:
    """Writes what scripts read; returns the environment of a script."""
    lines = [{"step": step, "loss": 5.0 - step / 10, "tokens": 64 * step} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "corpus").mkdir()
    text = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    (folder / "corpus" / "text.txt").write_text(text)
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_here(script: str, words: list[str], environment: dict[str, str], log: Path) -> None:
    with log.open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv[1:] = words
    runpy.run_module(f"benchmarks.{script}", run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("script", QUICK)
def test_a_script_runs_at_toy_size(script: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = QUICK[script].format(tmp=tmp_path).split()
    # A process that has imported torch already.
    process = context.Process(target=run_here, args=(script, words, inputs(tmp_path), log))
    process.start()
    process.join(120)
    assert process.exitcode == 0, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK | SLOW)
def test_a_script_runs_as_a_command(script: str, tmp_path: Path) -> None:
    words = (QUICK | SLOW)[script].format(tmp=tmp_path).split()
    command = [sys.executable, "-m", f"benchmarks.{script}", *words]
    environment = os.environ | inputs(tmp_path)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_run() -> None:
    assert {file.stem for file in FILES} == LIBRARIES | QUICK.keys() | SLOW.keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_a_page_are_those_that_the_script_makes(page: str) -> None:
    assert regenerated(page, traced_too=True) == (DOCS / page).read_text()


def test_bytes_and_balance_of_windows_are_those_that_the_script_counts() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    assert page == replace_block(page, "windows", context_parallel.window_table())


def test_a_halo_of_contiguous_ranks_is_a_token_shorter_than_the_window() -> None:
    for cp in (2, 4):
        layout = SeqLayout("contiguous", cp, (0, 64))
        assert context_parallel.window_bytes(layout, 5) == 4 * context_parallel.KV_BYTES


def test_the_page_on_scaling_has_the_sources_that_are_compared_now() -> None:
    parts = scaling.GENERATED.findall((DOCS / "scaling.md").read_text())
    assert len(parts) == 9
    assert "\n".join(published.sources([*published.tables()])) in parts[-1]


@pytest.mark.slow
def test_the_page_on_scaling_compares_with_what_the_planner_predicts_now() -> None:
    parts = scaling.GENERATED.findall((DOCS / "scaling.md").read_text())
    assert parts[-1] == "\n".join(
        (scaling.BEGIN, "", *published.report([*published.tables()]), "", scaling.END)
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_benchmarks_patch_nothing_and_use_nothing_private_of_ours(file: Path) -> None:
    tree = ast.parse(file.read_text())
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            if any(
                name.partition(".")[0] in OURS
                for name in (module, *(alias.name for alias in node.names))
            ):
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
                assert not [alias.name for alias in node.names if alias.name.startswith("_")]
                imported |= set(names)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in imported
        ):
            assert not isinstance(node.ctx, ast.Store), (
                f"line {node.lineno} sets {node.value.id}.{node.attr}"
            )
            assert not node.attr.startswith("_"), (
                f"line {node.lineno} uses {node.value.id}.{node.attr}"
            )
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("vars", "setattr")
        ):
            patched = (
                node.args and isinstance(node.args[0], ast.Name) and node.args[0].id in imported
            )
            assert not patched, f"line {node.lineno} patches a module of ours"
