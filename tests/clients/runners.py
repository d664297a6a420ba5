"""Checks of one client against a server, each in its own environment, for `make clients`.

    python runners.py NAME URL MODEL [IMAGE]      prints JSON: {feature: "yes" or what went wrong}

It imports nothing of the project. The model of clients that run tools is a script that calls the function
`look` once.
"""

import asyncio
import json
import sys
from collections.abc import Callable

NAME, URL, MODEL, *IMAGES = sys.argv[1:]
QUESTION = "Look, and tell what you see."
Check = Callable[[], object]


def right(text: object) -> None:
    assert "The tools said: a star" in str(text), str(text)[:100]


def openai_agents() -> dict[str, Check]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def look(kind: str) -> str:
        """Tell a shape."""
        return f"a {kind}"

    def agent(model: type, **settings: object) -> Agent:
        client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        return Agent(
            name="a",
            model=model(MODEL, client),
            tools=[look],
            model_settings=ModelSettings(**settings),
        )

    async def stream() -> None:
        result = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
        async for _ in result.stream_events():
            pass
        right(result.final_output)

    def run(model: type, **settings: object) -> None:
        right(Runner.run_sync(agent(model, **settings), QUESTION).final_output)

    return {
        "tools": lambda: run(OpenAIChatCompletionsModel),
        "tools of Responses": lambda: run(OpenAIResponsesModel),
        "truncation": lambda: run(OpenAIResponsesModel, truncation="auto"),
        "tools streamed": lambda: asyncio.run(stream()),
    }


def anthropic() -> dict[str, Check]:
    from anthropic import Anthropic, beta_tool

    @beta_tool
    def look(kind: str) -> str:
        """Tell a shape.

        Args:
            kind: Which one.
        """
        return f"a {kind}"

    client = Anthropic(base_url=URL, api_key="none", max_retries=0)

    def run(**options: object) -> None:
        wish = {"model": MODEL, "max_tokens": 100, "tools": [look], **options}
        turns = [{"role": "user", "content": QUESTION}]
        runner = client.beta.messages.tool_runner(messages=turns, **wish)
        right(runner.until_done().content[0].text)

    return {"tool_runner": run, "tool_runner streamed": lambda: run(stream=True)}


def mineru() -> dict[str, Check]:
    from mineru_vl_utils import MinerUClient
    from PIL import Image

    image = Image.open(IMAGES[0]).convert("RGB")
    client = MinerUClient("http-client", MODEL, URL, max_retries=0, use_tqdm=False)

    def extract(said: object) -> None:
        assert isinstance(said, str), said
        assert said

    return {
        "text": lambda: extract(client.content_extract(image)),
        "texts of a batch": lambda: [*map(extract, client.batch_content_extract([image] * 2))],
        "layout, then text": lambda: client.two_step_extract(image),
    }


def llama_index() -> dict[str, Check]:
    from llama_index.embeddings.openai import OpenAIEmbedding

    client = OpenAIEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")

    def embed() -> None:
        """Includes more texts than fit in a request: the vector of a text does not depend on the others."""
        texts = [f"text {number} of many" for number in range(300)]
        vectors = client.get_text_embedding_batch(texts)
        [alone] = client.get_text_embedding_batch(texts[-1:])
        assert len(vectors) == 300
        assert max(abs(a - b) for a, b in zip(vectors[-1], alone, strict=True)) < 1e-3

    return {"embeddings": embed, "a query": lambda: client.get_query_embedding("a query")}


def main() -> None:
    checks = {
        "openai-agents": openai_agents,
        "anthropic": anthropic,
        "mineru-vl-utils": mineru,
        "llama-index-embeddings-openai": llama_index,
    }
    told: dict[str, str] = {}
    for feature, check in checks[NAME]().items():
        try:
            check()
            told[feature] = "yes"
        except Exception as error:  # any exception of a client is a result
            told[feature] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
