"""`/v1/applications` without nodes: permissions, checks, canaries, concurrent deployments, and routes."""

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from msgspec.structs import replace

from deploy.commands import CommandFailed, run_apps, run_route
from shared.gateway_client import ApiFailed, Client
from shared.packages.deployment_state import DeploymentState
from shared.packages.deployments import (
    Generation,
    Outcome,
    Spec,
    read_routes,
    record_generation,
    settle,
    version_name,
)
from shared.packages.garbage import collect
from shared.packages.manifest import Layer, PackageConfig, digest_of, make_manifest
from shared.packages.rollout import App, LogLine, NodeRecord, Revision, Slot
from shared.packages.store import open_store
from shared.protocol import ModelCard
from shared.queue.keys import RedisKeys
from shared.queue.registry import WorkerRecord
from tests.factories_gateway import RunningGateway, make_body
from tests.factories_keys import code
from tests.waiting import until, until_equal

KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"  # an API key's ID that does not exist
DEPLOY = {"authorization": "Bearer may-deploy"}


class Deployments:
    """A gateway with a store, and methods that do the work of a node."""

    def __init__(self, gateway: RunningGateway, store_url: str) -> None:
        self.gateway = gateway
        self.client = gateway.client
        self.store = open_store(store_url)
        self.deployments: DeploymentState = gateway.services.deployments

    def add_package(self, text: str, kind: str = "model", **config) -> str:
        data = text.encode()
        name = "app.py" if kind == "python" else "config.json"
        self.store.put(digest_of(data), io.BytesIO(data))
        layer = Layer(name, digest_of(data), len(data))
        if kind == "python":
            config["entry"] = "app:A"
        manifest = make_manifest(PackageConfig(kind, **config), [layer])  # type: ignore[arg-type]
        self.store.put(manifest.digest, io.BytesIO(manifest.encode()))
        return manifest.digest

    async def put(self, digest: str, name: str = "n", headers=DEPLOY, **body) -> httpx.Response:
        body = {"digest": digest, **body}
        return await self.client.put(f"/v1/applications/{name}", json=body, headers=headers)

    async def ask(self, what: str = "", method: str = "POST", **body) -> httpx.Response:
        content = body if method == "POST" else None
        return await self.client.request(
            method, f"/v1/applications/n{what}", json=content, headers=DEPLOY
        )

    async def make_ready(self, digest: str) -> None:
        """Records a ready instance, as a node does."""
        before = (await self.deployments.apps())["n"]
        slot = Slot(before.next_slot, digest, "ready", "node")
        after = replace(before, slots=(*before.slots, slot), next_slot=slot.id + 1)
        assert await self.deployments.put(before, after)


@pytest.fixture
def run(fleet, tmp_path):
    @asynccontextmanager
    async def run(**gateway) -> AsyncIterator[Deployments]:
        url = f"file://{tmp_path}/store"
        gateway = {"deploy_keys": ("may-deploy",), **gateway}
        async with fleet.gateway(gateway=gateway, deploy={"store": url}) as running:
            yield Deployments(running, url)

    return run


@pytest.fixture
async def deployments(run) -> AsyncIterator[Deployments]:
    async with run() as deployments:
        yield deployments


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


async def test_deploy_keys_have_no_other_permissions(run):
    async with run(api_keys=("asks",), admin_keys=("operates",)) as deployments:
        digest, client = deployments.add_package("{}"), deployments.client
        expected = {None: 401, "wrong": 401, "asks": 403, "operates": 403, "may-deploy": 202}
        for key, status in expected.items():
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await deployments.put(digest, headers=headers)).status_code == status
            for method, path, found in (
                ("GET", "applications", 200),
                ("GET", "applications/n/logs", 200),
                ("POST", "packages", 415),
                ("PUT", f"blobs/{digest_of(b'')}", 201),
                ("HEAD", f"blobs/{digest_of(b'no')}", 404),
            ):
                answer = await client.request(method, f"/v1/{path}", headers=headers)
                assert answer.status_code == (found if key == "may-deploy" else status)
        lora = {"lora_name": "x", "lora_path": "x"}
        answer = await client.post("/v1/load_lora_adapter", json=lora, headers=DEPLOY)
        assert answer.status_code == 403  # the key has no operator role either
        wrong = Client(deployments.gateway.url, "wrong")
        with pytest.raises(ApiFailed, match="DEPLOY_KEY"):
            await asyncio.to_thread(wrong.call, "GET")
    async with run(deploy_keys=()) as deployments:
        answer = await deployments.put(digest)
    assert (answer.status_code, "VLM_GATEWAY__DEPLOY_KEYS" in message(answer)) == (403, True)


