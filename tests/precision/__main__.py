"""python -m tests.precision: writes the table of factors in docs/numerics.md."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import replace_block
from tests.precision.errors import Factor
from tests.precision.grid import EXCEPTIONS, factors

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def table() -> Iterator[str]:
    """Markdown: for each accumulator the number of parts with the largest factor."""
    exceptions = {accumulator.name for accumulator in EXCEPTIONS}
    worst: dict[str, tuple[list[int], Factor]] = {}
    for row in factors():
        name = row.accumulator
        parts, largest = worst.get(name, ([], row))
        worst[name] = [*parts, row.parts], max(largest, row, key=lambda each: each.factor)
    yield "| sum | parts | error of one part | largest error | factor |"
    yield "|---|---|---|---|---|"
    for name, (parts, row) in worst.items():
        factor = f"{row.factor:.2f}" + ", on purpose" * (name in exceptions)
        yield f"| {name} | {', '.join(f'{count:,}' for count in parts)} | {row.error_at_one:.1e} | {row.error:.1e} | {factor} |"


if __name__ == "__main__":
    PAGE.write_text(replace_block(PAGE.read_text(), "precision", [*table()]))
