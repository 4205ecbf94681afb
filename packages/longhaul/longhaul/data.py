"""Packed corpora in a training loop of your own.

    from longhaul.data import PackedDataLoader, open_packed

    dataset = open_packed("prepared/books", seq_len=131072)
    loader = PackedDataLoader(dataset, dp_rank=rank, dp_size=world_size, num_workers=2)

`state_dict()` is a position that any number of ranks and workers continues.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from .__main__ import ROOT

ROOMS = ("models", "parallelisms", "trainer")


def require_free_names() -> None:
    """Raises ImportError for a module of the user that has the name of a room: each would hide the
    other.
    """
    for name in ROOMS:
        spec = find_spec(name)
        # A folder without __init__.py has no origin, and hides no package.
        if spec is None or spec.origin is None or Path(spec.origin).parents[1] == ROOT:
            continue
        raise ImportError(
            f"{name} is a module of yours ({spec.origin}), and the name of a folder of Longhaul's: "
            "rename it, or start where it cannot be imported"
        )


require_free_names()
# Last: of all other names, those of the user are found first.
sys.path.append(str(ROOT))

from trainer.data.packed_loader import (  # noqa: E402 - found on the path since the line above
    PackedDataLoader as PackedDataLoader,
)
from trainer.data.packed_loader import (  # noqa: E402
    open_packed as open_packed,
)
from trainer.errors import DataError as DataError  # noqa: E402
