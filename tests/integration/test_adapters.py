"""LoRA adapters of a fleet: configured or loaded by an operator, requested as `model:adapter`, on any worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import Response

from engines.base import LoadedEngine
from engines.registry import create_engine
from shared.queue.registry import AdapterSource
from shared.settings.tree import SettingsError
from tests.factories_gateway import RunningGateway, make_body, make_settings, run_gateway_on_socket
from tests.factories_queue import MODEL, Ends
from tests.factories_worker import run_worker
from tests.waiting import until, until_equal

KEY, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("sk-client", "sk-admin"))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder from which adapters can be loaded."""
    for name in ("sql", "poet"):
        write(tmp_path / "adapters" / name, name)
    write(tmp_path / "elsewhere", "elsewhere")
    return tmp_path / "adapters"


def write(directory: Path, content: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "of": content}))
    return directory


@pytest.fixture
async def gateway(redis_server: str, redis_prefix: str) -> AsyncIterator[RunningGateway]:
    keys = {"api_keys": ("sk-client",), "admin_keys": ("sk-admin",)}
    settings = make_settings(redis_server, redis_prefix, gateway=keys)
    async with run_gateway_on_socket(settings) as gateway:
        gateway.client.headers.update(KEY)
        yield gateway


@asynccontextmanager
async def serving(gateway: RunningGateway, ends: Ends, worker_id: str = "w", **options: Any):
    """Runs a worker and waits until the gateway lists it."""
    async with run_worker(ends, worker_id, **options) as worker:
        await until_known(gateway, lambda: MODEL in gateway.services.models.cards)
        yield worker


async def until_known(gateway: RunningGateway, is_true: Callable[[], bool]) -> None:
    """Refreshes the gateway's models until the condition is true."""

    async def is_so() -> bool:
        await gateway.services.models.refresh()
        return is_true()

    await until(is_so)


async def ask(gateway: RunningGateway, model: str = MODEL, **more: Any) -> Response:
    return await gateway.chat(make_body(model=model, temperature=0, max_tokens=5, **more))


