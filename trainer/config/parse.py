"""Parse a TOML file and a command line into a `Recipe`, or list everything that is wrong with
them. Imports no torch.

Each source is validated separately, so that an error names its source; then command-line values
override the file's. TOML values have types, so `"50"` is not an integer there; on the command line
everything is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from models.files import MAX_CONFIG_BYTES, read_regular
from trainer.config import aliases, extension
from trainer.config.migrations import migrate_file, renamed_message, replaced_value_message
from trainer.config.sections import Section
from trainer.config.toml_format import toml_value
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "train_configs"
DEFAULT_CONFIG = "debug.toml"
COMMAND_LINE = "command line"

ERROR_MESSAGES = {
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "finite_number": "must be finite",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be a section",
    "path_type": "must be a path",
    "string_pattern_mismatch": "must match {pattern}",
    "string_type": "must be text",
    "too_long": "must have no more than {max_length} items",
    "too_short": "must have at least {min_length} items",
    "value_error": "{error}",
    "tuple_type": "must be a list",
}
TOML_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def load(argv: Sequence[str], *, imports_extensions: bool = True) -> Recipe:
    """The configuration of `--config NAME|PATH` and `--section.key VALUE`, whose extensions are
    installed unless `imports_extensions` is false, as for a file that the user did not name.
    Raises `ConfigError`.
    """
    arguments = parse_arguments(argv)
    problems = list(arguments.problems)
    sources = [ConfigSource(name=COMMAND_LINE, values=arguments.values, typed=False)]
    try:
        # The file is read even if an option is wrong: problems of both are reported at once.
        path = find_config_file(arguments.config)
        sources.insert(
            0, ConfigSource(name=show_path(path), values=migrate_file(read_toml(path)), typed=True)
        )
    except ConfigError as error:
        problems += error.problems
    values = merge_sources(sources, problems)
    if imports_extensions:
        extension.install(values.get("job", {}).get("extension", ()))
    return Recipe.model_validate(values)


def merge_sources(sources: Sequence[ConfigSource], problems: Sequence[str]) -> dict[str, Any]:
    """The values of the sources; later ones override.

    Raises `ConfigError` with these problems and the sources'.
    """
    problems = [*problems]
    merged = dict[str, Any]()
    for source in sources:
        try:
            # Only keys that a source sets count: its defaults must not override an earlier source.
            merged = deep_merge(merged, source.parse().model_dump(exclude_unset=True))
        except ValidationError as error:
            problems += source.format_errors(error.errors())
    if problems:
        raise ConfigError(problems)
    return merged


@cache
def all_sections() -> dict[str, type[Section]]:
    """Sections by name, in order: `job`, `model`, `model.rope`, ..."""
    return dict(_iter_sections("", Recipe))


@cache
def repeated_tables() -> dict[str, type[Section]]:
    """Tables that a file may repeat: `data.sources` (by name), `data.mix`, `validation.sets` (by
    name), `stage`.
    """
    owners: list[tuple[str, type[Section]]] = [*all_sections().items(), ("", Recipe)]
    result = {
        f"{name}.{key}".lstrip("."): inner
        for name, owner in owners
        for key, inner in _tables(owner).items()
    }
    return {name: inner for name, inner in result.items() if name not in all_sections()}


def section_keys(section: str) -> list[str]:
    """The keys of a section that hold a value, not a table."""
    owner = all_sections()[section]
    return [key for key in owner.fields_by_key() if key not in _tables(owner)]


# ---- the command line


@dataclass(frozen=True, kw_only=True)
class ParsedArguments:
    """A command line: its --config, its values by section and key, and the problems of its
    options.
    """

    config: str
    values: dict[str, Any]
    problems: list[str]


def parse_arguments(argv: Sequence[str]) -> ParsedArguments:
    """Parses `--section.key VALUE` and `--section.key=VALUE`; of a repeated option the last one
    counts.

    Values remain text. A key that takes a list has a list of text, written `1,2` or as JSON.
    """
    config = DEFAULT_CONFIG
    overrides = dict[str, str]()
    problems = list[str]()
    for option, value in _options(argv):
        if problem := _option_problem(option, value):
            problems.append(f"{COMMAND_LINE}: {problem}")
        elif option == "--config":
            config = str(value)
        else:
            overrides[option] = str(value)
    values: dict[str, Any] = {}
    for option, value in overrides.items():
        if value == "null":
            # Of a list, the parser would make one with nothing in it.
            values = deep_merge(values, _nested(option.removeprefix("--").split("."), None))
            continue
        try:
            # Options are parsed one by one, so that a value that cannot be parsed is reported with
            # its option.
            values = deep_merge(values, _cli_parser()(args=[f"{option}={value}"])())
        except SettingsError:
            problems.append(
                f"{COMMAND_LINE}: {option} {_shorten(value)} must be a list such as 1,2 or [1, 2]"
            )
    return ParsedArguments(config=config, values=values, problems=problems)


def _nested(path: Sequence[str], value: object) -> dict[str, Any]:
    """A value in tables of tables."""
    name, *rest = path
    return {name: _nested(rest, value) if rest else value}


def name_flags(problem: str, argv: Sequence[str]) -> str:
    """The problem with the options that set the keys it names."""
    words = {word.strip('():;,"') for word in problem.split()}
    options = {option for option, _ in _options(argv) if option.removeprefix("--") in words}
    is_named = problem.startswith(COMMAND_LINE) or not options
    return problem if is_named else f"{problem} (set by {', '.join(sorted(options))})"


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    remaining = list(argv)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        if equals:
            yield option, value
        # A value never begins with `--`, so a forgotten one does not swallow the next option.
        elif option.startswith("--") and remaining and not remaining[0].startswith("--"):
            yield option, remaining.pop(0)
        else:
            yield option, None


def _option_problem(option: str, value: str | None) -> str | None:
    section, _, key = option.removeprefix("--").rpartition(".")
    # The dots keep a longer name from matching a table whose name it begins with.
    if table_name := next(
        (table for table in repeated_tables() if f"{option[2:]}.".startswith(f"{table}.")), None
    ):
        return f"{_shorten(option)}: {table_name} can only be set in the file"
    if not option.startswith("--") or not key:
        return f'"{_shorten(option)}" is not an option; options are written --section.key VALUE'
    if option != "--config" and (
        section not in all_sections() or key not in section_keys(section)
    ):
        shown = option if value is None else f"{option} {value}"
        return f"{_shorten(shown)}: {_unknown_key_message(section, key)}"
    if value is None:
        is_bool = section and all_sections()[section].fields_by_key()[key].annotation is bool
        return f"{option} needs a value{': true or false' if is_bool else ''}"
    # Python decodes arguments that are not UTF-8 to lone surrogates (PEP 383), which no file can
    # store. A path keeps them, since file names may be any bytes.
    if option != "--config" and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{option} {_shorten(value)}: the value is not valid UTF-8"
    return None


@cache
def _cli_parser() -> CliSettingsSource[BaseSettings]:
    # pydantic-settings parses lists, JSON and null. Unknown options and help are handled above,
    # with messages of our own.
    class CommandLine(BaseSettings, Recipe):  # type: ignore[misc]  # Both declare model_config, settings with more keys.
        """`Recipe` with the parser of pydantic-settings."""

    return CliSettingsSource(CommandLine, cli_parse_args=False, cli_exit_on_error=False)


# ---- the file


def find_config_file(name: str) -> Path:
    """Looks a bare name up in `train_configs/`, then in the current folder; anything else is a
    path. Raises `ConfigError`.
    """
    path = Path(name)
    candidates = (
        [CONFIG_DIR / (name if name.endswith(".toml") else f"{name}.toml")]
        if path.name == name
        else []
    )
    try:
        for candidate in filter(Path.is_file, (*candidates, path)):
            return candidate
        if path.exists():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ConfigError([f"{name or path}: --config needs a TOML file, not {kind}"])
    except OSError as error:
        raise ConfigError([f"{_shorten(name)}: cannot be read: {error.strerror}"]) from error
    available = sorted(entry.stem for entry in CONFIG_DIR.glob("*.toml"))
    suggestions = [
        f"did you mean {match}? " for match in get_close_matches(path.stem, available, n=1)
    ]
    raise ConfigError(
        [
            f"{_shorten(name)}: no such file; {''.join(suggestions)}train_configs/ holds {', '.join(available)}"
        ]
    )


def read_toml(path: Path) -> dict[str, Any]:
    name = show_path(path)
    try:
        # Editors on Windows may begin a file with a byte order mark, which tomli refuses.
        text = read_regular(path, max_bytes=MAX_CONFIG_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = f"byte {error.start} (0x{error.object[error.start]:02x})"
        raise ConfigError([f"{name}:{line}: {byte} is not valid UTF-8"]) from error
    return parse_toml(text, name)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The values of a TOML text; errors call it `name`. Raises `ConfigError`."""
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        lines = [*error.doc.splitlines(), ""]
        text = lines[min(error.lineno, len(lines)) - 1].strip()
        rule = (
            "defined twice"
            if error.msg.endswith(("Cannot overwrite a value", "twice"))
            else error.msg
        )
        raise ConfigError([f"{name}:{error.lineno}: {rule}: {_shorten(text)}"]) from error
    # Not errors of tomli itself: integers of more than 4,300 digits and deeply nested arrays.
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{name}: {error}"]) from error


