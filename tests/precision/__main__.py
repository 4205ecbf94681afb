"""python -m tests.precision: the table of factors, in Markdown."""

import sys

from tests.precision.grid import factors

HEADER = "| accumulator | parts | error of one part | error | factor |\n|---|---|---|---|---|\n"


def main() -> None:
    sys.stdout.write(HEADER)
    for row in factors():
        cells = (row.accumulator, f"{row.parts:,}", f"{row.error_at_one:.1e}", f"{row.error:.1e}", f"{row.factor:.2f}")
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
