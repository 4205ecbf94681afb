"""Generate docs/configuration.md, docs/config.schema.json and the alias table of
docs/from_torchtitan.md.

python -m benchmarks.config_pages           write the files
python -m benchmarks.config_pages --check   exit 1 if one is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.pages import replace_block
from trainer.config.aliases import ALIASES
from trainer.config.help_text import document_keys, section_description, sections_by_heading
from trainer.config.training_stages import Recipe

DOCS = Path(__file__).resolve().parents[1] / "docs"
TOML_SCALAR_TYPES = (bool, int, float, str, list)
OUR_KEY = re.compile(r"^[a-z_]+\.[a-z._]+")
AS_CODE = r"`\g<0>`"

PAGE_HEADER = """\
# Configuration

<!-- Written by `python -m benchmarks.config_pages`; edit the docstrings in trainer/config instead. -->

A TOML file and options of the form `--section.key VALUE` describe a run; options override the file. Unknown keys,
wrong types and values out of range are reported together, before any process starts. A key marked *left out* has no
value by default; on the command line, `null` unsets it. A key marked *required* has no default. Tables that can be
repeated are for the file only. Relative paths are relative to the current folder, not to the file.
"""


def render_markdown() -> str:
    """Contents of docs/configuration.md."""
    lines = [PAGE_HEADER]
    for heading, (owner, names) in sections_by_heading().items():
        lines += [
            f"## {heading}",
            "",
            section_description(heading),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in document_keys(owner, names):
            type_name = key.type_name.replace("|", "\\|")
            default = {None: "*left out*", "": "*required*"}.get(key.default, f"`{key.default}`")
            lines += [f"| `{key.name}` | {type_name} | {default} | {key.description} |"]
        lines += [""]
    return "\n".join(lines)


def render_json_schema() -> str:
    """Contents of docs/config.schema.json, which editors find by the `#:schema` line of a TOML
    file.
    """
    return json.dumps(_strip_nulls(Recipe.model_json_schema()), indent=2) + "\n"


def insert_alias_table(page: str) -> str:
    """The page with the generated table between the alias markers."""
    rows = [f"| `{alias}` | {OUR_KEY.sub(AS_CODE, key)} |" for alias, key in ALIASES.items()]
    return replace_block(page, "aliases", ["| theirs | ours |", "|---|---|", *rows])


def stale_pages() -> dict[Path, str]:
    """The files that are out of date, and their new contents."""
    aliases_page = DOCS / "from_torchtitan.md"
    pages = {
        DOCS / "configuration.md": render_markdown(),
        DOCS / "config.schema.json": render_json_schema(),
        aliases_page: insert_alias_table(aliases_page.read_text()),
    }
    return {
        path: text
        for path, text in pages.items()
        if not path.is_file() or path.read_text() != text
    }


def main(argv: list[str]) -> int:
    stale = stale_pages()
    for path, text in stale.items() if "--check" not in argv else ():
        path.write_text(text)
    sys.stdout.write(
        "".join(
            f"{path} {'is out of date' if '--check' in argv else 'written'}\n" for path in stale
        )
    )
    return 1 if stale and "--check" in argv else 0


def _strip_nulls(node: object) -> object:
    """Removes null, which TOML lacks, and defaults of whole sections, which repeat those of their
    keys.
    """
    if isinstance(node, list):
        return [_strip_nulls(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    cleaned = {
        key: _strip_nulls(value)
        for key, value in node.items()
        if key != "default" or type(value) in TOML_SCALAR_TYPES
    }
    options = cleaned.get("anyOf")
    if isinstance(options, list) and len(options) == 1:
        del cleaned["anyOf"]
        return {**options[0], **cleaned}
    return cleaned


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
