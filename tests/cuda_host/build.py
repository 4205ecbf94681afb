"""python -m tests.cuda_host.build DIR: builds the stand-in CUDA runtime, and prints the variables
that put it before torch.

`eval "$(python -m tests.cuda_host.build DIR)"` in a shell runs everything after it on the
stand-in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("runtime.c")
LIBRARY = "libcuda.so.1"
"""The driver's name, so that a process with the runtime preloaded finds it as the driver too."""


def missing() -> str:
    """Why the stand-in cannot be built; empty if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build; ./run_tests.sh --torch 2.11 sets one up"
    tools = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    return f"{' and '.join(tools)} not found" if tools else ""


def build(folder: Path) -> dict[str, str]:
    """Compiles the library into the folder; returns the environment of a process that runs on
    it.
    """
    site = Path(sysconfig.get_path("purelib"))
    triton = site / "triton/backends/nvidia/include"
    runtime_headers = next(site.glob("nvidia/**/include/cuda_runtime_api.h")).parent
    answered = set(re.findall(r"\b(\w+)\([^;{]*\) \{", SOURCE.read_text()))
    asked = {
        *_undefined_symbols(site / "torch/lib"),
        *re.findall(r"\bcu[A-Z]\w+", (triton / "cuda.h").read_text()),
    }
    rest = folder / "rest.c"
    rest.write_text(
        "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(asked - answered))
    )
    includes = [f"-I{runtime_headers}", f"-I{triton}"]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        *includes,
        f"-Wl,-soname,{LIBRARY}",
        "-o",
        str(folder / LIBRARY),
    ]
    subprocess.run([*command, str(SOURCE), str(rest)], check=True)
    return {
        "LD_PRELOAD": str(folder / LIBRARY),
        "TRITON_LIBCUDA_PATH": str(folder),
        # Expandable segments need the driver's virtual memory.
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Worker processes may outlive the one that compiles, and hold its output open.
        # What other runs have compiled asks for other memory.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _undefined_symbols(folder: Path) -> Iterator[str]:
    """What torch's libraries ask of the runtime, cuBLAS and NCCL."""
    libraries = [str(path) for path in folder.glob("*.so")]
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True
    )
    for name in re.findall(r" U (\w+)", listing.stdout):
        if re.match(r"(__)?cuda[A-Z]|cublas|nccl", name):
            yield name


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    sys.stdout.write("".join(f"export {name}={value}\n" for name, value in build(target).items()))
