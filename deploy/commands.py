"""Implementation of the deployment commands: packaging, upload to the store or the gateway, and progress of rollouts."""

import io
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime  # noqa: TID251 (people see it)
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import yaml
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from deploy.kubernetes import CannotRender, render
from deploy.pack import Packed, pack, pack_installed
from shared.gateway_client import ApiFailed, Client, read_content
from shared.packages.deployments import (
    NAME,
    NAME_RULE,
    VERSION,
    BadEnvironment,
    Environment,
    Resources,
    Spec,
    check_environment,
    in_full,
    version_digest,
)
from shared.packages.garbage import blobs_of, collect, hold
from shared.packages.manifest import MANIFEST_TYPE, BadPackage, Manifest, config_bytes, digest_of
from shared.packages.signature import BadSignature, sign
from shared.packages.store import PackageStore, Report, StoreError, open_store
from shared.settings import is_loopback

ARGUMENTS, PACKAGING, UPLOAD, API, ROLLOUT = 1, 2, 3, 4, 5  # exit codes
INTERRUPTED = 130
_UPLOADS = 4  # concurrent uploads
WIDE = 1000  #: columns of tables in files and pipes, so that no cell is folded
_POLL_S = 0.5
_PHASES = ("start", "install", "fetch")  #: phases of an instance's start, the last phase first
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "": 1}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}

# Markup is off: rich would parse `[/usr]` in a message of an application as a closing tag.
console = Console(stderr=True, highlight=False, markup=False)
screen = Console(markup=False, width=None if sys.stdout.isatty() else WIDE)
_UPLOAD_S = 600.0
_TRIES = 4
_PIECE_BYTES = 256 * 1024


