"""Bodies of clients, field by field: each is answered, or refused in its API's own form."""

import msgspec
import pytest
from msgspec.structs import replace

from shared.protocol import OutputLogprob, TokenLogprob
from tests.factories_gateway import CARD, CHAT, HELLO, MODEL, TEXT_BODIES
from tests.factories_images import data_url

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATE, OLLAMA, COMPLETIONS = "/api/generate", "/api/chat", "/v1/completions"
BASE64 = data_url().partition(",")[2]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(*turns):
    return {"messages": [*HELLO, *turns]}


def items(*more):
    return {"input": [{"role": "user", "content": "hello"}, *more]}


def blocks(*more, role="user"):
    return {"messages": [*HELLO, {"role": role, "content": [*more]}, *HELLO]}


def parts(*more):
    return {"messages": [{"role": "user", "content": [*more]}]}


def image(**fields):
    return {"type": "image_url", "image_url": {"url": data_url()}, **fields}


NO_OPS = {
    "stop_token_ids": None, "prompt_logprobs": None, "use_beam_search": False,
    "spaces_between_special_tokens": True, "length_penalty": 1.0, "add_generation_prompt": True,
    "continue_final_message": False, "echo": False, "priority": 0, "cache_salt": None,
    "mm_processor_kwargs": {}, "return_token_ids": False, "include_stop_str_in_output": False,
    "chat_template": None, "kv_transfer_params": None, "truncate_prompt_tokens": None,
    "best_of": None, "logits_processors": None, "min_tokens": 0, "ignore_eos": False,
    "allowed_token_ids": None, "bad_words": [], "guided_json": None, "documents": None,
    "return_tokens_as_token_ids": None, "media_io_kwargs": None, "vllm_xargs": {}, "ebnf": None,
    "request_id": "x", "logits_processor": None, "separate_reasoning": True,
    "stream_reasoning": True, "regex": None, "no_repeat_ngram_size": 0, "add_special_tokens": False,
    "thinking_token_budget": None, "repetition_detection": None, "structured_outputs": None,
    "typical_p": 1, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1,
    "cache_prompt": True, "samplers": ["top_k"], "num_ctx": 4096, "keep_alive": "5m",
    "dynatemp_range": 0, "dry_multiplier": 0, "xtc_probability": 0, "n_probs": 0, "id_slot": -1,
    "timings_per_token": False, "grammar": None, "json_schema": None, "top_a": 0,
    "max_dynamic_patch": 6, "rid": None, "lora_path": None, "session_params": None,
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
    (CHAT, {"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 100352}}),
    (CHAT, {"repetition_penalty": 1.0, "presence_penalty": 1.0, "max_completion_tokens": 5}),
    (CHAT, {"reasoning": {"effort": "low"}}),
    (GENERATE, {"think": True}),
    # what changes nothing
    (CHAT, {"store": True, "service_tier": "auto", "parallel_tool_calls": False, "safety_identifier": "x",
            "prompt_cache_key": {"any": ["thing"]}, "verbosity": "low", "tools": [], "tool_choice": "none",
            "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1}),
    *((CHAT, {"tools": [TOOL], "tool_choice": choice}) for choice in ("auto", "none", None)),
    (CHAT, {"tool_choice": "auto", "functions": [], "function_call": "auto"}),
    # defaults of others
    (CHAT, NO_OPS),
    (COMPLETIONS, NO_OPS),
    # blocks and parts
    (CHAT, said({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO)),
    (CHAT, parts(image(min_pixels=784, max_pixels=100352))),
    (CHAT, parts(image(max_dynamic_patch=6))),
    (CHAT, parts({"type": "image_url", "image_url": {"url": data_url(), "detail": "low", "max_dynamic_patch": 6}})),
    (OLLAMA, {"options": {"stop": list("abcde")}}),
    # images
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": [data_url()]}]}),
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": [BASE64[:60] + "\n" + BASE64[60:]]}]}),
    # Ollama
    (GENERATE, {"context": [1, 2], "options": {"seed": 1.0, "num_ctx": 2048}}),
    (GENERATE, {"logprobs": False}),
    (GENERATE, {"logprobs": True, "top_logprobs": 2}),
    (OLLAMA, {"logprobs": True, "top_logprobs": 2}),
    (GENERATE, {"suffix": ""}),
    # tools
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "name": "n" * 128}}]}),
    (CHAT, {"tools": [TOOL] * 40}),
    (CHAT, said({"role": "assistant", "content": "", "tool_calls": [
        {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"})),
    (CHAT, {"tools": [{"type": "function", **FUNCTION}]}),
    (MESSAGES, {"tools": [{"name": f"f{i}" * 20, "input_schema": {"type": "object"}} for i in range(129)]}),
]  # fmt: skip


async def test_each_is_answered(gateway):
    for path, change in TAKEN:
        body = {"model": MODEL, **TEXT_BODIES[path], **change}
        response = await gateway.client.post(path, json=body)
        assert response.status_code == 200, (path, change, response.text)


@pytest.mark.parametrize("card", [replace(CARD, supports_grammars=True)])
async def test_flat_tools_and_arguments_as_objects_are_understood(gateway, worker):
    called = {**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}
    refusal = {"type": "refusal", "refusal": "No."}
    turn = {"role": "assistant", "content": [refusal], "tool_calls": [called]}
    change = {"tools": [{"type": "function", **FUNCTION}], "messages": [*HELLO, turn, *HELLO]}
    response = await gateway.client.post(CHAT, json={"model": MODEL, **change})
    assert response.status_code == 200, response.text
    task = worker.requests[-1].task
    assert [function.name for function in task.tools.functions] == ["f"]
    assert task.messages[1].tool_calls[0].arguments == '{"a":[1]}'
    assert task.messages[1].parts[0].text == "No."


async def test_the_output_of_a_local_shell_call_names_it_by_id(gateway, worker):
    call = {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec"}}
    output = {"type": "local_shell_call_output", "id": "c", "output": "ok"}
    response = await gateway.client.post(RESPONSES, json={"model": MODEL, **items(call, output)})
    assert response.status_code == 200, response.text
    assert worker.requests[-1].task.messages[-1].tool_call_id == "c"


@pytest.mark.parametrize("path", [OLLAMA, GENERATE])
@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_of_ollama(gateway, worker, path, stream):
    token = TokenLogprob.of(b"Hi", -0.5)

    async def answer(answer):
        entry = OutputLogprob(token, (token,))
        await answer.publish(
            answer.started(), *answer.deltas("Hi", logprobs=(entry,)), answer.finished()
        )

    worker.script = answer
    wish = {
        "model": MODEL,
        **TEXT_BODIES[path],
        "stream": stream,
        "logprobs": True,
        "top_logprobs": 1,
    }
    response = await gateway.client.post(path, json=wish)
    assert worker.requests[-1].task.sampling.num_logprobs == 1
    told = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    lines = [msgspec.json.decode(line) for line in response.text.splitlines()]
    [found] = [line["logprobs"] for line in lines if "logprobs" in line]
    assert found == [{**told, "top_logprobs": [told]}]
