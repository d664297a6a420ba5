"""A gateway and workers with the mock embedding engine, on the Redis of the test run."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from engines.base import LoadedEngine
from engines.mock_pooling.engine import MockPoolingModel, MockPoolingSettings, numbers_of
from engines.registry import create_engine
from shared.protocol import Embed, Rerank, TextPart, TokensPart
from tests.factories_gateway import RunningGateway, make_settings, run_gateway_on_socket
from tests.factories_queue import MODEL, Ends
from tests.factories_worker import RunningWorker, run_worker

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
_model = MockPoolingModel(MockPoolingSettings())


def load(**changes: Any) -> LoadedEngine:
    settings = {"kind": "mock_pooling", "served_name": MODEL, "mock": {"step_s": 0}, **changes}
    return create_engine(settings)


@asynccontextmanager
async def run_fleet(
    ends: Ends,
    redis_url: str,
    num_workers: int = 1,
    *,
    engine: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[RunningGateway, list[RunningWorker]]]:
    """Runs a gateway and workers. `changes`: to the gateway's settings, by group."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                run_worker(ends, f"w{number}", load=lambda: load(**(engine or {})))
            )
            for number in range(num_workers)
        ]
        settings = make_settings(redis_url, ends.prefix, **changes)
        yield await stack.enter_async_context(run_gateway_on_socket(settings)), workers


def vector_of(item: str | list[int], **options: Any) -> list[float]:
    """Returns the mock's vector of one input."""
    part = TextPart(item) if isinstance(item, str) else TokensPart(tuple(item))
    [row] = _model.rows(Embed((part,), **options), [])
    return numbers_of(row).tolist()


def score_of(query: str, document: str, **options: Any) -> float:
    """Returns the mock's score of one pair."""
    [row] = _model.rows(Rerank((query,), (document,), **options), [])
    return numbers_of(row)[0]


def read_vectors(answer: dict[str, Any]) -> list[list[float]]:
    """Returns the vectors of a response, in order."""
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]