async def test_repeating_a_deployment_changes_nothing(deployments):
    digest = deployments.add_package("{}")
    first = await deployments.put(digest, spec={"canary": 0.2})
    shown = first.json()["candidate"]
    assert (first.status_code, first.json()["state"]) == (202, "starting")
    assert (shown["digest"], shown["spec"]["canary"]) == (digest, 0.2)
    assert shown["spec"]["resources"] == {"cpu": 1.0, "memory_bytes": 0, "gpu": 0}
    assert shown["environment"] == {"variables": {}, "secrets": {}}
    again = await deployments.put(digest, spec=shown["spec"])  # the returned spec is accepted
    assert (again.status_code, again.json()["generation"]) == (200, 1)
    stale = await deployments.put(deployments.add_package("[]"), if_generation=8)
    assert stale.status_code == 409
    listed = await deployments.client.get("/v1/applications", headers=DEPLOY)
    assert [app["name"] for app in listed.json()["data"]] == ["n"]
    assert listed.json()["store"].startswith("file://")


async def test_invalid_deployments_are_refused_by_field(deployments, tmp_path):
    for change, says in (
        ({"digest": "sha256:" + 64 * "0"}, "has no package"),
        ({"digest": "sha256:../../x"}, "digest"),
        ({"spec": {"min_instances": 9, "max_instances": 2}}, "min_instances"),
        ({"spec": {"canary": 2}}, "canary"),
        ({"spec": {"unknown": 2}}, "unknown"),
        ({"spec": {"requires": ["environment"]}}, "requires"),  # only in stored records
        ({"environment": {"variables": {"LD_PRELOAD": "x"}}}, "variables.LD_PRELOAD"),
        ({"environment": {"secrets": {"TOKEN": "../key"}}}, "secrets.TOKEN"),
        ({"environment": {"secrets": {"TOKEN": f"sk-{KEY}"}}}, "secrets.TOKEN"),
        ({"environment": {"variables": {"A": "x"}}}, "models do not support environment variables"),
    ):
        body = {"digest": deployments.add_package("{}"), **change}
        answer = await deployments.put(**body)
        assert answer.status_code == 400, change
        assert says in message(answer)
        assert KEY not in answer.text
        assert (await deployments.ask(method="GET")).status_code == 404
    digest = deployments.add_package("{1}")
    for name in ("a b", "@x", "x" * 64):
        assert (await deployments.put(digest, name=name)).status_code in (400, 404)
    blob = tmp_path / "store" / "blobs" / "sha256" / digest_of(b"{1}").removeprefix("sha256:")
    for change in (lambda: blob.write_bytes(b"{"), blob.unlink):  # truncated, then missing
        change()
        answer = await deployments.put(digest)
        assert "config.json: blob missing or incomplete" in message(answer)


