"""`/v1/completions`, `/tokenize` and `/detokenize` as clients of OpenAI and vLLM use them."""

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from shared.protocol import (
    ErrorCode,
    Finished,
    FinishReason,
    Generate,
    OutputLogprob,
    PromptLogprob,
    Started,
    TextPart,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Tokens,
    Usage,
)
from tests.factories_gateway import CARD, CHAT, HELLO, MODEL, Answer
from tests.factories_images import data_url

USAGE = {"include_usage": True}
#: The required fields of a request to each API.
ASKED = {"/v1/completions": {"prompt": "Oh no yes"}, CHAT: {"messages": HELLO}}


async def say_prompt(answer: Answer) -> None:
    """Answers with the prompt, one token per word."""
    prompt = answer.request.task.prompt
    words = prompt.text.split() if isinstance(prompt, TextPart) else map(str, prompt.token_ids)
    await answer.start()
    await answer.finish(*(f" {word}" for word in words))


async def chunks_of(client: Any, *, stream: bool = False, **wish: Any) -> list[Any]:
    """Returns the chunks of a stream, or the complete response as the only chunk."""
    answer = await client.completions.create(**wish, stream=stream)
    return [chunk async for chunk in answer] if stream else [answer]


async def test_a_text_prompt_reaches_the_worker_unchanged(client, worker):
    answer = await client.completions.create(model=MODEL, prompt="<s>Once upon", echo=True)
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == ["<s>Once uponHello you"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 10
    [request] = worker.requests
    assert request.task.messages == ()
    assert request.task.prompt == TextPart("<s>Once upon")
    assert request.task.sampling.max_tokens == 16


async def test_each_prompt_has_n_choices_and_counts_once(client, worker):
    worker.script = say_prompt
    for prompt, texts in (
        (["a b", "c"], [" a b", " a b", " c", " c"]),
        ([7, 8], [" 7 8", " 7 8"]),
        ([[7], [8, 9]], [" 7", " 7", " 8 9", " 8 9"]),
    ):
        worker.answers.clear()
        answer = await client.completions.create(model=MODEL, prompt=prompt, n=2)
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))
        assert answer.usage.prompt_tokens == 7 * len(texts) // 2
        assert answer.usage.completion_tokens == sum(text.count(" ") for text in texts)
        assert len({request.task.sampling.seed for request in worker.requests}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_names_the_prompt_that_is_too_long(client, worker, stream):
    async def refuse_last(answer: Answer) -> None:
        if answer.choice < 2:
            return await say_prompt(answer)
        await asyncio.sleep(0.05)  # the other prompt is running
        await answer.fail(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "It is too long.", "prompt")

    worker.script = refuse_last
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=["a b", "c"], n=2, stream=stream)
    assert refused.value.param == "prompt.[1]"


async def test_a_stream_has_the_prompt_first_and_the_usage_last(client, worker):
    worker.script = say_prompt
    stream = await client.completions.create(
        model=MODEL, prompt=["a b", "c"], echo=True, stream=True, stream_options=USAGE
    )
    texts, reasons = ["", ""], {}
    async for chunk in stream:
        for choice in chunk.choices:
            assert chunk.usage is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == ["a b a b", "c c"]
    assert reasons == {0: "stop", 1: "stop"}
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (14, 3)


def prompt_entry(position: int, text: str) -> PromptLogprob:
    chosen = TokenLogprob.of(text.encode(), -0.5 if position else 0.0)
    if position == 0:
        return PromptLogprob(0, 40, chosen)
    rival = TokenLogprob.of(b" so", -0.25)
    return PromptLogprob(position, 40 + position, chosen, 2, ((7, rival),))


PROMPT_ENTRIES = [prompt_entry(place, text) for place, text in enumerate(("Oh", " no", " yes"))]


async def score_prompt(answer: Answer) -> None:
    """Publishes the prompt's logprobs in two ranges, the first twice, as after a takeover; then at most one token."""
    name = (answer.request.id, answer.claim.attempt)
    await answer.start()
    for entries in (PROMPT_ENTRIES[:2], PROMPT_ENTRIES[:2], PROMPT_ENTRIES[2:]):
        await answer.publish(Tokens(*name, 0, (), prompt_logprobs=tuple(entries)))
    if answer.request.task.sampling.max_tokens == 0:
        await answer.publish_raw(Finished(*name, FinishReason.LENGTH, Usage(3, 0)))
        return
    chosen = TokenLogprob.of(b" so", -0.5)
    [event] = answer.deltas(" so", logprobs=(OutputLogprob(chosen, (chosen,)),))
    await answer.publish(event, Finished(*name, FinishReason.LENGTH, Usage(3, 1)))