def text(answer: Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def load(gateway: RunningGateway, name: str, path: str, **more: Any) -> Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await gateway.client.post(LOAD, json=body, headers=ADMIN)


async def unload(gateway: RunningGateway, name: str) -> Response:
    return await gateway.client.post(UNLOAD, json={"lora_name": name}, headers=ADMIN)


async def test_an_adapter_of_the_settings_is_listed_and_answers_by_its_name(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    async with serving(gateway, ends, lora=(f"sql={directory / 'sql'}",)):
        answer = await ask(gateway, f"{MODEL}:sql")
        assert text(answer) != text(await ask(gateway))
        assert answer.json()["model"] == f"{MODEL}:sql"
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, f"{MODEL}:sql"]
        assert listed[0]["adapters"] == [f"{MODEL}:sql"]
        assert listed[1]["parent"] == listed[1]["root"] == MODEL
        assert listed[1]["num_workers"] == 1
        one = (await gateway.client.get(f"/v1/models/{MODEL}:sql")).json()
        assert one == listed[1]
        refused = await unload(gateway, "sql")
        assert refused.status_code == 400
        missing = await ask(gateway, f"{MODEL}:other")
        assert missing.status_code == 404
        key = {**KEY, "idempotency-key": "once"}
        body = make_body(model=f"{MODEL}:sql", temperature=0, max_tokens=5)
        first, second = [await gateway.chat(body, headers=key) for _ in range(2)]
        assert first.json() == second.json()
        assert text(first) == text(answer)


async def test_an_operator_loads_and_unloads_while_the_fleet_serves(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    options = {"lora_dir": str(directory)}
    async with serving(gateway, ends, "w1", **options), serving(gateway, ends, "w2", **options):
        plain = text(await ask(gateway))
        loaded = await load(gateway, "sql", "sql")
        assert loaded.status_code == 200
        assert loaded.text.startswith("Success: ")  # as in vLLM
        answers = await asyncio.gather(*(ask(gateway, f"{MODEL}:sql") for _ in range(8)))
        [changed] = {text(answer) for answer in answers}
        assert changed != plain
        assert (await load(gateway, "poet", str(directory / "poet"))).status_code == 200
        assert text(await ask(gateway, f"{MODEL}:poet")) not in (plain, changed)
        again = await load(gateway, "sql", "poet")
        assert again.status_code == 400
        assert again.json()["error"]["param"] == "lora_name"
        assert text(await ask(gateway, f"{MODEL}:sql")) == changed
        replaced = await load(gateway, "sql", "poet", load_inplace=True)
        assert replaced.status_code == 200
        assert text(await ask(gateway, f"{MODEL}:sql")) == text(await ask(gateway, f"{MODEL}:poet"))
        assert (await unload(gateway, "sql")).text.startswith("Success: ")
        gone = await ask(gateway, f"{MODEL}:sql")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert (await unload(gateway, "sql")).status_code == 404
        assert text(await ask(gateway)) == plain


async def test_another_worker_continues_with_the_same_adapter(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    options = {"lora_dir": str(directory), "lease_s": 1.0, "mock": {"num_output_tokens": 20}}
    body = make_body(model=f"{MODEL}:sql", temperature=0, max_tokens=20)
    async with serving(gateway, ends, "first", **options) as first:
        await load(gateway, "sql", "sql")
        expected = text(await gateway.chat(body))
        first.engine.steps_left = 8
        asked = asyncio.create_task(gateway.chat(body))
        await until(lambda: not first.engine.gate.is_set())
        await first.vanish()
        async with serving(gateway, ends, "second", **options):
            assert text(await asked) == expected


async def test_a_waiting_request_whose_adapter_was_unloaded_fails(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    """The request is never answered without its adapter."""
    options = {"lora_dir": str(directory), "max_num_seqs": 1}
    async with serving(gateway, ends, **options) as worker:
        await load(gateway, "sql", "sql")
        worker.engine.steps_left = 1
        first = asyncio.create_task(ask(gateway, f"{MODEL}:sql"))
        await until(lambda: not worker.engine.gate.is_set())
        waiting = asyncio.create_task(ask(gateway, f"{MODEL}:sql", user="another"))
        await until_equal(ends.num_open, 2)
        assert (await unload(gateway, "sql")).status_code == 200
        worker.engine.steps_left = None
        worker.engine.gate.set()
        assert (await first).status_code == 200
        refused = await waiting
        code = refused.json()["error"]["code"]
        assert (refused.status_code, code) == (409, "adapter_unavailable")


async def test_invalid_adapters_are_refused_by_field(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    (directory / "empty").mkdir()
    (directory / "link").symlink_to(directory.parent / "elsewhere")
    outside = ("../elsewhere", "/etc", ".", "link")
    missing = ("nothing", "empty", "a\0b", "a" * 1000)
    rows = [("sql", path, "lora_path") for path in outside + missing]
    rows += [(name, "sql", "lora_name") for name in ("a:b", "", "sql\n")]
    async with serving(gateway, ends, lora_dir=str(directory)):
        for name, path, param in rows:
            refused = await load(gateway, name, path)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param), (name, path)
            assert ("is outside" in error["message"]) == (path in outside)
            assert "/" not in error["message"].replace("/v1", "")
        refused = await load(gateway, "sql", "sql", base_model_name="nope")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "base_model_name")
        assert (await load(gateway, "sql", "sql")).status_code == 200


async def test_if_no_worker_can_load_the_error_has_the_reason(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    def load_numbers() -> LoadedEngine:
        return create_engine({"kind": "mock_pooling", "served_name": MODEL})

    numbers = {"load": load_numbers, "lora_dir": str(directory)}
    for options, reason in (({}, "VLM_WORKER__LORA_DIR"), (numbers, "not support adapters")):
        async with serving(gateway, ends, **options):
            refused = await load(gateway, "sql", "sql", base_model_name=MODEL)
            assert refused.status_code == 400
            assert reason in refused.json()["error"]["message"]


async def test_an_equal_or_failed_replacement_keeps_the_adapter(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    async with serving(gateway, ends, lora_dir=str(directory)):
        await load(gateway, "sql", "sql")
        expected = text(await ask(gateway, f"{MODEL}:sql"))
        assert (await load(gateway, "sql", "sql", load_inplace=True)).status_code == 200
        assert text(await ask(gateway, f"{MODEL}:sql")) == expected
        assert (await load(gateway, "sql", "nothing", load_inplace=True)).status_code == 400

        async def answers_again() -> bool:
            return (await ask(gateway, f"{MODEL}:sql")).status_code == 200

        await until(answers_again)
        assert text(await ask(gateway, f"{MODEL}:sql")) == expected


async def test_only_operators_can_load_adapters(
    gateway: RunningGateway, redis_server: str, redis_prefix: str
):
    body = {"lora_name": "sql", "lora_path": "sql"}
    wrong = {"authorization": "Bearer sk-wrong"}
    for path in (LOAD, UNLOAD):
        refused = await gateway.client.post(path, json=body)
        code = refused.json()["error"]["code"]
        assert (refused.status_code, code) == (403, "insufficient_permissions")
        assert (await gateway.client.post(path, json=body, headers=wrong)).status_code == 401
    for keys, statuses in (({"admin_keys": ("sk-admin",)}, (401, 400)), ({}, (403, 403))):
        settings = make_settings(redis_server, redis_prefix, gateway=keys)
        async with run_gateway_on_socket(settings) as open_to_all:
            assert (await open_to_all.client.get("/v1/models")).status_code == 200
            asked = [await open_to_all.client.post(LOAD, json=body, headers=h) for h in ({}, ADMIN)]
            assert tuple(answer.status_code for answer in asked) == statuses


async def test_metrics_count_by_adapter_until_there_are_too_many_names(
    gateway: RunningGateway, ends: Ends, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.calls.models.MAX_ADAPTER_LABELS", 1)
    own = tuple(f"{name}={directory / name}" for name in ("sql", "poet"))
    async with serving(gateway, ends, lora=own):
        for name in ("sql", "poet", "sql"):
            text(await ask(gateway, f"{MODEL}:{name}"))
        shown = (await gateway.client.get("/metrics", headers=ADMIN)).text
    assert f'vlm_requests_total{{model="{MODEL}:sql",outcome="ok"}} 2.0' in shown
    assert f'vlm_requests_total{{model="{MODEL}",outcome="ok"}} 1.0' in shown
    assert "poet" not in shown


async def test_the_number_of_loaded_adapters_is_limited(
    gateway: RunningGateway, ends: Ends, directory: Path
):
    async with serving(gateway, ends, lora_dir=str(directory)):
        most = gateway.services.settings.limits.max_loras
        registry = gateway.services.registry
        for number in range(most):
            await registry.put_adapter(MODEL, f"n{number}", AdapterSource("sql", "1"))
        await until_known(gateway, lambda: len(gateway.services.models.adapters) == most)
        refused = await load(gateway, "more", "poet")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "lora_name"
        await registry.put_adapter(MODEL, "more", AdapterSource("poet", "1"))

        async def errors() -> list[str]:
            """Returns the errors of adapters that the worker could not load."""
            [worker] = await registry.workers()
            return [each.error for each in worker.card.adapters if each.error]

        [error] = await until(errors)
        assert "VLM_LIMITS__MAX_LORAS" in error


async def test_a_bad_adapter_of_the_settings_stops_the_start(ends: Ends, tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SettingsError, match="VLM_WORKER__LORA: sql: there is no "):
            async with run_worker(ends, lora=(f"sql={path}",)):
                pass