async def test_a_record_of_a_newer_release_is_served_while_it_has_workers(
    deployments, run, redis, redis_prefix, fleet
):
    card = ModelCard("n@old", 1, 512, 1000)
    app = App("n", 1, active=Revision(1, "sha256:old", Spec(), card=card))
    await deployments.deployments.put(None, app)
    models = deployments.gateway.services.models
    async with fleet.worker(card):
        await models.refresh()
        await redis.hset(RedisKeys(redis_prefix).apps, "n", b'9 {"name":"n","desired":"newer"}')
        await models.refresh()
        answer = await deployments.gateway.chat(make_body(model="n"))
        assert answer.status_code == 200, answer.text
        [listed] = (await deployments.client.get("/v1/applications", headers=DEPLOY)).json()["data"]
        assert (listed["name"], listed["state"]) == ("n", "unreadable")
        async with run() as later:
            unread = [await later.gateway.chat(make_body(model="n"))]
    await models.registry.withdraw("scripted")
    await models.registry.forget(card.name)  # as nodes do after they retired the version
    await models.refresh()
    unread.append(await deployments.gateway.chat(make_body(model="n")))
    digest = deployments.add_package("{}")
    newer = b'{"name":"m","number":1,"digest":"%s","spec":{"newer":1}}' % digest.encode()
    deployments.store.put_if_absent("deployments/m/00000001.json", newer)
    unread.append(await deployments.client.get("/v1/applications/m", headers=DEPLOY))
    unread.append(await deployments.put(digest, "m"))
    for answer in unread:
        assert code(answer)[:2] == (503, "record_unreadable")


async def test_a_canary_is_promoted_and_rolled_back_by_hand(deployments):
    old, new = deployments.add_package("{}"), deployments.add_package("[]")
    await deployments.put(old)
    assert (await deployments.ask(":promote")).status_code == 409  # not ready yet
    await deployments.make_ready(old)
    promoted = await deployments.ask(":promote")
    assert (promoted.status_code, promoted.json()["active"]["digest"]) == (202, old)
    assert (await deployments.ask(":rollback")).status_code == 409  # no version was active before
    await deployments.put(new, spec={"canary": 0.1})
    taken_back = await deployments.ask(":rollback")
    assert taken_back.json()["generations"][-1]["outcome"] == "rolled_back"
    assert taken_back.json()["active"]["digest"] == old
    await deployments.put(new, spec={"canary": 0.2})
    await deployments.make_ready(new)
    await deployments.ask(":promote")
    back = (await deployments.ask(":rollback")).json()
    assert (back["active"]["digest"], back["candidate"]["digest"]) == (new, old)
    assert back["candidate"]["spec"]["canary"] == 0  # the version is known, so no canary runs


async def test_an_active_version_cannot_request_resources_that_no_node_has(deployments):
    """Such a version can be scaled and undeployed."""
    digest = deployments.add_package("{}")
    await deployments.put(digest)
    assert (await deployments.ask(":scale", min_instances=2)).status_code == 409
    await deployments.make_ready(digest)
    await deployments.ask(":promote")
    scaled = (await deployments.ask(":scale", min_instances=2)).json()
    assert (scaled["active"]["spec"]["min_instances"], scaled["candidate"]) == (2, None)
    assert (await deployments.ask(":scale", min_instances=200)).status_code == 400
    node = NodeRecord("node", cpu=2.0, memory_bytes=10, gpu=0)
    await deployments.deployments.announce(node, ttl_s=60)
    spec = scaled["active"]["spec"]
    refused = await deployments.put(digest, spec={**spec, "resources": {"cpu": 64.0}})
    assert refused.status_code == 409
    assert "no node has room for an instance of cpu=64" in message(refused)
    assert (await deployments.ask(method="GET")).json()["active"]["spec"] == spec
    changed = await deployments.put(digest, spec={**spec, "resources": {"cpu": 2.0}})
    assert (changed.status_code, changed.json()["state"]) == (202, "active")
    assert changed.json()["active"]["spec"]["resources"]["cpu"] == 2.0
    gone = await deployments.ask(method="DELETE")
    assert (gone.status_code, gone.json()["state"]) == (202, "undeployed")
    assert (await deployments.ask(":promote")).status_code == 404
    assert (await deployments.put(digest)).status_code == 202


