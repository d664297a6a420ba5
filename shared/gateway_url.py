"""The option `--url` of commands that ask a gateway."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

URL = "http://127.0.0.1:8000"


def read_url(text: str | None) -> str | None:
    """An address without the version that clients are told to put behind it. Raises: BadParameter."""
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not text.isprintable():
        raise typer.BadParameter(f"it is no address of a gateway; write one such as {URL}")
    return text.rstrip("/").removesuffix("/v1")


Url = Annotated[str, typer.Option("--url", help="Where the gateway listens.", callback=read_url)]
