"""The table of all settings, for `vlm settings` and docs/settings.md: variable, default, meaning."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from shared.settings.tree import PREFIX, Settings

ENGINE_PREFIX = f"{PREFIX}ENGINE__"


@dataclass(frozen=True, slots=True)
class Row:
    """A setting. `default`: as in the environment."""

    variable: str
    default: str
    description: str


def rows(engines: Iterable[type[BaseModel]]) -> list[Row]:
    """All settings in the order of the tree; the first engine describes those that several engines have."""
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
        elif field.json_schema_extra != {"is_listed": False}:  # those are for tests and nodes
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
    table = Table("variable", "default", "meaning")
    for row in rows(engines):
        table.add_row(row.variable, row.default, row.description)
    Console().print(table)
