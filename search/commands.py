"""What the commands print, and how they end."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engines.base import EngineStartError
from engines.registry import find_kind
from search.index import require
from shared.gateway_url import URL
from shared.settings import SettingsError

console = Console(stderr=True, highlight=False)
CHARS_PER_TOKEN = 4
LINE_S = 5.0


@contextmanager
def _failing() -> Iterator[None]:
    """A failure is a sentence and exit code 1."""
    require("numpy", "this command")
    require("safetensors", "this command")
    from search.collection import BadCollection  # noqa: PLC0415 (needs numpy)
    from search.sources import EmbedError  # noqa: PLC0415

    try:
        yield
    except (EmbedError, BadCollection, EngineStartError, SettingsError, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped; run it again to go on")
        sys.exit(130)


class _Lines:
    """Progress where no bar can be drawn, such as in a log: a line now and then."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def report(self, line: str) -> None:
        """Print it, if there is no bar and the last line is long ago."""
        if not console.is_terminal and time.monotonic() >= self._next_at:
            console.print(line, soft_wrap=True)
            self._next_at = time.monotonic() + LINE_S


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        bar.add_task(what, total=None, rate="")
        yield bar


def run_embed(
    inputs: list[Path],
    output: Path,
    model: str,
    url: str | None,
    engine: str,
    text_field: str,
    prompt: str | None,
    dtype: str,
    part_items: int,
    api_key: str | None,
) -> None:
    """`vlm embed`"""
    with _failing():
        from search import embed as embedding  # noqa: PLC0415
        from search.sources import fingerprint, read_sources  # noqa: PLC0415
        from search.transfer import Gateway, open_embedder  # noqa: PLC0415

        console.print(f"{output}: reading inputs", markup=False)
        known = fingerprint(read_sources(inputs, text_field))
        embedding.open_output(output)
        with _bar("loading") as bar:
            gateway = Gateway(url, api_key) if url else None
            embedder = open_embedder(engine, model, gateway, prompt)
            began_at, lines = time.monotonic(), _Lines()

            def report(progress: embedding.Progress) -> None:
                elapsed_s = max(time.monotonic() - began_at, 1e-3)
                items_s = (progress.num_items - progress.num_before) / elapsed_s
                tokens_s = progress.num_chars / CHARS_PER_TOKEN / elapsed_s
                rate = f"{items_s:.0f} items/s, ~{tokens_s:.0f} tokens/s"
                bar.update(
                    bar.task_ids[0],
                    description="embedding",
                    completed=progress.num_items,
                    total=progress.total,
                    rate=rate,
                )
                lines.report(f"{progress.num_items} of {progress.total} items, {rate}")

            try:
                manifest = embedding.embed(
                    inputs, output, embedder, text_field=text_field, dtype=dtype,
                    part_items=part_items, report=report, known=known,
                )  # fmt: skip
            finally:
                embedder.close()
        print(
            f"{output}: {manifest.num_items} items of {manifest.model}, {manifest.dimensions} numbers each"
        )


def run_load(directory: Path, name: str, url: str, model: str, api_key: str | None) -> None:
    """`vlm store load`"""
    with _failing(), _bar("loading") as bar:
        from search.transfer import Gateway, load  # noqa: PLC0415

        store = load(directory, name, Gateway(url, api_key), model, _teller(bar))
    print(f"{store['id']} {store['name']}: {store['num_items']} items")


def run_export(name: str, output: Path, url: str, dtype: str, api_key: str | None) -> None:
    """`vlm store export`"""
    with _failing(), _bar("exporting") as bar:
        from search.transfer import Gateway, export  # noqa: PLC0415

        manifest = export(name, output, Gateway(url, api_key), dtype, _teller(bar))
    print(f"{output}: {manifest.num_items} items")


def _teller(bar: Progress):
    def report(done: int, total: int) -> None:
        bar.update(bar.task_ids[0], completed=done, total=total)

    return report


def run_search(
    target: str,
    text: str | None,
    image: Path | None,
    limit: int,
    url: str | None,
    engine: str,
    model: str,
    api_key: str | None,
) -> None:
    """`vlm search`"""
    with _failing():
        from engines.packages.resolve import BUILT_IN  # noqa: PLC0415
        from search.collection import MANIFEST, read_manifest  # noqa: PLC0415
        from search.embed import PLAN  # noqa: PLC0415
        from search.embedders import GatewaySilent  # noqa: PLC0415
        from search.sources import EmbedError, Source, list_images  # noqa: PLC0415
        from search.transfer import (  # noqa: PLC0415
            Gateway,
            open_embedder,
            search_directory,
            search_images,
            search_store,
        )

        if (text is None) == (image is None):
            raise EmbedError("say what to look for: a text or --image FILE, one of them")
        if image is not None and not image.is_file():
            raise EmbedError(f"{image} is no file: name an image with --image")
        query = Source("query", text or "", image)
        directory = Path(target)
        if directory.is_dir():
            is_collection = (directory / MANIFEST).exists()
            if (directory / PLAN).exists() and not is_collection:
                read_manifest(directory)
            if not is_collection and not list_images(directory):
                raise EmbedError(
                    f"{directory} has no {MANIFEST}, which `vlm embed` writes, and holds no image"
                )
            if not model and url and is_collection:
                model = read_manifest(directory).model
            kind = find_kind(engine)
            if not model and is_collection and kind is not None and kind.needs_checkpoint:
                model = read_manifest(directory).model
                if model not in BUILT_IN:  # what a manifest names is not loaded unasked
                    raise EmbedError(f"name the model that made it with --model: {model}")
            gateway = Gateway(url, api_key) if url else None
            embedder = open_embedder(engine, model, gateway, None, is_query=True)
            try:
                search = search_directory if is_collection else search_images
                found = search(directory, query, limit, embedder)
            finally:
                embedder.close()
        else:
            gateway = Gateway(url or URL, api_key)
            try:
                found = search_store(target, query, limit, gateway)
            except GatewaySilent as error:
                raise EmbedError(f"there is no directory {target}, and {error}") from None
    for hit in found:
        print(f"{hit.score:7.4f}  {hit.id}  {hit.text[:100]}".rstrip())
