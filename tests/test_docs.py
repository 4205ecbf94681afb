"""README and docs: commands parse, links resolve, pages stay short, and limits stand in one
table.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trainer.command_table import COMMANDS
from trainer.config.parse import load

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    {
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "packages/attention").glob("*.md"),
        *DOCS.glob("*.md"),
    }
)
MAX_WORDS = 41_400
MODULES = {command: module for command, (module, _, _) in COMMANDS.items()}
"""Modules of the subcommands of `longhaul`."""
WITHOUT_GPU = ("debug", "debug_1m", "debug_window", "copy", "stages_debug")
"""Shipped configurations whose corpus and tokenizer every machine has, so their commands are also
validated.
"""
DENIALS = re.compile(
    r"\bnot yet\b|\bno\w* (?:\w+ )?(?:been )?(?:run|trained|tested|tried|measured|available|implemented|there|here)\b[^.|]{0,30}\byet\b"
    r"|\bstill to come\b|\bto be (?:built|written|done)\b|\bnot available\b|\bnot implemented\b|\bnot (?:been )?run on\b"
    r"|\bwill be added\b|\bcoming soon\b|\bTO"
    r"DO\b",
    re.IGNORECASE,
)
WITH_CLAIMS = [
    *PAGES,
    *sorted((ROOT / "train_configs").glob("*.toml")),
    *sorted(ROOT.glob("*.sh")),
]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[str]:
    """Lines of fenced bash blocks, without comments."""
    for block in re.findall(
        r"^ *```bash\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield shlex.join(words)


ALL_COMMANDS = [(page_name(page), line) for page in PAGES for line in commands(page)]


def parse_command(line: str) -> tuple[str, list[str], dict[str, str]] | None:
    """Module, its arguments and environment variables of a Longhaul command; None for other
    programs.
    """
    words = shlex.split(line)
    environment = {}
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, value = words.pop(0).split("=", 1)
        environment[name] = value
    words = words[: words.index(">")] if ">" in words else words
    if "./run_train.sh" in words:
        return MODULES["train"], words[words.index("./run_train.sh") + 1 :], environment
    if words[0] == "longhaul":
        length = 2 if words[1] == "evaluate" else 1
        return MODULES[" ".join(words[1 : 1 + length])], words[1 + length :], environment
    if words[0] in {"python", "torchrun"} and "-m" in words:
        at = words.index("-m") + 1
        if words[at] == "longhaul":
            return parse_command(shlex.join(words[at:]))
        return words[at], words[at + 1 :], environment
    return None


def run_as_main(module: str) -> None:
    """As `python -m` does, also if another test has imported the module already."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*found in sys.modules", category=RuntimeWarning
        )
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@cache
def help_text(module: str, *subcommand: str) -> str:
    """What `python -m MODULE [SUBCOMMAND] --help` prints; fails unless it exits with 0."""
    printed = io.StringIO()
    argv = sys.argv
    status = None
    sys.argv = [module, *subcommand, "--help"]
    try:
        with contextlib.redirect_stdout(printed):
            run_as_main(module)
    except SystemExit as left:
        status = left.code
    finally:
        sys.argv = argv
    assert not status, f"{module} {' '.join(subcommand)} --help exits with {status}"
    return printed.getvalue()


def check_arguments(module: str, arguments: list[str]) -> None:
    """Unknown subcommands and options fail; configuration options must load."""
    subcommand = [
        word
        for word in arguments[:1]
        if not word.startswith("-")
        and re.search(rf"(?<![-\w/]){re.escape(word)}(?![-\w/])", help_text(module))
    ]
    needs_command = module in {
        "longhaul_attention",
        "trainer.hf",
        "trainer.checkpoint",
        "trainer.slurm",
    }
    has_help_per_command = needs_command or module == "trainer.data.prepare"
    usage = help_text(module, *subcommand) if has_help_per_command else help_text(module)
    assert subcommand or not needs_command or not arguments, (
        f"{module} has no subcommand {arguments[0]}"
    )
    config = []
    for at, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name = word.split("=")[0]
        if name == "--config" or "." in name:
            config += arguments[at : at + 2]
        else:
            assert re.search(rf"{re.escape(name)}(?![-\w])", usage), f"no option {name}"
    load(config)


@pytest.mark.parametrize(("page", "line"), ALL_COMMANDS)
def test_a_documented_command_parses(
    page: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text('[job]\nname = "mine"\n')
    parsed = parse_command(line)
    if parsed is None or parsed[0].startswith("benchmarks."):
        program = shlex.split(line)[0]
        assert program in {
            "pip",
            "git",
            "tensorboard",
            "pre-commit",
            "python",
            "torchrun",
            "./run_tests.sh",
        }, page
        return
    module, arguments, environment = parsed
    if module.startswith("examples."):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
        return
    check_arguments(module, arguments)
    named = arguments[arguments.index("--config") + 1] if "--config" in arguments else "debug"
    if (
        module == MODULES["train"]
        and named.removesuffix(".toml") in WITHOUT_GPU
        and "--help" not in arguments
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # The bucket of the example is nowhere.
        monkeypatch.setattr("trainer.launch.launcher.copies_problems", lambda _: [])
        monkeypatch.setattr(sys, "argv", [module, *arguments, "--check"])
        with pytest.raises(SystemExit) as left:
            run_as_main(module)
        assert left.value.code == 0, capsys.readouterr().err


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def test_links_resolve() -> None:
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    ]
    broken = []
    for page, target in links:
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        is_heading = anchor and file.suffix == ".md"
        if not re.match(r"[a-z]+:", target) and not (
            file.exists() and (not is_heading or anchor in anchors(file))
        ):
            broken.append((page_name(page), target))
    assert len(links) > 100
    assert broken == []


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub builds them."""
    text = without_code(page)
    plain = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain
    }


def hand_written_words(page: Path) -> int:
    """Words outside of what a script writes; table rules and lone signs are no words."""
    text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", page.read_text(), flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in text.split())


def test_readme_and_docs_stay_within_the_word_limit() -> None:
    pages = [
        ROOT / "README.md",
        *(page for page in DOCS.glob("*.md") if page.name != "configuration.md"),
    ]
    words = {page_name(page): hand_written_words(page) for page in pages}
    assert sum(words.values()) <= MAX_WORDS, words
    assert words["README.md"] <= 900


def test_limits_stand_only_on_the_status_page() -> None:
    pages = [page for page in WITH_CLAIMS if page.name != "status.md"]
    found = [
        (page_name(page), match.group())
        for page in pages
        for match in DENIALS.finditer(page.read_text())
    ]
    assert not found, f"{found}: name the limit in docs/status.md and link to it"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    missing = [
        page.name
        for page in DOCS.glob("*.md")
        if page.name != "index.md" and f"({page.name})" not in index
    ]
    assert not missing


def test_named_files_exist() -> None:
    """Paths in code spans that start in one of our folders."""
    path = re.compile(
        r"`((?:trainer|models|parallelisms|tests|benchmarks|docs|train_configs)/[\w./-]+)`"
    )
    named = {
        (page_name(page), name) for page in PAGES for name in path.findall(without_code(page))
    }
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()
