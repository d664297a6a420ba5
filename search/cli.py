"""The commands of search: `vlm search-node`, `embed`, `store`, `search`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shared.gateway_url import URL, ApiKey, AskUrl, read_url
from shared.options import SettingOptions, takes_settings

if TYPE_CHECKING:
    from shared.settings.tree import Settings

SEARCH: SettingOptions = {
    "search.url": Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Where to listen: unix:///PATH or http://HOST:PORT.",
            show_default=False,
        ),
    ],
    "search.data_dir": Annotated[
        str | None,
        typer.Option("--data-dir", help="Where it keeps its files.", show_default="by user"),
    ],
}


def one_thread() -> None:
    """Let numpy multiply in the thread that asks: requests share the processors, not a product."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@takes_settings(SEARCH, process="search")
def search_node(settings: "Settings") -> None:
    """Run the process that keeps vector stores; one for all gateways."""
    one_thread()
    from search.server import run_search

    sys.exit(run_search(settings))


Engine = Annotated[str, typer.Option(help="Which engine computes in this process, without --url.")]
LocalUrl = Annotated[
    str | None,
    typer.Option(
        "--url", help="A gateway, whose fleet computes; else this process.", callback=read_url
    ),
]


def embed(
    inputs: Annotated[
        list[Path],
        typer.Argument(help=".txt (a text a line), .jsonl, .csv, images, folders of images."),
    ],
    output: Annotated[Path, typer.Option(help="Directory of the collection.")],
    model: Annotated[
        str,
        typer.Option(
            help="Directory, hub id; or a name at --url.",
            show_default="shapes-clip; at --url its only one",
        ),
    ] = "",
    url: LocalUrl = None,
    engine: Engine = "pooling",
    text_field: Annotated[str, typer.Option(help="Of .jsonl and .csv.")] = "text",
    prompt: Annotated[
        str | None, typer.Option(help="Before each text.", show_default="the model's own")
    ] = None,
    dtype: Annotated[Literal["f32", "f16"], typer.Option(help="Of the stored numbers.")] = "f32",
    part_items: Annotated[int, typer.Option(min=1, help="Items of one file.")] = 8192,
    api_key: ApiKey = None,
) -> None:
    """Make vectors of texts and images, in files to be searched; goes on where it was cut."""
    from search.commands import run_embed

    run_embed(inputs, output, model, url, engine, text_field, prompt, dtype, part_items, api_key)


store = typer.Typer(help="Vector stores of a gateway.", no_args_is_help=True)


@store.command("load")
def store_load(
    directory: Annotated[Path, typer.Argument(help="A collection of `vlm embed`.")],
    name: Annotated[str, typer.Option(help="Of the store; it is made where there is none.")],
    url: AskUrl = URL,
    model: Annotated[
        str, typer.Option(help="Name at the gateway.", show_default="the collection's")
    ] = "",
    api_key: ApiKey = None,
) -> None:
    """Put a collection into a vector store."""
    from search.commands import run_load

    run_load(directory, name, url, model, api_key)


@store.command("export")
def store_export(
    name: Annotated[str, typer.Argument(help="Name or id of the store.")],
    output: Annotated[Path, typer.Option(help="A new directory.")],
    url: AskUrl = URL,
    dtype: Annotated[Literal["f32", "f16"], typer.Option(help="Of the stored numbers.")] = "f32",
    api_key: ApiKey = None,
) -> None:
    """Write a vector store as a collection."""
    from search.commands import run_export

    run_export(name, output, url, dtype, api_key)


def find(
    target: Annotated[
        str, typer.Argument(help="A directory of `vlm embed`, a folder of images, or a store.")
    ],
    text: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    image: Annotated[Path | None, typer.Option("--image", "-i", help="What to look for.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=50, help="How many to show.")] = 10,
    url: LocalUrl = None,
    engine: Engine = "pooling",
    model: Annotated[
        str,
        typer.Option(
            help="That made a directory; for images `shapes-clip`.", show_default="its own"
        ),
    ] = "",
    api_key: ApiKey = None,
) -> None:
    """Find what is near to a text or an image, in a directory or in a store of a gateway."""
    from search.commands import run_search

    run_search(target, text, image, limit, url, engine, model, api_key)
