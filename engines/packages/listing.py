"""Output of `vlm models`, `vlm pull` and `vlm rm`."""

import json
import sys
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from engines.base import EngineStartError
from engines.packages import cache
from engines.packages.cache import FindEngine, format_bytes
from engines.packages.resolve import parse_hub_id, resolve_model

_UNKNOWN = "unknown: torch is not installed (pip install 'vlm-fleet[torch]')"


def show(as_json: bool, find_engine: FindEngine | None) -> None:
    """Print every model with its size, its format and whether it runs here."""
    rows = []
    for model in cache.list_models():
        runs, why = (None, _UNKNOWN) if find_engine is None else model.explain(find_engine)
        rows.append((model, runs, why))
    if as_json:
        listed = [
            {
                "name": model.name,
                "revision": model.revision,
                "size_bytes": model.num_bytes,
                "format": model.format,
                "source": model.source,
                "directory": str(model.directory),
                "runs": runs,
                "engine": why if runs else None,
                "problem": None if runs else why,
            }
            for model, runs, why in rows
        ]
        typer.echo(json.dumps(listed, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("name", "revision", "size", "format", "from", "runs here"):
        is_last = name == "runs here"
        justify = "right" if name == "size" else "left"
        table.add_column(name, overflow="fold", no_wrap=not is_last, justify=justify)
    for model, runs, why in rows:
        told = f"yes, engine {why}" if runs else f"no: {why}" if runs is False else why
        size = format_bytes(model.num_bytes)
        table.add_row(model.name, model.revision, size, model.format, model.source, told)
    console = Console()
    console.print(table, width=None if console.is_terminal else 200)


def pull(model: str, find_engine: FindEngine | None) -> None:
    """Download a model if it runs here."""
    if parse_hub_id(model) is None:
        sys.exit(f"{model!r} is no hub id: name one as org/name[@revision]")

    def check(directory: Path, num_weight_bytes: int) -> None:
        if find_engine is not None:
            find_engine(directory, num_weight_bytes)

    try:
        directory = resolve_model(model, check=check)
    except EngineStartError as problem:
        sys.exit(f"{problem}")
    typer.echo(f"{directory}\nvlm serve --model {model}")


def remove(model: str, yes: bool) -> None:
    """Remove a model after confirmation."""
    try:
        freed = cache.remove(model, lambda question: yes or typer.confirm(question))
    except EngineStartError as problem:
        sys.exit(f"{problem}")
    typer.echo("kept" if freed is None else f"{format_bytes(freed)} are free")
