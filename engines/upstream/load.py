"""Connects to a server, or starts one, and creates its engine."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from packaging.version import InvalidVersion, Version

from engines.base import EngineLoadFailed, EngineStartError, LoadedEngine, Progress
from engines.packages.checkpoint_json import read_json
from engines.packages.generation_config import read_sampling_defaults
from engines.packages.resolve import GGUF, default_name, resolve_model
from engines.text.chat_template import read_chat_template
from engines.text.processor import ChatProcessor, create_processor
from engines.text.tokenizer import MAX_VOCAB_SIZE
from engines.upstream.chat import ChatEngine
from engines.upstream.client import UpstreamClient
from engines.upstream.dialect import MODELS, Dialect, ServerInfo, find_model
from engines.upstream.engine import UpstreamEngine
from engines.upstream.llama_server import LlamaServer
from engines.upstream.media import UnexpandedMedia, find_media_tokens
from engines.upstream.server import ServerProcess, command_of, free_port
from engines.upstream.settings import (
    LlamaServerSettings,
    OpenAiSettings,
    ServerSettings,
    SglangSettings,
    UpstreamSettings,
    VllmSettings,
)
from engines.upstream.sglang import Sglang, SglangMedia
from engines.upstream.vllm import Vllm

POLL_S = 0.2
MAX_FRAMES = 32  #: frames of a video that vLLM reads, unless it is started with another limit
DEFAULT_MAX_LEN = 131_072  #: context length of a server that does not report it


def load_upstream_engine(settings: UpstreamSettings, progress: Progress | None) -> LoadedEngine:
    """Blocks until the server is ready. Raises: EngineStartError, EngineLoadFailed."""
    started = time.perf_counter()
    directory = _text_files(settings)
    found = find_media_tokens(directory, read_chat_template(directory) or "")
    tokens = {kind: token for kind, token in found.items() if kind in settings.media_kinds}
    media = UnexpandedMedia(tokens, MAX_FRAMES if settings.url else math.inf)
    if isinstance(settings, SglangSettings):
        media = SglangMedia(tokens, read_json(directory / "config.json").get("model_type"))
    processor = create_processor(directory, media)
    dialect = _create_dialect(settings, processor, [token_id for token_id, _ in tokens.values()])
    server, url = None, settings.url
    if not url:
        port = free_port()
        server = ServerProcess(command_of(settings, dialect, port), dialect.environment)
        url = f"http://127.0.0.1:{port}"
    key, paths = settings.api_key.get_secret_value(), (dialect.health_path, dialect.metrics_path)
    client = UpstreamClient(url, key, settings.max_num_seqs, settings.silence_s, *paths)
    with closed_on_failure(client, server, dialect.name):
        _wait_until_ready(client, server, settings.start_s, progress)
        info = dialect.describe(client)
        _check(settings, dialect, info)
        max_model_len = settings.max_model_len or info.max_model_len
        sizes = max_model_len, _vocab_size(directory, processor)
        engine = UpstreamEngine(settings, dialect, processor, client, *sizes, server)
    engine.startup_s = {"load": time.perf_counter() - started}
    card = engine.card(
        settings.served_name or default_name(settings.model),
        supports_images=info.takes_images and processor.image_token_id is not None,
        sampling=read_sampling_defaults(directory, "auto"),
        always_thinks=processor.always_thinks,
        format="gguf" if settings.model.endswith(GGUF) else "safetensors",
    )
    return LoadedEngine(engine, card)


def connect(
    settings: ServerSettings, num_streams: int, silence_s: float, progress: Progress | None
) -> tuple[UpstreamClient, dict[str, Any]]:
    """The client, and the model's entry of `GET /v1/models`. Raises: EngineStartError, EngineLoadFailed."""
    if not settings.url:
        raise EngineStartError("VLM_ENGINE__URL: this engine needs the address of a server")
    key = settings.api_key.get_secret_value()
    client = UpstreamClient(settings.url, key, num_streams, silence_s, MODELS)
    with closed_on_failure(client, None, "a server of OpenAI's API"):
        _wait_until_ready(client, None, settings.start_s, progress)
        found = find_model(client, settings.upstream_model)
    return client, found


