"""The wheel of packages/attention: its size, what its import costs beyond torch's, and what a
collator pays per batch.

    python -m benchmarks.attention_package [--rounds 9] [--tokens 1048576]

Imports are timed in fresh processes, in turn with and without the package; a batch is sharded by
one rank of a group of eight, on the host, as a data loader's worker would.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path) -> Path:
    """The wheel; installed beside it, for PYTHONPATH."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", str(ROOT / "packages/attention"), "--no-deps", "--wheel-dir", str(folder)],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", str(wheel), "--no-deps", "--target", str(folder / "installed")],
        check=True,
    )
    return wheel


def import_seconds(module: str, path: Path) -> float:
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=path, env=environment, capture_output=True, check=True
    )
    return float(done.stdout)


def shard_seconds(tokens: int, documents: int, rounds: int) -> dict[str, float]:
    """Median time of `shard_batch` by method, for random documents."""
    sys.path.insert(0, str(ROOT / "packages/attention"))
    from longhaul_attention import ContextParallel

    torch.manual_seed(0)
    starts = torch.zeros(tokens, dtype=torch.int64)
    starts[torch.randperm(tokens)[:documents]] = 1
    starts[0] = 1
    begin = torch.arange(tokens).where(starts.bool(), 0).cummax(0).values
    ids = torch.randint(32_000, (1, tokens))
    batch = {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(tokens) - begin)[None]}
    # A group of eight in one process: sharding sends nothing.
    group = SimpleNamespace(size=lambda: 8, rank=lambda: 3, group_name="group")
    mesh: Any = SimpleNamespace(
        size=lambda _=None: 8, ndim=1, shape=(8,), get_group=lambda _: group
    )
    found = {}
    with patch("parallelisms.mesh.collectives.all_gather_values", lambda value, _: [value] * 8):
        for method in ("ulysses", "allgather", "ring"):
            cp = ContextParallel(mesh, method=method)
            seconds = []
            for number in range(rounds + 1):
                # Other documents each time.
                batch["position_ids"] = batch["position_ids"].roll(number, 1)
                begun = time.perf_counter()
                cp.shard_batch(batch)
                seconds.append(time.perf_counter() - begun)
            found[method] = median(seconds[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / 1000:.0f} kB\n")
        path = Path(folder) / "installed"
        pairs = [
            [import_seconds(name, path) for name in ("torch", "longhaul_attention")]
            for _ in range(options.rounds)
        ]
    alone, both = (median(column) for column in zip(*pairs, strict=True))
    sys.stdout.write(
        f"import torch {alone:.2f} s, import longhaul_attention {both:.2f} s: {both - alone:.2f} s more\n"
    )
    for documents in (1, options.tokens // 1000, options.tokens // 50):
        timed = shard_seconds(options.tokens, documents, 3)
        line = ", ".join(f"{method} {1000 * seconds:.0f} ms" for method, seconds in timed.items())
        sys.stdout.write(
            f"shard_batch, {options.tokens:,} tokens in {documents:,} documents: {line}\n"
        )


if __name__ == "__main__":
    main()
