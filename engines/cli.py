"""The commands `vlm models`, `vlm pull` and `vlm rm`.

They import torch only when they run.
"""

import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from engines.packages.cache import FindEngine


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Show which models run on this machine.")
    ] = False,
) -> None:
    """List built-in models and models in the hub's cache."""
    from engines.packages.cache import format_bytes, list_models

    if check and find_spec("torch") is None:
        typer.echo("this command needs torch: pip install '.[torch]'", err=True)
        sys.exit(os.EX_CONFIG)
    find_engine = _load_find_engine() if check else None
    rows = [(model, find_engine and model.explain(find_engine)) for model in list_models()]
    if as_json:
        listed = []
        for model, found in rows:
            entry: dict[str, object] = {
                "name": model.name,
                "revision": model.revision,
                "size_bytes": model.num_bytes,
                "format": model.format,
                "source": model.source,
                "directory": str(model.directory),
            }
            if found:
                runs, why = found
                entry |= {"runs": runs, "engine": why if runs else None}
                entry["problem"] = None if runs else why
            listed.append(entry)
        typer.echo(json.dumps(listed, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("name", "revision", "size", "format", "from"):
        justify = "right" if name == "size" else "left"
        table.add_column(name, overflow="fold", no_wrap=True, justify=justify)
    if check:
        table.add_column("runs here", overflow="fold")
    for model, found in rows:
        size = format_bytes(model.num_bytes)
        cells = [model.name, model.revision, size, model.format, model.source]
        if found:
            runs, why = found
            cells.append(f"yes, engine {why}" if runs else f"no: {why}")
        table.add_row(*cells)
    console = Console(markup=False)
    console.print(table, width=None if console.is_terminal else 200)


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="org/name[@revision].")],
    force: Annotated[
        bool, typer.Option("--force", help="Download it even if it does not run on this machine.")
    ] = False,
) -> None:
    """Download a model from the hub if it runs on this machine."""
    from engines.base import EngineStartError
    from engines.packages.resolve import parse_hub_id, resolve_model

    if parse_hub_id(model) is None:
        sys.exit(f"{model!r} is not a hub id: write it as org/name[@revision]")
    try:
        directory = resolve_model(model, check=None if force else _load_find_engine())
    except EngineStartError as problem:
        sys.exit(f"{problem}")
    typer.echo(f"{directory}\nvlm serve --model {model}")


def rm(
    model: Annotated[str, typer.Argument(metavar="ID", help="org/name[@revision].")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the hub's cache."""
    from engines.base import EngineStartError
    from engines.packages.cache import format_bytes, remove

    try:
        freed = remove(model, lambda question: yes or typer.confirm(question))
    except EngineStartError as problem:
        sys.exit(f"{problem}")
    typer.echo("kept" if freed is None else f"{format_bytes(freed)} are free")


def _load_find_engine() -> "FindEngine | None":
    """The function that finds the engine of a model; None without torch."""
    if find_spec("torch") is None:
        return None
    from engines.pooling.load import find_engine

    return find_engine
