"""What jobs of several ranks share: the harness, small models, and the meshes they are spread over."""

from __future__ import annotations

from typing import TYPE_CHECKING

# mypy names a file by its folder, Python by where the project's root is.
if TYPE_CHECKING:
    from ranks import RankError, run_ranks
    from small import SMALL, TIED, gradients, largest_difference, packed, small_model
else:
    from tests.models.small import SMALL, TIED, gradients, largest_difference, packed, small_model
    from tests.ranks import RankError, run_ranks

__all__ = ["SMALL", "TIED", "RankError", "gradients", "largest_difference", "packed", "run_ranks", "small_model"]
