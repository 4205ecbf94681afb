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

from longhaul.__main__ import ROOT

ROOMS = ("models", "parallelisms", "trainer")


def require_free_names() -> None:
    """Raises ImportError for a module of the user that has the name of a room: each would hide the
    other.
    """
    for name in ROOMS:
        spec = find_spec(name)
        places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin])]
        if spec is not None and not any(Path(str(place)).parent == ROOT for place in places):
            raise ImportError(
                f"{name} is a module of yours ({', '.join(map(str, places))}), and the name of a folder of Longhaul's: "
                "rename it, or start where it cannot be imported"
            )


require_free_names()
sys.path.insert(0, str(ROOT))

from trainer.data.packed_loader import (  # noqa: E402 - found on the path since the line above
    PackedDataLoader as PackedDataLoader,
)
from trainer.data.packed_loader import (  # noqa: E402
    open_packed as open_packed,
)
from trainer.errors import DataError as DataError  # noqa: E402
