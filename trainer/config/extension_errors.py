"""Which extension an error comes from: by the frames of its traceback, by the part that its
message names, or by the objects that were called.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Protocol

PART = re.compile(r'\b(mixer|feed_forward|optimizer|loss|tracker) "([^"]+)"')
"""How our messages name a part of a model or a run."""
TABLES = {
    "mixer": "mixers",
    "feed_forward": "feed_forwards",
    "optimizer": "optimizers",
    "loss": "losses",
    "tracker": "trackers",
}
"""The field of an `Extension` by the word of `PART`."""
OUR_MODULES = ("train.py", "longhaul.py")
NO_FAULT_OF_ITS_CODE = ("OutOfMemoryError", "MemoryError")


class Installed(Protocol):
    """An installed extension, and where its source is."""

    @property
    def extension(self) -> Any: ...
    @property
    def folder(self) -> Path: ...
    def holds(self, file: Path) -> bool: ...


def describe(error: BaseException, installed: Iterable[Installed]) -> str | None:
    """Names the extension that an error comes from, with the line that raised it, or else with
    that of the class or function that was called; None if it comes from none.
    """
    if not (extensions := [*installed]):
        return None
    # Innermost first: callbacks of an extension have our frames on both sides.
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    for frame, line in frames:
        file = Path(frame.f_code.co_filename).resolve()
        owners = [each for each in extensions if each.holds(file)]
        beside = [each for each in extensions if _is_beside(each, file)]
        if owners or beside:
            return describe_as((owners or beside)[0], error, f"{file}:{line}")
    found = _named_in(str(error), extensions) or _called_in(error, frames, extensions)
    return None if found is None else describe_as(found[0], error, source_of(found[1]))


def describe_as(installed: Installed, error: BaseException, source: str) -> str:
    extension = installed.extension
    place = f" ({source})" if source else ""
    reason = f"{type(error).__name__}: {error}"
    return f'extension "{extension.name}" {extension.version}: {reason}{place}'


def source_of(part: object) -> str:
    """File and line of the class or function that makes up a part; empty if it is unknown."""
    defined = _definition(part)
    try:
        file = inspect.getsourcefile(defined)
        return f"{file}:{inspect.getsourcelines(defined)[1]}"
    except (OSError, TypeError):
        return ""


def _is_beside(installed: Installed, file: Path) -> bool:
    """Whether it is a module in the folder of an extension that is a single module."""
    folder = installed.folder.parent
    return (
        installed.folder.suffix == ".py"
        and file.parent == folder
        and file.is_file()  # Generated code is in "<string>", which is no file.
        and file.name not in OUR_MODULES
        # There the modules of others lie beside it.
        and folder.name not in ("site-packages", "dist-packages")
    )


def _named_in(message: str, extensions: Iterable[Installed]) -> tuple[Installed, object] | None:
    """The part of an extension that a message names."""
    for each in extensions:
        for word, name in PART.findall(message):
            parts: Mapping[str, Any] = getattr(each.extension, TABLES[word])
            if name in parts:
                return each, getattr(parts[name], "build", parts[name])
    return None


def _called_in(
    error: BaseException, frames: Iterable[tuple[FrameType, int]], extensions: Iterable[Installed]
) -> tuple[Installed, object] | None:
    """The innermost object of an extension's code among the local variables: a call with wrong
    arguments, or an error of torch about what was returned, has no frame in its code.
    """
    if not isinstance(error, Exception) or type(error).__name__ in NO_FAULT_OF_ITS_CODE:
        return None
    for frame, _ in frames:
        # The failure of a peer, whatever this rank was doing.
        if "torch/distributed/" in frame.f_code.co_filename.replace("\\", "/"):
            return None
        for part in _candidates(frame):
            for each in extensions:
                if (file := _file_of(part)) is not None and each.holds(file):
                    return each, part
    return None


def _candidates(frame: FrameType) -> Iterator[object]:
    """Local variables, `self` first."""
    variables = frame.f_locals
    if "self" in variables:
        yield variables["self"]
    yield from variables.values()


def _definition(part: object) -> Any:
    while isinstance(part, partial):
        part = part.func
    part = getattr(part, "__func__", part)
    return part if isinstance(part, (type, FunctionType)) else type(part)


def _file_of(part: object) -> Path | None:
    module = sys.modules.get(getattr(_definition(part), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()
