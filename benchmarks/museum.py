"""Write which released models and tokenizers are read, from the museum of them, into README.md and
docs/huggingface.md.

python -m benchmarks.museum           rewrite the lists between their markers
python -m benchmarks.museum --check   exit 1 if a page differs from what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.pages import replace_block
from tests.museum.packages import SHIPPED
from tests.museum.releases import READ, REFUSED, RELEASES, Release

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs/huggingface.md"


def by_type() -> dict[str, list[Release]]:
    types = sorted({release.model_type for release in READ.values()})
    return {name: [each for each in READ.values() if each.model_type == name] for name in types}


def names(releases: Iterable[Release]) -> str:
    return ", ".join(release.short_name for release in releases)


def short_list() -> list[str]:
    """For README.md: one line per type."""
    return ["", *(f"- `{name}`: {names(releases)}" for name, releases in by_type().items()), ""]


def table() -> list[str]:
    """For docs/huggingface.md: every release, what of it is ignored, and where it was read."""
    rows = ["| release | ignored | read in |", "|---|---|---|"]
    for release in RELEASES.values():
        ignored = refusal(release) or listed(ignored_keys(release))
        source = (
            f"[{place(release)}]({release.source})"
            if release.source.startswith("https")
            else place(release)
        )
        note = f" ({release.note})" if release.note else ""
        rows.append(f"| {release.name} | {ignored} | {source}{note} |")
    return ["", *rows, ""]


def tokenizer_table() -> list[str]:
    """For docs/huggingface.md: every tokenizer that a package ships, and the libraries whose ids
    it gives.
    """
    libraries = {
        "huggingface": "tokenizers, transformers",
        "tiktoken": "tiktoken",
        "sentencepiece": "sentencepiece",
    }
    rows = ["| tokenizer | package | `tokenizer.kind` | ids are those of |", "|---|---|---|---|"]
    for name, shipped in SHIPPED.items():
        package = f"`{shipped.requirement}` of {shipped.registry}"
        rows.append(f"| {name} | {package} | `{shipped.kind}` | {libraries[shipped.kind]} |")
    return ["", *rows, ""]


def listed(keys: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(f"`{key}`" for key in keys[:most])
    return f"{shown} and {len(keys) - most} more" if len(keys) > most else shown


def refusal(release: Release) -> str:
    return f"**refused:** `{REFUSED[release.name]}`" if release.name in REFUSED else ""


def ignored_keys(release: Release) -> list[str]:
    return [line.removeprefix("ignored: ").partition(" = ")[0] for line in release.remarks()]


def place(release: Release) -> str:
    """The repository, or the package and its version."""
    if not release.source.startswith("https://github.com/"):
        return f"`{release.source.partition(':')[0]}` of PyPI"
    return "/".join(release.source.removeprefix("https://github.com/").split("/")[:2])


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    return {
        README: replace_block(README.read_text(), "museum", short_list()),
        DOCS: replace_block(
            replace_block(DOCS.read_text(), "museum", table()), "tokenizers", tokenizer_table()
        ),
    }


def main(argv: Sequence[str]) -> int:
    stale = {page: text for page, text in pages().items() if text != page.read_text()}
    for page, text in stale.items():
        if "--check" not in argv:
            page.write_text(text)
    verb = "differs" if "--check" in argv else "rewritten"
    sys.stdout.write("".join(f"{page.relative_to(ROOT)} {verb}\n" for page in stale))
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
