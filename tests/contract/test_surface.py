"""The contract of every API of the gateway: each registered surface, and a toy surface of one file."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
import pytest_asyncio
from msgspec import inspect
from msgspec.structs import replace

from gateway.api import SURFACES
from gateway.api.fields import UNSUPPORTED
from gateway.services import Services
from shared.protocol import CallPiece, ErrorCode, Failed, FinishReason, Function
from tests.contract.toys.surface import Echo
from tests.factories_gateway import (
    CARD,
    MODEL,
    NUMBERS,
    TOKEN_IDS,
    TOLD,
    Answer,
    RunningGateway,
    ScriptedWorker,
    answer_any,
    in_words,
    make_settings,
    run_gateway_on_socket,
    run_worker,
    say_nothing,
    says,
    talk_on,
)
from tests.factories_images import data_url
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
AUDIO = "data:audio/wav;base64,UklGRiQAAABXQVZFZm10IA=="


@dataclass(frozen=True)
class Calling:
    """How tools are offered and called in one API.

    `calls_of` returns IDs, names and arguments of the calls in the bodies or events of one answer.
    """

    tools: Json
    must: Json
    one: Json
    calls_of: Callable[[list[Json]], list[tuple[str, str, Json]]]
    #: Request fields that follow a call with this ID; its result is a text and an image.
    after: Callable[[str], Json]
    reason: tuple[str, str]


def openai_error(answer: Json) -> tuple[str, str | None]:
    return answer["error"]["code"], answer["error"]["param"]


@dataclass(frozen=True)
class Dialect:
    """How the suite uses one API.

    `text_of` returns the text of a complete answer or of one event of a stream.
    """

    body: Json
    #: Further optional fields.
    extra: Json = field(default_factory=dict, kw_only=True)
    text_of: Callable[[Json], str]
    error_of: Callable[[Json], tuple[str, str | None]] = openai_error
    #: A field of the body, and a value of a wrong type.
    wrong: tuple[str, Any] = ("temperature", "warm")
    end: str = ""
    stream_type: str = "text/event-stream"
    #: Fields that make another request.
    other: Json = field(default_factory=lambda: {"user": "somebody else"})
    calling: Calling | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.end)


def embedded(answer: Json) -> str:
    return TOLD if answer["data"][0]["embedding"] == NUMBERS else ""


def reranked(answer: Json) -> str:
    scores = [result["relevance_score"] for result in answer["results"]]
    return TOLD if scores == sorted(NUMBERS, reverse=True) else ""


def scored(answer: Json) -> str:
    return TOLD if [pair["score"] for pair in answer["data"]] == NUMBERS else ""


def chat_text(answer: Json) -> str:
    choices = answer["choices"]
    return "".join(
        c.get("message", c.get("delta")).get("content", "") for c in choices if c["index"] == 0
    )


def completion_text(answer: Json) -> str:
    return "".join(choice["text"] for choice in answer["choices"] if choice["index"] == 0)


def tokenized(answer: Json) -> str:
    return TOLD if answer["tokens"] == TOKEN_IDS else ""


def response_text(answer: Json) -> str:
    items = answer.get("output", ())
    whole = "".join(part["text"] for item in items for part in item.get("content", ()))
    return answer["delta"] if answer.get("type") == "response.output_text.delta" else whole


def response_error(answer: Json) -> tuple[str, str | None]:
    """Returns code and param of an error body, or of the last event of a stream."""
    told = answer.get("error", answer)
    return told["code"], told.get("param")


def message_text(answer: Json) -> str:
    if answer["type"] == "content_block_delta":
        return answer["delta"].get("text", "")
    return "".join(block.get("text", "") for block in answer.get("content", ()))


def counted(answer: Json) -> str:
    return TOLD if answer["input_tokens"] == 2 else ""


def ollama_error(answer: Json) -> tuple[str, str | None]:
    assert isinstance(answer["error"], str)
    return answer["code"], answer["param"]


def task_text(answer: Json) -> str:
    return "".join(answer.get("output") or ()) + answer.get("item", "")


def transcript(answer: Json) -> str:
    return answer.get("delta", "") if "type" in answer else answer["text"]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"name": "look", "description": "Look.", "parameters": CITY}
ANSWER_TEXT = "rain"


def chat_calls(answers: list[Json]) -> list[tuple[str, str, Json]]:
    found: dict[int, list[str]] = {}
    for answer in answers:
        for choice in answer["choices"]:
            told = choice.get("message", choice.get("delta")).get("tool_calls") or ()
            for place, call in enumerate(told):
                parts = found.setdefault(call.get("index", place), ["", "", ""])
                parts[0] += call.get("id", "")
                parts[1] += call["function"].get("name", "")
                parts[2] += call["function"]["arguments"]
    return [(id_, name, json.loads(text)) for id_, name, text in found.values()]


def response_calls(answers: list[Json]) -> list[tuple[str, str, Json]]:
    whole = answers[-1].get("response", answers[-1])
    deltas: dict[str, str] = {}
    for event in answers:
        if event.get("type") == "response.function_call_arguments.delta":
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    items = [item for item in whole["output"] if item["type"] == "function_call"]
    assert [item["arguments"] for item in items] == list(deltas.values()) or len(answers) == 1
    return [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in items]


def message_calls(answers: list[Json]) -> list[tuple[str, str, Json]]:
    if answers[0]["type"] == "message":
        blocks = [block for block in answers[0]["content"] if block["type"] == "tool_use"]
        return [(block["id"], block["name"], block["input"]) for block in blocks]
    found: dict[int, list[str]] = {}
    for event in answers:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            if block["type"] == "tool_use":
                assert block["input"] == {}
                found[event["index"]] = [block["id"], block["name"], ""]
        elif event["type"] == "content_block_delta":
            found.get(event["index"], [""])[-1] += event["delta"].get("partial_json", "")
    return [(id_, name, json.loads(text)) for id_, name, text in found.values()]


def ollama_calls(answers: list[Json]) -> list[tuple[str, str, Json]]:
    calls = [call for line in answers for call in line["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def png() -> str:
    return data_url().partition(",")[2]


def chat_result(call_id: str) -> Json:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": data_url()}}
    parts = [{"type": "text", "text": ANSWER_TEXT}, image]
    return {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": parts},
        ]
    }


def response_result(call_id: str) -> Json:
    image = {"type": "input_image", "image_url": data_url()}
    output = [{"type": "input_text", "text": ANSWER_TEXT}, image]
    call = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": call_id, "output": output}
    return {"input": [{"role": "user", "content": "hello"}, call, result]}


def message_result(call_id: str) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": png()}
    content = [{"type": "text", "text": ANSWER_TEXT}, {"type": "image", "source": source}]
    call = {"type": "tool_use", "id": call_id, "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    }


def ollama_result(call_id: str) -> Json:
    call = {"id": call_id, "function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "tool_name": "look", "content": ANSWER_TEXT, "images": [png()]}
    return {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            result,
        ]
    }


CHAT_CALLING = Calling(
    tools={"tools": [{"type": "function", "function": NAMED}]},
    must={"tool_choice": "required"},
    one={"parallel_tool_calls": False},
    calls_of=chat_calls,
    after=chat_result,
    reason=("finish_reason", "tool_calls"),
)
RESPONSE_CALLING = Calling(
    tools={"tools": [{"type": "function", **NAMED}]},
    must={"tool_choice": {"type": "function", "name": "look"}},
    one={"parallel_tool_calls": False},
    calls_of=response_calls,
    after=response_result,
    reason=("status", "completed"),
)
MESSAGE_CALLING = Calling(
    tools={"tools": [{"name": "look", "description": "Look.", "input_schema": CITY}]},
    must={"tool_choice": {"type": "any"}},
    one={"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    calls_of=message_calls,
    after=message_result,
    reason=("stop_reason", "tool_use"),
)
OLLAMA_CALLING = Calling(
    tools=CHAT_CALLING.tools,
    must={},
    one={},
    calls_of=ollama_calls,
    after=ollama_result,
    reason=("done_reason", "stop"),
)
DIALECTS = {
    "/v1/chat/completions": Dialect(
        body={"messages": [{"role": "user", "content": "hello"}]},
        text_of=chat_text,
        end="[DONE]",
        calling=CHAT_CALLING,
    ),
    "/v1/completions": Dialect(body={"prompt": "hello"}, text_of=completion_text, end="[DONE]"),
    "/tokenize": Dialect(body={"prompt": "hello"}, text_of=tokenized, wrong=("prompt", 5)),
    "/detokenize": Dialect(
        body={"tokens": TOKEN_IDS}, text_of=lambda answer: answer["prompt"], wrong=("tokens", "you")
    ),
    "/v1/responses": Dialect(
        body={"input": "hello"},
        text_of=response_text,
        error_of=response_error,
        end="[DONE]",
        calling=RESPONSE_CALLING,
    ),
    "/v1/responses/input_tokens": Dialect(
        body={"input": "hello"}, text_of=counted, wrong=("input", 5)
    ),
    "/v1/messages": Dialect(
        body={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
        text_of=message_text,
        end='{"type":"message_stop"}',
        other={"metadata": {"user_id": "somebody else"}},
        calling=MESSAGE_CALLING,
    ),
    "/v1/messages/count_tokens": Dialect(
        body={"messages": [{"role": "user", "content": "hello"}]},
        text_of=counted,
        wrong=("messages", 5),
        other={"system": "another"},
    ),
    "/api/chat": Dialect(
        body={"messages": [{"role": "user", "content": "hello"}]},
        extra={"stream": False},
        text_of=lambda answer: answer["message"]["content"],
        error_of=ollama_error,
        wrong=("messages", 5),
        end='"done":true',
        stream_type="application/x-ndjson",
        calling=OLLAMA_CALLING,
    ),
    "/api/generate": Dialect(
        body={},
        extra={"prompt": "hello", "stream": False},
        text_of=lambda answer: answer["response"],
        error_of=ollama_error,
        wrong=("prompt", 5),
        end='"done":true',
        stream_type="application/x-ndjson",
    ),
    "/api/embed": Dialect(
        body={"input": "hello"},
        text_of=lambda answer: TOLD if answer["embeddings"] == [NUMBERS] else "",
        error_of=ollama_error,
        wrong=("input", 5),
    ),
    "/api/embeddings": Dialect(
        body={"prompt": "hello"},
        text_of=lambda answer: TOLD if answer == {"embedding": NUMBERS} else "",
        error_of=ollama_error,
        wrong=("prompt", 5),
    ),
    "/v1/embeddings": Dialect(body={"input": "hello"}, text_of=embedded, wrong=("input", 5)),
    "/v1/rerank": Dialect(
        body={"query": "hello", "documents": ["you", "me"]},
        text_of=reranked,
        wrong=("documents", "you"),
    ),
    "/v1/score": Dialect(
        body={"text_1": "hello", "text_2": ["you", "me"]}, text_of=scored, wrong=("text_2", 5)
    ),
    "/v1/applications/{name}/run": Dialect(
        body={"input": "hello"}, text_of=task_text, wrong=("stream", "at once"), end="[DONE]"
    ),
    "/v1/audio/transcriptions": Dialect(
        body={"file": AUDIO}, text_of=transcript, end='"transcript.text.done"'
    ),
    "/v1/audio/translations": Dialect(body={"file": AUDIO}, text_of=transcript),
    "/v1/echo": Dialect(
        body={"prompt": "hello"},
        text_of=lambda answer: answer["text"],
        error_of=lambda answer: (answer["code"], answer["field"]),
        wrong=("prompt", 5),
        end='"is_last":true}',
    ),
}
ALL = (*SURFACES, Echo)
TASK_OF: dict[str, str] = {create.path: create.task for create in ALL}  # type: ignore[attr-defined]
CALLING = [path for path, dialect in DIALECTS.items() if dialect.calling]
STREAMED = [path for path, dialect in DIALECTS.items() if dialect.is_streamed]
NUMBERED = [path for path in STREAMED if DIALECTS[path].stream_type == "text/event-stream"]
TASKS = ("generate", "embed", "rerank", "tokenize", "run")
only_calling = pytest.mark.parametrize("path", CALLING)
only_streamed = pytest.mark.parametrize("path", STREAMED)
only_numbered = pytest.mark.parametrize("path", NUMBERED)


async def test_every_registered_surface_is_in_the_suite():
    assert sorted(TASK_OF) == sorted(DIALECTS)


@dataclass
class Speaker:
    """A client of one surface."""

    client: httpx.AsyncClient
    services: Services
    path: str
    dialect: Dialect

    def url(self, model: str = MODEL) -> str:
        return self.path.replace("{name}", model)

    @property
    def model_field(self) -> str:
        """The name of the model in errors, which is `name` if the path contains it."""
        return "name" if "{name}" in self.path else "model"

    def body(self, model: str = MODEL, **changes: Any) -> Json:
        named = {"model": model} if self.model_field == "model" else {}
        return {**named, **self.dialect.body, **self.dialect.extra, **changes}

    async def ask(
        self, headers: dict[str, str] | None = None, model: str = MODEL, **changes: Any
    ) -> httpx.Response:
        body = self.body(model, **changes)
        return await self.client.post(self.url(model), json=body, headers=headers)

    async def numbers(self) -> dict[str, float]:
        lines = (await self.client.get("/metrics")).text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def error_of(self, response: httpx.Response) -> tuple[str, str | None]:
        assert response.headers["content-type"] == "application/json"
        return self.dialect.error_of(response.json())

    def events(self, text: str) -> list[Json]:
        """Returns the JSON of a stream's events."""
        if self.dialect.stream_type != "text/event-stream":
            return [json.loads(line) for line in text.splitlines()]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if "data: " in line]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def text_of_stream(self, text: str) -> str:
        assert self.dialect.end in text.rstrip().splitlines()[-1]
        return "".join(map(self.dialect.text_of, self.events(text)))


