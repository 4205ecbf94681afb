"""The idle time of pipeline schedules, checked against a simulation in
`tests/plan/test_pipeline_bubble.py`. Imports no torch.
"""

from __future__ import annotations

from parallelisms.mesh.pipeline_plan import PipelinePlan


def bubble_seconds(plan: PipelinePlan, chunk_seconds: float, *, p2p_seconds: float = 0) -> float:
    """Idle seconds of a rank in one step; a micro-batch in one stage takes `chunk_seconds`, a send
    `p2p_seconds`.
    """
    return plan.bubble_chunks * chunk_seconds + _exposed_sends(plan) * p2p_seconds


def _exposed_sends(plan: PipelinePlan) -> float:
    """Sends on the critical path: through all stages and back. 1F1B keeps just enough
    micro-batches in flight to hide no send, so every further micro-batch exposes its own.
    """
    sends_per_round_trip = 2 * (plan.num_stages - 1)
    further = plan.num_micro_batches - 1 if plan.schedule == "1F1B" else 0
    return sends_per_round_trip * (1 + further / plan.pp)
