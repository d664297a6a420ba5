"""Checks of all clients against a server, run by `make clients` in a separate environment.

    python checks.py URL MODEL IMAGE      prints JSON: {client: {feature: "yes" or what went wrong}}

It imports nothing of the project. Features that a client does not have are omitted.
"""

import atexit
import base64
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import instructor
import litellm
from anthropic import Anthropic
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from ollama import Client
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL, IMAGE = sys.argv[1:]
QUESTION = "What shape is at the top left?"
DATA = base64.b64encode(Path(IMAGE).read_bytes()).decode()
DATA_URL = f"data:image/png;base64,{DATA}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["star", "circle"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
PARTS = [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": QUESTION}]
CHAT = [{"role": "user", "content": PARTS}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ITEMS = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]
BLOCKS = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    {"type": "text", "text": QUESTION},
]
TURNS = [{"role": "user", "content": BLOCKS}]
Check = Callable[[], object]
FUNCTION = {"name": "look", "description": "Tell a shape.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


class Shape(BaseModel, extra="forbid"):
    """A shape."""

    kind: Literal["star", "circle"]


def right(text: object) -> None:
    """Checks that the answer contains the star of the image."""
    assert "star" in str(text), f"it said {str(text)[:60]!r}"


def right_call(name: str, arguments: dict[str, object]) -> None:
    """Checks the name of the function and its arguments."""
    assert name == "look", name
    assert set(arguments) == {"kind"}, arguments


def right_json(text: str) -> None:
    assert set(json.loads(text)) == {"kind"}, text[:60]


def openai_checks(url: str = URL) -> dict[str, Check]:

    client = OpenAI(base_url=f"{url}/v1", max_retries=0)
    ask = client.chat.completions.create
    respond = client.responses.create
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}

    def follow() -> None:
        first = respond(model=MODEL, input=ITEMS, temperature=0)
        right(first.output_text)
        wish = {"previous_response_id": first.id, "input": "What color is it?"}
        assert "red" in respond(model=MODEL, temperature=0, **wish).output_text

    def call() -> None:
        wish = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        message = ask(model=MODEL, messages=CHAT, **wish).choices[0].message
        [made] = message.tool_calls
        right_call(made.function.name, json.loads(made.function.arguments))
        result = {"role": "tool", "tool_call_id": made.id, "content": "Well."}
        ask(model=MODEL, messages=[*CHAT, message, result], tools=[TOOL])
        with client.chat.completions.stream(model=MODEL, messages=CHAT, **wish) as events:
            [again] = events.get_final_completion().choices[0].message.tool_calls
        right_call(again.function.name, json.loads(again.function.arguments))

    def respond_with_call() -> None:
        wish = {
            "tools": [{"type": "function", "strict": True, **FUNCTION}],
            "tool_choice": {"type": "function", "name": "look"},
            "parallel_tool_calls": False,
        }
        first = respond(model=MODEL, input=ITEMS, **wish)
        [made] = first.output
        right_call(made.name, json.loads(made.arguments))
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "Well."}
        respond(model=MODEL, input=[result], previous_response_id=first.id)
        with client.responses.stream(model=MODEL, input=ITEMS, **wish) as events:
            [again] = events.get_final_response().output
        right_call(again.name, json.loads(again.arguments))

    def parse() -> str:
        completion = client.chat.completions.parse(
            model=MODEL, messages=CHAT, response_format=Shape
        )
        return completion.choices[0].message.parsed.kind

    def stream() -> str:
        chunks = ask(model=MODEL, messages=CHAT, temperature=0, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def events() -> str:
        with client.responses.stream(model=MODEL, input=ITEMS, temperature=0) as stream:
            return stream.get_final_response().output_text

    return {
        "images": lambda: right(
            ask(model=MODEL, messages=CHAT, temperature=0).choices[0].message.content
        ),
        "stream": lambda: right(stream()),
        "JSON schema": lambda: right_json(
            ask(model=MODEL, messages=CHAT, response_format=FORM).choices[0].message.content
        ),
        "parse()": parse,
        "tools": call,
        "completions": lambda: client.completions.create(model=MODEL, prompt="a", max_tokens=3),
        "Responses": lambda: right(respond(model=MODEL, input=ITEMS, temperature=0).output_text),
        "Responses streamed": lambda: right(events()),
        "Responses with a schema": lambda: right_json(
            respond(model=MODEL, input=ITEMS, text=text).output_text
        ),
        "Responses with tools": respond_with_call,
        "previous_response_id": follow,
        "models": lambda: client.models.retrieve(MODEL),
    }


def anthropic_checks(url: str = URL) -> dict[str, Check]:

    client = Anthropic(base_url=url, max_retries=0)
    wish = {"model": MODEL, "max_tokens": 30, "messages": TURNS, "extra_body": {"temperature": 0}}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}

    def stream() -> str:
        with client.messages.stream(**wish) as events:
            return "".join(events.text_stream)

    def call() -> None:
        tool = {"name": "look", "description": "Tell a shape.", "input_schema": SCHEMA}
        more = {
            "tools": [tool],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 100,
        }
        first = client.messages.create(**{**wish, **more})
        [made] = first.content
        right_call(made.name, made.input)
        result = {"type": "tool_result", "tool_use_id": made.id, "content": BLOCKS}
        turns = [*TURNS, first.to_param(), {"role": "user", "content": [result]}]
        client.messages.create(**{**wish, "messages": turns, "tools": [tool]})
        with client.messages.stream(**{**wish, **more}) as events:
            [again] = events.get_final_message().content
        right_call(again.name, again.input)

    def follow() -> str:
        first = client.messages.create(**wish)
        turns = [*TURNS, first.to_param(), {"role": "user", "content": "What color is it?"}]
        return client.messages.create(**{**wish, "messages": turns}).content[0].text

    return {
        "images": lambda: right(client.messages.create(**wish).content[0].text),
        "stream": lambda: right(stream()),
        "multi-turn": lambda: follow().index("red") >= 0,
        "JSON schema": lambda: right_json(
            client.messages.create(**wish, output_config=form).content[0].text
        ),
        "tools": call,
        "token counts": lambda: client.messages.count_tokens(model=MODEL, messages=TURNS),
    }


