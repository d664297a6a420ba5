"""`vlm serve`: Redis, a gateway, workers and a node on one machine, and a screen with examples."""

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from pydantic import SecretStr
from rich.console import Console
from rich.panel import Panel

from engines.base import EngineStartError
from engines.registry import check_installed, check_settings, find_kind, kind_of
from engines.settings import EngineSettings
from shared.process import Pauses, cancel, on_stop_signal
from shared.redis.embedded import EmbeddedRedis, EmbeddedRedisError
from shared.settings import SettingsError, own_folder
from shared.settings.tree import EngineValues, Settings
from shared.telemetry.logs import setup_logging
from worker.node.agent import NodeAgent
from worker.node.environment import (
    GATEWAY_GROUPS,
    HUB_SECRETS,
    SEARCH_GROUPS,
    WORKER_GROUPS,
    child_environment,
)
from worker.node.resources import find_gpus, share_gpus
from worker.node.supervisor import Child, Node, NodeError, describe_end

SAMPLE = Path(__file__).parents[2] / "engines" / "packages" / "shapes" / "samples" / "shapes.png"
TEXT_QUESTION = "Write a sentence about the sea."
GRACE_S = 5.0
REDIS_POLL_S = 0.1
PROGRESS_S = 5.0  #: interval of progress messages

console = Console(stderr=True, highlight=False)
logger = logging.getLogger(__name__)


def run_node(
    settings: Settings,
    num_workers: int,
    data_dir: Path | None,
    search: bool = False,
    also: Sequence[str] = (),
    ray: str = "",
) -> int:
    """Run Redis (unless its URL is set), workers and a gateway until a signal. Returns the exit code.

    `search`: also run a search process, unless its URL is set. `also`: other models, each with a worker on the CPU.
    `ray`: address of the Ray cluster that runs the workers; empty: this machine.
    """
    if ray:
        _check_reachable(settings)
    here = [] if ray else [settings.engine.values()]
    try:
        for values in (*here, *({"model": model} for model in also)):
            check_installed(values)
    except EngineStartError as error:
        raise SettingsError(str(error)) from None
    if settings.logs.level is None:  # info logs would hide the screen with examples
        settings = settings.changed(logs={"level": "warning"})
    setup_logging(settings.logs, "serve")
    gateway = settings.gateway
    try:
        settings = settings.changed(gateway={"port": find_port(gateway.host, gateway.port)})
        by_port = own_folder("state") / str(settings.gateway.port)
        folder = (data_dir or by_port).absolute()
        engine = kind_of(settings.engine.values())
        console.print(f"starting the {engine} engine on {num_workers} worker(s) ...")
        with ExitStack() as stack:
            redis = None
            if search and not settings.search.url:
                # In a temporary folder, because socket paths must be short.
                sockets = stack.enter_context(TemporaryDirectory(prefix="vlm-search-"))
                files = settings.search.data_dir or str(folder / "search")
                place = {"url": f"unix://{sockets}/socket", "data_dir": files}
                settings = settings.changed(search=place)
            if not settings.gateway.files:
                settings = settings.changed(gateway={"files": f"file://{folder / 'files'}"})
            if not settings.redis.url:
                redis = EmbeddedRedis(folder, settings.redis.max_memory_bytes)
                settings = settings.changed(redis={"url": stack.enter_context(redis).url})
            if settings.deploy.store or redis is not None:
                settings = _with_deployments(settings, folder)
                stack.enter_context(_key_by_port(by_port, folder))
            settings = _with_key(settings)
            node = create_node(settings, num_workers, search=search, also=also, ray=ray)

            def show(models: Sequence[dict[str, Any]]) -> None:
                main, others = tell_apart(models, also)
                show_screen(settings, main, num_workers, others)

            asyncio.run(_run(settings, node, redis, show))
    except (NodeError, EmbeddedRedisError) as error:
        if str(error):
            console.print(str(error), style="red", markup=False, soft_wrap=True)
        return error.exit_code if isinstance(error, NodeError) else os.EX_CONFIG
    return 0