async def test_deploy_keys_can_read_the_latest_log_lines_of_instances(deployments):
    await deployments.put(deployments.add_package("{}"))
    assert (await deployments.ask("/logs", "GET")).json()["data"] == []
    lines = [LogLine(n / 10, "node", n % 2, f"line {n}") for n in range(1200)]
    for first in range(0, 1200, 100):
        await deployments.deployments.add_log("n", lines[first : first + 100])
    for query, expected in (("limit=1000", [*range(200, 1200)]), ("limit=2&slot=1", [1197, 1199])):
        shown = (await deployments.ask(f"/logs?{query}", "GET")).json()["data"]
        assert [line["text"] for line in shown] == [f"line {n}" for n in expected]
    unknown = await deployments.client.get("/v1/applications/other/logs", headers=DEPLOY)
    assert unknown.status_code == 404
    assert (await deployments.ask("/logs?limit=0", "GET")).json()["error"]["param"] == "limit"


async def test_requests_go_to_the_active_version_and_responses_name_it(deployments, fleet):
    """Requests go to the queue of the active digest. A canary gets its share; a user always gets one version."""
    digest = deployments.add_package("{}")
    card = ModelCard("n@old", 1, 512, 1000, package=f"n@{digest}")
    other = replace(card, name="n@new", package="n@sha256:new")
    spec = Spec(canary=0.3)
    app = App(
        "n", 2,
        active=Revision(1, digest, spec, card=card),
        candidate=Revision(2, "sha256:new", spec, card=other, is_canary=True),
        slots=(Slot(1, "sha256:new", "ready"),),
    )  # fmt: skip
    written = await deployments.deployments.put(None, app)
    async with fleet.worker(card), fleet.worker(other):
        await deployments.gateway.services.models.refresh()
        seen = set()
        for number in range(12):
            body = make_body(model="n", user=f"user-{number}")
            whole = await deployments.gateway.chat(body)
            assert whole.status_code == 200, whole.text
            package = whole.headers["x-vlm-package"]
            assert whole.json()["system_fingerprint"] == package
            assert whole.json()["model"] == "n"
            streamed = await deployments.gateway.chat({**body, "stream": True})
            assert streamed.headers["x-vlm-package"] == package  # the same for each user
            assert f'"system_fingerprint":"{package}"' in streamed.text
            seen.add(package)
        assert seen == {f"n@{digest}", "n@sha256:new"}
        models = (await deployments.client.get("/v1/models")).json()["data"]
        assert "n" in {model["id"] for model in models}
        await deployments.deployments.put(written, replace(app, slots=()))  # the instances restart
        await deployments.gateway.services.models.refresh()
        answers = [await deployments.gateway.chat({**body, "user": str(n)}) for n in range(12)]
        assert {answer.headers["x-vlm-package"] for answer in answers} == {f"n@{digest}"}


