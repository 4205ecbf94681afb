"""Ways in which the code was broken on purpose, each with the tests that notice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[2]
CAUGHT = Path(__file__).with_name("caught.json")
PAGE = ROOT / "docs" / "mutants.md"


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

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            "\n".join((self.file, self.find, self.replace, *self.tests)).encode()
        ).hexdigest()[:12]

    def apply(self, text: str) -> str:
        """Raises ValueError unless the place stands exactly once in the file."""
        if (count := text.count(self.find)) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its place stands {count} times in {self.file}, not once"
            )
        return text.replace(self.find, self.replace)


def known_mutants() -> list[Mutant]:
    return [
        Mutant(area=path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomli.loads(path.read_text())["mutant"]
    ]


def read_caught() -> dict[str, dict[str, str]]:
    """By mutant: its `digest` when it was last run, and the first `test` that failed, empty if it
    survived.
    """
    records: dict[str, dict[str, str]] = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
    return records


def failed_tests(mutants: list[Mutant]) -> dict[str, str]:
    """By mutant that was run as it is now: the first test that failed."""
    records = read_caught()
    failed = {mutant.name: records.get(mutant.name, {}) for mutant in mutants}
    digests = {mutant.name: mutant.digest for mutant in mutants}
    return {
        name: each["test"] for name, each in failed.items() if each.get("digest") == digests[name]
    }


def table(mutants: list[Mutant], tests: dict[str, str]) -> list[str]:
    """The generated part of docs/mutants.md."""
    caught = sum(bool(tests.get(mutant.name)) for mutant in mutants)
    lines = [f"{caught} of {len(mutants)} are caught."]
    for area in dict.fromkeys(mutant.area for mutant in mutants):
        lines += ["", f"## {area}", "", "| mutant | file | test that fails |", "|---|---|---|"]
        for mutant in mutants:
            if mutant.area == area:
                test = tests.get(mutant.name, "").replace("|", "\\|")
                lines.append(
                    f"| {mutant.name} | `{mutant.file}` | {f'`{test}`' if test else '**none**'} |"
                )
    return lines