def _with_deployments(settings: Settings, folder: Path) -> Settings:
    """Add a package store, a cache and a deploy key in the data directory, unless they are set.

    Any user who can read the key's file may deploy; `vlm deploy` on this machine finds the file.
    """
    deploy = {
        "store": settings.deploy.store or f"file://{folder / 'packages'}",
        "cache_dir": settings.deploy.cache_dir or str(folder / "packages-cache"),
    }
    keys = settings.gateway.deploy_keys or (SecretStr(_deploy_key(folder)),)
    return settings.changed(deploy=deploy, gateway={"deploy_keys": keys})


def _with_key(settings: Settings) -> Settings:
    """Add a random API key for `wait_until_served` if there is only a root key, which may not list models."""
    gateway = settings.gateway
    if gateway.root_key is None or gateway.api_keys or gateway.deploy_keys:
        return settings
    return settings.changed(gateway={"api_keys": (SecretStr(token_urlsafe(32)),)})


def _deploy_key(folder: Path) -> str:
    """The deploy key of this machine; it is created once, readable for its owner. Raises: NodeError."""
    file = folder / "deploy.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (file.exists() and file.read_text().strip()):
            new = folder / "deploy.key.new"
            new.touch(0o600)
            new.write_text(token_urlsafe(32))
            new.replace(file)
        return file.read_text().strip()
    except OSError as error:
        text = (
            f"{file} cannot be written ({error.strerror}): make room, or choose another --data-dir"
        )
        raise NodeError(text, os.EX_CONFIG) from None


@contextmanager
def _key_by_port(by_port: Path, folder: Path) -> Iterator[None]:
    """Link the deploy key into `by_port`, where `vlm deploy` reads it, unless `by_port` is `folder` or not writable."""
    link, key = by_port / "data-dir.key", folder / "deploy.key"
    with suppress(OSError):
        link.unlink(missing_ok=True)  # left by a killed process
        if folder != by_port and key.exists():
            by_port.mkdir(parents=True, exist_ok=True)
            link.symlink_to(key)
    try:
        yield
    finally:
        with suppress(OSError):
            link.unlink(missing_ok=True)


async def _run(
    settings: Settings, node: Node, redis: EmbeddedRedis | None, show: Callable[[Any], None]
) -> None:
    agent = NodeAgent(settings) if settings.deploy.store else None

    def on_signal() -> None:
        if node.stopping.is_set():
            node.kill()
            if agent is not None:
                agent.kill()
            return
        node.stopping.set()
        if node.was_ready:
            console.print(
                f"stopping: requests have {node.stop_within_s:g} s to finish; Ctrl-C again ends them at once"
            )

    on_stop_signal(on_signal)
    # Redis ends after the node, whose drain needs it.
    watcher = asyncio.create_task(keep_running(redis)) if redis else None
    deployed = asyncio.create_task(agent.run(), name="deployments") if agent else None
    try:
        await node.run(show)
        console.print("stopped")
    finally:
        if agent is not None and deployed is not None:
            agent.stop()
            await asyncio.wait({deployed})
        await cancel(watcher)


async def keep_running(redis: EmbeddedRedis) -> None:
    """Restart Redis whenever it ends. Never returns."""
    pauses = Pauses()
    while True:
        while (code := redis.exit_code) is None:
            await asyncio.sleep(REDIS_POLL_S)
        pause_s = pauses.next_s()
        logger.warning(
            "redis %s; restarting in %.1f s; its log is %s",
            describe_end(code), pause_s, redis.log_path,
        )  # fmt: skip
        await asyncio.sleep(pause_s)
        pauses.started()
        try:
            redis.restart()  # in this thread: the server ends with the thread that started it
        except (EmbeddedRedisError, OSError) as error:
            logger.warning("redis does not start: %s", error)


