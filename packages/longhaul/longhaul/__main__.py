"""`longhaul COMMAND ...`, also as `python -m longhaul`, in any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "trainer").is_dir() else HERE.parents[2]
"""Where the rooms are: here once installed, in a checkout three folders up."""


def main() -> None:
    # First, here and in every process that is started: the current folder may have a `models` or a
    # `trainer.py` of its own.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    os.environ["PYTHONSAFEPATH"] = "1"
    from trainer.cli import main as run

    run()


if __name__ == "__main__":
    main()