def show_path(path: Path) -> str:
    """The path, relative to the current folder if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# ---- one source


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A named source of nested values, which are typed (TOML) or all text (command line)."""

    name: str
    values: dict[str, Any]
    typed: bool

    def parse(self) -> Recipe:
        """A `Recipe` with the fields of this source set. Raises `ValidationError`."""
        values = aliases.our_values(self.values)
        if not self.typed:
            return Recipe.model_validate(values, strict=False)
        # Strict JSON has TOML's types: text for a path, an array for a tuple, 1 for 1.0. No key
        # holds a date: as a list it is refused where a string would be accepted.
        return Recipe.model_validate_json(
            json.dumps(values, default=lambda date: [str(date)]), strict=True
        )

    def format_errors(self, errors: Sequence[ErrorDetails]) -> list[str]:
        """One line for each key that has an error; where a value may have one of several types,
        with the rules of all.
        """
        # pydantic reports each member type of a union as an error; the user wrote one value.
        by_key = dict[tuple[int | str, ...], list[ErrorDetails]]()
        for details in errors:
            by_key.setdefault(self._without_type(details["loc"]), []).append(details)
        return [self.format_error(*each, loc=loc) for loc, each in by_key.items()]

    def _without_type(self, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """The location of a key, without the type's name that pydantic appends where a value may
        have one of several types.
        """
        section, *key = _section_at(loc[:-2]), *loc[-2:-1]
        is_key = (
            section is not None
            and key
            and key[0] in section.fields_by_key()
            and _section_at(loc[:-1]) is None
        )
        has_types = (
            is_key
            and isinstance(loc[-1], str)
            and not isinstance(self._value(loc[:-1]), dict | list)
        )
        return loc[:-1] if has_types else loc

    def format_error(
        self, details: ErrorDetails, *others: ErrorDetails, loc: tuple[int | str, ...]
    ) -> str:
        """The errors of a key in one line: source, key, value, rule."""
        location, key_path = self._locate(loc)
        items = [part for part in key_path if isinstance(part, int)]
        names = [part for part in key_path if isinstance(part, str)]
        value = self._value(loc[: len(loc) - len(items)])
        key = ".".join(names)
        is_missing = details["type"] == "missing" and not items
        assignment = f"{location}{key if is_missing else self._format_assignment(key, value)}"
        if details["type"] == "extra_forbidden":
            full_name = ".".join(part for part in loc if isinstance(part, str))
            owner = _section_at(loc[:-1])
            is_table = isinstance(value, dict)
            message = (
                renamed_message(full_name)
                or _foreign_section_message(full_name, value)
                or _unknown_key_message(".".join(names[:-1]), names[-1], owner, is_table=is_table)
            )
            return f"{self.name}: {assignment}: {message}"
        rule = ", or ".join(
            [_rule(details), *(_rule(other).removeprefix("must be ") for other in others)]
        )
        if details["type"].endswith("_type") and self.typed and not items:
            rule += f", not {TOML_TYPES.get(type(value), 'a date or time')}"
        section = _section_at(loc[:-1])
        if (
            details["type"] == "string_pattern_mismatch"
            and section
            and names[-1] in section.fields_by_key()
        ):
            rule += f" ({section.describe(names[-1])})"
        if replaced := replaced_value_message(key, value):
            rule += f"; {replaced}"
        return f"{self.name}: {assignment}{f': item {items[0] + 1}' if items else ''} {rule}"

    def _locate(self, loc: tuple[int | str, ...]) -> tuple[str, list[int | str]]:
        """Name of the list item that holds the error, such as `stage "a": `, and the key path
        within it.
        """
        location = ""
        remainder = list[int | str]()
        for index, part in enumerate(loc):
            remainder.append(part)
            if isinstance(part, int) and index + 1 < len(loc):
                name = self._value((*loc[: index + 1], "name"))
                location += f"{'.'.join(map(str, remainder[:-1]))} {part + 1 if name is None else toml_value(name)}: "
                remainder = []
        return location, remainder

    def _value(self, path: Sequence[int | str]) -> object:
        value: Any = self.values
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):  # A missing key.
                return None
        return value

    def _format_assignment(self, key: str, value: object) -> str:
        if self.typed:
            return (
                f"[{key}]" if isinstance(value, dict) else f"{key} = {_shorten(toml_value(value))}"
            )
        text = (
            ",".join(map(str, value))
            if isinstance(value, list)
            else "null"
            if value is None
            else str(value)
        )
        return f"--{key} {_shorten(text)}"