def create_node(
    settings: Settings,
    num_workers: int,
    *,
    search: bool = False,
    also: Sequence[str] = (),
    ray: str = "",
) -> Node:
    """The processes of these settings. The CPU threads are divided among the workers."""
    worker_environment = child_environment(settings, WORKER_GROUPS)
    gateway_environment = child_environment(settings, GATEWAY_GROUPS, HUB_SECRETS)
    engine = read_engine_settings(settings)
    _check_names(settings, also)
    num_sharing = getattr(engine, "tensor_parallel", 0)  # 0: the engine runs in the worker process
    if num_workers > 1 and getattr(engine, "num_threads", None) == 0:
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        worker_environment["VLM_ENGINE__NUM_THREADS"] = str(threads)
    is_free = num_sharing or getattr(engine, "device", "cpu") in ("auto", "cuda")
    gpus = share_gpus(find_gpus(os.environ) if is_free else [], num_workers, num_sharing or 1)
    workers = [
        Child(f"worker {number}", ["worker"], worker_environment | own)
        for number, own in enumerate(gpus, 1)
    ]
    if ray:
        arguments = ["ray-workers", "--ray", ray, "--workers", str(num_workers)]
        environment = child_environment(settings, WORKER_GROUPS)
        workers = [Child("workers on Ray", arguments, environment)]
    for number, model in enumerate(also, num_workers + 1):
        engine = EngineValues.model_validate({"model": model, "device": "cpu"})
        changed = settings.changed(worker={"lora": ()}).model_copy(update={"engine": engine})
        environment = child_environment(changed, WORKER_GROUPS)
        workers.append(Child(f"worker {number}", ["worker"], environment))
    if search:
        environment = child_environment(settings, SEARCH_GROUPS, HUB_SECRETS)
        workers.append(Child("search", ["search-node"], environment))
    gateway = Child("gateway", ["gateway"], gateway_environment, must_start=True)
    drain_s = max(settings.gateway.drain_s, settings.worker.drain_s)
    ready = partial(wait_until_served, settings, 1 + len(also), search)
    return Node([*workers, gateway], ready, drain_s + GRACE_S)


def _check_names(settings: Settings, also: Sequence[str]) -> None:
    """Raises: NodeError if two models have the same name."""
    if not also:
        return
    # The hub's client is slow to import.
    from engines.packages.resolve import default_name  # noqa: PLC0415

    engine, kind = read_engine_settings(settings), find_kind(kind_of(settings.engine.values()))
    names = {engine.served_name}
    if not engine.served_name and kind is not None and kind.needs_checkpoint:
        names = {default_name(engine.model)}
    for model in also:
        if (name := default_name(model)) in names:
            raise NodeError(
                f"--also {model}: a model named {name} is already served; remove the option, or rename "
                "the model of --model with --served-name",
                os.EX_CONFIG,
            )
        names.add(name)


def read_engine_settings(settings: Settings) -> EngineSettings:
    """Validate the engine's settings. Raises: SettingsError."""
    try:
        return check_settings(settings.engine.values())
    except EngineStartError as error:
        raise SettingsError(str(error)) from None


async def wait_until_served(
    settings: Settings, num_models: int, search: bool = False
) -> list[dict[str, Any]]:
    """Wait until `num_models` models have workers, and show the progress; returns the models, the newest first.

    Deployments and adapters do not count. `search`: wait for the search process too.
    """
    keys = [*settings.gateway.api_keys, *settings.gateway.deploy_keys]
    headers = {"authorization": f"Bearer {keys[0].get_secret_value()}"} if keys else {}
    started_at = shown_at = time.monotonic()
    client = httpx.AsyncClient(base_url=base_url(settings), headers=headers, trust_env=False)
    async with client:
        with console.status("starting") as status:
            while True:
                models: list[dict[str, Any]] = []
                with suppress(httpx.HTTPError):  # gateway or Redis are starting or busy
                    if (await client.get("/readyz?workers=1")).is_success:
                        if search:
                            (await client.get("/v1/vector_stores")).raise_for_status()
                        listing = (await client.get("/v1/models")).raise_for_status()
                        models = [
                            model
                            for model in listing.json()["data"]
                            if model["num_workers"]
                            and not model["parent"]
                            and "package" not in model
                        ]
                if len(models) >= num_models:
                    return models
                if time.monotonic() - shown_at >= PROGRESS_S:
                    shown_at = time.monotonic()
                    text = f"starting for {shown_at - started_at:.0f} s, {len(models)} of {num_models} model(s) ready"
                    status.update(text)
                    if not console.is_terminal:
                        console.print(text)
                await asyncio.sleep(0.1)


