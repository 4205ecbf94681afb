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

from trainer.config.parse import SHIPPED, keys, sections, tables, toml_value
from trainer.config.sections import Section
from trainer.config.training_stages import Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
KINDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
BOUNDS = {"minimum": ">= ", "exclusiveMinimum": "> ", "maximum": "<= ", "exclusiveMaximum": "< "}
VALUES = (bool, int, float, str, list)
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

PAGE = """\
# Configuration

<!-- Written by `python -m trainer.config.docs`; edit the docstrings of the sections in trainer/ instead. -->

A run is described by a TOML file and by options of the form `--section.key VALUE`, which count more than the file.
Unknown keys, wrong types and values out of range are refused, all at once, before any process starts. A key marked
*left out* has no value unless one is given; on the command line, `null` takes it back. A key marked *needed* has none
that could be meant. Tables that may be there several times are for the file only. Relative paths are relative to the
folder where the command is given, not to the file.
"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, in words."""

    name: str
    kind: str
    default: str | None
    meaning: str


def headings() -> dict[str, tuple[type[Section], list[str]]]:
    """Sections and tables as the file writes them, and the keys of each."""
    found = {f"[{name}]": (owner, keys(name)) for name, owner in sections().items()}
    for name, owner in tables().items():
        heading = f"[{name}.NAME]" if name in ("data.sources", "validation.sets") else f"[[{name}]]"
        found[heading] = (owner, [*owner.by_key()])
    return found


def describe(owner: type[Section], names: list[str]) -> list[Key]:
    """These keys of a section, with their types, ranges, defaults and docstrings."""
    properties = owner.model_json_schema()["properties"]
    return [
        Key(
            name=key,
            kind=kind_of(properties[key]),
            default=default_of(owner, key),
            meaning=properties[key]["description"],
        )
        for key in names
    ]


def default_of(owner: type[Section], key: str) -> str | None:
    """As TOML writes it; empty for a key that is needed, None for one that is left out."""
    about = owner.by_key()[key]
    default = "" if about.is_required() else about.get_default()
    if default is None or isinstance(default, Section) or default in ((), {}):
        return None
    return "" if about.is_required() else toml_value(plain(default))


def plain(default: Any) -> Any:
    """A default as TOML has it."""
    return [*default] if isinstance(default, tuple) else str(default) if isinstance(default, Path) else default


def kind_of(schema: dict[str, Any]) -> str:
    """A type and its range, from JSON schema: `integer >= 1`, `"a" | "b"`, `[number, number]`, `[integer, ...]`."""
    if "$ref" in schema:
        return f"table: {schema['$ref'].rpartition('/')[2].removesuffix('Section').lower()}"
    if "anyOf" in schema:
        return " | ".join(kind_of(option) for option in schema["anyOf"] if option.get("type") != "null")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return " | ".join(toml_value(choice) for choice in choices)
    if schema["type"] == "array":
        parts = [kind_of(item) for item in schema.get("prefixItems", ())] or [kind_of(schema["items"]), "..."]
        return f"[{', '.join(parts)}]"
    kind = schema["format"] if schema.get("format") == "path" else KINDS[schema["type"]]
    limits = [f"{sign}{schema[bound]:g}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([kind, *limits])


def help_text(usage: str = USAGE) -> str:
    shipped = fill(
        ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml"))), WIDTH - 24, subsequent_indent=" " * 23
    )
    lines = usage.format(names=shipped).splitlines()
    for heading, (owner, names) in headings().items():
        lines += ["", *wrap(f"{heading}  {_purpose(heading.strip('[]'))}", WIDTH)]
        option = "" if heading.strip("[]") not in sections() else f"--{heading.strip('[]')}."
        for key in describe(owner, names):
            default = "needed" if key.default == "" else f"default: {key.default or 'left out'}"
            told = f"{option}{key.name}  {key.kind}  ({default})"
            lines += wrap(told, WIDTH, initial_indent="  ", subsequent_indent=" " * 10, break_on_hyphens=False)
            lines += wrap(key.meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def page() -> str:
    """`docs/configuration.md`."""
    lines = [PAGE]
    for heading, (owner, names) in headings().items():
        lines += [
            f"## {heading}",
            "",
            _purpose(heading.strip("[]")),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in describe(owner, names):
            kind = key.kind.replace("|", "\\|")
            default = {None: "*left out*", "": "*needed*"}.get(key.default, f"`{key.default}`")
            lines += [f"| `{key.name}` | {kind} | {default} | {key.meaning} |"]
        lines += [""]
    return "\n".join(lines)


def schema() -> str:
    """`docs/config.schema.json`, which editors read because of the `#:schema` line on top of a TOML file."""
    return json.dumps(_for_toml(Recipe.model_json_schema()), indent=2) + "\n"


def main(*, write: bool) -> int:
    pages = {DOCS / "configuration.md": page(), DOCS / "config.schema.json": schema()}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if write:
            path.write_text(pages[path])
        sys.stderr.write(f"{path} {'was written' if write else 'is out of step: run python -m trainer.config.docs'}\n")
    return 0 if write or not stale else 1


def _purpose(section: str) -> str:
    above, _, name = section.removesuffix(".NAME").rpartition(".")
    owner = sections()[above] if above else Recipe
    return str(owner.by_key()[name].description)


def _for_toml(node: object) -> object:
    """Without null, which TOML does not have, and without the defaults of whole sections, which repeat their keys'."""
    if isinstance(node, list):
        return [_for_toml(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    kept = {key: _for_toml(value) for key, value in node.items() if key != "default" or type(value) in VALUES}
    options = kept.get("anyOf")
    if isinstance(options, list) and len(options) == 1:
        del kept["anyOf"]
        return {**options[0], **kept}
    return kept


if __name__ == "__main__":
    sys.exit(main(write="--check" not in sys.argv[1:]))