@contextmanager
def closed_on_failure(
    client: UpstreamClient, server: ServerProcess | None, name: str
) -> Iterator[None]:
    """Close client and server if the engine cannot be created. Raises: EngineLoadFailed for unexpected responses."""
    try:
        yield
    except BaseException as error:
        client.close()
        if server is not None:
            server.close()
        if isinstance(error, httpx.HTTPError | LookupError | TypeError | ValueError):
            raise EngineLoadFailed(
                f"{client.url} does not respond like {name}: {type(error).__name__}: {error}"
            ) from None
        raise


def load_chat_engine(settings: OpenAiSettings, progress: Progress | None) -> LoadedEngine:
    """Connect to a server of OpenAI's API. Raises: EngineStartError, EngineLoadFailed."""
    client, found = connect(settings, settings.max_num_seqs, settings.silence_s, progress)
    engine = ChatEngine(settings, client, found["id"])
    card = engine.card(
        settings.served_name or found["id"],
        max_model_len=settings.max_model_len or found.get("max_model_len") or DEFAULT_MAX_LEN,
        vocab_size=MAX_VOCAB_SIZE,
        supports_images=settings.takes_images,
    )
    return LoadedEngine(engine, card)


def _text_files(settings: UpstreamSettings) -> Path:
    """The directory of configuration, tokenizer and chat template. Raises: EngineStartError."""
    loads_weights = not (settings.url or settings.command or settings.tokenizer)
    path = resolve_model(settings.tokenizer or settings.model, needs_weights=loads_weights)
    if path.suffix != GGUF:
        return path
    # imports torch and transformers, which only GGUF files need
    from engines.torch_backend.loading.gguf_checkpoint import open_tokenizer  # noqa: PLC0415

    return open_tokenizer(path)


def _vocab_size(directory: Path, processor: ChatProcessor) -> int:
    """The number of logits, which may exceed the number of tokens."""
    config = read_json(directory / "config.json")
    rows = config.section("text_config").get("vocab_size") or config.get("vocab_size") or 0
    return max(processor.tokenizer.vocab_size, rows)


def _create_dialect(
    settings: UpstreamSettings, processor: ChatProcessor, media_token_ids: Sequence[int]
) -> Dialect:
    match settings:
        case VllmSettings():
            return Vllm(settings, media_token_ids)
        case SglangSettings():
            return Sglang(settings, media_token_ids)
        case LlamaServerSettings():
            return LlamaServer(settings, processor)
    raise AssertionError(settings)


def _wait_until_ready(
    client: UpstreamClient, server: ServerProcess | None, start_s: float, progress: Progress | None
) -> None:
    started = time.monotonic()
    while True:
        try:
            status = client.request("GET", client.health_path).status_code
            if status == httpx.codes.OK:
                client.is_ready = True
                return
            if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise EngineStartError(f"VLM_ENGINE__API_KEY: {client.url} refuses it ({status})")
            reason = f"the server returns status {status}"
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        if server is not None:
            server.check()
        waited_s = time.monotonic() - started
        if waited_s > start_s:
            raise EngineLoadFailed(f"{client.url} is not ready after {start_s:g} s: {reason}")
        if progress is not None:
            progress("load", min(0.99, waited_s / start_s))
        time.sleep(POLL_S)


def _check(settings: UpstreamSettings, dialect: Dialect, info: ServerInfo) -> None:
    if settings.max_model_len is not None and settings.max_model_len > info.max_model_len:
        raise EngineStartError(
            f"max_model_len is {settings.max_model_len}, but the server's context is "
            f"{info.max_model_len} tokens: set at most {info.max_model_len}"
        )
    if dialect.versions is None:
        return
    first, last = map(Version, dialect.versions)
    try:
        is_tested = first <= Version(info.version) < last
    except InvalidVersion:
        is_tested = False
    if not is_tested:
        raise EngineStartError(
            f"{dialect.name} {info.version} is not supported: install a version from {first} and below {last}"
        )
