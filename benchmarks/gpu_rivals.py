"""Jobs of the GPU benchmark that other libraries run: the same model and tokens in a process of
their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_bench import ROOT, Bench, K
from benchmarks.gpu_steps import StepCase

STEPS = 4
INSTALLED = "LONGHAUL_RIVALS"
"""Environment variable: a folder of packages that a rival imports before all others."""


@dataclass(frozen=True)
class RivalCase:
    library: str
    tokens: int
    recompute: str
    """torchtitan: none, selective or full. transformers: none or full."""
    compile: bool = False

    @property
    def name(self) -> str:
        return f"{self.library}, 1.24B, {self.tokens // K}K, {self.recompute}{', compiled' * self.compile}"


def is_absent(library: str) -> bool:
    return PathFinder.find_spec(library, [os.environ.get(INSTALLED, ""), *sys.path]) is None


def install(wheels: Path, target: Path) -> None:
    """Unpacks the wheels of a folder for `rival`: without a network, and apart from the packages
    of this environment.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
    ]
    subprocess.run([*command, *files], check=True)
    os.environ[INSTALLED] = str(target)


def answer_of(asked: dict[str, Any]) -> dict[str, Any]:
    """What a process of benchmarks/rival_step.py prints.

    Raises RuntimeError with the end of its errors.
    """
    paths = os.pathsep.join(filter(None, (os.environ.get(INSTALLED), str(ROOT))))
    command = [sys.executable, "-m", "benchmarks.rival_step", json.dumps(asked)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"status {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-2:])[-250:]}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rival(bench: Bench, case: RivalCase) -> None:
    """A row of another library's steps."""
    tokens = bench.size(case.tokens)
    model = StepCase("1.24B", tokens).config(tiny=bench.rehearse).model.build()
    names = (
        "vocab_size",
        "dim",
        "ffn_dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "tie_embeddings",
    )
    changes = {"tokens": tokens, "sizes": {name: getattr(model, name) for name in names}}
    changes |= {"device": bench.device.type, "steps": 1 if bench.rehearse else STEPS}
    answer = answer_of(asdict(case) | changes)
    seconds = median(answer["seconds"])
    flops = model.flops(tokens=tokens, pairs=model.mean_pairs(tokens))
    peak = bench.peak_flops
    bench.row(
        system=f"{case.library} {answer['version']}",
        model="1.24B",
        tokens=tokens,
        recompute=case.recompute,
        compile=case.compile,
        head=answer["head"],
        s_step=seconds,
        n=len(answer["seconds"]),
        mfu=flops / seconds / peak if peak else None,
        peak_gib=answer["peak_gib"],
    )