def _rule(details: ErrorDetails) -> str:
    limits = {
        key: f"{value:g}" if isinstance(value, float) else value
        for key, value in details.get("ctx", {}).items()
    }
    return ERROR_MESSAGES.get(details["type"], details["msg"]).format(**limits).replace("'", '"')


def _foreign_section_message(name: str, value: object) -> str | None:
    """Our key for each key of another trainer's section; None for any other value."""
    if not isinstance(value, dict):
        return None
    suggestions = [
        f"{key}: {message}" for key in value if (message := aliases.suggest(f"{name}.{key}"))
    ]
    return f"unknown section; {', '.join(suggestions)}" if suggestions else None


def sections_with(key: str) -> list[str]:
    """The sections that have a key of this name, whose words may be joined by dashes."""
    return [name for name in all_sections() if key.replace("-", "_") in section_keys(name)]


def _unknown_key_message(
    section: str, key: str, section_type: type[Section] | None = None, *, is_table: bool = False
) -> str:
    """Suggests a key for one that this section or table does not have."""
    name = f"{section}.{key}".lstrip(".")
    if section_type not in (None, Recipe, all_sections().get(section)):
        return f"unknown key; {_suggest(key, [*section_type.fields_by_key()])}"
    if name in all_sections():
        return f"a section, not a key; [{name}] has {', '.join(section_keys(name))}"
    if message := renamed_message(name):
        return message
    # The most specific advice comes first: our renamed keys, the right section of ours, keys of
    # other trainers, then similar names.
    owners = [f"[{owner}]" for owner in sections_with(key)]
    if not (owners and section in all_sections()) and (suggestion := aliases.suggest(name)):
        return f"unknown key; {suggestion}"
    if is_table or (section and section not in all_sections()):
        unknown_name = name if is_table else section
        matches = get_close_matches(unknown_name, [*all_sections(), *repeated_tables()], n=1)
        hint = (
            f"did you mean [{matches[0]}]?"
            if matches
            else f"the sections are {', '.join(all_sections())}"
        )
        return f"unknown section [{unknown_name}]; {hint}"
    if owners and f"[{section}]" not in owners:
        return f"unknown key; {key} belongs to {' or '.join(owners)}"
    if section:
        return f"unknown key; {_suggest(key, section_keys(section), f'[{section}] has {{}}')}"
    known_keys = [f"{home}.{inner}" for home in all_sections() for inner in section_keys(home)]
    return f"unknown key; {_suggest(key, known_keys, 'see --help')}"


