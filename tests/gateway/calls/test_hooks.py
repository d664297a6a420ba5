"""Hooks: what they read and change in each API, refusals by hooks, and failures of hooks."""

import asyncio
import json
import logging
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.calls import hooks
from shared.protocol import Embed, OutputLogprob, TokenLogprob
from shared.settings import SettingsError
from tests.factories_gateway import CARD, CHAT, MODEL, TEXT_BODIES, answer_any, make_body, says
from tests.factories_images import data_url, image_part
from tests.factories_keys import code

EXAMPLES = Path(__file__).parents[3] / "examples" / "hooks"
MESSAGES = [{"role": "user", "content": "write to ann@example.com"}]


class Scripted:
    """A hook whose behavior the test defines."""

    def __init__(self):
        self.calls, self.answers = [], []
        self.on_call = self.on_answer = lambda call: None

    async def before(self, call):
        self.calls.append(call)
        await self.result(self.on_call(call))

    async def after(self, answer):
        self.answers.append(answer)
        await self.result(self.on_answer(answer))

    async def result(self, value):
        if asyncio.iscoroutine(value):
            await value


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def hook(monkeypatch):
    scripted = Scripted()
    monkeypatch.setattr(sys.modules[__name__], "scripted", scripted, raising=False)
    return scripted


@pytest.fixture
def card():
    return replace(CARD, tasks=("generate", "embed", "rerank", "tokenize", "run"))


@pytest.fixture
def options():
    return {}


@pytest.fixture
def changes(hook, options):
    return {"gateway": {"hooks": (f"{__name__}:scripted",), "hook_timeout_s": 0.2, **options}}


def upper(call):
    for message in call.messages:
        message.text = message.text.upper()


def set_all(text):
    def change(call):
        for message in call.messages:
            message.text = text

    return change


async def test_hooks_change_the_texts_of_prompts_on_every_api(gateway, worker, hook):
    worker.script, hook.on_call = answer_any, upper
    for path, body, roles in (
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "be"}, *MESSAGES], "n": 2}, ["system", "user"]),
        ("/v1/completions", {"prompt": ["one", "two"], "n": 2}, ["user", "user"]),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, ["user"]),
        ("/v1/responses", {"input": "hi"}, ["user"]),
        ("/api/chat", {"messages": MESSAGES, "stream": False}, ["user"]),
        ("/v1/embeddings", {"input": ["hi"]}, ["user"]),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}, ["user", "user"]),
    ):  # fmt: skip
        for of_the_last in (worker.answers, hook.calls, hook.answers):
            of_the_last.clear()
        answer = await gateway.client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        [call] = hook.calls
        assert ([message.role for message in call.messages], call.model) == (roles, MODEL)
        asked = [text for request in worker.requests for text in request.task.texts()]
        assert asked
        assert all(text == text.upper() for text in asked)
        generates = not path.endswith(("embeddings", "rerank"))
        assert len(hook.answers) == generates


