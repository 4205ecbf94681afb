"""Garbage collection in processes that import torch: a full one looks at half a million objects,
for a third of a second.
"""

from __future__ import annotations

import gc

_freeze = gc.freeze


def settle() -> None:
    """Collects what is garbage, and leaves all that is alive out of later collections: modules and
    caches.
    """
    gc.collect()
    _freeze()


def freeze_imports() -> None:
    """Leaves everything that is alive now out of all later collections, of which every trainer
    asks for several.

    A trainer also freezes what it finds, and unfreezes it at its end. Here that would bring the
    imports back, or keep the process groups of every trainer and their threads.
    """
    settle()
    gc.freeze = gc.unfreeze = lambda: None
