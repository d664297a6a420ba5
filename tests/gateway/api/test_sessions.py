"""Sessions of applications: each task runs once, and any client with the same key finds it again."""

import asyncio
import itertools
import json
import signal
import time
from typing import Any

import pytest
from msgspec.structs import replace

from shared.protocol import ErrorCode
from shared.queue.api import QueueUnavailable
from shared.queue.keys import RedisKeys
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CARD, MODEL, Answer, say_nothing
from tests.factories_keys import code
from tests.waiting import until, until_equal


@pytest.fixture
def card():
    return replace(CARD, tasks=("run",), package=f"{MODEL}@sha256:0")


class Scripted:
    """A worker that answers each task with its input when the test allows it."""

    def __init__(self, worker) -> None:
        self.worker = worker
        self.gate = asyncio.Event()
        self.gate.set()
        worker.script = self.play

    async def play(self, answer: Answer) -> None:
        asked = json.loads(bytes(answer.request.task.input))
        await self.gate.wait()
        if asked == "fail":
            await answer.fail(ErrorCode.TASK_FAILED, "told to")
        elif asked == "pieces":
            await answer.finish('{"item":1}\n', '{"item":2}\n', '{"output":null}\n')
        else:
            await answer.finish(json.dumps({"output": [asked]}, ensure_ascii=False) + "\n")