@pytest.fixture
def changes() -> dict[str, Json]:
    return {}


@pytest.fixture
def can_call() -> bool:
    return True


@dataclass
class Fleet:
    """A gateway and a worker for all tests that need the same settings."""

    prefix: str
    gateway: RunningGateway
    worker: ScriptedWorker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets(redis_server):
    """Returns a function that finds or starts the fleet with these settings and model capabilities."""
    async with AsyncExitStack() as stack:
        fleets: dict[str, Fleet] = {}

        async def find(changes: dict[str, Json], can_call: bool) -> Fleet:
            key = json.dumps([changes, can_call])
            if key not in fleets or fleets[key].worker.has_ended:
                prefix = f"surface{uuid4().hex[:8]}"
                card = replace(CARD, supports_audio=True, tasks=TASKS, supports_grammars=can_call)
                settings = make_settings(redis_server, prefix, **changes)
                worker = await stack.enter_async_context(run_worker(redis_server, prefix, card))
                running = run_gateway_on_socket(settings, surfaces=ALL)
                fleets[key] = Fleet(prefix, await stack.enter_async_context(running), worker)
            return fleets[key]

        yield find


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(fleets, changes, can_call):
    fleet = await fleets(changes, can_call)
    fleet.worker.script = answer_any
    yield fleet
    await fleet.worker.rest()


