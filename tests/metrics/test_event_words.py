"""Events in words: every kind that a run logs, and fields of any type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.watch.invented_runs import EVENTS
from trainer.metrics.event_words import FAULTS, MAX_SHOWN_CHARS, TEMPLATES, describe_event, shorten

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = {"start", "restart", "replica_mismatch", "unstable_step"}


def test_every_kind_that_is_logged_has_words() -> None:
    logged = {
        kind
        for path in (ROOT / "trainer").rglob("*.py")
        for kind in re.findall(r'log_event\(\s*"(\w+)"', path.read_text())
    }
    assert len(logged) > 15, "the calls were not found"
    assert logged == TEMPLATES.keys() | SPECIAL
    assert logged > FAULTS


def test_events_read_as_lines_of_a_log() -> None:
    assert [describe_event(event) for event in EVENTS] == [
        "started on 32 ranks",
        "step time 11.5 s, predicted 11.2 s for h100-80gb",
        "validation on held_out: loss 8.1000",
        "step-100 saved: 96.0 GiB in 41.2 s, training waited 1.3 s",
        "validation on held_out: loss 4.7000",
        "loss 9.750 is 11 sigmas above the recent mean",
        "rolled back to step-100, skipping sequences 3200 to 4864",
        "step-200 saved: 96.0 GiB in 39.8 s, training waited 1.1 s",
        "validation on held_out: loss 3.4000",
        "rank 17 on node-3 is a straggler: compute takes 1.6 times the median",
        "preempted: SIGTERM",
        "resumed from step-240 on 32 ranks",
    ]
    ranks = [{"rank": rank, "host": "node-1"} for rank in range(5)]
    assert describe_event({"event": "replica_mismatch", "ranks": ranks}) == (
        "copies of weights or moments differ: rank 0 on node-1, rank 1 on node-1, rank 2 on node-1, 2 more"
    )
    restart = {"event": "restart", "life": 2, "without_progress": 2}
    assert describe_event(restart) == (
        "workers failed and are started again (launch 3, 2 in a row without a new checkpoint)"
    )


@pytest.mark.parametrize("kind", [*sorted(TEMPLATES.keys() | SPECIAL), "another", ""])
def test_fields_of_any_type_have_a_plain_text(kind: str) -> None:
    without_fields = TEMPLATES.get(kind, kind)
    assert describe_event({"event": kind}) == (kind if "{" in without_fields else without_fields)
    names = set(re.findall(r"\{(\w+)", " ".join(TEMPLATES.values())))
    names |= {"world_size", "resumed", "life", "without_progress", "ranks", "stage"}
    values: list[Any] = [
        None,
        True,
        10**400,
        -1.5,
        "\x1b[2J\n<b>",
        [],
        [[]],
        {},
        [{"rank": {}}],
        "x" * 10**6,
    ]
    for value in values:
        text = describe_event({"event": kind, **dict.fromkeys(names, value)})
        assert len(shorten(text)) <= MAX_SHOWN_CHARS + 3
        assert text.isprintable()


def test_an_event_without_a_kind_is_described() -> None:
    assert describe_event({"step": 3, "why": [1]}) == 'None: {"why": [1]}'
