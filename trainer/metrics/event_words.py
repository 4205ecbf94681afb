"""Events of a run in words, for trackers and for `longhaul watch`. Imports no torch.

An event is an object of events.jsonl, which may come from a stranger: a field that is missing, or
of another type, gives a plainer text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from trainer.errors import printable
from trainer.storage.durable_io import format_bytes

Event = Mapping[str, Any]
MAX_CHARS = 10_000
MAX_SHOWN_CHARS = 500
MAX_NAMED_RANKS = 3

FAULTS = frozenset(
    {
        "checkpoint_failed",
        "expert_collapse",
        "quarantined",
        "remote_damaged",
        "replica_mismatch",
        "rerun",
        "restart",
        "rolled_back",
        "skipped",
        "spike",
        "straggler",
        "unstable_step",
        "upload_failed",
    }
)
"""Kinds of events that a person may want to look into."""

TEMPLATES = {
    "checkpoint": "{path} saved: {bytes} in {seconds:.1f} s, training waited {blocked_seconds:.1f} s",
    "checkpoint_downloaded": "checkpoint of step {step} downloaded from {url}: {bytes} in {seconds:.1f} s",
    "checkpoint_failed": "checkpoint not saved: {reason}",
    "checkpoint_uploaded": "checkpoint uploaded to {url}: {bytes} in {seconds:.1f} s",
    "end": "all steps are done, loss {loss:.4f}",
    "expert_collapse": "layer {layer} has collapsed: most of its experts had no token for ten steps",
    "planned": "step time {measured_seconds:.3g} s, predicted {predicted_seconds:.3g} s for {device}",
    "preempted": "preempted: {reason}",
    "quarantined": "{path} is damaged and was set aside: {reason}",
    "remote_damaged": "{url} is damaged: {reason}",
    "rerun": "the step gave the same result when it was run again: suspect its data",
    "rolled_back": "rolled back to {to}, skipping sequences {without_rows[0]} to {without_rows[1]}",
    "skipped": "optimizer step skipped: the gradient was not finite",
    "spike": "loss {loss:.3f} is {sigmas:.0f} sigmas above the recent mean",
    "stage": "stage {name} is done, loss {loss:.4f}",
    "straggler": "rank {rank} on {host} is a straggler: {phase} takes {ratio:.1f} times the median",
    "upload_failed": "uploading checkpoints failed, tried again later: {reason}",
    "validation": "validation on {set}: loss {loss:.4f}",
}


def describe_event(event: Event) -> str:
    """An event in one line, without its step and time."""
    kind = str(event.get("event"))
    try:
        if (describe := _SPECIAL.get(kind)) is not None:
            text = describe(event)
        else:
            text = TEMPLATES[kind].format_map(_readable(event))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        fields = {key: event[key] for key in event if key not in ("event", "time", "step")}
        text = f"{kind}: {json.dumps(fields, ensure_ascii=False)}" if fields else kind
    return printable(" ".join(text[:MAX_CHARS].split()))


def shorten(text: str) -> str:
    """The beginning of a text that is shown in a list."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _readable(event: Event) -> Event:
    """The fields with sizes in units, and checkpoints by name."""
    readable = dict(event)
    if "bytes" in event:
        readable["bytes"] = format_bytes(event["bytes"])
    for key in ("path", "to"):
        if isinstance(event.get(key), str):
            readable[key] = PurePath(event[key]).name
    return readable


def _describe_start(event: Event) -> str:
    ranks = event["world_size"]
    resumed = event["resumed"]
    begun = f"resumed from {PurePath(resumed).name}" if resumed else "started"
    stage = f", stage {event['stage']}" if event.get("stage") else ""
    return f"{begun} on {ranks} rank{'' if ranks == 1 else 's'}{stage}"


def _describe_restart(event: Event) -> str:
    without = event["without_progress"]
    reason = f", {without} in a row without a new checkpoint" if without else ""
    return f"workers failed and are started again (launch {event['life'] + 1}{reason})"


def _describe_ranks(prefix: str) -> Callable[[Event], str]:
    def describe(event: Event) -> str:
        ranks = event["ranks"]
        named = [f"rank {each['rank']} on {each['host']}" for each in ranks[:MAX_NAMED_RANKS]]
        if len(ranks) > MAX_NAMED_RANKS:
            named.append(f"{len(ranks) - MAX_NAMED_RANKS} more")
        return f"{prefix}: {', '.join(named)}"

    return describe


_SPECIAL: dict[str, Callable[[Event], str]] = {
    "start": _describe_start,
    "restart": _describe_restart,
    "replica_mismatch": _describe_ranks("copies of weights or moments differ"),
    "unstable_step": _describe_ranks("the step gave another result when it was run again"),
}