class Client:
    """A client of one session."""

    def __init__(self, gateway, key: str = "") -> None:
        self.gateway = gateway
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.id = ""

    async def ask(self, method: str, path: str = "", body: Any = None, status: int = 200) -> Any:
        path = f"/v1/sessions/{self.id}{path}" if self.id else path
        answer = await self.gateway.client.request(method, path, json=body, headers=self.headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def open(self, **body: Any) -> "Client":
        self.id = (await self.ask("POST", f"/v1/applications/{MODEL}/sessions", body))["id"]
        return self

    async def send(self, *tasks: dict[str, Any], status: int = 200) -> Any:
        return await self.ask("POST", "/tasks", {"tasks": list(tasks)}, status)

    async def end_of(self, task_id: str) -> dict[str, Any]:
        return await self.ask("GET", f"/tasks/{task_id}?wait=20")

    async def counts(self) -> dict[str, int]:
        found = await self.ask("GET")
        names = ("pending", "running", "succeed", "failed", "cancelled")
        return {name: found[name] for name in names if found[name]}


@pytest.fixture
def scripted(worker) -> Scripted:
    return Scripted(worker)


@pytest.fixture
async def session(gateway, scripted) -> Client:
    return await Client(gateway).open(common_data={"word": "dear"})


async def test_tasks_get_the_common_data_of_their_session_and_end(session, worker):
    sent = await session.send({"input": {"a": 1}, "id": "one"}, {"input": "fail", "id": "two"})
    assert [task["state"] for task in sent["data"]] == ["pending", "pending"]
    one, two = await session.end_of("one"), await session.end_of("two")
    assert (one["state"], one["output"]) == ("succeed", [{"a": 1}])
    assert one["package"] == f"{MODEL}@sha256:0"
    assert (two["state"], two["error"]["message"]) == ("failed", "told to")
    assert two["error"]["code"] == "task_failed"
    common = {request.task.common for request in worker.requests}
    assert len(common) == 1
    assert await worker.blobs.get(common.pop()) == b'{"word":"dear"}'
    assert await session.counts() == {"succeed": 1, "failed": 1}
    again = await session.send({"input": {"a": 1}, "id": "one"})  # the same task is not run again
    assert again["data"][0]["state"] == "succeed"
    assert await session.end_of("one") == one
    assert len(worker.requests) == 2
    other = await session.send({"input": 2, "id": "one"}, status=409)
    assert other["error"]["code"] == "task_id_reused"


async def test_a_list_of_tasks_shows_inputs_and_outputs(session):
    long, breaks = "x" * 1000, "a\u2028b\x85c"  # Unicode line breaks stay part of the text
    inputs = {"one": {"a": 1}, "two": "fail", "three": long, "four": breaks}
    await session.send(*({"input": value, "id": name} for name, value in inputs.items()))
    for name in inputs:
        await session.end_of(name)
    listed = await session.ask("GET", "/tasks?include=results")
    by_id = {task["id"]: task for task in listed["data"]}
    asked = {name: task["input"] for name, task in by_id.items() if name != "four"}
    assert asked == {"one": '{"a":1}', "two": '"fail"', "three": json.dumps(long)[:256]}
    outputs = [by_id[name]["output"] for name in ("one", "three", "four")]
    assert outputs == [[{"a": 1}], [long], [breaks]]
    assert by_id["two"]["error"]["message"] == "told to"
    assert "output" not in (await session.ask("GET", "/tasks"))["data"][0]
    path = f"/v1/applications/{MODEL}/run"
    answer = await session.gateway.client.post(path, json={"input": breaks})
    assert answer.json()["output"] == [breaks]


async def test_limits_count_open_sessions_until_they_are_closed(gateway, scripted, redis):
    deployments, now = gateway.services.deployments, time.time()
    assert await deployments.session_limits(MODEL, now) == (0, 0)
    one = await Client(gateway).open(min_instances=1, max_instances=2)
    two = await Client(gateway).open(max_instances=3)
    shown = await one.ask("GET")
    assert (shown["min_instances"], shown["max_instances"]) == (1, 2)
    assert await deployments.session_limits(MODEL, now) == (1, 5)
    free = await Client(gateway).open()
    assert await deployments.session_limits(MODEL, now) == (1, 0)
    await free.ask("POST", ":close", {})
    await two.ask("POST", ":close", {})
    await two.send({"input": 1}, status=409)
    assert await deployments.session_limits(MODEL, now) == (1, 2)
    await one.send({"input": 1, "id": "x"})
    assert await deployments.session_limits(MODEL, now + 7200 + 60) == (0, 0)
    wrong = {"min_instances": 3, "max_instances": 2}
    refused = await Client(gateway).ask("POST", f"/v1/applications/{MODEL}/sessions", wrong, 400)
    assert refused["error"]["param"] == "min_instances"


async def test_a_session_requires_instances_with_its_resources(gateway, scripted, monkeypatch):
    has = {"cpu": 2.0, "memory_bytes": 2**30, "gpu": 0}
    monkeypatch.setattr(gateway.services.models, "resources", lambda name: has)
    await Client(gateway).open(resources={"cpu": 2, "memory_bytes": 2**30})
    session = await Client(gateway).open(resources={"memory_bytes": 2**20})
    path = f"/v1/applications/{MODEL}/sessions"
    for more in ({"cpu": 3}, {"gpu": 1}):
        refused = await Client(gateway).ask("POST", path, {"resources": more}, 409)
        assert refused["error"]["code"] == "insufficient_resources"
    has["memory_bytes"] = 2**10  # as if a later version with other resources was deployed
    refused = await session.send({"input": 1}, status=409)
    assert refused["error"]["code"] == "insufficient_resources"


async def test_sessions_are_listed_in_pages(gateway, scripted, worker):
    sessions = [await Client(gateway).open() for _ in range(5)]
    scripted.gate.clear()
    await sessions[0].send({"input": 1}, {"input": 2})
    found, after = [], ""
    for expected in (2, 2, 1):
        page = await Client(gateway).ask("GET", f"/v1/sessions?limit=2&after={after}")
        assert (len(page["data"]), page["has_more"]) == (expected, expected == 2)
        found += page["data"]
        after = found[-1]["id"]
    assert [each["id"] for each in found] == [each.id for each in reversed(sessions)]
    assert found[-1]["pending"] + found[-1]["running"] == 2
    tasks = f"/{sessions[0].id}/tasks?after=nothing"
    for query in ("?after=nothing", "?limit=0", "?limit=101", "?state=open", tasks):
        refused = await Client(gateway).ask("GET", f"/v1/sessions{query}", status=400)
        assert refused["error"]["param"] == query.partition("?")[2].partition("=")[0]


async def test_a_task_is_followed_piece_by_piece(session, gateway):
    await session.send({"input": "pieces", "id": "p"})
    answer = await gateway.client.get(f"/v1/sessions/{session.id}/tasks/p/events")
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert [json.loads(line).get("item") for line in lines[:-1]] == [1, 2, None]
    assert (await session.end_of("p"))["output"] == [1, 2]
    await session.send({"input": "fail", "id": "f"})
    answer = await gateway.client.get(f"/v1/sessions/{session.id}/tasks/f/events")
    assert '"code":"task_failed"' in answer.text


@pytest.mark.parametrize("changes", [{"limits": {"max_open_requests": 1}}])
async def test_following_a_task_counts_as_an_open_request(session, gateway, scripted):
    scripted.gate.clear()
    await session.send({"input": 1, "id": "t"})
    path = f"/v1/sessions/{session.id}/tasks/t/events"
    async with gateway.client.stream("GET", path) as answer:
        refused = await session.ask("GET", status=503)
        assert refused["error"]["code"] == "server_overloaded"
        gateway.server.handle_exit(signal.SIGTERM, None)
        assert not gateway.server.should_exit
        scripted.gate.set()
        text = (await answer.aread()).decode()
    assert text.endswith("data: [DONE]\n\n")
    await until(lambda: gateway.server.should_exit)


async def test_json_deeper_than_100_levels_is_refused_by_field(session, gateway, worker):
    run, tasks = f"/v1/applications/{MODEL}/run", f"/v1/sessions/{session.id}/tasks"
    for (opening, closing), levels in itertools.product(
        (("[", "]"), ('{"a":', "}")), (100, 101, *range(966, 972), 5000)
    ):
        value = opening * levels + "1" + closing * levels
        for path, body, param in (
            (run, '{"input": %s}', "input"),
            (tasks, '{"tasks": [{"input": 1}, {"input": %s}]}', "tasks.[1].input"),
            (f"/v1/applications/{MODEL}/sessions", '{"common_data": %s}', "common_data"),
        ):
            answer = await gateway.client.post(path, content=body % value)
            if levels <= 100:
                assert answer.status_code == 200, answer.text
                continue
            assert code(answer)[::2] == (400, param), (levels, path)


async def test_any_gateway_finds_a_task(session, fleet, gateway, scripted, monkeypatch):
    """The lookup also finds a task whose reply was lost when it was queued."""
    submit = gateway.services.dispatcher.submit

    async def lose_reply(*arguments: Any, **options: Any) -> None:
        (await submit(*arguments, **options)).close()
        raise QueueUnavailable

    scripted.gate.clear()
    monkeypatch.setattr(gateway.services.dispatcher, "submit", lose_reply)
    await session.send({"input": 1, "id": "x"}, status=503)
    async with fleet.gateway() as other:
        elsewhere = Client(other)
        elsewhere.id = session.id
        waiting = asyncio.create_task(elsewhere.end_of("x"))
        await until_equal(elsewhere.counts, {"running": 1})
        scripted.gate.set()
        assert (await waiting)["output"] == [1]
    assert await session.counts() == {"succeed": 1}


async def test_closing_cancels_waiting_tasks_and_lets_running_ones_finish(
    session, scripted, worker, redis, redis_prefix
):
    scripted.gate.clear()
    await session.send({"input": 0, "id": "runs"})
    await until(lambda: worker.requests)
    worker.stop_claiming()
    await session.send({"input": 1, "id": "waits"})
    # A task that is being claimed at this moment can still be claimed.
    closed = await session.ask("POST", ":close", {})
    assert (closed["state"], closed["cancelled"]) == ("closed", 1)
    common = worker.requests[0].task.common  # the common data is kept until the running task ends
    assert await redis.pttl(RedisKeys(redis_prefix).blob(common.sha256)) > 1000 * 3600
    scripted.gate.set()
    assert (await session.end_of("runs"))["state"] == "succeed"
    assert (await session.end_of("waits"))["state"] == "cancelled"
    refused = await session.send({"input": 2}, status=409)
    assert refused["error"]["code"] == "session_closed"


async def test_a_cancelled_task_stops_its_worker(session, scripted, worker, redis, redis_prefix):
    await session.send({"input": 1, "id": "x"}, {"input": "fail", "id": "y"})
    assert (await session.end_of("x"))["state"] == "succeed"
    assert (await session.end_of("y"))["state"] == "failed"
    keys = [key async for key in redis.scan_iter(f"{redis_prefix}:*:request:*")]
    assert await redis.delete(*keys)  # as if nobody had requested the events for a long time
    gone = await session.ask("GET", "/tasks/x/events", status=404)
    assert gone["error"]["code"] == "result_expired"
    worker.script = say_nothing
    await session.send({"input": 0, "id": "z"})
    await until(lambda: len(worker.requests) == 3)
    for name, state in (("x", "succeed"), ("y", "failed"), ("z", "cancelled")):
        assert (await session.ask("POST", f"/tasks/{name}:cancel", {}))["state"] == state
    await asyncio.wait_for(worker.cancelled.wait(), 20)


@pytest.mark.parametrize("changes", [{"limits": {"max_queue_depth": 2}}])
async def test_the_error_names_tasks_that_were_not_queued(session, scripted, worker):
    """Tasks that a full queue refused can be sent again."""
    scripted.gate.clear()
    tasks = [{"input": i, "id": f"t{i}"} for i in range(10)]
    worker.stop_claiming()
    refused = await session.send(*tasks, status=503)
    assert refused["error"]["code"] == "server_overloaded"
    listed = await session.ask("GET", "/tasks")
    assert sorted(t["id"] for t in refused["data"]) == sorted(t["id"] for t in listed["data"])
    assert 0 < len(refused["data"]) < 10
    assert refused["error"]["param"].startswith("tasks[")
    assert "tasks[9]" in refused["error"]["message"]
    await worker.start()
    scripted.gate.set()
    ended: set[str] = set()
    while len(ended) < 10:
        for task in tasks:
            path = f"/v1/sessions/{session.id}/tasks"
            answer = await session.gateway.client.post(path, json=task)
            assert answer.status_code in (200, 503)
            if answer.is_success and (await session.end_of(task["id"]))["state"] == "succeed":
                ended.add(task["id"])
    assert len({request.id for request in worker.requests}) == len(worker.requests) == 10


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": "sk-one,sk-two"}}])
async def test_a_session_is_visible_to_its_tenant_only(gateway, scripted):
    own = await Client(gateway, "sk-one").open()
    await own.send({"input": 1, "id": "x"})
    await own.end_of("x")
    stranger = Client(gateway, "sk-two")
    assert (await stranger.ask("GET", "/v1/sessions"))["data"] == []
    stranger.id = own.id
    await stranger.send({"input": 1}, status=404)
    for method, path, body in (
        ("GET", "", None), ("GET", "/tasks", None), ("GET", "/tasks/x", None),
        ("GET", "/tasks/x/events", None), ("POST", ":close", {}), ("POST", "/tasks/x:cancel", {}),
    ):  # fmt: skip
        told = await stranger.ask(method, path, body, status=404)
        assert told["error"]["code"] == "session_not_found"
    assert (await own.end_of("x"))["output"] == [1]


async def test_the_number_of_sessions_of_a_key_is_limited(gateway, scripted, monkeypatch):
    monkeypatch.setattr(LimitSettings, "max_sessions", 2)
    await Client(gateway).open(idle_s=0.001, timeout_s=0.001)
    last = await Client(gateway).open()
    async with asyncio.timeout(20):
        while len((await Client(gateway).ask("GET", "/v1/sessions"))["data"]) > 1:
            await asyncio.sleep(0.01)
    await Client(gateway).open()  # replaces the closed session
    path = f"/v1/applications/{MODEL}/sessions"
    told = await Client(gateway).ask("POST", path, {}, status=409)
    assert told["error"]["code"] == "too_many_sessions"
    assert (await last.ask("GET"))["state"] == "open"


BAD_TASKS: list[tuple[dict[str, Any], str]] = [
    ({}, "tasks"),
    ({"input": 1, "tasks": [{"input": 1}]}, "tasks"),
    ({"tasks": []}, "tasks"),
    ({"tasks": [{"input": 1}], "id": "x"}, "id"),
    ({"tasks": [{"id": "x"}]}, "tasks.[0].input"),
    ({"input": 1, "id": "a b"}, "id"),
    ({"tasks": [{"input": i} for i in range(1001)]}, "tasks"),
]


async def test_bad_tasks_name_the_field(session):
    for body, param in BAD_TASKS:
        told = await session.ask("POST", "/tasks", body, 400)
        assert told["error"]["param"] == param
    told = await session.send({"input": "x" * (4 * 2**20 + 1)}, status=413)
    assert told["error"]["code"] == "task_too_large"
    client = Client(session.gateway)
    common = {"common_data": "x" * (2**20 + 1)}
    told = await client.ask("POST", f"/v1/applications/{MODEL}/sessions", common, 413)
    assert told["error"]["param"] == "common_data"
    for path in ("run", "sessions"):
        told = await client.ask("POST", f"/v1/applications/nobody/{path}", {"input": 1}, 404)
        assert told["error"]["param"] == "name"


async def test_tasks_with_and_without_a_session_have_the_same_value_limit(session, gateway):
    numbers = [1] * 400_000
    await session.send({"input": numbers, "id": "many"})
    assert (await session.end_of("many"))["output"] == [numbers]
    ran = await gateway.client.post(f"/v1/applications/{MODEL}/run", json={"input": numbers})
    assert ran.status_code == 200


@pytest.mark.parametrize("card", [CARD])
async def test_sessions_of_a_model_are_refused(gateway, worker):
    for path in ("sessions", "run"):
        answer = await gateway.client.post(f"/v1/applications/{MODEL}/{path}", json={"input": 1})
        assert code(answer) == (400, "wrong_task", "name")
