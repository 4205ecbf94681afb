"""A node whose products are wrong in its preflight, as those of a bad device are."""

from __future__ import annotations

from pathlib import Path

LYING = """\
import os, socket, sys
if os.path.exists("{folder}/" + socket.gethostname() + " lies") and "trainer.hardware.check_node" in sys.orig_argv:
    import torch
    multiply = torch.Tensor.__matmul__
    def lie(one, other):
        found = multiply(one, other)
        if found.dtype == torch.bfloat16:
            found[0, 0] += 1
        return found
    torch.Tensor.__matmul__ = lie
"""


def may_lie(folder: Path) -> str:
    """An entry of `slurm.setup` with which nodes lie once `lie` has named them."""
    (folder / "sitecustomize.py").write_text(LYING.format(folder=folder))
    return f'"export PYTHONPATH={folder}"'


def lie(folder: Path, node: str) -> None:
    (folder / f"{node} lies").touch()
