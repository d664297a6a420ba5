"""The APIs that are served, one file or folder each.

A new API is one new file: a class that implements `gateway.calls.surface.Surface`, and its line in
`SURFACES`. Its route, its part of the OpenAPI document and its errors follow.
`tests/contract/test_surface.py` tests all of them.
"""

from collections.abc import Callable

from gateway.api.chat import ChatCompletions
from gateway.api.embeddings import Embeddings
from gateway.api.rerank import Reranking, Scoring
from gateway.calls.surface import Surface
from shared.settings.limits import LimitSettings

SURFACES: tuple[Callable[[LimitSettings], Surface], ...] = (
    ChatCompletions,
    Embeddings,
    Reranking,
    Scoring,
)
