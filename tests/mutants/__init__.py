"""Ways in which the code was broken on purpose, each with the tests that notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One place of one file, and what stands there instead."""

    area: str
    """The file of mutants that it stands in: `ring` of tests/mutants/ring.toml."""
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Raises ValueError unless the place stands exactly once in the file."""
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"mutant {self.name!r}: its place stands {count} times in {self.file}, not once")
        return text.replace(self.find, self.replace)


def known_mutants() -> list[Mutant]:
    return [
        Mutant(area=path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomli.loads(path.read_text())["mutant"]
    ]
