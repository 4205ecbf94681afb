"""`ContextParallel` on a mesh, from the keys of its plan and its own options."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from models.score_pairs import Scores
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.context_plan import ContextPlan

OWN_OPTIONS = ("reduce_dtype", "kernel", "causal", "dropout")


def build_core(mesh: DeviceMesh, **options: Any) -> ContextParallel:
    """All ranks of a one-dimensional mesh; `hybrid` on a mesh of two dimensions: ring, then
    Ulysses.
    """
    own = {key: options.pop(key) for key in OWN_OPTIONS if key in options}
    own["scores"] = Scores(options.pop("window", None), options.pop("softcap", None))
    defaults: dict[str, Any] = {"cp": mesh.size(), "ranks_per_node": mesh.size()}
    if mesh.ndim == 2:
        defaults |= {"method": "hybrid", "cp_ulysses": mesh.size(1)}
    return ContextParallel(mesh, ContextPlan(**(defaults | options)), **own)
