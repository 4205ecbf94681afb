"""What of a weight a module uses: all of it, unless something that spreads the model puts a part in its place."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

WeightView = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x
