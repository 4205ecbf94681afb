"""The line of this program that an operation comes from."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from trainer.config import extension

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("models", "parallelisms", "trainer")
TRACER = "trainer/trace"
FSDP = str(Path("torch", "distributed", "fsdp"))
UNKNOWN = "autograd"
"""Where no line of the engine is being run: backward passes of torch's operators."""


def current_line() -> tuple[str, str]:
    """`file:line function` of the innermost frame in the engine, and what FSDP handles there:
    "weights", "gradients" or "".
    """
    # Called for every allocation: inspect.stack() would read source files each time.
    frame = sys._getframe(1)
    fsdp = ""
    while frame is not None:
        code = frame.f_code
        if (file := engine_file(code.co_filename)) is not None:
            return f"{file}:{frame.f_lineno} {code.co_name}", fsdp
        if FSDP in code.co_filename and fsdp != "gradients":
            fsdp = "gradients" if "post_backward" in code.co_name else "weights"
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN, fsdp


@cache
def engine_file(path: str) -> str | None:
    """Relative to the root, or to what holds an extension; None for a file of the tracer or of a
    library.
    """
    for each in extension.installed():
        if each.holds(Path(path)):
            return Path(path).relative_to(each.folder.parent).as_posix()
    try:
        file = Path(path).relative_to(ROOT)
    except ValueError:
        return None
    is_engine = file.parts[0] in ENGINE and not file.as_posix().startswith(TRACER)
    return file.as_posix() if is_engine else None
