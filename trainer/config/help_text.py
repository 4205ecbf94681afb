"""Text of `--help`, from the docstrings, types and defaults of the sections. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from trainer.config.parse import CONFIG_DIR, all_sections, repeated_tables, section_keys
from trainer.config.sections import Section
from trainer.config.toml_format import toml_value
from trainer.config.training_stages import Recipe

TYPE_NAMES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
}
BOUND_SYMBOLS = {
    "minimum": ">= ",
    "exclusiveMinimum": "> ",
    "maximum": "<= ",
    "exclusiveMaximum": "< ",
}
WIDTH = 100

INTRODUCTION = """\
Every key below can be set in the file, under its [section], and on the command line, as --section.key VALUE, which
takes precedence. The last of a repeated option counts. Lists are written 0.9,0.95; null unsets a key.
"""


@dataclass(frozen=True, kw_only=True)
class KeyDoc:
    """Documentation of one key."""

    name: str
    type_name: str
    default: str | None
    """The default in TOML syntax; "" for a required key, None for one that is left out."""
    description: str


def sections_by_heading() -> dict[str, tuple[type[Section], list[str]]]:
    """Section type and keys of every section and table, by TOML heading."""
    result = {f"[{name}]": (owner, section_keys(name)) for name, owner in all_sections().items()}
    for name, owner in repeated_tables().items():
        heading = (
            f"[{name}.NAME]" if name in ("data.sources", "validation.sets") else f"[[{name}]]"
        )
        result[heading] = (owner, [*owner.fields_by_key()])
    return result


def section_description(heading: str) -> str:
    parent, _, name = heading.strip("[]").removesuffix(".NAME").rpartition(".")
    owner = all_sections()[parent] if parent else Recipe
    return owner.describe(name)


def document_keys(owner: type[Section], names: list[str]) -> list[KeyDoc]:
    schemas = owner.model_json_schema()["properties"]
    return [
        KeyDoc(
            name=key,
            type_name=format_type(schemas[key]),
            default=format_default(schemas[key]),
            description=schemas[key]["description"],
        )
        for key in names
    ]


def format_default(schema: dict[str, Any]) -> str | None:
    """`KeyDoc.default` of a JSON schema."""
    if "default" not in schema:
        return ""
    default = schema["default"]
    # An empty list or a nested section is how pydantic spells a key that was left out.
    return None if default in (None, []) or isinstance(default, dict) else toml_value(default)


def format_type(schema: dict[str, Any]) -> str:
    """Type and range of a JSON schema: `integer >= 1`, `"a" | "b"`, `[number, number]`, `[integer,
    ...]`.
    """
    if "$ref" in schema:
        return f"table: {schema['$ref'].rpartition('/')[2].removesuffix('Section').lower()}"
    # Every optional key takes null, so the type does not repeat it.
    if "anyOf" in schema:
        return " | ".join(
            format_type(option) for option in schema["anyOf"] if option.get("type") != "null"
        )
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return " | ".join(toml_value(choice) for choice in choices)
    if "examples" in schema:
        return " | ".join(map(toml_value, schema["examples"]))
    if schema["type"] == "array":
        item_types = [format_type(item) for item in schema.get("prefixItems", ())] or [
            format_type(schema["items"]),
            "...",
        ]
        return f"[{', '.join(item_types)}]"
    type_name = schema["format"] if schema.get("format") == "path" else TYPE_NAMES[schema["type"]]
    bounds = [
        f"{sign}{schema[bound]:.12g}" for bound, sign in BOUND_SYMBOLS.items() if bound in schema
    ]
    return " ".join([type_name, *bounds])


def render_keys() -> str:
    """Every key with its type, default and meaning, after the names of the shipped files."""
    shipped = ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.toml")))
    lines = [*wrap(f"train_configs/ holds {shipped}.", WIDTH), "", *wrap(INTRODUCTION, WIDTH)]
    for heading, (owner, names) in sections_by_heading().items():
        lines += ["", *wrap(f"{heading}  {section_description(heading)}", WIDTH)]
        option = "" if heading.strip("[]") not in all_sections() else f"--{heading.strip('[]')}."
        for key in document_keys(owner, names):
            default = "required" if key.default == "" else f"default: {key.default or 'left out'}"
            entry = f"{option}{key.name}  {key.type_name}  ({default})"
            lines += wrap(
                entry,
                WIDTH,
                initial_indent="  ",
                subsequent_indent=" " * 10,
                break_on_hyphens=False,
            )
            lines += wrap(
                key.description, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines)
