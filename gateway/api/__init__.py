"""The APIs that are served, one file or folder each.

A new API is one new file: a class that implements `gateway.calls.surface.Surface`, and its line in
`SURFACES`. Its route, its part of the OpenAPI document and its errors follow.
`tests/contract/test_surface.py` tests all of them.
"""

from collections.abc import Callable

from gateway.api.batches import BatchRoutes
from gateway.api.chat import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.embeddings import Embeddings
from gateway.api.files import Files
from gateway.api.messages import CountTokens, Messages
from gateway.api.ollama import OllamaChat, OllamaGenerate, OllamaRoutes
from gateway.api.rerank import Reranking, Scoring
from gateway.api.responses import ResponseInputTokens, ResponseRoutes, Responses
from gateway.api.routes import Operation
from gateway.api.sessions import Sessions
from gateway.api.similar import Similar
from gateway.api.tokenize import Detokenizing, Tokenizing
from gateway.api.vector_stores import VectorStores
from gateway.batches.records import Batches
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Surface
from gateway.search import SearchClient
from shared.sessions.store import SessionStore
from shared.settings.limits import LimitSettings

SURFACES: tuple[Callable[[LimitSettings], Surface], ...] = (
    ChatCompletions,
    Completions,
    Embeddings,
    Reranking,
    Scoring,
    Tokenizing,
    Detokenizing,
    Responses,
    ResponseInputTokens,
    Messages,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
)


def create_operations(
    lifecycle: Lifecycle,
    search: SearchClient,
    batches: Batches | None,
    look: Callable[[], None],
    sessions: SessionStore,
    limits: LimitSettings,
    default_store: str,
) -> list[Operation]:
    """The APIs that are plain routes: over the search process, and of what the fleet serves."""
    stores = VectorStores(lifecycle, search, limits, default_store)
    return [
        *stores.operations(),
        *Files(
            search, batches and batches.files, lifecycle.kept, lifecycle.loader, limits
        ).operations(),
        *BatchRoutes(batches, look, limits).operations(),
        *Similar(stores).operations(),
        *ResponseRoutes(lifecycle.kept).operations(),
        *OllamaRoutes(lifecycle.models).operations(),
        *Sessions(lifecycle, sessions, limits).operations(),
    ]
