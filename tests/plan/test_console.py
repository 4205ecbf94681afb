"""Console output of a report: complete on a terminal, in a file and at any width."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from tests.plan.sample_documents import HOST, MEMORY, MFU, SAMPLE, SEARCH, TIME, TOKENS, stages
from trainer.plan.console import show
from trainer.plan.document import BarChart, LineChart, PlanReport, StackedBar, Table

WIDTHS = [100, 72, 50, 34]


def shown(report: PlanReport, width: int = 100, *, terminal: bool = False) -> str:
    file = io.StringIO()
    colours: Literal["standard"] | None = "standard" if terminal else None
    show(report, Console(file=file, width=width, force_terminal=terminal, color_system=colours))
    return file.getvalue()


def part(*parts: BarChart | Table | LineChart, width: int = 100) -> list[str]:
    """Lines of a report with these sections."""
    return shown(
        PlanReport(title="a plan", verdict="it fits", fits=True, facts=[], sections=parts), width
    ).splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = (line for line in lines if line.startswith(f"{name} "))
    return found.removeprefix(name).split()


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_fit_the_width_without_trailing_blanks(width: int) -> None:
    lines = shown(replace(SAMPLE, configurations=()), width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []


def test_output_is_at_most_100_columns_wide() -> None:
    wordy = replace(
        SAMPLE, verdict="too much " * 20, notes=["and why " * 40], title="of a name " * 15
    )
    assert shown(wordy, 300) == shown(wordy, 100)


@pytest.mark.parametrize("width", WIDTHS)
def test_values_are_never_cut(width: int) -> None:
    words = set(shown(SAMPLE, width).replace("*", " ").split())
    told = [
        *(value for fact in SAMPLE.facts for value in fact),
        *(cell for row in SEARCH.rows for cell in row),
    ]
    told += [
        SAMPLE.title,
        SAMPLE.verdict,
        *SAMPLE.notes,
        *SAMPLE.configurations,
        SEARCH.note,
        *SEARCH.columns,
    ]
    told += [text for part in SAMPLE.sections for text in (part.title,)]
    told += ["57.0 41.8 7.7 1,046 2,048 78.4 27.2 <0.1 67.0", "7.49 129.2 1,209 32K 4M 24.1 39.4"]
    assert {word for text in told for word in text.split()} - words == set()


def test_a_file_has_no_escapes_and_a_terminal_only_bold_headings() -> None:
    assert "\x1b" not in shown(SAMPLE)
    on_terminal = shown(SAMPLE, terminal=True)
    assert set(re.findall("\x1b.*?m", on_terminal)) == {"\x1b[1m", "\x1b[0m"}
    assert re.sub("\x1b.*?m", "", on_terminal) == shown(SAMPLE)


def test_show_prints_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    show(SAMPLE)
    assert capsys.readouterr().out == shown(SAMPLE)


def test_an_ascii_console_gets_ascii() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as file:
        show(
            replace(SAMPLE, sections=[*SAMPLE.sections, stages(16)]), Console(file=file, width=100)
        )
        file.flush()
        assert b"stage 16 of 16" in raw.getvalue()


def test_the_verdict_is_in_words() -> None:
    assert shown(SAMPLE).splitlines()[1] == f"FITS: {SAMPLE.verdict}"
    assert shown(replace(SAMPLE, fits=False)).splitlines()[1] == f"DOES NOT FIT: {SAMPLE.verdict}"


def test_rich_markup_is_not_interpreted() -> None:
    bars = replace(
        HOST,
        title="[red]host[/red]",
        bars=[StackedBar(label="[bold]", segments={"[memory] kept": 1.0})],
    )
    table = Table(title="[b]", columns=["[data]"], rows=[["[/x] :smile:"]], note="[n]", best=0)
    lines = "\n".join(part(bars, table))
    for text in (
        "[red]host[/red]",
        "[bold]",
        "[memory] kept",
        "[b]",
        "[data]",
        "[/x] :smile:",
        "[n]",
    ):
        assert text in lines


def test_numbers_are_right_aligned_and_words_left_aligned() -> None:
    lines = [line for line in part(SEARCH) if "cp " in line or line.lstrip().startswith("mesh")]
    head, *rows = lines
    assert {line[: head.index("MFU") + 3][-1] for line in rows} == {"%", "-"}
    assert [line[: head.index("GiB") + 3].split()[-1] for line in rows] == [
        row[3] for row in SEARCH.rows
    ]
    assert all(
        line[head.index("method")] in "hru" and line[head.index("method") - 1] == " "
        for line in rows
    )


def test_bars_are_columns_with_totals() -> None:
    lines = part(MEMORY)
    assert row(lines, "gathered weights") == ["0.4"]
    assert row(lines, "total") == ["57.0", "41.8", "7.7"]
    assert row(lines, "limit") == ["79.1"] * 3
    assert row(lines, "headroom") == ["22.1", "37.3", "71.4"]


def test_only_first_fullest_and_last_of_many_bars_are_shown() -> None:
    lines = part(stages(16))
    assert re.findall(
        r"stage \d+ of 16", next(line for line in lines if line.startswith("GiB"))
    ) == [
        "stage 1 of 16",
        "stage 3 of 16",
        "stage 16 of 16",
    ]
    assert "the first, the fullest and the last of 16; 13 omitted" in lines
    assert "1 of 16 over the limit, stage 3 of 16 by 2.9 GiB" in lines
    assert not any("omitted" in line or "over the limit" in line for line in part(stages(4)))


def test_a_single_bar_has_proportional_marks() -> None:
    marks = {line.split("  ")[0]: line.count("#") for line in part(TIME)}
    assert marks["attention"] == 24
    assert marks["recomputation"] == round(24 * 27.2 / 78.4)
    assert marks["optimizer"] == marks["total"] == 0


def test_only_the_best_row_is_marked() -> None:
    (marked,) = (line for line in part(replace(SEARCH, best=3)) if line.startswith("*  "))
    assert "61.0" in marked
    assert "* the best" in part(SEARCH)
    assert not any("*" in line for line in part(replace(SEARCH, best=None)))


def test_a_narrow_console_gets_records_instead_of_a_grid() -> None:
    lines = part(replace(SEARCH, best=1), width=50)
    first, second = (
        index for index, line in enumerate(lines) if re.fullmatch(r"method +hybrid 8 x 4", line)
    )
    assert lines[first + 2] == "GiB        57.0"
    assert [lines[first - 2], lines[second - 2]] == [SEARCH.title, "*"]
    assert lines[second + 1 : second + 3] == ["recompute  full", "GiB        52.9"]


def test_points_over_the_limit_are_marked() -> None:
    lines = part(TOKENS)
    assert row(lines, "    1M") == ["56.8", "36.7", "1,209*"]
    assert row(lines, "    4M") == ["209.5*", "129.2*", "-"]
    assert "GiB by tokens; * over the limit of 79.1" in lines
    assert not any("*" in line for line in part(MFU))


def test_a_long_curve_keeps_its_ends() -> None:
    lines = part(
        replace(MFU, x="GPUs", lines={"all": [(float(n), 7.25 * n) for n in range(1, 41)]})
    )
    numbers = [line.split()[0] for line in lines if re.fullmatch(r" *\d+  +[\d.]+", line)]
    assert (numbers[0], numbers[-1], len(numbers)) == ("1", "40", 12)
    assert "MFU, % by GPUs; 28 of 40 rows omitted" in lines


def test_empty_sections_print_a_placeholder() -> None:
    empty = Table(title="meshes", columns=["mesh"], rows=[])
    curve = replace(MFU, lines={})
    assert part(empty, BarChart(title="bars", unit="GiB", bars=[]), curve).count("(nothing)") == 3
    assert row(
        part(replace(HOST, bars=[StackedBar(label="node", segments={"a": 0.0})])), "total"
    ) == ["0"]
