"""From a TOML file and a command line to a `Recipe`, or to the list of everything that is wrong with them.

Each of the two sources is checked by itself, so that a fault names where it stands; what they say is then put together,
the command line last. TOML has types, so `"50"` is no integer there; on the command line everything is text.
Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args

import tomli
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from trainer.config.job_config import Config, Section
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "train_configs"
DEFAULT = "debug.toml"
COMMAND_LINE = "command line"

RULES = {
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


def load(argv: Sequence[str]) -> Recipe:
    """The configuration that `--config NAME|PATH` and `--section.key VALUE` describe, or `ConfigError`."""
    arguments = split(argv)
    problems = list(arguments.problems)
    sources = [Source(name=COMMAND_LINE, values=arguments.values, typed=False)]
    try:
        path = find(arguments.config)
        sources.insert(0, Source(name=show_path(path), values=read_toml(path), typed=True))
    except ConfigError as error:
        problems += error.problems
    merged: dict[str, Any] = {}
    for source in sources:
        try:
            merged = overlay(merged, source.check().model_dump(exclude_unset=True))
        except ValidationError as error:
            problems += [source.explain(details) for details in error.errors()]
    if problems:
        raise ConfigError(problems)
    return Recipe.model_validate(merged)


def to_toml(config: Config) -> str:
    """The resolved configuration as a file that `load` reads back to an equal one; absent keys are left out."""
    values = config.model_dump(mode="json", exclude_none=True)
    # What a stage does not say is the sections'.
    if isinstance(config, Recipe):
        values["stage"] = [stage.model_dump(mode="json", exclude_unset=True) for stage in config.stage]
        for key in ("steps", "seq_len") if config.stage else ():
            del values["training"][key]
    return "\n".join(_toml_tables((), values)).lstrip() + "\n"


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by its name, in order: `job`, `model`, `model.rope`, ..."""
    return dict(_sections("", Recipe))


@cache
def tables() -> dict[str, type[Section]]:
    """What the file may hold several of, by its heading: `[data.sources.NAME]`, `[[data.mix]]`, `[[stage]]`."""
    places: list[tuple[str, type[Section]]] = [(f"{name}.", owner) for name, owner in sections().items()]
    places.append(("", Recipe))
    found = {f"{prefix}{key}": _inner(owner, key) for prefix, owner in places for key in owner.by_key()}
    return {key: inner for key, inner in found.items() if inner is not None and key not in sections()}


def keys(section: str) -> list[str]:
    """The keys of a section, without its sub-sections and tables."""
    return [key for key in sections()[section].by_key() if _inner(sections()[section], key) is None]