class CommandFailed(Exception):
    """A command failed for the reason in the message. `code`: its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def make_spec(*, resources: str, canary: str, **fields: Any) -> Spec:
    """Build the spec from options such as `cpu=2,memory=4g,gpu=1` and `10%`. Raises: CommandFailed."""
    try:
        spec = Spec(resources=parse_resources(resources), canary=_parse_share(canary), **fields)
        return msgspec.json.decode(msgspec.json.encode(spec), type=Spec)  # validates the fields
    except (ValueError, msgspec.ValidationError) as error:
        problem, _, field = str(error).partition(" - at `$.")
        option = f"--{re.split('[`.]', field)[0].replace('_', '-')}: " if field else ""
        raise CommandFailed(option + problem, ARGUMENTS) from None


def make_environment(env: list[str] | None, secret: list[str] | None) -> Environment:
    """Build the environment from `--env` and `--secret`. Raises: CommandFailed."""
    variables = dict(_assignment("--env", each) for each in env or ())
    named = (each.partition("=") for each in secret or ())
    secrets = {name.strip(): other or name.strip() for name, _, other in named}
    environment = Environment(variables, secrets)
    try:
        check_environment(environment)
    except BadEnvironment as error:
        raise CommandFailed(f"--env, --secret: {error}", ARGUMENTS) from None
    return environment


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandFailed(f"{option} {name}: write NAME=VALUE", ARGUMENTS)
    return name.strip(), value


def parse_resources(text: str) -> Resources:
    """Parse `cpu=2,memory=4g,gpu=1`; each of the three is optional. Raises: CommandFailed."""
    readers = {"cpu": _parse_processors, "memory": _parse_size, "gpu": int}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name] = readers[name](value.strip().lower())
        except (KeyError, ValueError, OverflowError):
            raise CommandFailed(
                f"--resources {part}: write cpu=NUMBER, memory=SIZE (512m, 4g) or gpu=NUMBER",
                ARGUMENTS,
            ) from None
    return Resources(values.get("cpu", 1.0), values.get("memory", 0), values.get("gpu", 0))


def _parse_processors(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _parse_size(text: str) -> int:
    size = text.removesuffix("b")
    unit = size.lstrip("0123456789.")
    return int(float(size.removesuffix(unit)) * _UNITS[unit])


def _parse_share(text: str) -> float:
    """Parse a fraction such as `10%` or `0.1`. Raises: CommandFailed."""
    share = text.strip()
    with suppress(ValueError):
        number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        if 0 <= number <= 0.99:
            return number
    text = f"--canary {text}: write a fraction of requests up to 99%, such as 10%"
    raise CommandFailed(text, ARGUMENTS)


def run_deploy(
    client: Client,
    name: str,
    application: str,
    spec: Spec,
    package: dict[str, Any],
    *,
    store_url: str | None,
    signing_key: Path | None,
    is_dry: bool,
    form: str,
    image: str | None,
    wait_s: float,
) -> None:
    """Pack, upload and deploy, then wait for the rollout. Raises: CommandFailed.

    `package`: options in `deploy.cli.PACKAGE`. `image`: print Kubernetes manifests with this image, and do not deploy.
    """
    environment = make_environment(package["env"], package["secret"])
    if not re.match(NAME, name):
        raise CommandFailed(f"--name {name}: {NAME_RULE}", ARGUMENTS)
    packed = _pack(application or name, package, is_named=bool(application))
    try:
        if image is not None:
            if signing_key is not None:
                raise CannotRender("--sign: not supported with --target kubernetes; leave it out")
            url = store_url or find_store(client)
            documents = render(name, packed.manifest, spec, url, environment, image)
            with nullcontext() if is_dry else _uploaded(packed, client, store_url):
                show(documents, form)
            _, _, version = documents[0]["metadata"]["name"].rpartition("-")
            console.print(f"when its workers are ready, run: vlm route {name} {version}=100")
            return
        if is_dry:
            show(_plan(name, packed, spec, environment, store_url or client.url), form)
            return
        digest = packed.manifest.digest
        body: dict[str, Any] = {"digest": digest, "spec": msgspec.to_builtins(spec)}
        if environment != Environment():
            body["environment"] = msgspec.to_builtins(environment)
        if signing_key is not None:
            body["signature"] = sign(signing_key, digest)
        with _uploaded(packed, client, store_url):
            found = client.call("PUT", f"/{name}", body)
    except (BadSignature, CannotRender) as error:
        code = PACKAGING if isinstance(error, BadSignature) else ARGUMENTS
        raise CommandFailed(str(error), code) from None
    finally:
        packed.unpacked.close()
    console.print(f"{name}: generation {found['generation']}, {digest}", soft_wrap=True)
    if wait_s:
        wait(client, name, found["generation"], wait_s)


def _pack(application: str, package: dict[str, Any], *, is_named: bool) -> Packed:
    engine = dict(_assignment("--set", each) for each in package["engine"] or ())
    try:
        command = shlex.split(package["command"])
    except ValueError as error:
        raise CommandFailed(f"--command: {error}", ARGUMENTS) from None
    if is_named == package["installed"]:
        raise CommandFailed("give --application, or --command with --installed", ARGUMENTS)
    if sum(map(bool, (engine, package["entry"], command))) > 1:
        text = "--set is for models, --entry for Python applications, --command for executables: give only one"
        raise CommandFailed(text, ARGUMENTS)
    try:
        with _progress("hashing") as bar:
            if package["installed"]:
                return pack_installed(command)
            return pack(
                application, engine=engine, entry=package["entry"], command=command, report=bar
            )
    except (BadPackage, OSError) as error:
        raise CommandFailed(f"{application}: {error}", PACKAGING) from None


def run_logs(client: Client, name: str, slot: int | None, num_lines: int) -> None:
    chosen = "" if slot is None else f"&slot={slot}"
    found = client.call("GET", f"/{name}/logs?limit={num_lines}{chosen}")
    for line in found["data"]:
        at = datetime.fromtimestamp(line["at"], UTC).isoformat(timespec="seconds")
        print(f"{at} {line['slot']} {line['text']}")


def find_store(client: Client) -> str:
    return client.call("GET")["store"]


def _plan(
    name: str, packed: Packed, spec: Spec, environment: Environment, url: str
) -> dict[str, Any]:
    return {
        "name": name,
        **in_full(packed.manifest.config),
        "url": url,
        "digest": packed.manifest.digest,
        "version": version_digest(packed.manifest.digest, environment),
        "environment": in_full(environment),
        "size": packed.manifest.size,
        "spec": in_full(spec),
        "manifest": json.loads(packed.manifest.encode()),
    }


def show(content: Any, form: str) -> None:
    text = json.dumps(content, indent=2)
    if form == "json":
        print(text)
    else:
        found = json.loads(text)  # copied: YAML writes an alias for an object that is repeated
        documents = found if isinstance(found, list) else [found]
        print(yaml.safe_dump_all(documents, sort_keys=False), end="")


class GatewayStore:
    """Write-only store that uploads through the gateway, for clients that cannot access the gateway's store."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._there: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    def begin(self, manifest: Manifest) -> None:
        """Ask which blobs are missing, and protect all blobs of the package from garbage collection. Raises: ApiFailed."""
        headers = {"content-type": MANIFEST_TYPE}
        plan = self._client.send("POST", "/v1/packages", content=manifest.encode(), headers=headers)
        missing = read_content(plan)["missing"]
        self._starts = {each["digest"]: each["start"] for each in missing}
        sizes = {layer.digest: layer.size for layer in manifest.layers}
        self._there = {d: size for d, size in sizes.items() if d not in self._starts}

    def size(self, digest: str) -> int | None:
        """See `shared.packages.store.FileStore.size`."""
        return self._there.get(digest)

    def put(self, digest: str, file: IO[bytes], report: Report | None = None) -> None:
        """See `shared.packages.store.FileStore.put`; resumes after a broken connection. Raises: ApiFailed."""
        size = file.seek(0, os.SEEK_END)
        start = self._starts.get(digest, 0)
        for is_last in (*[False] * (_TRIES - 1), True):
            file.seek(start)
            if report is not None:
                report(start)
            try:
                sent = self._send(digest, file, start, size, report)
                if sent.status_code != 409 or is_last:
                    read_content(sent)
                    return
            except ApiFailed:
                if is_last or (start := self._start(digest)) == 0:
                    raise
            else:
                start = self._start(digest)
            if report is not None:
                report(-file.tell())

    def _send(
        self, digest: str, file: IO[bytes], start: int, size: int, report: Report | None
    ) -> httpx.Response:
        def pieces() -> Iterator[bytes]:
            while piece := file.read(_PIECE_BYTES):
                yield piece
                if report is not None:
                    report(len(piece))

        headers = {"content-length": str(size - start), "content-type": "application/octet-stream"}
        if start:
            headers["content-range"] = f"bytes {start}-{size - 1}/{size}"
        content = pieces() if size > start else b""
        return self._client.send(
            "PUT", f"/v1/blobs/{digest}", content=content, headers=headers, timeout=_UPLOAD_S
        )

    def _start(self, digest: str) -> int:
        found = self._client.send("HEAD", f"/v1/blobs/{digest}")
        return int(found.headers.get("upload-offset", "0"))