@pytest.mark.parametrize("num_asked", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_logprobs_except_for_its_first_token(
    client, worker, stream, num_asked
):
    worker.script = score_prompt
    prompt = [40, 41, 42] if stream else "Oh no yes"
    wish = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": num_asked}
    told = await chunks_of(client, **wish, logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in told]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    said = [" so"][:num_asked]
    text = "Oh no yes" + "".join(said)
    assert "".join(choice.text for choice in choices) == text
    assert [x for each in logprobs for x in each.tokens] == ["Oh", " no", " yes", *said]
    values = [x for each in logprobs for x in each.token_logprobs]
    assert values == [None, -0.5, -0.5, -0.5][: 3 + num_asked]
    tops = [x for each in logprobs for x in each.top_logprobs]
    assert tops[:2] == [None, {" so": -0.25, " no": -0.5}]
    assert [x for each in logprobs for x in each.text_offset] == [0, 2, 5, 9][: 3 + num_asked]
    assert choices[-1].finish_reason == "length"
    sampling = worker.requests[0].task.sampling
    assert (sampling.num_prompt_logprobs, sampling.max_tokens) == (1, num_asked)
    if stream and num_asked:  # token ids are also echoed without logprobs
        [told] = await chunks_of(client, **wish)
        assert (told.choices[0].text, told.choices[0].logprobs) == (text, None)


async def test_prompt_logprobs_have_the_format_of_vllm(gateway, worker):
    worker.script = score_prompt
    wish = {"model": MODEL, "prompt_logprobs": 2, "max_tokens": 1}
    rival = {"logprob": -0.25, "rank": 1, "decoded_token": " so"}
    own = {"logprob": -0.5, "rank": 2, "decoded_token": " no"}
    for path in ASKED:
        response = await gateway.client.post(path, json={**wish, **ASKED[path]})
        [choice] = response.json()["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == " so"
        holder = choice if path == "/v1/completions" else response.json()
        found = holder["prompt_logprobs"]
        assert (found[:2], len(found)) == ([None, {"41": own, "7": rival}], 3)
        assert worker.requests[-1].task.sampling.num_prompt_logprobs == 2


async def test_token_ids_of_prompt_and_output_are_returned_on_request(gateway, worker):
    async def script(answer: Answer) -> None:
        name = (answer.request.id, answer.claim.attempt)
        await answer.publish_raw(Started(*name, Usage(3, 0), (40, 41, 42)))
        await answer.publish(Tokens(*name, 0, (5, 6), "hi"), Tokens(*name, 2, (7,)))
        await answer.publish_raw(Finished(*name, FinishReason.STOP, Usage(3, 3)))

    worker.script = script
    for path, stream in itertools.product(ASKED, (False, True)):
        body = {"model": MODEL, "return_token_ids": True, "stream": stream, **ASKED[path]}
        response = await gateway.client.post(path, json=body)
        lines = response.text.split("\n\n") if stream else [response.text]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.endswith("}")]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [i for choice in choices for i in choice.get("token_ids", ())] == [5, 6, 7]
        holders = choices if path == "/v1/completions" else chunks
        found = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
        assert found == [[40, 41, 42]]
        assert worker.requests[-1].task.sampling.returns_prompt_ids


async def tokenize(answer: Answer) -> None:
    task, name = answer.request.task, (answer.request.id, answer.claim.attempt)
    strings = ("a", "b") if task.with_strings else ()
    await answer.publish(Tokenized(*name, 2, (3, 4), strings, "a b"), answer.finished())


@pytest.mark.parametrize("card", [replace(CARD, tasks=("generate", "tokenize"))])
async def test_prompts_and_conversations_are_tokenized_as_by_vllm(gateway, worker):
    worker.script = tokenize
    post = gateway.client.post
    prompt = {"model": MODEL, "prompt": "a b", "add_special_tokens": False}
    told = await post("/tokenize", json=prompt)
    assert told.json() == {"count": 2, "max_model_len": 512, "tokens": [3, 4], "token_strs": None}
    told = await post("/tokenize", json={**prompt, "return_token_strs": True})
    assert told.json()["token_strs"] == ["a", "b"]
    parts = [{"type": "image_url", "image_url": data_url()}, {"type": "text", "text": "what?"}]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
    assert (await post("/tokenize", json=chat)).json()["count"] == 2
    told = await post("/detokenize", json={"model": MODEL, "tokens": [3, 4]})
    assert told.json() == {"prompt": "a b"}
    first, _, third, fourth = [request.task for request in worker.requests]
    assert isinstance(first, Tokenize)
    assert isinstance(first.of, Generate)
    assert (first.of.prompt, first.of.add_special_tokens) == (TextPart("a b"), False)
    assert len(third.images) == 1
    assert fourth.token_ids == (3, 4)
    both = await post("/tokenize", json={**prompt, **chat})
    assert both.json()["error"]["param"] == "messages"
