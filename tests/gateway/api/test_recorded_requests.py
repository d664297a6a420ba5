"""Requests recorded from programs, reduced to fields that the gateway once refused."""

from base64 import b64encode

import pytest
from msgspec.structs import replace

from shared.protocol import TextPart, ToolCall
from tests.factories_gateway import CARD, CHAT, HELLO, MODEL, TEXT_BODIES
from tests.factories_images import data_url

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATE, OLLAMA, COMPLETIONS = "/api/generate", "/api/chat", "/v1/completions"
BASE64 = data_url().partition(",")[2]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def post(gateway, path, **body):
    response = await gateway.client.post(path, json={"model": MODEL, **body})
    return response, response.json()


def texts(worker, place: int = -1) -> list[tuple[str, str]]:
    return [
        (turn.role, "".join(part.text for part in turn.parts if isinstance(part, TextPart)))
        for turn in worker.requests[place].task.messages
    ]


@pytest.mark.parametrize("card", [CARD, replace(CARD, template_options=("reasoning_effort",))])
async def test_claude_code(gateway, worker, card):
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=1f;"
    reference = {"type": "tool_reference", "tool_name": "grep"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [reference]}
    use = {"type": "tool_use", "id": "t", "name": "find_tools", "input": {}}
    response, answer = await post(
        gateway,
        MESSAGES,
        max_tokens=9,
        system=[{"type": "text", "text": billing}, {"type": "text", "text": "Be short."}],
        messages=[
            *HELLO,
            {"role": "system", "content": "Mind the date."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high"},
    )
    assert response.status_code == 200, response.text
    # `citations` is a list because clients disagree about null.
    assert answer["content"] == [{"type": "text", "text": "Hello you", "citations": []}]
    ignored = set(response.headers["x-vlm-ignored"].split(", "))
    takes_effort = "reasoning_effort" in card.template_options
    assert "context_management" in ignored
    assert ({"thinking", "output_config.effort"} <= ignored) is not takes_effort
    assert texts(worker) == [
        ("system", "Be short."), ("user", "hello"), ("system", "Mind the date."),
        ("assistant", ""), ("tool", "grep"),
    ]  # fmt: skip
    effort = {"reasoning_effort": "high"} if takes_effort else {}
    assert worker.requests[-1].task.template_options == effort


async def test_anthropics_tool_runner_can_continue_without_a_thread(gateway):
    body = {"max_tokens": 9, "messages": HELLO, "thread": {"type": "create"}}
    response, told = await post(gateway, MESSAGES, **body)
    assert response.status_code == 400
    assert told["error"]["details"] == {
        "error_code": "thread_unsupported_request", "unsupported": ["thread"],
    }  # fmt: skip


async def test_text_documents_and_search_results_become_text(gateway, worker):
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain",
                                                      "data": "words"}},
        {"type": "document", "source": {"type": "content", "content": [
            {"type": "text", "text": "more"}]}},
        {"type": "search_result", "source": "u", "title": "S",
         "content": [{"type": "text", "text": "found"}]},
    ]  # fmt: skip
    skipped = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    turns = [*HELLO, {"role": "assistant", "content": [skipped, {"type": "text", "text": "so"}]}]
    turns.append({"role": "user", "content": blocks})
    response, _ = await post(gateway, MESSAGES, max_tokens=9, messages=turns)
    assert response.status_code == 200, response.text
    assert texts(worker)[1:] == [("assistant", "so"), ("user", "T\nwordsmoreS\nu\nfound")]


async def test_ollamas_load_and_unload_need_no_worker(gateway, worker):
    for path in ("/api/generate", "/api/chat"):
        for keep_alive in (None, 0, "0s", "5m", -1):
            body = {"messages": []} if path == "/api/chat" else {}
            if keep_alive is not None:
                body["keep_alive"] = keep_alive
            _, told = await post(gateway, path, **body)
            assert told["done"] is True
            assert told["done_reason"] == ("unload" if keep_alive in (0, "0s") else "load")
            assert told.get("response", told.get("message", {}).get("content")) == ""
            assert worker.requests == []
            response, _ = await post(gateway, path, model="nobody", **body)
            assert response.status_code == 404
    metrics = (await gateway.client.get("/metrics")).text
    assert 'vlm_request_duration_seconds_count{model="tiny"}' not in metrics