@contextmanager
def _uploaded(packed: Packed, client: Client, store_url: str | None) -> Iterator[None]:
    """Upload a package, and protect it from garbage collection inside the block. Raises: CommandFailed."""
    url = store_url or find_store(client)
    path = url.removeprefix("file://")
    try:
        # If the store is a writable directory of this machine, the files are not sent to the gateway.
        is_here = path != url and is_loopback(urlsplit(client.url).hostname)
        if store_url is None and not (is_here and os.access(path, os.W_OK)):
            target = GatewayStore(client)
            target.begin(packed.manifest)
            try:
                upload(packed, target)
            except ApiFailed as error:
                raise StoreError(str(error)) from None
            yield
            return
        store = open_store(url)
        with hold(store, blobs_of(packed.manifest)):
            upload(packed, store)
            yield
    except StoreError as error:
        raise CommandFailed(str(error), UPLOAD) from None


def upload(packed: Packed, store: PackageStore | GatewayStore) -> int:
    """Upload missing blobs, and the manifest last. Returns the number of uploaded blobs. Raises: StoreError."""
    manifest, config = packed.manifest.encode(), config_bytes(packed.manifest)
    sizes = {layer.digest: layer.size for layer in packed.manifest.layers}
    with ThreadPoolExecutor(_UPLOADS) as threads:
        there = dict(zip(sizes, threads.map(store.size, sizes), strict=True))
        missing = {digest: size for digest, size in sizes.items() if there[digest] != size}
        with _progress("uploading", sum(missing.values())) as bar:

            def put(digest: str) -> None:
                with packed.files[digest].open("rb") as file:
                    store.put(digest, file, bar)

            for done in as_completed([threads.submit(put, digest) for digest in missing]):
                done.result()
    for data in (config, manifest):
        if store.size(digest_of(data)) is None:
            store.put(digest_of(data), io.BytesIO(data))
    text = f"{len(missing)} of {len(sizes)} blobs uploaded, {sum(missing.values()) / 1e6:.1f} MB"
    console.print(text)
    return len(missing)