@pytest.fixture
def worker(fleet) -> ScriptedWorker:
    return fleet.worker


@pytest.fixture(params=TASK_OF)
def path(request) -> str:
    return request.param


@pytest.fixture
def speaker(fleet, path) -> Speaker:
    gateway = fleet.gateway
    return Speaker(gateway.client, gateway.services, path, DIALECTS[path])


# Refusals


async def test_a_body_that_is_not_a_json_object_is_a_400(speaker):
    headers = {"content-type": "application/json"}
    for body in (b"", b"{", b"\xff", b"[1]", b"null"):
        response = await speaker.client.post(speaker.url(), content=body, headers=headers)
        assert response.status_code == 400, body
        assert speaker.error_of(response)[0] in ("invalid_json", "invalid_value")


async def test_the_error_names_a_missing_or_wrong_field(speaker):
    name, value = speaker.dialect.wrong
    response = await speaker.ask(**{name: value})
    assert response.status_code == 400
    assert speaker.error_of(response) == ("invalid_value", name)
    for name in speaker.body().keys() - speaker.dialect.extra.keys():
        body = {key: value for key, value in speaker.body().items() if key != name}
        response = await speaker.client.post(speaker.url(), json=body)
        assert response.status_code == 400
        assert speaker.error_of(response) == ("missing_field", name)


