"""The launcher's handover to training processes: the resolved configuration and its prepared data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config.training_stages import Recipe


@dataclass(frozen=True)
class RunSpec:
    """A validated run, passed to `train.py` as one argument."""

    config: Recipe
    datasets: Mapping[str, Path]
    """Folder of prepared tokens by source name; empty for the synthetic corpus."""

    def to_json(self) -> str:
        """Omits unset keys, because `recompute = "auto"` only chooses those."""
        config = self.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return json.dumps({"config": config, "datasets": {name: str(path) for name, path in self.datasets.items()}})

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        values = json.loads(text)
        datasets = {name: Path(path) for name, path in values["datasets"].items()}
        return cls(Recipe.model_validate_json(json.dumps(values["config"])), datasets)
