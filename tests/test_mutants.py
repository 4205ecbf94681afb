"""The mutants can be applied to today's code; `python -m tests.mutants` shows that the tests named
for them fail.
"""

from __future__ import annotations

import ast
from functools import cache

from benchmarks.pages import replace_block
from tests.mutants import PAGE, ROOT, failed_tests, known_mutants, table

MUTANTS = known_mutants()


def test_there_are_200_mutants_by_distinct_names() -> None:
    assert len(MUTANTS) >= 200
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def tree_of(path: str) -> str:
    return ast.dump(ast.parse(text_of(path)))


def test_every_mutant_applies_and_is_python() -> None:
    for mutant in MUTANTS:
        broken = mutant.apply(text_of(mutant.file))
        assert ast.dump(ast.parse(broken)) != tree_of(mutant.file), mutant.name


def test_the_tests_of_every_mutant_exist() -> None:
    for mutant in MUTANTS:
        for test in mutant.tests:
            path, _, name = test.partition("::")
            function = name.partition("[")[0]
            assert f"def {function}(" in text_of(path) if name else (ROOT / path).is_file(), (
                mutant.name,
                test,
            )


def test_every_mutant_was_caught_when_last_run() -> None:
    """After a new mutant: python -m tests.mutants --record --new."""
    failed = failed_tests(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if not failed.get(mutant.name)] == []
    assert PAGE.read_text() == replace_block(PAGE.read_text(), "mutants", table(MUTANTS, failed))