async def test_an_unknown_field_is_ignored_and_listed(speaker):
    response = await speaker.ask(colour="blue", shade=None)
    assert response.status_code == 200, response.text
    assert response.headers["x-vlm-ignored"] == "colour"
    assert "x-vlm-ignored" not in (await speaker.ask()).headers


@pytest.mark.parametrize("changes", [{"gateway": {"unknown_fields": "refuse"}}])
async def test_an_unknown_field_is_refused_by_name_if_configured(speaker):
    response = await speaker.ask(colour="blue")
    assert response.status_code == 400
    assert speaker.error_of(response) == ("unsupported_parameter", "colour")


async def test_unsupported_fields_are_refused_unless_they_are_no_ops(speaker):
    for path, values in UNSUPPORTED.get(speaker.path, {}).items():
        for value in (*values, None, {"x": 1}):
            is_no_op = value in (*values, None)
            fields: Any = value
            for name in reversed(path.split(".")[1:]):
                fields = {name: fields}
            name = path.partition(".")[0]
            if name == "messages":
                fields = [{"role": "user", "content": "x", **fields}]
            response = await speaker.ask(**{name: fields})
            assert response.status_code == (200 if is_no_op else 400), (path, value, response.text)
            if not is_no_op:
                code, param = speaker.error_of(response)
                assert code == "unsupported_parameter"
                assert param.replace(".[0]", "") == path


