"""What can be configured, told three ways from the sections: `--help`, `docs/configuration.md`, a schema for editors.

`python -m trainer.config.docs` writes the two files; `--check` only says whether they are in step, with 0 or 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from trainer.config.parse import CONFIG_DIR, all_sections, repeated_tables, section_keys, toml_value
from trainer.config.sections import Section
from trainer.config.training_stages import Recipe

DOCS_DIR = Path(__file__).resolve().parents[2] / "docs"
TYPE_NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
BOUND_SYMBOLS = {"minimum": ">= ", "exclusiveMinimum": "> ", "maximum": "<= ", "exclusiveMaximum": "< "}
TOML_SCALAR_TYPES = (bool, int, float, str, list)
WIDTH = 100

USAGE = """\
./run_train.sh [--config NAME|PATH] [--section.key VALUE]... [--check] [--plan] [--help]

  --config NAME|PATH  what to run: a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --check             print the resolved configuration and the mesh, start nothing
  --plan              what the run would cost on a cluster; not available yet
  --help              this text

Every key below can stand in the file, under its [section], and on the command line, where it counts
more. Of a repeated option the last one counts. Lists are written 0.9,0.95; null takes a value back.

NGPU sets the processes per node. Left out: the GPUs present; without any, the product of the
degrees that the configuration states, at least 2 and at most 8. For several nodes, set NNODES,
NODE_RANK, MASTER_ADDR and MASTER_PORT on each of them.
"""

PAGE_HEADER = """\
# Configuration

<!-- Written by `python -m trainer.config.docs`; edit the docstrings of the sections in trainer/ instead. -->

A run is described by a TOML file and by options of the form `--section.key VALUE`, which count more than the file.
Unknown keys, wrong types and values out of range are refused, all at once, before any process starts. A key marked
*left out* has no value unless one is given; on the command line, `null` takes it back. A key marked *needed* has none
that could be meant. Tables that may be there several times are for the file only. Relative paths are relative to the
folder where the command is given, not to the file.
"""


@dataclass(frozen=True, kw_only=True)
class KeyDoc:
    """One key, in words."""

    name: str
    type_name: str
    default: str | None
    description: str


def sections_by_heading() -> dict[str, tuple[type[Section], list[str]]]:
    """Sections and tables as the file writes them, and the keys of each."""
    result = {f"[{name}]": (owner, section_keys(name)) for name, owner in all_sections().items()}
    for name, owner in repeated_tables().items():
        heading = f"[{name}.NAME]" if name in ("data.sources", "validation.sets") else f"[[{name}]]"
        result[heading] = (owner, [*owner.fields_by_key()])
    return result


def document_keys(owner: type[Section], names: list[str]) -> list[KeyDoc]:
    """These keys of a section, with their types, ranges, defaults and docstrings."""
    properties = owner.model_json_schema()["properties"]
    return [
        KeyDoc(
            name=key,
            type_name=format_type(properties[key]),
            default=format_default(owner, key),
            description=properties[key]["description"],
        )
        for key in names
    ]


def format_default(owner: type[Section], key: str) -> str | None:
    """As TOML writes it; empty for a key that is needed, None for one that is left out."""
    field = owner.fields_by_key()[key]
    default = "" if field.is_required() else field.get_default()
    if default is None or isinstance(default, Section) or default in ((), {}):
        return None
    return "" if field.is_required() else toml_value(to_toml_type(default))


def to_toml_type(default: Any) -> Any:
    """A default as TOML has it."""
    return [*default] if isinstance(default, tuple) else str(default) if isinstance(default, Path) else default


def format_type(schema: dict[str, Any]) -> str:
    """A type and its range, from JSON schema: `integer >= 1`, `"a" | "b"`, `[number, number]`, `[integer, ...]`."""
    if "$ref" in schema:
        return f"table: {schema['$ref'].rpartition('/')[2].removesuffix('Section').lower()}"
    if "anyOf" in schema:
        return " | ".join(format_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return " | ".join(toml_value(choice) for choice in choices)
    if schema["type"] == "array":
        item_types = [format_type(item) for item in schema.get("prefixItems", ())] or [
            format_type(schema["items"]),
            "...",
        ]
        return f"[{', '.join(item_types)}]"
    type_name = schema["format"] if schema.get("format") == "path" else TYPE_NAMES[schema["type"]]
    bounds = [f"{sign}{schema[bound]:g}" for bound, sign in BOUND_SYMBOLS.items() if bound in schema]
    return " ".join([type_name, *bounds])


def render_help(usage: str = USAGE) -> str:
    config_names = fill(
        ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.toml"))), WIDTH - 24, subsequent_indent=" " * 23
    )
    lines = usage.format(names=config_names).splitlines()
    for heading, (owner, names) in sections_by_heading().items():
        lines += ["", *wrap(f"{heading}  {_section_description(heading.strip('[]'))}", WIDTH)]
        option = "" if heading.strip("[]") not in all_sections() else f"--{heading.strip('[]')}."
        for key in document_keys(owner, names):
            default = "needed" if key.default == "" else f"default: {key.default or 'left out'}"
            entry = f"{option}{key.name}  {key.type_name}  ({default})"
            lines += wrap(entry, WIDTH, initial_indent="  ", subsequent_indent=" " * 10, break_on_hyphens=False)
            lines += wrap(key.description, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def render_markdown() -> str:
    """`docs/configuration.md`."""
    lines = [PAGE_HEADER]
    for heading, (owner, names) in sections_by_heading().items():
        lines += [
            f"## {heading}",
            "",
            _section_description(heading.strip("[]")),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in document_keys(owner, names):
            type_name = key.type_name.replace("|", "\\|")
            default = {None: "*left out*", "": "*needed*"}.get(key.default, f"`{key.default}`")
            lines += [f"| `{key.name}` | {type_name} | {default} | {key.description} |"]
        lines += [""]
    return "\n".join(lines)


def render_json_schema() -> str:
    """`docs/config.schema.json`, which editors read because of the `#:schema` line on top of a TOML file."""
    return json.dumps(_strip_nulls(Recipe.model_json_schema()), indent=2) + "\n"


def main(*, write: bool) -> int:
    pages = {DOCS_DIR / "configuration.md": render_markdown(), DOCS_DIR / "config.schema.json": render_json_schema()}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if write:
            path.write_text(pages[path])
        sys.stderr.write(f"{path} {'was written' if write else 'is out of step: run python -m trainer.config.docs'}\n")
    return 0 if write or not stale else 1


def _section_description(section: str) -> str:
    parent, _, name = section.removesuffix(".NAME").rpartition(".")
    owner = all_sections()[parent] if parent else Recipe
    return str(owner.fields_by_key()[name].description)


def _strip_nulls(node: object) -> object:
    """Without null, which TOML does not have, and without the defaults of whole sections, which repeat their keys'."""
    if isinstance(node, list):
        return [_strip_nulls(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    cleaned = {
        key: _strip_nulls(value) for key, value in node.items() if key != "default" or type(value) in TOML_SCALAR_TYPES
    }
    options = cleaned.get("anyOf")
    if isinstance(options, list) and len(options) == 1:
        del cleaned["anyOf"]
        return {**options[0], **cleaned}
    return cleaned


if __name__ == "__main__":
    sys.exit(main(write="--check" not in sys.argv[1:]))
