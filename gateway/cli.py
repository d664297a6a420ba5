"""`vlm gateway` and `vlm chat`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.gateway_url import URL, ApiKey, AskUrl
from shared.options import LISTEN, takes_settings

if TYPE_CHECKING:
    from shared.settings.tree import Settings


@takes_settings(LISTEN, process="gateway")
def gateway(settings: "Settings") -> None:
    """Run one gateway process. VLM_REDIS_URL is the address of Redis."""
    from gateway.main import run_gateway

    sys.exit(run_gateway(settings))


def chat(
    question: Annotated[
        str | None, typer.Argument(help="What to ask; omit it for a conversation.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", "-i", help="An image; may be repeated.")
    ] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video; may be repeated.")] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="An audio file; may be repeated.")
    ] = None,
    url: AskUrl = URL,
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the server's first")
    ] = None,
    api_key: ApiKey = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Ask a question about images, videos and audio; prints the answer as it streams, and the time of each stage."""
    from gateway.chat_client import printable, run_chat
    from shared.gateway_client import ApiFailed

    try:
        given = {"image": image, "video": video, "audio": audio}
        files = [(kind, path) for kind, paths in given.items() for path in paths or ()]
        code = run_chat(url, model, api_key, files, question, max_tokens, temperature)
    except ApiFailed as error:
        typer.secho(printable(str(error)), err=True, fg="red")
        code = 1
    sys.exit(code)