#: Media types that a page can send to another origin without a preflight; the last request has no type.
SIMPLE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")


async def test_pages_cannot_send_a_body_without_a_preflight(speaker, worker):
    body = json.dumps(speaker.body())
    for media_type in SIMPLE_TYPES:
        for header in ({"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            headers = {"content-type": media_type, **header}
            response = await speaker.client.post(speaker.url(), content=body, headers=headers)
            assert response.status_code == 403, headers
            assert speaker.error_of(response)[0] == "origin_not_allowed"
    assert worker.requests == []


async def test_json_needs_no_media_type(speaker):
    body = json.dumps(speaker.body())
    for media_type in SIMPLE_TYPES:
        headers = {"content-type": media_type} if media_type else {}
        response = await speaker.client.post(speaker.url(), content=body, headers=headers)
        assert response.status_code == 200, response.text


async def test_the_error_of_an_unknown_or_unfit_model_lists_the_others(
    speaker, fleet, redis_server
):
    others = tuple(task for task in TASKS if task != TASK_OF[speaker.path])
    card = replace(CARD, name="of-another-kind", tasks=others)
    async with run_worker(redis_server, fleet.prefix, card) as other:
        await speaker.services.models.refresh()
        unknown = await speaker.ask(model="nobody")
        wrong = await speaker.ask(model="of-another-kind")
    assert unknown.status_code == 404
    assert speaker.error_of(unknown) == ("model_not_found", speaker.model_field)
    assert MODEL in unknown.text
    assert "of-another-kind" not in unknown.text
    assert wrong.status_code == 400
    assert speaker.error_of(wrong) == ("wrong_task", speaker.model_field)
    assert ", ".join(others) in wrong.text
    assert speaker.url(model="of-another-kind") in wrong.text  # the requested path
    assert other.requests == []


@pytest.mark.parametrize("path", ["/v1/echo"])
@pytest.mark.parametrize("changes", [{"limits": {"max_images": 2}}])
async def test_images_are_checked_for_every_surface(speaker, worker, fleet, redis_server):
    """The surface checks neither their number nor whether the model supports images; the gateway does."""
    card = replace(CARD, name="blind", supports_images=False)
    async with run_worker(redis_server, fleet.prefix, card) as blind:
        blind.script = answer_any
        await speaker.services.models.refresh()
        for model, most, code in ((MODEL, 2, "too_many_images"), ("blind", 0, "unsupported_image")):
            images = [data_url()] * most
            assert (await speaker.ask(model=model, images=images)).status_code == 200
            refused = await speaker.ask(model=model, images=[*images, data_url()])
            assert refused.status_code == 400
            assert speaker.error_of(refused) == (code, f"images.[{most}]")
    assert (len(worker.requests), len(blind.requests)) == (1, 1)


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ["sk-right"]}}])
async def test_a_wrong_key_is_a_401_in_the_format_of_the_api(speaker):
    response = await speaker.ask(headers={"authorization": "Bearer sk-wrong"})
    assert response.status_code == 401
    assert speaker.error_of(response)[0] == "invalid_api_key"
    right = await speaker.ask(headers={"authorization": "Bearer sk-right"})
    assert right.status_code == 200


