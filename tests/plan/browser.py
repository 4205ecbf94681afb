"""Pages in a headless Chromium, at several widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--window-size=1700,2000", "--virtual-time-budget=5000", "--dump-dom",
]  # fmt: skip
Box = list[float]
MEASURE = """
addEventListener("load", () => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }
  const measured = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, all = kind => [...page.querySelectorAll(kind)]
    all("details").forEach(each => { each.open = true })
    return {
      width: page.documentElement.clientWidth, scrollWidth: page.documentElement.scrollWidth,
      bars: all(".bar").map(bar => ({ place: box(bar), segments: [...bar.querySelectorAll("span")].map(box) })),
      labels: all(".bars .of").map(box), sums: all(".bars .sum").map(box), facts: all("dd").map(box),
      scrollers: all(".scroll").map(box),
      resources: page.defaultView.performance.getEntriesByType("resource").map(each => each.name),
      scripts: page.scripts.length,
    }
  })
  document.body.innerHTML = ""
  const result = { id: "measured", textContent: JSON.stringify(measured) }
  document.body.append(Object.assign(document.createElement("pre"), result))
})
"""


def dump(page: Path | str, folder: Path, *options: str) -> tuple[str, str]:
    """(document after its scripts have run, standard error) of a file or an address."""
    if BROWSER is None:
        pytest.skip(
            "chromium is missing: apt-get install --no-install-recommends chromium fonts-dejavu-core"
        )
    address = page.as_uri() if isinstance(page, Path) else page
    command = [BROWSER, *OPTIONS, *options, f"--user-data-dir={folder / 'user'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return done.stdout, done.stderr


def measure(documents: Sequence[str], widths: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Measurements of each page at each width."""
    frames = [
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(document)}"></iframe>'
        for document in documents
        for width in widths
    ]
    page = folder / "page.html"
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body>{"".join(frames)}<script>{MEASURE}</script></body>'
    )
    document, errors = dump(page, folder)
    found = re.search('<pre id="measured">(.*?)</pre>', document, re.DOTALL)
    assert found, errors
    measured: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return measured


def are_disjoint(boxes: list[Box]) -> bool:
    """With a tolerance of one pixel."""
    return not any(
        one[0] < other[2] - 1
        and other[0] < one[2] - 1
        and one[1] < other[3] - 1
        and other[1] < one[3] - 1
        for index, one in enumerate(boxes)
        for other in boxes[:index]
    )