def tell_apart(
    models: Sequence[dict[str, Any]], also: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Separate the model of --model from those of --also."""
    others = []
    if also:
        from engines.packages.resolve import default_name  # noqa: PLC0415

        names = {default_name(model) for model in also}
        others = [model for model in models if model["id"] in names]
    own = [model for model in models if model not in others]
    return next((model for model in own if "generate" in model["tasks"]), own[0]), others


def find_port(host: str, port: int) -> int:
    """Check that the port is free, or choose a free one for port 0. Raises: NodeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        if port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port",
                os.EX_CONFIG,
            ) from None
        return probe.getsockname()[1]


def base_url(settings: Settings) -> str:
    host, port = settings.gateway.host, settings.gateway.port
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def show_screen(
    settings: Settings,
    model: dict[str, Any],
    num_workers: int,
    others: Sequence[dict[str, Any]] = (),
) -> None:
    """Print the served models and addresses, and commands to try them."""
    url, name = base_url(settings), model["id"]
    is_managed = settings.gateway.root_key is not None
    needs_key = bool(settings.gateway.api_keys) or is_managed
    console.print(
        Panel(
            f"[bold]{name}[/bold] on {num_workers} worker(s), engine {kind_of(settings.engine.values())}\n"
            + "".join(f"[bold]{other['id']}[/bold] on 1 worker\n" for other in others)
            + f"{url}/          chat page\n"
            f"{url}/v1        base_url of any OpenAI client\n"
            f"{url}/metrics   Prometheus\n"
            + (f"{url}/v1/vector_stores\n" if settings.search.url else "")
            + (f"{url}/admin     keys and usage\n" if is_managed else "")
            + f"{url}/docs      API reference",
            title="vlm-fleet is ready",
            expand=False,
        )
    )
    if "generate" in model["tasks"]:
        sees = model["supports_images"]
        console.print(f"Ask{' about an image' if sees else ''} from another terminal:\n")
        console.print(sample_curl(url, model, needs_key), markup=False, soft_wrap=True)
        vlm = "vlm" if shutil.which("vlm") else _short(Path(sys.executable).parent / "vlm")
        asked = f'--image {_short(SAMPLE)} "Describe the image."' if sees else f'"{TEXT_QUESTION}"'
        console.print(f"\nor: {vlm} chat --url {url} {asked}", soft_wrap=True)
    else:
        console.print("Ask for numbers from another terminal:\n")
        console.print(numbers_curl(url, model, needs_key), markup=False, soft_wrap=True)
    for other in others:
        console.print("\nor for numbers:\n")
        console.print(numbers_curl(url, other, needs_key), markup=False, soft_wrap=True)
    console.print("\nCtrl-C stops everything.", style="dim")


def sample_curl(url: str, model: dict[str, Any], needs_key: bool) -> str:
    """A curl command with the sample image, or with text for a model without images."""
    content = f'"{TEXT_QUESTION}"'
    if model["supports_images"]:
        image = f"$(base64 < {_short(SAMPLE)} | tr -d '\\n')"
        content = (
            "[\n"
            f'  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,{image}"}}}},\n'
            '  {"type": "text", "text": "Describe the image."}]'
        )
    body = (
        f'{{"model": "{model["id"]}", "temperature": 0, '
        f'"messages": [{{"role": "user", "content": {content}}}]}}'
    )
    return _curl(f"{url}/v1/chat/completions", needs_key, f"@- <<EOF\n{body}\nEOF")


def numbers_curl(url: str, model: dict[str, Any], needs_key: bool) -> str:
    """A curl command for vectors, or for scores."""
    body: dict[str, Any] = {"model": model["id"]}
    if "embed" in model["tasks"]:
        path, more = "embeddings", {"input": ["a red star", "a blue circle"]}
    else:
        path, more = "rerank", {"query": "a red star", "documents": ["a star", "a circle"]}
    return _curl(f"{url}/v1/{path}", needs_key, f"'{json.dumps(body | more)}'")


def _curl(url: str, needs_key: bool, data: str) -> str:
    key = ' -H "authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl -s {url}{key} -H 'content-type: application/json' -d {data}"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check_reachable(settings: Settings) -> None:
    """Raises: SettingsError if the nodes of a cluster cannot reach Redis."""
    url = settings.redis.url
    if not url or "unix:" in url:
        raise SettingsError(
            "--ray: set VLM_REDIS_URL=redis://HOST:PORT/0 to a Redis that the cluster's nodes reach"
        )