@contextmanager
def _progress(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal. The yielded function advances the bar by a number of bytes."""
    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(text, total=total)
    with progress if console.is_terminal else nullcontext():
        yield lambda count: progress.advance(task, count)


def wait(client: Client, name: str, generation: int, wait_s: float) -> None:
    """Wait until the generation is active or a canary. Raises: CommandFailed after a rollback or timeout."""
    began_at, shown = time.monotonic(), ""
    while True:
        found = client.call("GET", f"/{name}")
        own = next(g for g in found["generations"] if g["generation"] == generation)
        if own["outcome"] == "active":
            console.print(f"{name}: generation {generation} is active")
            return
        if own["outcome"] == "rolled_back":
            raise CommandFailed(
                f"{name}: generation {generation} was rolled back: {own['message']}", ROLLOUT
            )
        if found["state"] == "canary" and found["generation"] == generation:
            share = found["candidate"]["spec"]["canary"]
            console.print(
                f"{name}: generation {generation} has {share:.0%} of the requests; next: vlm promote"
            )
            return
        if (doing := found["message"] or _phase(client, found)) not in ("", shown):
            shown = doing
            console.print(f"{name}: {shown}", soft_wrap=True)
        waited_s = time.monotonic() - began_at
        start_s = _start_s_of_idle(found, generation)
        if start_s is not None and waited_s > start_s and found["message"]:
            text = (
                f"{name}: generation {generation} did not start within {start_s:g} s: {shown}. The "
                f"rollout continues; cancel it with vlm rollback {name}"
            )
            raise CommandFailed(text, ROLLOUT)
        if waited_s > wait_s:
            text = f"{name}: generation {generation} is not ready after {wait_s:g} s; the rollout continues"
            raise CommandFailed(text, ROLLOUT)
        try:
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            raise CommandFailed(
                f"{name}: the rollout of generation {generation} continues; see vlm app {name}, or cancel "
                f"it with vlm rollback {name}",
                INTERRUPTED,
            ) from None


def _start_s_of_idle(found: dict[str, Any], generation: int) -> float | None:
    """The `start_s` of a candidate that no node has started yet; None for other generations."""
    candidate = found["candidate"]
    if candidate is None or found["generation"] != generation:
        return None
    slots = [slot for slot in found["slots"] if slot["digest"] == candidate["digest"]]
    return None if any(slot["node"] for slot in slots) else candidate["spec"]["start_s"]


def _phase(client: Client, found: dict[str, Any]) -> str:
    """The furthest phase of the candidate's instances, or a hint if the fleet has no node; empty without instances."""
    digest = found["candidate"]["digest"] if found["candidate"] else ""
    nodes = {slot["phase"]: slot["node"] for slot in found["slots"] if slot["digest"] == digest}
    if not found["slots"] and not client.ask("GET", "/v1/nodes")["data"]:
        return "there is no node to run it: start `vlm node`"
    return next((f"{phase} on {nodes[phase]}" for phase in _PHASES if phase in nodes), "")


def run_change(
    client: Client, method: str, path: str, body: dict[str, Any] | None, wait_s: float = 0
) -> None:
    """Request a change, and wait up to `wait_s` for its outcome. Raises: CommandFailed."""
    found = client.call(method, path, body)
    name, generation = found["name"], found["generation"]
    last = found["generations"][-1]
    told = {
        None: f"generation {generation}: {last['cause']} begins",
        "active": f"generation {generation} is active",
        "rolled_back": f"generation {generation} is rolled back",
    }[last["outcome"]]
    if last["cause"] == "undeploy":
        told = "accepts no more requests; waiting requests are answered"
    console.print(f"{name}: {told}")
    if wait_s and last["outcome"] is None:
        wait(client, name, generation, wait_s)


def run_route(client: Client, name: str, weights: list[str]) -> None:
    """Set the weights of versions such as `3f2a91b0c4d5=90`; without weights, remove the route. Raises: CommandFailed."""
    parts = [each.partition("=") for each in weights]
    good = {v for v, _, weight in parts if weight.isdecimal() and re.match(VERSION, v)}
    if len(good) < len(parts):
        text = f"{' '.join(weights)}: write VERSION=WEIGHT, each once, such as 3f2a91b0c4d5=90"
        raise CommandFailed(text, ARGUMENTS)
    body = {"weights": {version: int(weight) for version, _, weight in parts}}
    found = client.call("POST", f"/{name}:route", body)
    console.print(f"{name}: {_split(found['weights']) or 'the route is removed'}")


def _split(weights: dict[str, int]) -> str:
    return " ".join(f"{version}={weight}" for version, weight in weights.items())


def run_gc(url: str, older_than_s: float, num_kept: int, *, is_dry: bool) -> None:
    path = url.removeprefix("file://")
    if path != url and not os.path.isdir(path):
        text = f"{url}: there is no such directory here; run the command on a machine that has it"
        raise CommandFailed(text, UPLOAD)
    try:
        found = collect(open_store(url), grace_s=older_than_s, num_kept=num_kept, is_dry=is_dry)
    except StoreError as error:
        raise CommandFailed(str(error), UPLOAD) from None
    for blob in found.blobs if is_dry else ():
        print(f"{blob.size:>14} {blob.key}")
    did = "would be removed" if is_dry else "removed"
    console.print(
        f"{len(found.blobs)} blobs of {(found.size + found.part_bytes) / 1e6:.1f} MB {did}, "
        f"{found.num_kept} are kept"
    )


def run_apps(client: Client, form: str | None) -> None:
    found = client.call("GET")
    if form:
        show(found, form)
        return
    table = new_table("name", "state", "serves", "ready", "candidate", "last gen.", "message")
    for app in found["data"]:
        active, candidate = app["active"], app["candidate"]
        ready = f"{active['num_ready'] if active else 0}/{app['desired']}"
        table.add_row(
            app["name"], app["state"], _short(active), ready, _short(candidate),
            str(app["generation"]), app["message"],
        )  # fmt: skip
    screen.print(table)
    if routes := found.get("routes"):  # older gateways do not send routes
        table = new_table("route", "weights")
        for name, weights in routes.items():
            table.add_row(name, _split(weights))
        screen.print(table)


def run_nodes(client: Client, form: str | None) -> None:
    found = client.ask("GET", "/v1/nodes")
    if form:
        show(found, form)
        return
    table = new_table("node", "state", "cpu", "memory", "gpu", "instances")
    for node in found["data"]:
        held = [f"{each['application']} ({each['state']})" for each in node["instances"]]
        table.add_row(
            node["id"], node["state"], f"{node['cpu']:g}", f"{node['memory_bytes'] / 1e9:.1f} GB",
            str(node["gpu"]), ", ".join(held) or "-",
        )  # fmt: skip
    screen.print(table)


def run_drain(client: Client, name: str, wait_s: float) -> None:
    """Drain a node, and wait up to `wait_s` until it has ended. Raises: CommandFailed."""
    node = client.ask("POST", f"/v1/nodes/{quote(name, safe='')}:drain")
    give_up_at, shown = time.monotonic() + wait_s, -1
    while node is not None and time.monotonic() < give_up_at:
        if (left := len(node["instances"])) != shown:
            shown = left
            console.print(f"{name}: {left} instances are left")
        time.sleep(_POLL_S)
        found = client.ask("GET", "/v1/nodes")["data"]
        node = next((each for each in found if each["id"] == name), None)
    if node is not None and wait_s:
        raise CommandFailed(f"{name}: not drained after {wait_s:g} s; the drain continues", ROLLOUT)
    console.print(f"{name}: {'drains' if node is not None else 'has ended'}")


def run_app(client: Client, name: str, form: str | None, pause_s: float | None) -> None:
    """Show one deployment, repeatedly if `pause_s` is set. Raises: CommandFailed."""
    found = client.call("GET", f"/{name}")
    if form:
        show(found, form)
        return
    rates = _Rates()
    if pause_s is None:
        screen.print(_table(found, rates))
        return
    with Live(_table(found, rates), console=screen) as live:
        while True:
            time.sleep(pause_s)
            live.update(_table(client.call("GET", f"/{name}"), rates))


class _Rates:
    """Rate of answers of each version, in answers per second since the last call of `of`."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[int, float]] = {}

    def of(self, revision: dict[str, Any]) -> str:
        count, now = revision["num_finished"] + revision["num_failed"], time.monotonic()
        before, at = self._counted.get(revision["digest"], (count, now))
        self._counted[revision["digest"]] = (count, now)
        return f"{max(0, count - before) / (now - at):.1f}" if now > at else "-"


def new_table(*columns: str) -> Table:
    """A table that folds columns on narrow terminals."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _table(app: dict[str, Any], rates: _Rates) -> Table:
    outer = Table(
        title=f"{app['name']}: {app['state']}. {app['message']}", title_justify="left",
        show_header=False, box=None, padding=(0, 0, 1, 0),
    )  # fmt: skip
    versions = new_table("version", "digest", "share", "ready", "running", "answers/s", "failed")
    share = app["candidate"]["spec"]["canary"] if app["state"] == "canary" else 0.0
    for role, part in (("active", 1 - share), ("candidate", share)):
        if (each := app[role]) is not None:
            versions.add_row(
                role, _short(each), f"{part:.0%}", str(each["num_ready"]),
                str(each["num_running"]), rates.of(each), str(each["num_failed"]),
            )  # fmt: skip
    revisions = new_table("generation", "cause", "digest", "outcome", "message")
    for each in app["generations"][-8:]:
        revisions.add_row(
            str(each["generation"]), each["cause"], each["version"][:19], each["outcome"] or "-",
            each["message"],
        )  # fmt: skip
    slots = new_table("slot", "digest", "state", "node")
    for slot in app["slots"]:
        state = f"{slot['state']} ({slot['phase']})" if slot["phase"] else slot["state"]
        slots.add_row(str(slot["id"]), slot["digest"][:19], state, slot["node"] or "-")
    events = new_table("event")
    for event in app["events"][-10:]:
        events.add_row(event["text"])
    for each in (versions, revisions, slots, events):
        outer.add_row(each)
    return outer


def _short(revision: dict[str, Any] | None) -> str:
    """The first 12 digits of a digest, as in docker: a row fits a terminal of 80 columns."""
    return revision["digest"].removeprefix("sha256:")[:12] if revision else "-"