async def test_hooks_see_reasoning_tool_arguments_and_the_number_of_images(gateway, worker, hook):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":"b"}'}}
    history = [
        {"role": "user", "content": [image_part(data_url()), {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    hook.on_call = upper
    answer = await gateway.chat(make_body(messages=history))
    assert answer.status_code == 200, answer.text
    [seen] = hook.calls
    assert seen.num_images == 1
    assert {(m.role, m.text) for m in seen.messages} == {
        ("user", "LOOK"), ("reasoning", "HM"), ("assistant", "OK"), ("call", '{"A":"B"}'), ("tool", "7"),
    }  # fmt: skip
    [request] = worker.requests
    assert len(request.task.images) == 1
    assert list(request.task.texts()) == ["LOOK", "HM", '{"A":"B"}', "OK", "7"]


async def test_hooks_change_the_text_of_complete_responses(gateway, hook):
    hook.on_answer = set_all("changed")
    for path, body in (*TEXT_BODIES.items(), (CHAT, {"messages": MESSAGES, "n": 2})):
        answer = await gateway.client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        n = body.get("n", 1)
        assert answer.text.count("changed") == n
        assert "Hello" not in answer.text
        assert [message.role for message in hook.answers[-1].messages] == ["assistant"] * n


async def test_a_changed_answer_has_no_logprobs_of_the_old_one(gateway, worker, hook):
    async def say(answer):
        entry = OutputLogprob(TokenLogprob.of(b"secret", -1.0))
        await answer.publish(*answer.deltas("secret", logprobs=(entry,)), answer.finished())

    worker.script = say
    body = make_body(logprobs=True, return_token_ids=True)
    assert '"token":"secret"' in (await gateway.chat(body)).text
    hook.on_answer = set_all("masked")
    answer = await gateway.chat(body)
    assert answer.json()["choices"][0]["message"]["content"] == "masked"
    assert "secret" not in answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1


async def test_hooks_see_a_complete_stream_and_can_end_it_with_an_error(gateway, hook):
    hook.on_answer = set_all("changed")
    text = await gateway.stream()
    assert "changed" not in text
    assert text.endswith("data: [DONE]\n\n")

    def refuse(answer):
        assert [message.text for message in answer.messages] == ["Hello you"]
        raise answer.refuse("No.", code="too_rude")

    hook.on_answer = refuse
    text = await gateway.stream()
    assert hook.answers[-1].is_streamed
    assert '"code":"too_rude"' in text
    assert "[DONE]" not in text


async def test_a_refusal_is_a_4xx_with_its_code_and_nothing_is_queued(gateway, worker, hook):
    def refuse(call):
        raise call.refuse("Not about that.", code="off_topic", status=403)

    hook.on_call = refuse
    assert code(await gateway.chat())[:2] == (403, "off_topic")
    assert not worker.requests
    hook.on_call, hook.on_answer = lambda _: None, lambda call: _raise(call.refuse("No."))
    assert code(await gateway.chat())[:2] == (400, "request_refused")


def _raise(error):
    raise error


FAILURES = (
    lambda call: (upper(call), 1 / 0),
    set_all(7),
    lambda call: asyncio.sleep(20),
    lambda call: _raise(call.refuse("x", status=500)),
)


@pytest.mark.parametrize("options", [{"hook_failure": "closed"}, {"hook_failure": "open"}])
async def test_a_failing_hook_refuses_the_request_or_is_skipped(
    gateway, worker, hook, options, caplog
):
    for hook.on_call in FAILURES:
        with caplog.at_level(logging.ERROR):
            answer = await gateway.chat()
        if options["hook_failure"] == "open":
            assert answer.status_code == 200, answer.text
            assert list(worker.requests[-1].task.texts()) == ["hello"]
        else:
            assert code(answer)[:2] == (503, "hook_failed")
            assert answer.headers["retry-after"]
            assert not worker.requests
    assert "hello" not in caplog.text.lower()
    metrics = (await gateway.client.get("/metrics")).text
    assert f'vlm_hook_failures_total{{hook="{__name__}:scripted"}} 4.0' in metrics


@pytest.fixture
async def moderation(monkeypatch):
    """A moderation server that flags the word `bad`; returns the texts that it received."""
    asked = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split()[0])
        texts = json.loads(await reader.readexactly(size))["input"]
        asked.append(texts)
        body = json.dumps({"results": [{"flagged": "bad" in text} for text in texts]})
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("MODERATION_URL", f"http://127.0.0.1:{port}/v1/moderations")
    yield asked
    server.close()


@pytest.mark.parametrize("options", [{"hooks": ("mask_email:MaskEmail", "moderation:Moderation")}])
async def test_the_examples_mask_addresses_and_refuse_what_a_moderation_server_flags(
    moderation, gateway, worker, options
):
    assert (await gateway.chat()).status_code == 200
    assert code(await gateway.chat(make_body("bad")))[:2] == (400, "content_refused")
    assert (await gateway.chat(make_body("a@b.de"))).status_code == 200
    assert [list(each.task.texts()) for each in worker.requests] == [["hello"], ["[email]"]]
    assert moderation == [["hello"], ["Hello you"], ["bad"], ["[email]"], ["Hello you"]]
    await gateway.client.post("/v1/embeddings", json={"model": MODEL, "input": [1, 2]})
    assert isinstance(worker.requests[-1].task, Embed)
    worker.script = says("so ", "bad")
    assert code(await gateway.chat())[:2] == (400, "content_refused")


class Nothing:
    pass


class NotAsync:
    def before(self, call):
        pass


@pytest.mark.parametrize(
    "name",
    ["nowhere:Hook", "mask_email:Absent", "absent", f"{__name__}:Nothing", f"{__name__}:NotAsync"],
)
def test_an_invalid_hook_is_refused_at_startup(name):
    with pytest.raises(SettingsError, match=f"VLM_GATEWAY__HOOKS: {name} "):
        hooks.load_hooks([name])


def test_a_hook_of_a_package_is_found_by_its_entry_point(monkeypatch):
    entry = EntryPoint("mask", "mask_email:MaskEmail", hooks.ENTRY_POINTS)
    found = EntryPoints([entry])
    monkeypatch.setattr(hooks, "entry_points", lambda **names: found.select(**names))
    assert type(hooks.load_hooks(["mask"])["mask"]).__name__ == "MaskEmail"
