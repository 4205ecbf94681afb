"""The launcher's handover to training processes: the resolved configuration and its prepared
data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.sections import Section
from trainer.config.training_stages import Recipe

SECRET_ENV = "LONGHAUL_SECRET"
"""Environment variable of the workers: the secret of their launch, as text."""
STORE_FILE_ENV = "LONGHAUL_STORE_FILE"
"""Environment variable of the workers of one node: the file descriptor of the store in which they
meet.
"""


class RunSpec(Section):
    """A validated run, passed to `train.py` as one argument."""

    config: Recipe
    datasets: dict[str, Path]
    """Folder of prepared tokens by source name; empty for the synthetic corpus."""
    prediction: dict[str, Any] | None = None
    """Content of `prediction.json`, which rank 0 writes as soon as it holds the run folder; None:
    it stays as it is.
    """

    def to_json(self) -> str:
        """Omits unset keys, because `recompute = "auto"` only chooses those."""
        return self.model_dump_json(exclude_unset=True)