async def test_only_post_is_supported(speaker):
    response = await speaker.client.get(speaker.url())
    assert response.status_code in (404, 405)  # 404: an object of another API
    assert response.status_code == 404 or "send POST" in response.text


# Responses


async def test_an_answer_is_the_same_whole_and_streamed(speaker):
    answers = {"application/json": await speaker.ask()}
    assert speaker.dialect.text_of(answers["application/json"].json()) == TOLD
    if speaker.dialect.is_streamed:
        answers[speaker.dialect.stream_type] = streamed = await speaker.ask(stream=True)
        assert streamed.headers["cache-control"] == "no-cache"
        assert speaker.text_of_stream(streamed.text) == TOLD
    for media_type, answer in answers.items():
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(media_type)
        assert len(answer.headers.get_list("x-request-id")) == 1
        assert answer.headers["server-timing"].startswith("ingest;dur=")


async def test_an_answer_is_counted_once_and_logged_in_numbers_only(speaker, worker):
    before = await speaker.numbers()
    for more in ({}, {"stream": True} if speaker.dialect.is_streamed else {}):
        assert (answer := await speaker.ask(**more)).status_code == 200, answer.text
    after = await speaker.numbers()
    for name in ('vlm_requests_total{model="tiny",outcome="ok"}',
                 'vlm_request_duration_seconds_count{model="tiny"}'):  # fmt: skip
        assert after[name] - before.get(name, 0) == 2
    assert after["vlm_open_requests"] == 0


@asynccontextmanager
async def begun(speaker: Speaker, **headers: str):
    """Opens a stream, and closes it at the end of the block."""
    async with speaker.client.stream(
        "POST", speaker.url(), json=speaker.body(stream=True), headers=headers
    ) as response:
        assert response.status_code == 200
        yield response


@only_streamed
async def test_closing_a_stream_cancels_its_call(speaker, worker):
    worker.script = talk_on
    async with begun(speaker) as response:
        await anext(response.aiter_bytes())
    await asyncio.wait_for(worker.cancelled.wait(), 10)


async def test_closing_a_request_without_a_stream_cancels_its_call(speaker, worker):
    worker.script = say_nothing
    waiting = asyncio.create_task(speaker.ask())
    await until(lambda: worker.requests)
    waiting.cancel()
    await asyncio.wait_for(worker.cancelled.wait(), 10)


@pytest.mark.parametrize("changes", [{"gateway": {"request_timeout_s": 0.1}}])
async def test_the_deadline_ends_a_call(speaker, worker):
    worker.script = say_nothing
    whole = await speaker.ask()
    assert whole.status_code == 504
    assert speaker.error_of(whole)[0] == "deadline_exceeded"
    if not speaker.dialect.is_streamed:
        return
    streamed = await speaker.ask(stream=True)
    *_, error = speaker.events(streamed.text)
    assert speaker.dialect.error_of(error)[0] == "deadline_exceeded"


