"""Generate `--help`, docs/configuration.md, docs/config.schema.json and the alias table of docs/from_torchtitan.md.

`python -m trainer.config.docs` writes the files; with `--check` it exits 1 if one is out of date and writes nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from trainer.config import aliases
from trainer.config.parse import CONFIG_DIR, all_sections, repeated_tables, section_keys
from trainer.config.sections import Section
from trainer.config.toml_format import toml_value
from trainer.config.training_stages import Recipe

DOCS_DIR = Path(__file__).resolve().parents[2] / "docs"
TYPE_NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
BOUND_SYMBOLS = {"minimum": ">= ", "exclusiveMinimum": "> ", "maximum": "<= ", "exclusiveMaximum": "< "}
TOML_SCALAR_TYPES = (bool, int, float, str, list)
WIDTH = 100
ALIASES_BEGIN, ALIASES_END = "<!-- aliases:begin -->", "<!-- aliases:end -->"

USAGE = """\
./run_train.sh [--config NAME|PATH] [--section.key VALUE]... [--check] [--plan] [--help]

  --config NAME|PATH  what to run: a TOML file, or one of train_configs/ by name; default: debug
                      ({names})
  --check             print the resolved configuration and the mesh; start nothing
  --plan              print the plan of the run: memory, step time, bottleneck; start nothing
  --help              print this text

Every key below can be set in the file, under its [section], and on the command line, which takes
precedence. The last of a repeated option counts. Lists are written 0.9,0.95; null unsets a key.

NGPU sets the processes per node. Default: the GPUs present; without GPUs, the product of the
degrees in the configuration, at least 2 and at most 8. For several nodes, set NNODES, NODE_RANK,
MASTER_ADDR and MASTER_PORT on each of them.
"""

PAGE_HEADER = """\
# Configuration

<!-- Written by `python -m trainer.config.docs`; edit the docstrings in trainer/config instead. -->

A TOML file and options of the form `--section.key VALUE` describe a run; options override the file. Unknown keys,
wrong types and values out of range are reported together, before any process starts. A key marked *left out* has no
value by default; on the command line, `null` unsets it. A key marked *required* has no default. Tables that can be
repeated are for the file only. Relative paths are relative to the current folder, not to the file.
"""


@dataclass(frozen=True, kw_only=True)
class KeyDoc:
    """Documentation of one key."""

    name: str
    type_name: str
    default: str | None
    """In TOML syntax; "" for a required key, None for one that is left out."""
    description: str


def sections_by_heading() -> dict[str, tuple[type[Section], list[str]]]:
    """Section type and keys of every section and table, by TOML heading."""
    result = {f"[{name}]": (owner, section_keys(name)) for name, owner in all_sections().items()}
    for name, owner in repeated_tables().items():
        heading = f"[{name}.NAME]" if name in ("data.sources", "validation.sets") else f"[[{name}]]"
        result[heading] = (owner, [*owner.fields_by_key()])
    return result


def document_keys(owner: type[Section], names: list[str]) -> list[KeyDoc]:
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
    """`KeyDoc.default` of a key."""
    field = owner.fields_by_key()[key]
    default = "" if field.is_required() else field.get_default()
    if default is None or isinstance(default, Section) or default in ((), {}):
        return None
    return "" if field.is_required() else toml_value(to_toml_type(default))


def to_toml_type(default: Any) -> Any:
    return [*default] if isinstance(default, tuple) else str(default) if isinstance(default, Path) else default


def format_type(schema: dict[str, Any]) -> str:
    """Type and range of a JSON schema: `integer >= 1`, `"a" | "b"`, `[number, number]`, `[integer, ...]`."""
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
            default = "required" if key.default == "" else f"default: {key.default or 'left out'}"
            entry = f"{option}{key.name}  {key.type_name}  ({default})"
            lines += wrap(entry, WIDTH, initial_indent="  ", subsequent_indent=" " * 10, break_on_hyphens=False)
            lines += wrap(key.description, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def render_markdown() -> str:
    """Contents of docs/configuration.md."""
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
            default = {None: "*left out*", "": "*required*"}.get(key.default, f"`{key.default}`")
            lines += [f"| `{key.name}` | {type_name} | {default} | {key.description} |"]
        lines += [""]
    return "\n".join(lines)


def render_json_schema() -> str:
    """Contents of docs/config.schema.json, which editors find by the `#:schema` line of a TOML file."""
    return json.dumps(_strip_nulls(Recipe.model_json_schema()), indent=2) + "\n"


def insert_alias_table(page: str) -> str:
    """The page with the generated table between the alias markers."""
    before, _, rest = page.partition(ALIASES_BEGIN)
    _, _, after = rest.partition(ALIASES_END)
    return f"{before}{ALIASES_BEGIN}\n{aliases.markdown_table()}\n{ALIASES_END}{after}"


def main(*, write: bool) -> int:
    aliases_page = DOCS_DIR / "from_torchtitan.md"
    pages = {
        DOCS_DIR / "configuration.md": render_markdown(),
        DOCS_DIR / "config.schema.json": render_json_schema(),
        aliases_page: insert_alias_table(aliases_page.read_text()),
    }
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if write:
            path.write_text(pages[path])
        sys.stderr.write(f"{path} {'written' if write else 'is out of date: run python -m trainer.config.docs'}\n")
    return 0 if write or not stale else 1


def _section_description(section: str) -> str:
    parent, _, name = section.removesuffix(".NAME").rpartition(".")
    owner = all_sections()[parent] if parent else Recipe
    return str(owner.fields_by_key()[name].description)


def _strip_nulls(node: object) -> object:
    """Removes null, which TOML lacks, and defaults of whole sections, which repeat those of their keys."""
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