@pytest.mark.parametrize("card", [replace(CARD, template_options=("enable_thinking",))])
async def test_requests_of_candle_vllm(gateway, worker):
    for stop in ({"Single": "</s>"}, {"Multiple": ["</s>"]}, "</s>", ["</s>"]):
        for thinking in (True, {"type": "enabled"}):
            body = {"stop": stop, "penalty": 1.5, "repeat_last_n": 64, "thinking": thinking}
            response, _ = await post(gateway, CHAT, messages=HELLO, **body)
            assert response.status_code == 200, response.text
            assert response.headers["x-vlm-ignored"] == "repeat_last_n"
            task = worker.requests[-1].task
            assert (task.sampling.stop, task.sampling.repetition_penalty) == (("</s>",), 1.5)
            assert task.template_options == {"enable_thinking": True}


async def test_requests_of_open_webuis_settings_panel(gateway, worker):
    body = {"repeat_penalty": 1.5, "num_ctx": 4096, "keep_alive": "5m", "mirostat": 0}
    response, _ = await post(gateway, CHAT, messages=HELLO, **body)
    assert response.headers["x-vlm-ignored"] == "num_ctx, keep_alive"
    assert worker.requests[-1].task.sampling.repetition_penalty == 1.5


async def test_wrapped_base64_many_tools_and_empty_tool_results_are_accepted(gateway, worker):
    url = data_url()
    start = url.index(",") + 20
    wrapped = {"url": f"{url[:start]}\n{url[start:]}"}
    image = {"type": "image_url", "image_url": wrapped, "uuid": "7"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    tools = [{"type": "function", "function": {"name": f"{'n' * 120}_{i}"}} for i in range(300)]
    response, _ = await post(gateway, CHAT, messages=turns, tools=tools, stop=["x"] * 16)
    assert response.status_code == 200, response.text
    assert response.headers["x-vlm-ignored"] == "messages.content.uuid"


async def test_older_functions_files_and_thinking_parts_of_chat_are_understood(gateway, worker):
    async def task_of(*turns):
        response, _ = await post(gateway, CHAT, messages=[*HELLO, *turns])
        assert response.status_code == 200, response.text
        return worker.requests[-1].task

    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    task = await task_of(call, {"role": "function", "name": "f", "content": "42"})
    _, called, answered = task.messages
    assert called.tool_calls == (ToolCall("f", "f", "{}"),)
    assert (answered.role, answered.tool_call_id) == ("tool", "f")
    url = f"data:text/plain;base64,{b64encode('wörds'.encode()).decode()}"
    text = {"type": "file", "file": {"filename": "x", "file_data": url}}
    picture = {"type": "file", "file": {"file_data": data_url()}}
    task = await task_of({"role": "user", "content": [text, picture]})
    assert task.messages[1].parts[0] == TextPart("wörds")
    assert len(task.images) == 1
    said = [{"type": "thinking", "thinking": "hm", "closed": True}, {"type": "text", "text": "so"}]
    turn = (await task_of({"role": "assistant", "content": said}, *HELLO)).messages[1]
    assert (turn.reasoning, turn.parts) == ("hm", (TextPart("so"),))


BEGUN = [*HELLO, {"role": "assistant", "content": "There are"}]


async def test_a_last_message_of_the_assistant_is_continued(gateway, worker):
    for path, body, ending in (
        (CHAT, {"messages": BEGUN}, "message"),
        (CHAT, {"messages": BEGUN, "continue_final_message": True,
                                  "add_generation_prompt": False}, "message"),
        (CHAT, {"messages": BEGUN, "continue_final_message": False,
                                  "add_generation_prompt": True}, "answer"),
        (CHAT, {"messages": BEGUN, "add_generation_prompt": False}, "none"),
        (CHAT, {"messages": HELLO, "add_generation_prompt": False}, "none"),
        (CHAT, {"messages": HELLO, "add_generation_prompt": True}, "answer"),
        ("/v1/messages", {"messages": BEGUN, "max_tokens": 9}, "message"),
        ("/v1/responses", {"input": BEGUN}, "message"),
        ("/api/chat", {"messages": BEGUN, "stream": False}, "message"),
    ):  # fmt: skip
        response, _ = await post(gateway, path, **body)
        assert response.status_code == 200, response.text
        assert "x-vlm-ignored" not in response.headers
        assert worker.requests[-1].task.ending == ending


async def test_ocr_clients_ask_for_special_tokens_in_the_text(gateway, worker):
    for skips in (True, False, None):
        body = {"skip_special_tokens": skips, "vllm_xargs": {"no_repeat_ngram_size": 100}}
        response, _ = await post(gateway, CHAT, messages=HELLO, **body)
        assert response.status_code == 200, response.text
        assert worker.requests[-1].task.sampling.skip_special_tokens is (skips is not False)


async def test_the_error_of_an_unknown_ollama_path_is_a_string(gateway):
    response, told = await post(gateway, "/api/pull")
    assert response.status_code == 404
    assert isinstance(told["error"], str)
    assert (await gateway.client.get("/ping")).status_code == 200
    assert (await gateway.client.get("/version")).json()["version"]


async def test_codex_cli(gateway, worker):
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "a\nb"}
    shell = {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": []}}
    response, _ = await post(
        gateway,
        "/v1/responses",
        input=[
            {"type": "message", "role": "user", "content": "hello"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {**call, "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            shell,
            {"type": "local_shell_call_output", "id": "d", "output": "files"},
        ],
        client_metadata={"session": "7"},
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        store=False,
        truncation="auto",
    )
    assert response.status_code == 200, response.text
    assert {"client_metadata", "reasoning.effort", "truncation"} <= set(
        response.headers["x-vlm-ignored"].split(", ")
    )
    turns = worker.requests[-1].task.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant", "tool"]
    assert turns[1].tool_calls == (ToolCall("c", "apply_patch", '{"input":"a\\nb"}'),)
    assert turns[3].tool_calls[0].name == "local_shell"
    assert turns[4].tool_call_id == "d"  # the call is identified by `id`
    items = [*HELLO, {"type": "item_reference", "id": "msg_1"}]
    response, told = await post(gateway, "/v1/responses", input=items)
    assert (response.status_code, told["error"]["param"]) == (404, "input.[1].id")


async def test_thinking_is_ignored_for_a_model_without_reasoning(gateway):
    for path, body, name in (
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"enable_thinking": True}, "enable_thinking"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs.enable_thinking"),
        (CHAT, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ("/api/chat", {"think": True, "stream": False}, "think"),
        ("/api/chat", {"think": "low", "stream": False}, "think"),
    ):  # fmt: skip
        response, _ = await post(gateway, path, messages=HELLO, **body)
        assert response.status_code == 200, response.text
        assert response.headers["x-vlm-ignored"] == name


@pytest.mark.parametrize("card", [replace(CARD, template_options=("reasoning_effort",))])
async def test_ollama_run_and_stop(gateway, worker, card):
    """Requests as in Ollama's source: cmd/cmd.go and api/types.go."""
    empty = {"prompt": "", "suffix": "", "system": "", "template": ""}
    show = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert (await gateway.client.head("/")).status_code == 200
    response, _ = await post(gateway, "/api/show", **show)
    assert response.status_code == 200, response.text
    for changes, reason in (({"think": True}, "load"), ({"keep_alive": "0s"}, "unload")):
        response, told = await post(gateway, "/api/generate", **empty, **changes, options=None)
        assert (response.status_code, told["done_reason"]) == (200, reason)
    for think, effort in (("low", "low"), ("max", "high")):
        body = {"model": MODEL, **empty, "prompt": "hello", "options": {}, "think": think}
        response = await gateway.client.post("/api/generate", json=body)
        assert response.status_code == 200, response.text
        assert worker.requests[-1].task.template_options == {"reasoning_effort": effort}


# Single fields of bodies


def said(*turns):
    return {"messages": [*HELLO, *turns]}


def items(*more):
    return {"input": [{"role": "user", "content": "hello"}, *more]}


def parts(*more):
    return {"messages": [{"role": "user", "content": [*more]}]}


NO_OPS = {
    "stop_token_ids": None, "prompt_logprobs": None, "add_generation_prompt": True, "continue_final_message": False,
    "priority": 0, "cache_salt": None, "mm_processor_kwargs": {}, "return_token_ids": False, "min_tokens": 0,
    "include_stop_str_in_output": False, "kv_transfer_params": None, "ignore_eos": False, "allowed_token_ids": None,
    "media_io_kwargs": None, "vllm_xargs": {}, "request_id": "x", "separate_reasoning": True, "stream_reasoning": True,
    "add_special_tokens": False, "structured_outputs": None, "samplers": ["top_k"], "n_probs": 0, "lora_path": None,
}  # fmt: skip

TAKEN = [
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}),
    (RESPONSES, items({"type": "compaction", "id": "i", "encrypted_content": "x"})),
    (RESPONSES, items({"type": "compaction_summary", "encrypted_content": "x"})),
    (RESPONSES, items({"type": "ghost_snapshot", "ghost_commit": {}})),
    (RESPONSES, items({"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}},
                      {"type": "tool_search_output", "call_id": "c", "status": "completed",
                       "execution": "client", "tools": []})),
    (RESPONSES, items({"type": "image_generation_call", "id": "i", "status": "completed", "result": ""})),
    (RESPONSES, items({"type": "mcp_call", "id": "i", "name": "f", "server_label": "s", "arguments": "{}"})),
    (RESPONSES, items({"type": "reasoning", "id": "i", "summary": [], "encrypted_content": None})),
    (CHAT, {"repetition_penalty": 1.0, "presence_penalty": 1.0, "max_completion_tokens": 5}),
    (CHAT, {"reasoning": {"effort": "low"}}),
    (GENERATE, {"think": True}),
    # no-op values
    (CHAT, {"store": True, "service_tier": "auto", "parallel_tool_calls": False, "safety_identifier": "x",
            "prompt_cache_key": {"any": ["thing"]}, "verbosity": "low", "tools": [], "tool_choice": "none",
            "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1}),
    # defaults of other programs
    (CHAT, NO_OPS),
    (COMPLETIONS, NO_OPS),
    # content blocks and parts
    (CHAT, parts({"type": "image_url", "image_url": data_url(), "max_dynamic_patch": 6})),
    (CHAT, parts({"type": "image_url", "image_url": {"url": data_url(), "detail": "low", "max_dynamic_patch": 6}})),
    (OLLAMA, {"options": {"stop": list("abcde")}}),
    # images
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": [data_url()]}]}),
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": [BASE64[:60] + "\n" + BASE64[60:]]}]}),
    # Ollama
    (GENERATE, {"context": [1, 2], "options": {"seed": 1.0, "num_ctx": 2048}}),
    (GENERATE, {"logprobs": False}),
    # tools
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "name": "n" * 128}}]}),
    (CHAT, said({"role": "assistant", "content": "", "tool_calls": [
        {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"})),
    (MESSAGES, {"tools": [{"name": f"f{i}" * 20, "input_schema": {"type": "object"}} for i in range(129)]}),
]  # fmt: skip


async def test_each_recorded_body_is_answered(gateway):
    for path, change in TAKEN:
        body = {"model": MODEL, **TEXT_BODIES[path], **change}
        response = await gateway.client.post(path, json=body)
        assert response.status_code == 200, (path, change, response.text)


@pytest.mark.parametrize("card", [replace(CARD, supports_grammars=True)])
async def test_flat_tools_and_arguments_as_objects_are_understood(gateway, worker):
    called = {**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}
    refusal = {"type": "refusal", "refusal": "No."}
    turn = {"role": "assistant", "content": [refusal], "tool_calls": [called]}
    tools = [{"type": "function", **FUNCTION}]
    response, _ = await post(gateway, CHAT, tools=tools, **said(turn, *HELLO))
    assert response.status_code == 200, response.text
    task = worker.requests[-1].task
    assert [function.name for function in task.tools.functions] == ["f"]
    assert task.messages[1].tool_calls[0].arguments == '{"a":[1]}'
    assert task.messages[1].parts[0].text == "No."


SAMPLING = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 3, "stop_token_ids": [5],
    "allowed_token_ids": [5, 6], "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "logit_bias": {"5": 1.0}, "min_tokens": 2, "skip_special_tokens": False, "ignore_eos": True,
}  # fmt: skip


async def test_every_text_api_accepts_every_sampling_field(gateway, worker):
    expected = {
        **SAMPLING,
        "stop_token_ids": (5,),
        "allowed_token_ids": (5, 6),
        "logit_bias": {5: 1},
    }
    for path in TEXT_BODIES:
        fields = {"options": SAMPLING} if path.startswith("/api/") else SAMPLING
        response, _ = await post(gateway, path, **TEXT_BODIES[path], **fields)
        assert response.status_code == 200, response.text
        assert "x-vlm-ignored" not in response.headers
        sampling = worker.requests[-1].task.sampling
        assert {name: getattr(sampling, name) for name in SAMPLING} == expected
