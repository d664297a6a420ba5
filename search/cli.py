"""Search commands: `vlm search-node`, `embed`, `store` and `search`."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shared.gateway_url import URL, ApiKey, AskUrl, read_url
from shared.options import SettingOptions, option, takes_settings
from shared.settings import URL_VARIABLE, SettingsError

if TYPE_CHECKING:
    from shared.settings.tree import Settings

SEARCH: SettingOptions = {
    "search.url": option(str, "--url", "Address to listen on: unix:///PATH or http://HOST:PORT."),
    "search.data_dir": option(str, "--data-dir", "Directory of its files.", "by user"),
}


@takes_settings(SEARCH, process="search")
def search_node(settings: "Settings") -> None:
    """Run the search process, which has the vector stores of all gateways."""
    _require("the search process")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # requests run in parallel instead
    from search.server import run_search

    run_search(settings)


def _require(use: str = "this command") -> None:
    """Raises: SettingsError if the extra is not installed."""
    from search.index import INSTALL

    for package in ("numpy", "safetensors"):
        if find_spec(package) is None:
            raise SettingsError(f"{use} needs the package {package!r}: {INSTALL}")


def _load():
    """Import the implementation, only when a command runs, because that is slow. Raises: SettingsError."""
    _require()
    from search import commands

    return commands


Engine = Annotated[str, typer.Option(help="Engine to embed with, without --url.")]
LocalUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        help="Embed with this gateway, not in this process.",
        callback=read_url,
    ),
]


def embed(
    inputs: Annotated[
        list[Path],
        typer.Argument(help=".txt (one text per line), .jsonl, .csv, images, folders of images."),
    ],
    output: Annotated[Path, typer.Option(help="Directory of the collection.")],
    model: Annotated[
        str,
        typer.Option(
            help="Directory or hub id of the model; with --url, the name of a gateway's model.",
            show_default="shapes-clip; with --url, the only model",
        ),
    ] = "",
    url: LocalUrl = None,
    engine: Engine = "pooling",
    text_field: Annotated[
        str, typer.Option(help="Field of .jsonl and .csv with the text.")
    ] = "text",
    prompt: Annotated[
        str | None, typer.Option(help="Name of a prompt for texts.", show_default="by model")
    ] = None,
    dtype: Annotated[
        Literal["f32", "f16"], typer.Option(help="Type of the stored vectors.")
    ] = "f32",
    part_items: Annotated[int, typer.Option(min=1, help="Items per file.")] = 8192,
    api_key: ApiKey = None,
) -> None:
    """Embed texts and images into a directory that can be searched; resumes an interrupted run."""
    commands = _load()
    open_ = partial(commands.open_embedder, engine, model, url, api_key, prompt)
    commands.run_embed(inputs, output, text_field, dtype, part_items, open_)


store = typer.Typer(help="Vector stores of a gateway.", no_args_is_help=True)


@store.command("load")
def store_load(
    directory: Annotated[Path, typer.Argument(help="A collection of `vlm embed`.")],
    name: Annotated[
        str, typer.Option(help="Name of the store; it is created if it does not exist.")
    ],
    url: AskUrl = URL,
    model: Annotated[
        str, typer.Option(help="Model of a new store.", show_default="the collection's")
    ] = "",
    api_key: ApiKey = None,
) -> None:
    """Load a collection into a vector store."""
    _load().run_load(directory, name, url, model, api_key)


@store.command("export")
def store_export(
    name: Annotated[str, typer.Argument(help="Name or id of the store.")],
    output: Annotated[Path, typer.Option(help="A new directory.")],
    url: AskUrl = URL,
    dtype: Annotated[
        Literal["f32", "f16"], typer.Option(help="Type of the stored vectors.")
    ] = "f32",
    api_key: ApiKey = None,
) -> None:
    """Write a vector store as a collection."""
    _load().run_export(name, output, url, dtype, api_key)


def find(
    target: Annotated[
        str, typer.Argument(help="A directory of `vlm embed`, a folder of images, or a store.")
    ],
    text: Annotated[str | None, typer.Argument(help="Text to search for.")] = None,
    image: Annotated[
        Path | None, typer.Option("--image", "-i", help="Image to search for.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=50, help="Number of results.")] = 10,
    url: LocalUrl = None,
    engine: Engine = "pooling",
    model: Annotated[
        str,
        typer.Option(
            help="Model that embeds the query.", show_default="the collection's, else shapes-clip"
        ),
    ] = "",
    api_key: ApiKey = None,
) -> None:
    """Search a directory, or a store of a gateway, by a text or an image."""
    _load().run_search(target, text, image, limit, url, engine, model, api_key)
