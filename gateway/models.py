"""Which models the fleet serves, as its workers announce them; refreshed in the background.

A model that was seen within a day stays known while no worker is up: its requests wait in the queue.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from redis.exceptions import RedisError

from gateway.errors import NotFound
from gateway.schemas import ModelList, ModelObject
from shared.protocol import ModelCard
from shared.registry import Registry

_REFRESH_PAUSE_S = 1.0
_STALE_AFTER_S = 5.0
_MISS_PAUSE_S = 0.1  #: how often unknown names may make us look early

logger = logging.getLogger(__name__)

OnModels = Callable[[Iterable[str]], Awaitable[None]]


class ModelDirectory:
    """The model cards of the fleet. `on_models` is called before a new model's requests are accepted."""

    def __init__(self, registry: Registry, on_models: OnModels) -> None:
        self.registry = registry
        self.cards: dict[str, ModelCard] = {}
        self.num_live_workers = 0
        self._on_models = on_models
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()

    @property
    def is_fresh(self) -> bool:
        """Whether Redis answered lately."""
        return time.monotonic() - self._refreshed_at < _STALE_AFTER_S

    async def refresh(self) -> None:
        """Ask the registry. Raises: RedisError, OSError."""
        async with self._lock:
            workers = await self.registry.workers()
            cards = {card.name: card for card in await self.registry.models()}
            cards.update({worker.card.name: worker.card for worker in workers})
            if new := cards.keys() - self.cards.keys():
                await self._on_models(sorted(new))
            self.cards = cards
            self.num_live_workers = sum(worker.state == "ready" for worker in workers)
            self._refreshed_at = time.monotonic()

    async def keep_fresh(self) -> None:
        """Refresh for ever."""
        while True:
            try:
                await self.refresh()
            except (RedisError, OSError) as error:
                logger.warning("cannot reach Redis: %s", type(error).__name__)
            await asyncio.sleep(_REFRESH_PAUSE_S)

    async def find(self, name: str) -> ModelCard:
        """A model's card. Raises: NotFound; RedisError or OSError if there is nobody to ask."""
        card = self.cards.get(name)
        if card is None and time.monotonic() - self._refreshed_at > _MISS_PAUSE_S:
            await self.refresh()  # it may have come this second
            card = self.cards.get(name)
        if card is None:
            raise NotFound("The model does not exist.", param="model", code="model_not_found")
        return card

    def listing(self) -> ModelList:
        """The answer of `/v1/models`."""
        return ModelList([to_object(card) for _, card in sorted(self.cards.items())])


def to_object(card: ModelCard) -> ModelObject:
    """A model as the wire shows it."""
    return ModelObject(card.name, card.created_at, card.max_model_len, card.supports_images)