def ollama_checks() -> dict[str, Check]:

    client = Client(host=URL)
    turns = [{"role": "user", "content": QUESTION, "images": [DATA]}]
    options = {"temperature": 0}

    def tools() -> None:
        said = client.chat(model=MODEL, messages=turns, options=options, tools=[TOOL])
        right(said.message.content)
        called = {"function": {"name": "look", "arguments": {"kind": "star"}}}
        history = [
            *turns,
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_name": "look", "content": "A star."},
        ]
        client.chat(model=MODEL, messages=history, options=options, tools=[TOOL])

    def stream() -> str:
        lines = client.chat(model=MODEL, messages=turns, options=options, stream=True)
        return "".join(line.message.content or "" for line in lines)

    return {
        "images": lambda: right(
            client.chat(model=MODEL, messages=turns, options=options).message.content
        ),
        "stream": lambda: right(stream()),
        "JSON schema": lambda: right_json(
            client.chat(model=MODEL, messages=turns, format=SCHEMA).message.content
        ),
        "tools": tools,
        "completions": lambda: right(
            client.generate(model=MODEL, prompt=QUESTION, images=[DATA], options=options).response
        ),
        "models": lambda: (client.list().models[0], client.show(MODEL).capabilities, client.ps()),
    }


def ollama_run_checks() -> dict[str, Check]:
    """The requests of `ollama run` and `ollama stop`, as in Ollama's source: cmd/cmd.go and api/types.go."""
    generate = {"model": MODEL, "prompt": "", "suffix": "", "system": "", "template": ""}

    def send(method: str, path: str, body: object = None) -> list[dict[str, object]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(URL + path, data, method=method)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [json.loads(line) for line in answer if method == "POST"]

    def show() -> None:
        send("HEAD", "/")
        body = {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None,
                "name": ""}  # fmt: skip
        [shown] = send("POST", "/api/show", body)
        assert {"completion", "vision"} <= {*shown["capabilities"]}

    def load() -> None:
        show()
        [told] = send("POST", "/api/generate", {**generate, "options": None})
        assert (told["done"], told["done_reason"]) == (True, "load")

    def ask() -> None:
        show()
        body = {**generate, "prompt": QUESTION, "images": [DATA], "options": {"temperature": 0}}
        lines = send("POST", "/api/generate", body)
        right("".join(line["response"] for line in lines))
        assert lines[-1]["eval_count"]

    def converse() -> None:
        turn = {"role": "user", "content": QUESTION, "images": [DATA]}
        body = {"model": MODEL, "messages": [turn], "options": {"temperature": 0}}
        lines = send("POST", "/api/chat", body)
        right("".join(line["message"]["content"] for line in lines))
        assert lines[-1]["done"]
        assert lines[-1]["eval_count"]

    def unload() -> None:
        show()
        [told] = send("POST", "/api/generate", {**generate, "keep_alive": "0s", "options": None})
        assert told["done_reason"] == "unload"

    return {"load": load, "images": ask, "conversation": converse, "unload": unload}


def litellm_checks() -> dict[str, Check]:

    litellm.suppress_debug_info = True
    wish = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "temperature": 0}

    def follow() -> str:
        first = litellm.completion(**wish, messages=CHAT).choices[0].message
        turns = [*CHAT, first.model_dump(), {"role": "user", "content": "What color is it?"}]
        return litellm.completion(**wish, messages=turns).choices[0].message.content

    def stream() -> str:
        chunks = litellm.completion(**wish, messages=CHAT, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def call() -> None:
        made = litellm.completion(
            **wish, messages=CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        )
        [told] = made.choices[0].message.tool_calls
        right_call(told.function.name, json.loads(told.function.arguments))
        turns = [*CHAT, made.choices[0].message.model_dump()]
        turns.append({"role": "tool", "tool_call_id": told.id, "content": "Well."})
        litellm.completion(**wish, messages=turns, tools=[TOOL])

    def claude() -> str:
        answer = litellm.completion(
            model=f"anthropic/{MODEL}", api_base=URL, messages=CHAT, temperature=0, max_tokens=30
        )
        return answer.choices[0].message.content

    return {
        "images": lambda: right(
            litellm.completion(**wish, messages=CHAT).choices[0].message.content
        ),
        "stream": lambda: right(stream()),
        "multi-turn": lambda: follow().index("red") >= 0,
        "JSON schema": lambda: right_json(
            litellm.completion(**wish, messages=CHAT, response_format=FORM)
            .choices[0]
            .message.content
        ),
        "tools": call,
        "Responses": lambda: right(litellm.responses(**wish, input=ITEMS).output_text),
        "as Anthropic": lambda: right(claude()),
    }


def proxy_checks() -> dict[str, Check]:
    """OpenAI's and Anthropic's clients through LiteLLM's proxy, and LiteLLM's other providers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bases = {"hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
    served = {MODEL: (f"openai/{MODEL}", f"{URL}/v1")}
    served |= {name: (f"{name}/{MODEL}", base) for name, base in bases.items()}
    config = {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": m, "api_base": b, "api_key": "none"}}
            for name, (m, b) in served.items()
        ]
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    atexit.register(process.kill)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                break
        except OSError:
            time.sleep(0.5)
    told = {f"openai: {name}": check for name, check in openai_checks(url).items()}
    told |= {f"anthropic: {name}": check for name, check in anthropic_checks(url).items()}
    ask = partial(
        OpenAI(base_url=f"{url}/v1", max_retries=0).chat.completions.create, messages=CHAT
    )

    def answer(name: str) -> None:
        right(ask(model=name, temperature=0, max_tokens=30).choices[0].message.content)

    def stream(name: str) -> None:
        chunks = ask(model=name, temperature=0, max_tokens=30, stream=True)
        right("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))

    for name in bases:
        told[f"provider {name}: images"] = partial(answer, name)
        told[f"provider {name}: stream"] = partial(stream, name)
    return told


def langchain_checks() -> dict[str, Check]:

    messages = [("human", PARTS)]
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", temperature=0)
    responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", temperature=0, use_responses_api=True)
    claude = ChatAnthropic(model=MODEL, base_url=URL, temperature=0, max_tokens=30, api_key="none")
    ollama = ChatOllama(model=MODEL, base_url=URL, temperature=0)
    structured = chat.with_structured_output(Shape, method="json_schema")

    def call(model: ChatOpenAI | ChatAnthropic, choice: str) -> None:
        [made] = model.bind_tools([TOOL], tool_choice=choice).invoke(messages).tool_calls[:1]
        right_call(made["name"], made["args"])

    calling = chat.with_structured_output(Shape, method="function_calling")
    # LangChain would split texts with OpenAI's tokenizer, whose token IDs are other words here.
    embeddings = OpenAIEmbeddings(
        model="shapes-clip", base_url=f"{URL}/v1", check_embedding_ctx_length=False
    )

    def embed() -> None:
        vectors = embeddings.embed_documents([f"text {number}" for number in range(300)])
        query = embeddings.embed_query("text 299")
        assert len(vectors) == 300
        assert max(abs(a - b) for a, b in zip(vectors[-1], query, strict=True)) < 1e-3

    return {
        "embeddings": embed,
        "images": lambda: right(chat.invoke(messages).content),
        "stream": lambda: right("".join(str(c.content) for c in chat.stream(messages))),
        "JSON schema": lambda: structured.invoke(messages).kind,
        "with_structured_output": lambda: calling.invoke(messages).kind,
        "tools": lambda: call(chat, "required"),
        "tools of Responses": lambda: call(responses, "required"),
        "tools as Anthropic": lambda: call(claude.model_copy(update={"max_tokens": 100}), "any"),
        "Responses": lambda: right(responses.invoke(messages).content),
        "as Anthropic": lambda: right(claude.invoke(messages).content),
        "as Ollama": lambda: right(ollama.invoke(messages).content),
    }


def instructor_checks() -> dict[str, Check]:
    client = OpenAI(base_url=f"{URL}/v1", max_retries=0)

    def ask(mode: instructor.Mode) -> str:
        patched = instructor.from_openai(client, mode=mode)
        return patched.chat.completions.create(
            model=MODEL, messages=CHAT, response_model=Shape, max_retries=0
        ).kind

    modes = {"tools": instructor.Mode.TOOLS, "JSON": instructor.Mode.JSON_SCHEMA}
    return {name: lambda mode=mode: ask(mode) for name, mode in modes.items()}


def pydantic_ai_checks() -> dict[str, Check]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    prompt = [QUESTION, BinaryContent(Path(IMAGE).read_bytes(), media_type="image/png")]

    def ask(output: object) -> str:
        return str(Agent(model, output_type=output).run_sync(prompt).output)

    return {
        "images": lambda: right(Agent(model).run_sync(prompt).output),
        "tool output": lambda: ask(ToolOutput(Shape)),
        "native output": lambda: ask(NativeOutput(Shape)),
    }


COMPLY_FORMS = ("openai-chat", "open-responses", "anthropic")


def comply_checks() -> dict[str, Check]:
    def run(form: str) -> None:
        command = [Path(sys.executable).with_name("llm-comply"), "--format", form, "--json"]
        command += ["-u", f"{URL}/v1", "-k", "none", "-m", MODEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        results = json.loads(done.stdout)
        results = results if isinstance(results, list) else results["results"]
        failed = {each["id"]: each.get("errors") for each in results if each["status"] == "failed"}
        assert not failed, json.dumps(failed)[:400]

    return {form: lambda form=form: run(form) for form in COMPLY_FORMS}


#: By the name of the package, with other names of the client.
CLIENTS: dict[str, Callable[[], dict[str, Check]]] = {
    "openai": openai_checks,
    "anthropic": anthropic_checks,
    "ollama": ollama_checks,
    "ollama run": ollama_run_checks,
    "litellm": litellm_checks,
    "litellm proxy": proxy_checks,
    "langchain-openai": langchain_checks,
    "instructor": instructor_checks,
    "pydantic-ai-slim": pydantic_ai_checks,
    "llm-comply": comply_checks,
}


def main() -> None:
    told: dict[str, dict[str, str]] = {}
    for name, checks in CLIENTS.items():
        package, _, what = name.partition(" ")
        title = name if name == "ollama run" else f"{package} {version(package)} {what}"
        results = told[title.rstrip()] = {}
        for feature, check in checks().items():
            try:
                check()
                results[feature] = "yes"
            except Exception as error:  # any exception of a client is a result
                results[feature] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
