"""The process of `longhaul preflight` that runs the checks: a line of JSON before each, and one
with its result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from trainer.hardware.node_checks import CHECKS, CheckFailedError, Node


def main(argument: str) -> None:
    asked = json.loads(argument)
    node = Node(Path(asked["path"]), asked["devices"])
    for name, check in CHECKS.items():
        _say({"name": name})
        began = time.monotonic()
        try:
            state = "passed"
            detail = check(node)
        except CheckFailedError as error:
            state = "failed"
            detail = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a broken device raises
            lines = str(error).strip().splitlines() or [""]
            state = "failed"
            detail = f"{type(error).__name__}: {lines[0][:300]}"
        _say({"name": name, "state": state, "detail": detail, "seconds": time.monotonic() - began})


def _say(values: dict[str, object]) -> None:
    # Flushed at once: the parent must know which check hangs or kills this process.
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
