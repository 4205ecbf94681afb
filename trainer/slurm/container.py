"""The container of a job (pyxis): what is mounted in it, and how its interpreter starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import extension
from trainer.config.data import HF_PREFIX
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError

PATH_KEYS = ("corpus", "path", "initial_load_path", "device")
"""Keys whose text may be a path: some of their values are names."""
CLEAN_INTERPRETER = (
    'env -u PYTHONHOME PYTHONPATH="$PYTHONPATH" PYTHONNOUSERSITE="${PYTHONNOUSERSITE-1}" "$PYTHON"'
)
"""The interpreter, with our import path whatever the image sets, and without packages of a mounted
home, which are those of another interpreter.
"""


def mounted_paths(config: Recipe, *, mounted: Sequence[Path], working_dir: Path) -> list[Path]:
    """The paths that the configuration names, as far as they are outside of `mounted`, and what
    they link to.

    Of a path that does not exist yet, its nearest folder. Raises ConfigError for one that pyxis
    cannot mount.
    """
    named = [working_dir / path for path in named_paths(config)]
    places = {
        _nearest(Path(form(path)))
        for path in (*mounted, *named)
        for form in (os.path.abspath, os.path.realpath)
    }
    outside = list[Path]()
    # Folders come before what is in them. Nothing may cover the whole image.
    for place in sorted(places - {Path("/")}):
        if not any(place.is_relative_to(each) for each in (*mounted, *outside)):
            outside.append(place)
    problems = [
        f"slurm.container: {path} has a comma, a colon or a quote, with which pyxis mounts no path"
        for path in (*mounted, *outside)
        if re.search(r"[,:\"'\\$`\n]", str(path))
    ]
    if problems:
        raise ConfigError(problems)
    return outside


def named_paths(config: Recipe) -> Iterator[Path]:
    """Files and folders of the configuration, of its stages and of its extensions."""
    stages = [stage.config for stage in config.training_stages]
    for section in (config, *stages):
        yield from _paths_in(section.model_dump())
    yield from (each.folder for each in extension.installed())


def _paths_in(values: Mapping[str, Any]) -> Iterator[Path]:
    for key, value in values.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Mapping):
                yield from _paths_in(each)
            elif isinstance(each, Path):
                yield each
            elif key in PATH_KEYS and isinstance(each, str):
                # What is a name, and no path, leads to the working folder.
                yield Path(each.removeprefix("hf-text:").removeprefix(HF_PREFIX))


def _nearest(path: Path) -> Path:
    """The path itself or, if there is nothing, the folder in which it will be."""
    # Not Path.exists, which raises an error for a folder that may not be read.
    return next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110
