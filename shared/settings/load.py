"""Loads the settings once in `main`, passes them to child processes as environment variables, and lists them.

Called by the command line and by code that starts processes.
"""

import ast
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError
from pydantic_settings import SettingsError as UnparsedValue

from shared.settings import KEY_VARIABLE, URL_VARIABLE
from shared.settings.tree import CONFIG_VARIABLE, PREFIX, Settings, SettingsError

ENGINE_PREFIX = f"{PREFIX}ENGINE__"


def load_settings(typed: Mapping[str, str] = {}, **overrides: dict[str, Any]) -> Settings:
    """Read all sources. `overrides` are sub-trees by name, such as `gateway={"port": 0}`.

    `typed`: the command-line option that set a field, for error messages, such as `{"gateway.port": "--port"}`.
    Raises: SettingsError, naming every bad or unknown field.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if path and not Path(path).is_file():
        raise SettingsError(f"{CONFIG_VARIABLE}: the file {path!r} does not exist")
    fields = (PREFIX + name.upper() for name in Settings.model_fields)
    known = {CONFIG_VARIABLE, KEY_VARIABLE, URL_VARIABLE, *fields}
    given = (name for name in os.environ if name.upper().startswith(PREFIX))
    unknown = sorted(name for name in given if name.upper().split("__")[0] not in known)
    if unknown:
        lines = [f"{name}: {_unknown(name)}" for name in unknown]
        raise SettingsError("\n  ".join(["unknown settings in the environment", *lines]))
    try:
        settings = Settings(**overrides)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise SettingsError(_describe(error, typed)) from None
    except UnparsedValue as error:  # a group as JSON; the message names the field
        raise SettingsError(f"{error}: write JSON, or a variable for each setting") from None
    except UnicodeDecodeError:
        raise SettingsError("the file .env is not UTF-8: save it as UTF-8") from None
    if settings.redis_url and not settings.redis.url:
        return settings.changed(redis={"url": settings.redis_url})
    return settings


def _describe(error: ValidationError, typed: Mapping[str, str]) -> str:
    """One line per error, without the value, which may be a secret."""
    lines: list[str] = []
    for fault in error.errors(include_input=False, include_url=False):
        path = ".".join(str(part) for part in fault["loc"]).lower()
        variable = path.replace(".", "__").upper()
        variable = variable if variable.startswith(PREFIX) else PREFIX + variable
        says = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            says = _unknown(variable)
        lines.append(f"{_as_typed(path, typed) or variable}: {says}")
    return "invalid settings\n  " + "\n  ".join(lines)


def _as_typed(path: str, typed: Mapping[str, str]) -> str | None:
    for other, words in typed.items():
        if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
            return words
    return None


def _unknown(variable: str) -> str:
    """The message for an unknown variable."""
    known = [row.variable for row in rows(())]
    close = get_close_matches(variable.upper(), known, 1, 0.75)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no such setting; {hint}`vlm settings` lists them"


def to_environment(settings: BaseModel | Mapping[str, Any], prefix: str = PREFIX) -> dict[str, str]:
    """The variables from which a child process loads the same settings, without defaults."""
    defaults: dict[str, Any] = {}
    values = settings
    if isinstance(settings, BaseModel):
        defaults = {name: field.default for name, field in type(settings).model_fields.items()}
        values = {
            name: getattr(settings, name) for name in (*defaults, *(settings.model_extra or ()))
        }
    variables: dict[str, str] = {}
    for name, value in dict(values).items():
        variable = prefix + name.upper()
        if isinstance(value, BaseModel) or (isinstance(value, Mapping) and name not in defaults):
            variables |= to_environment(value, f"{variable}__")
        elif value != defaults.get(name):
            variables[variable] = _to_text(value)
    return variables


def _to_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(_to_text(item) for item in value)
    if isinstance(value, dict):
        return TypeAdapter(dict).dump_json(value, exclude_none=True).decode()
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


@dataclass(frozen=True, slots=True)
class Row:
    """A setting in the table of all settings. `default`: as written in the environment."""

    variable: str
    default: str
    description: str


def rows(engines: Iterable[type[BaseModel]]) -> list[Row]:
    """All settings in the order of the tree. The first engine describes a setting that several engines have."""
    found: dict[str, Row] = {}
    for row in _rows(Settings, PREFIX):
        found[row.variable] = row
        if row.variable == ENGINE_PREFIX + "KIND":
            for own in (own for one in engines for own in _rows(one, ENGINE_PREFIX)):
                found.setdefault(own.variable, own)
    return list(found.values())


def _rows(group: type[BaseModel], prefix: str) -> Iterator[Row]:
    meanings = _attribute_docstrings(group)
    for name, field in group.model_fields.items():
        variable = prefix + name.upper()
        if isinstance(field.default, BaseModel):
            yield from _rows(type(field.default), variable + "__")
        elif field.json_schema_extra != {"is_listed": False}:  # unlisted: for tests and nodes
            default = "" if field.default in (None, (), "", {}) else str(field.default)
            yield Row(variable, default, meanings.get(name) or field.description or "")


def _attribute_docstrings(group: type[BaseModel]) -> dict[str, str]:
    """The docstrings below fields, read only here: pydantic would read them at every start."""
    found: dict[str, str] = {}
    for base in reversed(group.mro()):
        if base.__module__.partition(".")[0] in ("builtins", "pydantic", "pydantic_settings"):
            continue
        [definition] = ast.parse(dedent(inspect.getsource(base))).body
        for field, text in pairwise(definition.body):  # type: ignore[attr-defined]
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(words))):
                    found[name] = " ".join(words.split())
    return found


def show(engines: Iterable[type[BaseModel]]) -> None:
    from rich.console import Console  # noqa: PLC0415 (rarely needed)
    from rich.table import Table  # noqa: PLC0415

    table = Table("variable", "default", "meaning")
    for row in rows(engines):
        table.add_row(row.variable, row.default, row.description)
    Console().print(table)