def _suggest(key: str, known: list[str], otherwise: str = "the keys are {}") -> str:
    matches = get_close_matches(key, known, n=1)
    return f"did you mean {matches[0]}?" if matches else otherwise.format(", ".join(known))


def deep_merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with `overrides` merged in, table by table."""
    merged = {
        key: deep_merge(base[key], value)
        for key, value in overrides.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | overrides | merged


def _iter_sections(prefix: str, owner: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for key, field in owner.fields_by_key().items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield f"{prefix}{key}", field.annotation
            yield from _iter_sections(f"{prefix}{key}.", field.annotation)


@cache
def _tables(owner: type[Section]) -> dict[str, type[Section]]:
    """The section types of the keys that hold one section or several."""
    return {
        key: kind
        for key, field in owner.fields_by_key().items()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _section_at(loc: Sequence[int | str]) -> type[Section] | None:
    """The section type at a path, whose parts include list indices and table names."""
    owner: type[Section] | None = Recipe
    is_table_name = False
    for part in loc:
        if is_table_name or isinstance(part, int):
            is_table_name = False
        elif owner is None or part not in owner.fields_by_key():
            return None
        else:
            # What follows a dict is a name that the user chose, such as that of a source, not a
            # key.
            is_table_name = get_origin(owner.fields_by_key()[part].annotation) is dict
            owner = _tables(owner).get(part)
    return owner


def _shorten(text: str) -> str:
    # What a URL has besides its place may be a secret.
    text = re.sub(r"(?<=://)[^@\"]*@", "...@", text)
    text = re.sub(r"(://[^?]*)\?[^\"]*", r"\1?...", text)
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
