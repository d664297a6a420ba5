"""`GET /v1/models`: the models that the fleet serves.

Source: OpenAI API reference, "Models".
"""

import msgspec
from fastapi import APIRouter, Response

from gateway.calls.models import ModelDirectory
from shared.protocol import ModelCard


class ModelObject(msgspec.Struct):
    """A model, with what a client may want to know of it besides OpenAI's four fields."""

    id: str
    created: int
    max_model_len: int
    supports_images: bool
    #: That take requests now; without any, requests wait in the queue.
    num_workers: int
    #: Tags of the tasks that it takes: `generate`, `embed`, `rerank`.
    tasks: tuple[str, ...]
    #: Of its vectors, and what they may be cut to; absent where it makes none.
    dimensions: int | msgspec.UnsetType = msgspec.UNSET
    shorter_dimensions: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "model"
    owned_by: str = "vlm-fleet"


class ModelList(msgspec.Struct):
    """The models that somebody works on first, of these the newest first."""

    data: list[ModelObject]
    object: str = "list"


def create_model_routes(models: ModelDirectory) -> APIRouter:
    """The list and its entries."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    def to_object(card: ModelCard) -> ModelObject:
        return ModelObject(
            id=card.name,
            created=card.created_at,
            max_model_len=card.max_model_len,
            supports_images=card.supports_images,
            num_workers=models.num_workers[card.name],
            tasks=card.tasks,
            dimensions=card.dimensions or msgspec.UNSET,
            shorter_dimensions=card.shorter_dimensions if card.dimensions else msgspec.UNSET,
        )

    @router.get("", operation_id="list_models")
    async def list_models() -> Response:
        """The models that the fleet serves."""
        objects = [to_object(card) for _, card in sorted(models.cards.items())]
        objects.sort(key=lambda model: (model.num_workers == 0, -model.created))
        return _json(ModelList(objects))

    @router.get("/{name:path}", operation_id="retrieve_model")
    async def retrieve_model(name: str) -> Response:
        """One model."""
        if name not in models.cards:
            raise models.missing(name)
        return _json(to_object(models.cards[name]))

    return router


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
