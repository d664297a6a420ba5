"""`vlm serve`: the processes and the output for its settings, and the wait for the gateway."""

import asyncio
import json
import os
from functools import partial

import httpx
import pytest
from pydantic import SecretStr

from gateway.http.auth import KeyRing
from shared.settings.tree import WorkerSettings
from tests.worker.node.test_resources import make_settings
from worker.node.ray_workers import WorkerActor
from worker.node.serve import create_node, run_node, show_screen, tell_apart, wait_until_served
from worker.node.supervisor import Child, Node, NodeError, run_options, start_process


def test_a_model_of_also_has_its_own_worker_on_the_cpu():
    settings = make_settings(kind="mock")
    settings = settings.model_copy(update={"worker": WorkerSettings(lora=("a=/adapters/a",))})
    node = create_node(settings, 2, also=["shapes-clip"])
    *workers, other, gateway = node.children
    assert [child.arguments for child in node.children] == 3 * [["worker"]] + [["gateway"]]
    assert {child.environment["VLM_ENGINE__KIND"] for child in workers} == {"mock"}
    assert other.environment["VLM_ENGINE__MODEL"] == "shapes-clip"
    assert other.environment["VLM_ENGINE__DEVICE"] == "cpu"
    assert not {"VLM_ENGINE__KIND", "VLM_WORKER__LORA"} & other.environment.keys()
    assert gateway.must_start


async def test_a_process_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "vlm.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert WorkerActor({}, [*run_options("vlm"), "worker"]).wait() == os.EX_CONFIG
    tmp_path.joinpath("vlm.py").unlink()
    tmp_path.rmdir()
    process = await start_process("vlm", "worker", environment=dict(os.environ))
    assert await process.wait() == os.EX_CONFIG  # because the URL of Redis is missing


def listed(name: str, num_workers: int = 1, **more: str) -> dict[str, object]:
    return {"id": name, "num_workers": num_workers, "parent": None, **more}


#: Entries of `/v1/models` that this start did not add: a deployment, an adapter, and a model of yesterday.
OTHERS = [
    listed("app@1f2e3d4c5b6a", package="app@sha256:1f2e3d4c5b6a"),
    listed("app", parent="app@1f2e3d4c5b6a", package="app@sha256:1f2e3d4c5b6a"),
    listed("one:sql", parent="one"),
    listed("old", num_workers=0),
]


@pytest.mark.parametrize("sees", [True, False])
def test_the_example_has_an_image_only_if_the_model_accepts_images(sees, capsys):
    show_screen(make_settings(), {"id": "one", "tasks": ["generate"], "supports_images": sees}, 1)
    screen = capsys.readouterr().err
    assert (" --image " in screen, "image_url" in screen) == (sees, sees)
    if not sees:
        body = json.loads(screen.split("<<EOF\n")[1].split("\nEOF")[0])
        [message] = body["messages"]
        assert isinstance(message["content"], str)


def test_the_model_of_the_engine_is_distinguished_from_those_of_also():
    clip, mock = ({"id": name, "tasks": ["embed"]} for name in ("shapes-clip", "mock-embeddings"))
    assert tell_apart([clip, mock], ["shapes-clip"]) == (mock, [clip])


@pytest.mark.parametrize("num_models", [1, 2])
async def test_a_gateway_that_cannot_list_its_models_yet_is_polled_again(num_models, monkeypatch):
    one, two = listed("one"), listed("two")
    answers = [(503, []), (200, OTHERS), (200, [*OTHERS, one]), (200, [one, *OTHERS, two])]
    answers = answers[: num_models + 2]
    searches = [503, *(200 for _ in answers)]  # the search process is starting

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/vector_stores":
            return httpx.Response(searches.pop(0))
        status, models = answers.pop(0) if request.url.path == "/v1/models" else (200, [])
        return httpx.Response(status, json={"data": models})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("worker.node.serve.httpx.AsyncClient", client)
    async with asyncio.timeout(60):
        models = await wait_until_served(make_settings(), num_models, search=True)
    assert [model["id"] for model in models] == ["one", "two"][:num_models]
    assert answers == searches == []


@pytest.mark.parametrize(
    ("engine", "also", "is_refused"),
    [
        ({}, ["shapes"], True),
        ({"served_name": "shapes-clip"}, ["shapes-clip"], True),
        ({"kind": "mock"}, ["shapes"], False),
        ({"kind": "mock", "served_name": "shapes"}, ["shapes"], True),
    ],
)
def test_two_models_of_one_name_are_refused(engine, also, is_refused):
    settings = make_settings(**engine)
    if is_refused:
        with pytest.raises(NodeError, match=also[-1]) as caught:
            create_node(settings, 1, also=also)
        assert caught.value.exit_code == 78
    else:
        assert len(create_node(settings, 1, also=also).children) == 3


async def test_a_gateway_with_only_a_root_key_accepts_a_key_of_the_node(monkeypatch):
    def stop(settings, *_, **__):
        gateways.append(settings.gateway)
        raise NodeError("")

    gateways = []
    monkeypatch.setattr("worker.node.serve.create_node", stop)
    groups = {"redis": {"url": "redis://r"}, "gateway": {"root_key": SecretStr("root"), "port": 0}}
    run_node(make_settings(kind="mock").changed(**groups), 1, None)
    key = gateways[0].api_keys[0].get_secret_value()
    assert await KeyRing(gateways[0]).authenticate([(b"authorization", f"Bearer {key}".encode())])


async def test_a_process_that_fails_to_start_three_times_ends_the_node():
    never = asyncio.Event()
    worker = Child("worker 1", ["worker", "--no-such-option"], dict(os.environ))
    node = Node([worker], never.wait, stop_within_s=5.0)
    with pytest.raises(NodeError, match=r"worker 1 ended with exit code 2 in 3 starts") as ended:
        await asyncio.wait_for(node.run(lambda _: None), 120)
    assert ended.value.exit_code == 1
