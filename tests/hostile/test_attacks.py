"""Every attack that a client can make over the wire, on real processes, with checks after each.

A greedy request runs beside each attack and must get the usual answer. The processes stay alive and ready, Redis has no
leftovers, and logs and metrics contain nothing of the attack.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import jsonschema
import pytest

from tests.faults.clients import body_of
from tests.faults.rest import MIB
from tests.hostile.bodies import BODIES, image
from tests.hostile.bodies import body as chat_body
from tests.hostile.fleet import CANARY, CHAT, JSON_TYPE, HostileFleet, check, run_hostile_fleet
from tests.hostile.wires import GET, POST, WIRES
from tests.long import IS_LONG, long
from tests.schemas.hostile import HOSTILE

#: `make hostile` runs every row; other targets run these representative ones.
SHORT = {"media types", "urls", "values", "samplings", "json", "text"}
SHORT |= {"targets and hosts", "smuggling", "chunks", "protocols"}
BODY_ROWS = [row for row in BODIES if IS_LONG or row in SHORT]
WIRE_ROWS = [row for row in WIRES if IS_LONG or row in SHORT]

in_the_long_form = long("hostile")

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@asynccontextmanager
async def under_attack(fleet: HostileFleet) -> AsyncIterator[None]:
    canary = asyncio.create_task(fleet.canary())
    yield
    await canary
    await fleet.holds()


@pytest.mark.parametrize("row", BODY_ROWS)
async def test_a_body(fleet: HostileFleet, row: str) -> None:
    async with under_attack(fleet):
        for body, statuses in BODIES[row]():
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = await fleet.client.post(CHAT, headers=JSON_TYPE, **content)
            check(response, statuses)


@pytest.mark.parametrize("row", WIRE_ROWS)
async def test_bytes_on_the_wire(fleet: HostileFleet, row: str) -> None:
    async with under_attack(fleet):
        for data, statuses in WIRES[row]:
            answer = await fleet.talk(data)
            status = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
            assert (int(status[1]) if status else 0) in statuses, (data[:200], answer[:300])
            assert len(answer) < 16_384


@in_the_long_form
async def test_schemas(tmp_path) -> None:
    """Each one is refused by the name of its field, or the answer conforms to it."""
    kinds = ("json", "regex", "choice")
    compiled_bytes = 128 * MIB  # kept by the worker
    async with run_hostile_fleet(tmp_path, kept_bytes=compiled_bytes) as fleet, under_attack(fleet):
        for kind, source in HOSTILE:
            if kind not in kinds:
                continue
            body = chat_body(CANARY, max_tokens=300, structured_outputs={kind: source})
            response = await fleet.client.post(CHAT, json=body)
            check(response, {200, 400})
            if response.status_code == 400:
                assert response.json()["error"]["param"].startswith(f"structured_outputs.{kind}")
                continue
            (choice,) = response.json()["choices"]
            if kind == "json" and choice["finish_reason"] == "stop":
                schema = json.loads(source) if isinstance(source, str) else source
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)


async def test_without_a_known_key_nothing_is_answered(fleet: HostileFleet) -> None:
    """Odd keys, on every documented path and on others."""
    paths = (await fleet.client.get("/openapi.json")).json()["paths"]
    values = ["", "Bearer", "Basic eA==", "Bearer ' OR 1=1--", "Bearer *", "Bearer apikey:*",
              b"Bearer sk-\xff\xfe", "Bearer " + "x" * 20_000, "Bearer ../" + CANARY]  # fmt: skip
    async with under_attack(fleet):
        others = ("/redoc", "/metrics", "/openapi.json", "/debug", "/v1", "//healthz", "/healthz/")
        for path in (*paths, *others):
            for method in ("GET", "POST", "OPTIONS", "HEAD", "TRACE", "DELETE"):
                response = await fleet.stranger.request(
                    method, fleet.url + path.replace("{", "").replace("}", "")
                )
                is_probe = path in ("/health", "/healthz", "/readyz", "/ping")
                assert response.status_code in ({200, 405} if is_probe else {401}), (method, path)
        for value in values:
            response = await fleet.stranger.post(CHAT, json={}, headers={"authorization": value})
            check(response, {401})
            assert response.headers["www-authenticate"] == "Bearer"


async def test_tenants_do_not_see_each_other(fleet: HostileFleet) -> None:
    """Another tenant's answer is a 404, like one that never existed."""
    async with under_attack(fleet):
        body = body_of("mine", 4)
        mine = await fleet.client.post(CHAT, json=body, headers={"x-vlm-resumable": "true"})
        path = mine.headers["x-vlm-stream"]
        assert (await fleet.client.get(path)).status_code == 200
        theirs, missing = await fleet.other.get(path), await fleet.other.get(path[:-4] + "0000")
        for response in (theirs, missing):
            check(response, {404})
        assert theirs.content == missing.content


async def test_no_url_is_fetched(fleet: HostileFleet) -> None:
    """With remote images disabled, neither an image nor a text causes a connection."""
    asked = asyncio.Event()
    async with await asyncio.start_server(lambda *_: asked.set(), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{CANARY}.png"
        async with under_attack(fleet):
            for host in ("127.0.0.1", "localhost", "localhost.", "[::1]", "0", "127.1"):
                remote = image(url.replace("127.0.0.1", host))
                check(await fleet.client.post(CHAT, json=remote), {400})
            for text in (f"![]({url})", f"<img src={url}>"):
                check(await fleet.client.post(CHAT, json=chat_body(text)), {200})
    assert not asked.is_set()


@in_the_long_form
async def test_slow_and_silent_clients_are_disconnected(fleet: HostileFleet) -> None:
    """Silent connections, and headers and bodies that stop."""
    pieces = [b"", GET[:40], POST + b"content-length: 9\r\n\r\n{"]
    async with under_attack(fleet):
        await asyncio.gather(*(fleet.talk(piece) for piece in pieces * 10))


@in_the_long_form
async def test_names_and_paths_create_no_metric_series(fleet: HostileFleet) -> None:
    """Random paths, methods, models and request IDs."""
    async with under_attack(fleet):
        for number in range(40):
            name = f"{CANARY}{number}"
            check(await fleet.client.get(f"/{name}"), {404})
            check(await fleet.client.request("PUT", f"/v1/models/{name}"), {405})
            odd_id = {"x-request-id": f"{CANARY} \t{number}" * 20}
            response = await fleet.client.post(
                CHAT, json=chat_body("x", model=name), headers=odd_id
            )
            check(response, {404})
            assert CANARY not in response.headers["x-request-id"]


async def test_guessing_keys_does_not_lock_out_other_clients(fleet: HostileFleet) -> None:
    """The last test: from here on, this address is limited."""
    async with under_attack(fleet):
        for number in range(100):
            guess = {"authorization": f"Bearer sk-{number}"}
            response = await fleet.stranger.get("/v1/models", headers=guess)
            check(response, {401, 429})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) > 0