async def test_a_deployment_is_listed_after_models_of_workers_and_before_its_versions(deployments):
    own = ModelCard("own", 1, 512, 1000)
    version = ModelCard("n@old", 2, 512, 1000, package="n@sha256:old")
    revision = Revision(1, "sha256:old", Spec(), card=version)
    await deployments.deployments.put(None, App("n", 1, active=revision))
    models = deployments.gateway.services.models
    for card in (own, version):
        await models.registry.announce(WorkerRecord(card.name, card, "mock"), ttl_s=600)
    await models.refresh()
    listed = (await deployments.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["own", "n", "n@old"]


# Routes: requests for a name are split between versions by weight


def version(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


async def announce(deployments: Deployments, digest: str, worker: str = "w") -> None:
    """Registers a worker of the version, as a pod does."""
    card = ModelCard(version_name("n", digest), 1, 512, 1000, package=f"n@{digest}")
    record = WorkerRecord(f"{worker}-{digest}", card, "mock")
    await deployments.gateway.services.models.registry.announce(record, ttl_s=600)


async def serving(deployments: Deployments, *texts: str) -> list[str]:
    """Adds a package for each text, each with a worker; returns the digests."""
    digests = [deployments.add_package(text) for text in texts]
    for digest in digests:
        await announce(deployments, digest)
    return digests


async def route(deployments: Deployments, weights: dict[str, int]) -> httpx.Response:
    weights = {version(digest): weight for digest, weight in weights.items()}
    return await deployments.ask(":route", weights=weights)


async def picked(deployments: Deployments, count: int = 1000) -> Counter[str]:
    """Returns how many of `count` clients are routed to each package."""
    models = deployments.gateway.services.models
    cards = [await models.find("n", f"client {number}") for number in range(count)]
    return Counter(card.package.partition("@")[2] for card in cards)


async def test_versions_get_their_weights_and_few_clients_move_on_changes(deployments):
    old, new = await serving(deployments, "{}", "[]")
    assert (await route(deployments, {old: 90, new: 10})).status_code == 200
    first = await picked(deployments)
    assert set(first) == {old, new}
    assert 60 <= first[new] <= 140
    models = deployments.gateway.services.models
    moved = {f"{n}" for n in range(200) if (await models.find("n", f"{n}")).package.endswith(new)}
    assert (await route(deployments, {old: 1, new: 1})).status_code == 200
    still = {side for side in moved if (await models.find("n", side)).package.endswith(new)}
    assert still == moved
    await models.registry.withdraw(f"w-{old}")
    await models.refresh()
    for side in map(str, range(20)):  # the fallback is used if no worker serves the chosen version
        is_new = (await models.find("n", side)).package.endswith(new)
        assert models.num_ready("n", side) == is_new
    await announce(deployments, old)
    assert (await route(deployments, {old: 0, new: 100})).status_code == 200
    assert await picked(deployments) == {new: 1000}
    listed = (await deployments.client.get("/v1/models")).json()["data"]
    assert "n" in [model["id"] for model in listed]
    listed = (await deployments.client.get("/v1/applications", headers=DEPLOY)).json()
    assert listed["routes"] == {"n": {version(old): 0, version(new): 100}}


async def test_a_route_survives_an_emptied_redis_and_reaches_other_gateways(
    deployments, run, redis, redis_prefix, monkeypatch
):
    monkeypatch.setattr("gateway.calls.models.READ_PAUSE_S", 0.0)
    old, new = await serving(deployments, "{}", "[]")
    await route(deployments, {old: 1, new: 1})
    async with run() as other:
        assert set(await picked(other)) == {old, new}
        for key in await redis.keys(f"{redis_prefix}:*"):
            await redis.delete(key)
        # No workers are running, as with zero pods, so requests wait for a worker.
        for each in (deployments, other):
            await each.gateway.services.models.refresh()
            assert set(await picked(each)) == {old, new}
        assert (await route(deployments, {new: 1})).status_code == 200

        async def has_moved() -> bool:
            await other.gateway.services.models.refresh()
            return await picked(other) == {new: 1000}

        await until(has_moved)


async def deploy_on_nodes(deployments: Deployments, text: str) -> str:
    """Adds a version that an instance on a node serves."""
    digest = deployments.add_package(text)
    record_generation(deployments.store, Generation("n", 1, digest, Spec()))
    settle(deployments.store, "n", 1, Outcome("active"))
    await announce(deployments, digest, "node")
    card = ModelCard(version_name("n", digest), 1, 512, 1000, package=f"n@{digest}")
    app = App("n", 1, active=Revision(1, digest, Spec(), card=card))
    app = replace(app, slots=(Slot(1, digest, "ready", "node"),))
    assert await deployments.deployments.put(None, app)
    await deployments.gateway.services.models.refresh()
    return digest


async def test_a_routed_version_on_nodes_is_not_retired(deployments):
    nodes, [pods] = await deploy_on_nodes(deployments, "[]"), await serving(deployments, "{}")
    assert await picked(deployments) == {nodes: 1000}
    await route(deployments, {pods: 1})
    assert await picked(deployments) == {pods: 1000}
    assert (await route(deployments, {})).status_code == 200  # removes the route
    assert await picked(deployments) == {nodes: 1000}
    missing = await route(deployments, {})
    assert code(missing)[:2] == (404, "application_not_found")
    assert (await route(deployments, {nodes: 90, pods: 10})).status_code == 200
    refused = [
        await deployments.ask(method="DELETE"),
        await deployments.put(deployments.add_package("1")),
    ]
    for answer in refused:
        assert answer.status_code == 409
        assert "only nodes serve it" in message(answer)
    await announce(deployments, nodes, "pod")
    assert (await deployments.ask(method="DELETE")).status_code == 202
    late = await route(deployments, {nodes: 1})
    assert (late.status_code, "stopping" in message(late)) == (409, True)
    assert (await route(deployments, {pods: 1})).status_code == 200
    assert await picked(deployments) == {pods: 1000}


async def test_invalid_weights_are_refused(deployments):
    missing = "sha256:" + 64 * "1"
    await announce(deployments, missing)
    for weights, status, says in (
        ({"3f2a": 1}, 400, "weights"),
        ({64 * "0": -1}, 400, "weights"),
        ({64 * "0": 0}, 400, "above 0"),
        ({64 * "0": 1}, 409, "No worker serves n@000000000000"),
        ({missing: 1}, 400, "has no package"),
        (dict.fromkeys((f"{n:064}"[::-1] for n in range(17)), 1), 400, "weights"),
    ):
        answer = await route(deployments, weights)
        assert (answer.status_code, says in message(answer)) == (status, True), weights
    [pods] = await serving(deployments, "{}")
    assert (await deployments.put(deployments.add_package("[]"))).status_code == 202
    answer = await route(deployments, {pods: 1})
    assert (answer.status_code, "being rolled out" in message(answer)) == (409, True)


async def test_one_of_two_concurrent_routes_is_refused(deployments, monkeypatch):
    """Garbage collection does not delete the packages of routes."""
    old, new = await serving(deployments, "{}", "[]")
    deployments.add_package("garbage")
    before = read_routes(deployments.store)
    await route(deployments, {old: 1})
    with monkeypatch.context() as patch:
        patch.setattr("gateway.api.applications.read_routes", lambda _: before)
        assert (await route(deployments, {old: 2})).status_code == 409
    await route(deployments, {new: 1})
    collect(deployments.store, grace_s=-1, num_kept=2)
    assert [deployments.store.size(digest) is None for digest in (old, new)] == [False, False]
    removed = collect(deployments.store, grace_s=-1, num_kept=1)
    assert len(removed.blobs) == 2  # the unused package's manifest and its file
    assert deployments.store.size(old) is None


# Adapters


OPERATOR = {"authorization": "Bearer sk-admin"}


@pytest.mark.parametrize("changes", [{"gateway": {"admin_keys": ["sk-admin"]}}])
async def test_a_disconnected_operator_releases_the_adapter_lock(gateway, redis, redis_prefix):
    load = {"lora_name": "slow", "lora_path": "slow"}
    loading = gateway.client.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    waiting, pattern = asyncio.create_task(loading), f"{redis_prefix}:*adapters*"
    await until(lambda: redis.keys(pattern), 30)
    waiting.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        await waiting
    unload = {"lora_name": "other"}
    answer = await gateway.client.post("/v1/unload_lora_adapter", json=unload, headers=OPERATOR)
    assert answer.status_code == 404
    await until_equal(lambda: redis.keys(pattern), [], 30)


async def test_commands_set_show_and_remove_a_route(deployments, capsys):
    [pods] = await serving(deployments, "{}")
    client = Client(deployments.gateway.url, "may-deploy")
    await asyncio.to_thread(run_route, client, "n", [f"{version(pods)}=90"])
    await asyncio.to_thread(run_apps, client, None)
    assert f"{version(pods)}=90" in capsys.readouterr().out
    with pytest.raises(ApiFailed):
        await asyncio.to_thread(run_route, client, "n", ["000000000000=1"])
    one = version(pods)
    for wrong in (
        ["x=1"],
        [one],
        [f"{one}="],
        [f"{one}=1.5"],
        [f"{one}=-1"],
        [f"{one}=1", f"{one}=2"],
    ):
        with pytest.raises(CommandFailed, match="VERSION=WEIGHT") as failed:
            run_route(client, "n", wrong)
        assert failed.value.code == 1
    await asyncio.to_thread(run_route, client, "n", [])
    assert not read_routes(deployments.store)["n"].versions
