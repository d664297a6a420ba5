"""Routes split a name's requests between versions by weight; changes that would leave a name unserved are refused."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
from msgspec.structs import replace

from deploy.commands import CommandFailed, run_apps, run_route
from gateway.http.errors import ApiError
from shared.gateway_client import ApiFailed, Client
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
from shared.packages.rollout import App, Revision, Slot
from shared.packages.store import StoreError
from shared.protocol import ModelCard
from shared.queue.registry import WorkerRecord
from tests.gateway.api.test_applications import DEPLOY, Deployments, message, run
from tests.waiting import until


@pytest.fixture
async def deployments(redis_server, redis_prefix, tmp_path) -> AsyncIterator[Deployments]:
    async with run(redis_server, redis_prefix, tmp_path) as deployments:
        yield deployments


def version(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


async def announce(deployments: Deployments, digest: str, worker: str = "w") -> None:
    """A worker of the version serves, as in a pod."""
    card = ModelCard(version_name("n", digest), 1, 512, 1000, package=f"n@{digest}")
    record = WorkerRecord(f"{worker}-{digest}", card, "mock")
    await deployments.gateway.services.models.registry.announce(record, ttl_s=600)


async def serving(deployments: Deployments, *texts: str) -> list[str]:
    """Packages with a worker each."""
    digests = [deployments.add_package(text) for text in texts]
    for digest in digests:
        await announce(deployments, digest)
    return digests


async def route(deployments: Deployments, weights: dict[str, int]) -> httpx.Response:
    weights = {version(digest): weight for digest, weight in weights.items()}
    return await deployments.ask(":route", weights=weights)


async def picked(deployments: Deployments, count: int = 1000) -> Counter[str]:
    """The packages that answer so many clients."""
    models = deployments.gateway.services.models
    cards = [await models.find("n", f"client {number}") for number in range(count)]
    return Counter(card.package.partition("@")[2] for card in cards)


async def test_each_version_has_its_weight_and_few_clients_move_as_it_changes(deployments):
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
    assert (await route(deployments, {old: 0, new: 100})).status_code == 200
    assert await picked(deployments) == {new: 1000}
    listed = (await deployments.client.get("/v1/models")).json()["data"]
    assert "n" in [model["id"] for model in listed]
    listed = (await deployments.client.get("/v1/applications", headers=DEPLOY)).json()
    assert listed["routes"] == {"n": {version(old): 0, version(new): 100}}


async def test_a_route_survives_an_emptied_redis_and_reaches_other_gateways(
    deployments, redis, redis_server, redis_prefix, tmp_path, monkeypatch
):
    monkeypatch.setattr("gateway.calls.models.READ_PAUSE_S", 0.0)
    old, new = await serving(deployments, "{}", "[]")
    await route(deployments, {old: 1, new: 1})
    async with run(redis_server, redis_prefix, tmp_path) as other:
        assert set(await picked(other)) == {old, new}
        for key in await redis.keys(f"{redis_prefix}:*"):
            await redis.delete(key)
        # No worker is there, as at zero pods: requests wait for one.
        for each in (deployments, other):
            await each.gateway.services.models.refresh()
            assert set(await picked(each)) == {old, new}
        assert (await route(deployments, {new: 1})).status_code == 200

        async def has_moved() -> bool:
            await other.gateway.services.models.refresh()
            return await picked(other) == {new: 1000}

        await until(has_moved)


async def test_a_removed_route_leaves_the_name_to_its_deployment(deployments):
    [pods] = await serving(deployments, "{}")
    nodes = await deploy_on_nodes(deployments, "[]")
    assert await picked(deployments) == {nodes: 1000}
    await route(deployments, {pods: 1})
    assert await picked(deployments) == {pods: 1000}
    assert (await route(deployments, {})).status_code == 200
    assert await picked(deployments) == {nodes: 1000}
    missing = await route(deployments, {})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "application_not_found")


async def deploy_on_nodes(deployments: Deployments, text: str) -> str:
    """A version that one instance of a node serves."""
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


async def test_what_nodes_serve_stays_while_a_route_names_it(deployments):
    nodes, [pods] = await deploy_on_nodes(deployments, "[]"), await serving(deployments, "{}")
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


async def test_a_route_waits_for_a_rollout(deployments):
    [pods] = await serving(deployments, "{}")
    assert (await deployments.put(deployments.add_package("[]"))).status_code == 202
    answer = await route(deployments, {pods: 1})
    assert (answer.status_code, "being rolled out" in message(answer)) == (409, True)


async def test_commands_set_show_and_remove_a_route(deployments, capsys):
    [pods] = await serving(deployments, "{}")
    client = Client(deployments.gateway.url, "may-deploy")
    await asyncio.to_thread(run_route, client, "n", [f"{version(pods)}=90"])
    await asyncio.to_thread(run_apps, client, None)
    assert f"{version(pods)}=90" in capsys.readouterr().out
    for wrong in (["x=1"], ["000000000000=1"]):
        with pytest.raises(ApiFailed):
            await asyncio.to_thread(run_route, client, "n", wrong)
    for wrong in (["x"], ["x="], ["x=1.5"], ["x=-1"], ["x=1", "x=2"]):
        with pytest.raises(CommandFailed, match="VERSION=WEIGHT") as failed:
            run_route(client, "n", wrong)
        assert failed.value.code == 1
    await asyncio.to_thread(run_route, client, "n", [])
    assert not read_routes(deployments.store)["n"].versions


async def test_weights_that_cannot_be_are_refused(deployments):
    for weights, status, says in (
        ({"3f2a": 1}, 400, "weights"),
        ({64 * "0": -1}, 400, "weights"),
        ({64 * "0": 0}, 400, "more than 0"),
        ({64 * "0": 1}, 409, "No worker serves n@000000000000"),
        (dict.fromkeys((f"{n:064}"[::-1] for n in range(17)), 1), 400, "weights"),
    ):
        answer = await route(deployments, weights)
        assert answer.status_code == status, weights
        assert says in message(answer)


async def test_a_package_that_the_store_lacks_is_refused(deployments):
    digest = "sha256:" + 64 * "0"
    await announce(deployments, digest)
    answer = await route(deployments, {digest: 1})
    assert (answer.status_code, "has no package" in message(answer)) == (400, True)


async def test_of_two_routes_at_once_one_is_refused(deployments, monkeypatch):
    [pods] = await serving(deployments, "{}")
    before = read_routes(deployments.store)
    await route(deployments, {pods: 1})
    monkeypatch.setattr("gateway.api.applications.read_routes", lambda _: before)
    assert (await route(deployments, {pods: 2})).status_code == 409


async def test_packages_of_routes_are_no_garbage(deployments):
    old, new = await serving(deployments, "{}", "[]")
    deployments.add_package("garbage")
    await route(deployments, {old: 1})
    await route(deployments, {new: 1})
    collect(deployments.store, grace_s=-1, num_kept=2)
    assert [deployments.store.size(digest) is None for digest in (old, new)] == [False, False]
    removed = collect(deployments.store, grace_s=-1, num_kept=1)
    assert len(removed.blobs) == 2  # a manifest and its file
    assert deployments.store.size(old) is None


async def test_until_its_store_answers_a_gateway_calls_no_name_unknown(
    redis_server, redis_prefix, tmp_path, monkeypatch
):
    def fail(*_):
        raise StoreError("it is away")

    monkeypatch.setattr("gateway.calls.models.READ_PAUSE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("gateway.calls.models.read_routes", fail)
        async with run(redis_server, redis_prefix, tmp_path) as deployments:
            models = deployments.gateway.services.models
            with pytest.raises(ApiError) as refused:
                await models.find("n")
            assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
            patch.undo()
            with pytest.raises(ApiError) as refused:
                await models.find("n")
            assert (refused.value.status, refused.value.code) == (404, "model_not_found")