# ---- the command line


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line taken apart: the file it names, what it sets, and what is wrong with its options."""

    config: str
    values: dict[str, Any]
    problems: list[str]


def split(argv: Sequence[str]) -> Arguments:
    """Takes `--key VALUE` and `--key=VALUE` apart; of a repeated option the last counts.

    A value is still text where the key takes one of them, and a list, written `1,2` or as JSON, where it takes several.
    """
    config, overrides = DEFAULT, {}
    problems = []
    for option, value in _options(argv):
        problem = _option_problem(option, value)
        if problem:
            problems.append(f"{COMMAND_LINE}: {problem}")
        elif option == "--config":
            config = str(value)
        else:
            overrides[option] = str(value)
    values: dict[str, Any] = {}
    for option, value in overrides.items():
        try:
            values = overlay(values, _cli_source()(args=[f"{option}={value}"])())
        except SettingsError:
            problems.append(f"{COMMAND_LINE}: {option} {_shorten(value)} must be a list such as 1,2 or [1, 2]")
    return Arguments(config=config, values=values, problems=problems)


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    words = list(argv)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if equals:
            yield option, value
        elif option.startswith("--") and words and not words[0].startswith("--"):
            yield option, words.pop(0)
        else:
            yield option, None


def _option_problem(option: str, value: str | None) -> str | None:
    section, _, key = option.removeprefix("--").rpartition(".")
    if held := next((table for table in tables() if f"{option[2:]}.".startswith(f"{table}.")), None):
        return f"{_shorten(option)}: {held} is for the file; the command line sets single keys"
    if not option.startswith("--") or not key:
        return f'"{_shorten(option)}" stands alone; options are written --section.key VALUE'
    if option != "--config" and (section not in sections() or key not in keys(section)):
        written = option if value is None else f"{option} {value}"
        return f"{_shorten(written)}: {_unknown(section, key)}"
    if value is None:
        switch = section and sections()[section].by_key()[key].annotation is bool
        return f"{option} needs a value{': true or false' if switch else ''}"
    if option != "--config" and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{option} {_shorten(value)}: the value is not valid UTF-8"
    return None


@cache
def _cli_source() -> CliSettingsSource[BaseSettings]:
    class CommandLine(BaseSettings, Recipe):  # type: ignore[misc]  # Both declare model_config, settings with more keys.
        """The sections, with the parser that pydantic-settings makes of them."""

    return CliSettingsSource(CommandLine, cli_parse_args=False, cli_exit_on_error=False)


# ---- the file


def find(name: str) -> Path:
    """A bare name is one of `train_configs/`, else a file here; anything else is a path, relative to this folder."""
    path = Path(name)
    candidates = [SHIPPED / (name if name.endswith(".toml") else f"{name}.toml")] if path.name == name else []
    try:
        for candidate in (*candidates, path):
            if candidate.is_file():
                return candidate
        if path.exists():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ConfigError([f"{name or path}: --config needs a TOML file, and this is {kind}"])
    except OSError as error:
        raise ConfigError([f"{_shorten(name)}: cannot be read: {error.strerror}"]) from error
    there = sorted(entry.stem for entry in SHIPPED.glob("*.toml"))
    near = [f"did you mean {match}? " for match in get_close_matches(path.stem, there, n=1)]
    raise ConfigError(
        [f"{_shorten(name)}: there is no such file; {''.join(near)}train_configs/ holds {', '.join(there)}"]
    )


def read_toml(path: Path) -> dict[str, Any]:
    name = show_path(path)
    try:
        return tomli.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"{name}:{line}: byte {error.start} (0x{error.object[error.start]:02x}) is not valid UTF-8"
        raise ConfigError([problem]) from error
    except tomli.TOMLDecodeError as error:
        lines = [*error.doc.splitlines(), ""]
        text = lines[min(error.lineno, len(lines)) - 1].strip()
        twice = error.msg == "Cannot overwrite a value" or error.msg.endswith("twice")
        rule = "this is given twice" if twice else error.msg
        raise ConfigError([f"{name}:{error.lineno}: {rule}: {_shorten(text)}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{name}: {error}"]) from error


def show_path(path: Path) -> str:
    """Relative to the current folder where it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# ---- one source, checked


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where values come from: its name, its nested values, and whether they have types or are all text."""

    name: str
    values: dict[str, Any]
    typed: bool

    def check(self) -> Recipe:
        """A `Recipe` whose set fields are those of this source. Raises `ValidationError`."""
        if not self.typed:
            return Recipe.model_validate(self.values, strict=False)
        # By way of JSON, because its strict types are TOML's: text for a path, an array for a tuple, 1 for 1.0.
        return Recipe.model_validate_json(json.dumps(self.values, default=lambda date: [str(date)]), strict=True)

    def explain(self, details: ErrorDetails) -> str:
        """One fault in one line: source, key, value, rule."""
        at, path = self._place(details["loc"])
        items = [part for part in path if isinstance(part, int)]
        names = [part for part in path if isinstance(part, str)]
        value = self._value(details["loc"][: len(details["loc"]) - len(items)])
        key = ".".join(names)
        is_absent = details["type"] == "missing" and not items
        written = f"{at}{key if is_absent else self._written(key, value)}"
        if details["type"] == "extra_forbidden":
            owner = _owner(details["loc"][:-1])
            return f"{self.name}: {written}: {_unknown('.'.join(names[:-1]), names[-1], owner, table=isinstance(value, dict))}"
        limits = {
            key: f"{value:g}" if isinstance(value, float) else value for key, value in details.get("ctx", {}).items()
        }
        rule = RULES.get(details["type"], details["msg"]).format(**limits).replace("'", '"')
        if details["type"].endswith("_type") and self.typed and not items:
            rule += f", not {TOML_TYPES.get(type(value), 'a date or time')}"
        owner = _owner(details["loc"][:-1])
        if details["type"] == "string_pattern_mismatch" and owner and names[-1] in owner.by_key():
            rule += f" ({owner.by_key()[names[-1]].description})"
        return f"{self.name}: {written}{f': item {items[0] + 1}' if items else ''} {rule}"

    def _place(self, loc: tuple[int | str, ...]) -> tuple[str, list[int | str]]:
        """The table of a list that a fault is in, in words, and where it is there."""
        told, rest = "", list[int | str]()
        for index, part in enumerate(loc):
            rest.append(part)
            if isinstance(part, int) and index + 1 < len(loc):
                name = self._value((*loc[: index + 1], "name"))
                told += f"{'.'.join(map(str, rest[:-1]))} {part + 1 if name is None else toml_value(name)}: "
                rest = []
        return told, rest

    def _value(self, path: Sequence[int | str]) -> object:
        value: Any = self.values
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):  # What is missing has none.
                return None
        return value

    def _written(self, key: str, value: object) -> str:
        if self.typed:
            return f"[{key}]" if isinstance(value, dict) else f"{key} = {_shorten(toml_value(value))}"
        text = ",".join(map(str, value)) if isinstance(value, list) else "null" if value is None else str(value)
        return f"--{key} {_shorten(text)}"


def _unknown(section: str, key: str, owner: type[Section] | None = None, *, table: bool = False) -> str:
    """What a key that does not exist, in this section or table, was probably meant to be."""
    name = f"{section}.{key}".lstrip(".")
    if owner not in (None, Recipe, sections().get(section)):
        here = [*owner.by_key()]
        near = get_close_matches(key, here, n=1)
        return f"there is no such key; {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(here)}"
    if name in sections():
        return f"a section, not a key; [{name}] has {', '.join(keys(name))}"
    if table or (section and section not in sections()):
        wrong = name if table else section
        near = get_close_matches(wrong, [*sections(), *tables()], n=1)
        guess = f"did you mean [{near[0]}]?" if near else f"there are {', '.join(sections())}"
        return f"there is no section [{wrong}]; {guess}"
    homes = [f"[{home}]" for home in sections() if key in keys(home)]
    if homes:
        return f"there is no such key; {key} belongs to {' or '.join(homes)}"
    here = keys(section) if section else [f"{home}.{inner}" for home in sections() for inner in keys(home)]
    near = get_close_matches(key, here, n=1)
    if near:
        return f"there is no such key; did you mean {near[0]}?"
    return f"there is no such key; [{section}] has {', '.join(here)}" if section else "there is no such key; see --help"


# ---- small things


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with what `above` says put over it, table by table."""
    both = {
        key: overlay(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return below | above | both


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL bare, TOML forbids it
    return str(value)


def _toml_tables(path: tuple[str, ...], table: dict[str, Any]) -> Iterator[str]:
    several = {key: value for key, value in table.items() if isinstance(value, list) and not path}
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and key not in several}
    if plain and path:
        yield f"\n[{'.'.join(path)}]"
    yield from (f"{key} = {toml_value(value)}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml_tables((*path, key), value)
    for key, tables in several.items():
        for one in tables:
            yield f"\n[[{key}]]"
            yield from (f"{name} = {toml_value(value)}" for name, value in one.items())


def _sections(prefix: str, owner: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for key, about in owner.by_key().items():
        if isinstance(about.annotation, type) and issubclass(about.annotation, Section):
            yield f"{prefix}{key}", about.annotation
            yield from _sections(f"{prefix}{key}.", about.annotation)


def _inner(owner: type[Section], key: str) -> type[Section] | None:
    """The section that a key is, or those that it holds several of, are of."""
    annotation = owner.by_key()[key].annotation
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _owner(loc: Sequence[int | str]) -> type[Section] | None:
    """The section at a place, of which numbers and names of a table are parts."""
    owner: type[Section] | None = Recipe
    named = False
    for part in loc:
        if named or isinstance(part, int):
            named = False
        elif owner is None or part not in owner.by_key():
            return None
        else:
            named = get_args(owner.by_key()[part].annotation)[:1] not in ((), (_inner(owner, part),))
            owner = _inner(owner, part)
    return owner


def _shorten(text: str) -> str:
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