async def test_a_failure_before_the_first_event_has_its_status(speaker, worker):
    worker.script = methodcaller("fail", ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    for more in ({}, {"stream": True} if speaker.dialect.is_streamed else {}):
        response = await speaker.ask(**more)
        assert response.status_code == 400
        assert speaker.error_of(response)[0] == "context_length_exceeded"


@only_streamed
async def test_a_failure_after_the_first_token_is_the_streams_last_event(speaker, worker):
    """Tokens that arrive together with the failure are sent too."""
    go_on = asyncio.Event()

    async def fail(answer: Answer) -> None:
        await answer.start()
        await go_on.wait()
        told = answer.deltas(in_words(answer, "half"))
        name = (answer.request.id, answer.claim.attempt)
        await answer.publish(*told, Failed(*name, ErrorCode.ENGINE_FAILURE, "It failed."))

    worker.script = fail
    async with begun(speaker) as response:
        assert response.status_code == 200
        go_on.set()
        await response.aread()
    *told, error = speaker.events(response.text)
    assert "".join(map(speaker.dialect.text_of, told)) == "half"
    assert speaker.dialect.error_of(error)[0] == "engine_failure"
    assert speaker.dialect.end not in response.text


@only_numbered
@pytest.mark.parametrize("changes", [{"gateway": {"headers_after_s": 0.1, "keep_alive_s": 0.05}}])
async def test_a_waiting_stream_is_kept_alive(speaker, worker, changes):
    go_on = asyncio.Event()

    async def script(answer: Answer) -> None:
        await go_on.wait()
        await answer_any(answer)

    worker.script = script
    text = ""
    async with begun(speaker) as response:
        async for piece in response.aiter_text():
            text += piece
            if text.count(": keep-alive\n\n") >= 2:
                go_on.set()
    assert speaker.text_of_stream(text) == TOLD


@only_numbered
async def test_a_resumable_stream_continues_after_the_last_event(speaker, worker):
    go_on = asyncio.Event()
    worker.script = says("you", begins="Hello ", after=go_on)
    text = ""
    async with begun(speaker, **{"x-vlm-resumable": "true"}) as response:
        where = response.headers["x-vlm-stream"]
        async for piece in response.aiter_text():
            text += piece
            if "Hello" in text and text.endswith("\n\n"):
                break
    last_id = [line for line in text.splitlines() if line.startswith("id: ")][-1]
    go_on.set()
    rest = await speaker.client.get(where, headers={"last-event-id": last_id.removeprefix("id: ")})
    assert rest.status_code == 200
    assert len(rest.headers.get_list("x-request-id")) == 1
    told = "".join(map(speaker.dialect.text_of, speaker.events(text)))
    assert told + speaker.text_of_stream(rest.text) == TOLD


#: A value for each kind of type; other types are sequences.
VALUES: dict[type, Callable[[Any], Any]] = {
    inspect.Metadata: lambda kind: fill(kind.type),
    inspect.UnionType: lambda kind: fill([t for t in kind.types if t != inspect.NoneType()][-1]),
    inspect.StructType: lambda kind: kind.cls(**{f.name: fill(f.type) for f in kind.fields}),
    inspect.DictType: lambda kind: {"a": fill(kind.value_type)},
    inspect.LiteralType: lambda kind: kind.values[0],
    inspect.RawType: lambda _: msgspec.Raw(b'{"a":[null]}'),
    inspect.TupleType: lambda _: (),
    inspect.StrType: lambda _: "a",
    inspect.IntType: lambda _: 1,
    inspect.FloatType: lambda _: 1.5,
    inspect.BoolType: lambda _: True,
    inspect.NoneType: lambda _: None,
}


def fill(kind: inspect.Type) -> Any:
    """Returns a value of a type in which every optional field is set."""
    return VALUES.get(type(kind), lambda kind: [fill(kind.item_type)])(kind)


async def test_stored_options_of_a_resumable_answer_are_read_back(path):
    [surface] = [create for create in ALL if create.path == path]
    written = msgspec.json.encode(fill(inspect.type_info(surface.options)))
    read = msgspec.json.decode(written, type=surface.options)
    assert msgspec.json.encode(read) == written


# Tool calls


async def call_twice(answer: Answer) -> None:
    """Answers with a text and two calls; the arguments of the first call are in pieces."""
    await answer.start()
    pieces = [
        ("Well.", ()),
        ("", (CallPiece(0, "look"), CallPiece(0, "", '{"city"'))),
        ("", (CallPiece(0, "", ': "Oslo"}'),)),
        ("", (CallPiece(1, "look", "{}"),)),
    ]
    for text, calls in pieces:
        [event] = answer.deltas(text)
        await answer.publish(replace(event, calls=calls))
    await answer.finish(reason=FinishReason.TOOL_CALLS)


def told_reasons(answers: list[Json], name: str) -> set[str]:
    """Returns all values of a key, at any depth."""
    found = re.findall(f'"{name}": "([^"]*)"', json.dumps(answers[-2:]))
    return set(found)


@only_calling
async def test_calls_are_the_same_whole_and_streamed(speaker, worker):
    calling = speaker.dialect.calling
    worker.script = call_twice
    whole = [(await speaker.ask(**calling.tools)).json()]
    streamed = speaker.events((await speaker.ask(**calling.tools, stream=True)).text)
    for answers in (whole, streamed):
        (first, name, city), (second, other, nothing) = calling.calls_of(answers)
        assert (name, city, other, nothing) == ("look", {"city": "Oslo"}, "look", {})
        assert first != second
        said = "".join(map(speaker.dialect.text_of, answers))
        assert said == "Well."
        field_, value = calling.reason
        assert value in told_reasons(answers, field_)


@only_calling
async def test_tools_reach_the_worker_in_the_same_form(speaker, worker):
    calling = speaker.dialect.calling
    for wish in ({}, calling.must, calling.one):
        assert (await speaker.ask(**{**calling.tools, **wish})).status_code == 200
    function = Function("look", json.dumps(CITY), "Look.")
    tools = [request.task.tools for request in worker.requests]
    for each, wish in zip(tools, (None, calling.must, calling.one), strict=True):
        [told] = each.functions
        assert (told.name, told.description) == (function.name, function.description)
        assert json.loads(told.parameters) == CITY
        assert each.is_required is bool(wish and wish is calling.must)
        assert each.is_parallel is not (wish and wish is calling.one)


@only_calling
async def test_a_tool_result_can_contain_an_image(speaker, worker):
    calling = speaker.dialect.calling
    assert (await speaker.ask(**calling.tools, **calling.after("call_7"))).status_code == 200
    [request] = worker.requests
    user, called, result = request.task.messages
    assert user.role == "user"
    assert [(call.id, call.name, call.arguments) for call in called.tool_calls] == [
        ("call_7", "look", "{}")
    ]
    assert (result.role, result.tool_call_id) == ("tool", "call_7")
    assert sorted(type(part).__name__ for part in result.parts) == ["ImagePart", "TextPart"]
    assert len(request.task.images) == 1


@only_calling
@pytest.mark.parametrize("can_call", [False])
async def test_a_model_without_tool_support_answers_in_text(speaker, worker):
    calling = speaker.dialect.calling
    assert (await speaker.ask(**calling.tools)).status_code == 200
    assert worker.requests[0].task.tools is None
    if calling.must:
        refused = await speaker.ask(**calling.tools, **calling.must)
        assert refused.status_code == 400
        assert speaker.error_of(refused) == ("unsupported_parameter", "tool_choice")


def took_as_long(answer: Json) -> Json:
    """Returns an answer without its duration."""
    return {name: value for name, value in answer.items() if name != "total_duration"}


@pytest.mark.parametrize("path", ["/api/chat"])
@pytest.mark.parametrize("headers", [{"x-vlm-resumable": "true"}, {"idempotency-key": "lines"}])
async def test_a_resumable_stream_of_json_lines_has_no_other_lines(speaker, headers):
    first = await speaker.ask(headers, stream=True)
    where = first.headers["x-vlm-stream"]
    again = await speaker.client.get(where, headers={"last-event-id": "1"})
    assert speaker.text_of_stream(first.text) == TOLD
    assert speaker.text_of_stream(again.text) == TOLD.removeprefix("Hello ")
    # Words that arrive together share a line.
    told, rest = ([*map(took_as_long, speaker.events(each.text))] for each in (first, again))
    assert rest[-1] == told[-1]
    assert {frozenset(line) for line in rest} <= {frozenset(line) for line in told}


async def test_a_retry_with_the_same_key_gets_the_same_answer(speaker, worker):
    headers = {"idempotency-key": uuid4().hex}
    first, again = [await speaker.ask(headers) for _ in range(2)]
    assert took_as_long(first.json()) == took_as_long(again.json())
    assert len(worker.requests) == 1
    other = await speaker.ask(headers, **speaker.dialect.other)
    assert other.status_code == 422
    assert speaker.error_of(other)[0] == "idempotency_key_reused"
