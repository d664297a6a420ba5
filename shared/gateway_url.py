"""The options `--url` and `--api-key` of commands that call a gateway.

The default key is `VLM_API_KEY`. `OPENAI_API_KEY` is read only if the URL comes from `OPENAI_BASE_URL`,
so that OpenAI's key is never sent to another server.
"""

import os
from typing import Annotated
from urllib.parse import urlsplit

import typer

from shared.settings import KEY_VARIABLE, URL_VARIABLE

URL = "http://127.0.0.1:8000"


def read_url(text: str | None) -> str | None:
    """The URL without a trailing `/v1`, with which base URLs of OpenAI clients end. Raises: BadParameter."""
    if text is None:
        return None
    if text and "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not text.isprintable():
        raise typer.BadParameter(f"not the address of a gateway; write an address such as {URL}")
    return text.rstrip("/").removesuffix("/v1")


def read_key(context: typer.Context, key: str | None) -> str | None:
    """The given key, or `OPENAI_API_KEY` if the URL comes from `OPENAI_BASE_URL`."""
    source = context.get_parameter_source("url")
    is_openai = source is not None and source.name == "ENVIRONMENT"
    if not key and is_openai and not os.environ.get(URL_VARIABLE):
        return os.environ.get("OPENAI_API_KEY") or None
    return key


Url = Annotated[
    str,
    typer.Option("--url", envvar=URL_VARIABLE, help="Address of the gateway.", callback=read_url),
]
#: The option `--url` of commands that call models. Eager, because `read_key` needs the source of the URL.
AskUrl = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=[URL_VARIABLE, "OPENAI_BASE_URL"],
        help="Address of the gateway.",
        callback=read_url,
        is_eager=True,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=KEY_VARIABLE,
        help="API key, if the server requires one. OPENAI_API_KEY is used with OPENAI_BASE_URL.",
        callback=read_key,
    ),
]
DeployKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["DEPLOY_KEY", KEY_VARIABLE],
        help="API key with the permission to deploy.",
        show_default="the key of vlm serve",
    ),
]
