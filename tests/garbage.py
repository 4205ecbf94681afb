"""Garbage collection in processes that import torch: a full one looks at half a million objects, for a third of a second."""

from __future__ import annotations

import gc


def freeze_imports() -> None:
    """Leaves everything that is alive now out of all later collections, of which every trainer asks for several.

    A trainer also freezes what it finds, and unfreezes it at its end. Here that would bring the imports back, or keep the
    process groups of every trainer and their threads.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
