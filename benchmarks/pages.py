"""Blocks of the documentation that scripts write, between `<!-- NAME:begin -->` and `<!-- NAME:end
-->`.
"""

from __future__ import annotations

from collections.abc import Sequence


def replace_block(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with `lines` as the block. Raises ValueError unless the page has it once."""
    begin = f"<!-- {name}:begin -->\n"
    end = f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no block {name}")
    before, _, rest = page.partition(begin)
    return "\n".join((before + begin.rstrip(), *lines, end + rest.partition(end)[2]))
