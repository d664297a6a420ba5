"""The settings as a table for people: variable, default, meaning. Made from the code, so always true.

Called by `vlm settings` and by the test that keeps docs/settings.md equal to it.
"""

from dataclasses import dataclass

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from shared.settings.tree import PREFIX, Settings


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. `default` is as one would write it in the environment."""

    variable: str
    default: str
    description: str


def rows(group: type[BaseModel] = Settings, prefix: str = PREFIX) -> list[Row]:
    """Every setting in the order of the tree."""
    found: list[Row] = []
    for name, field in group.model_fields.items():
        variable = prefix + name.upper()
        if isinstance(field.default, BaseModel):
            found += rows(type(field.default), variable + "__")
        else:
            default = "" if field.default in (None, (), "") else str(field.default)
            found.append(Row(variable, default, field.description or ""))
    return found


def to_markdown() -> str:
    """The table in Markdown."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{row.variable}` | {f'`{row.default}`' if row.default else ''} | {row.description} |"
        for row in rows()
    ]
    return "\n".join(lines)


def show(markdown: bool) -> None:
    """Print the table, for the terminal or in Markdown."""
    if markdown:
        print(to_markdown())
        return
    table = Table("variable", "default", "meaning")
    for row in rows():
        table.add_row(row.variable, row.default, row.description)
    Console().print(table)
