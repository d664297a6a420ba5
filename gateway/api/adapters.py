"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: load and unload LoRA adapters on all workers.

For admin keys only. The answer waits until every worker of the model has loaded or unloaded the adapter.
Source: vLLM, "LoRA Adapters".
"""

import asyncio
import logging
import time
from collections.abc import Callable
from secrets import token_hex
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from gateway.api.fields import invalid
from gateway.calls.models import ModelDirectory
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import InvalidRequest, NotFound, Overloaded, ServerError
from shared.protocol import PROTOCOL_VERSION, AdapterCard, ModelCard
from shared.queue.registry import AdapterSource
from shared.settings.limits import MAX_MODEL_CHARS
from shared.settings.tree import ADAPTER_NAME

_POLL_S = 0.1
_MAX_PATH_CHARS = 1024
_MAX_LOAD_S = 120.0

#: `(?!\n)`, as Python's `$` also matches before a last newline, and JSON Schema has no `\Z`.
AdapterName = Annotated[str, Meta(pattern=rf"^(?:{ADAPTER_NAME.pattern})$(?!\n)")]
logger = logging.getLogger(__name__)


class UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora_name: AdapterName
    lora_int_id: int | None = None  #: sent by vLLM's clients; ignored
    #: Required unless exactly one model is served. The name is from vLLM's `--lora-modules`.
    base_model_name: Annotated[str, Meta(max_length=MAX_MODEL_CHARS)] | None = None


class LoadAdapter(UnloadAdapter, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora_path: Annotated[str, Meta(min_length=1, max_length=_MAX_PATH_CHARS)]
    load_inplace: bool = False  #: whether to replace an adapter with this name


class Adapters(Resource):
    """Changes of the adapters of a model's workers."""

    tag = "models"
    access = "adapters"

    def __init__(self, models: ModelDirectory, max_loras: int) -> None:
        self._models = models
        self._registry = models.registry
        self._max_loras = max_loras
        self._lock = asyncio.Lock()

    @operation("POST", "/v1/load_lora_adapter")
    async def load_lora_adapter(self, caller: Caller, body: LoadAdapter) -> Response:
        """Load a LoRA adapter on every worker of a model; it is served as `model:lora_name`."""
        name = body.lora_name
        async with self._lock:
            model = await self._base_model(body.base_model_name, caller.context.tenant)
            listed = await self._listed(model, name)
            before = listed.get(name)
            if before is not None and not body.load_inplace:
                raise invalid("lora_name", "already loaded; unload it, or send load_inplace: true")
            if before is None and len(listed) >= self._max_loras:
                raise invalid("lora_name", f"at most {self._max_loras} adapters; unload one")
            source = AdapterSource(body.lora_path, token_hex(8))
            await self._registry.put_adapter(model, name, source)
            try:
                await self._wait(model, lambda held: _is_loaded(held.get(name), source))
            except BaseException:
                if before is None:
                    await self._registry.remove_adapter(model, name)
                else:
                    await self._registry.put_adapter(model, name, before)
                raise
        logger.info("the adapter %s:%s is loaded", model, name)
        return _confirm(name, "added")

    @operation("POST", "/v1/unload_lora_adapter")
    async def unload_lora_adapter(self, caller: Caller, body: UnloadAdapter) -> Response:
        """Unload a LoRA adapter. Running requests finish with the adapter."""
        name = body.lora_name
        async with self._lock:
            model = await self._base_model(body.base_model_name, caller.context.tenant)
            if name not in await self._listed(model, name):
                raise NotFound(
                    "No adapter of this name is loaded: GET /v1/models lists adapters.",
                    param="lora_name",
                    code="model_not_found",
                )
            await self._registry.remove_adapter(model, name)
            await self._wait(model, lambda held: name not in held)
        logger.info("the adapter %s:%s is unloaded", model, name)
        return _confirm(name, "removed")

    async def _base_model(self, name: str | None, tenant: str) -> str:
        """The model of the request. Raises: Forbidden, InvalidRequest, and as `ModelDirectory.find`."""
        if name is not None:
            model = (await self._models.find(name, param="base_model_name")).queue
        else:
            names = [card.queue for card in self._models.served() if "generate" in card.tasks]
            if len(names) != 1:
                raise invalid("base_model_name", "required unless exactly one model is served")
            [model] = names
        self._models.check_use(tenant, model)
        return model

    async def _listed(self, model: str, name: str) -> dict[str, AdapterSource]:
        """The adapters that were loaded by request. Raises: InvalidRequest if the workers' settings define `name`."""
        for card in await self._workers(model):
            if any(each.name == name and not each.revision for each in card.adapters):
                raise invalid("lora_name", "the workers' settings define this adapter; change them")
        return await self._registry.adapters(model)

    async def _workers(self, model: str) -> list[ModelCard]:
        """The cards of live workers. Raises: Overloaded if there are none."""
        workers = await self._registry.workers()
        cards = [w.card for w in workers if w.card.name == model and w.state == "ready"]
        cards = [card for card in cards if card.version == PROTOCOL_VERSION]
        if not cards:
            message = "No worker serves this model: start one, then retry."
            raise Overloaded("no_worker", message, code="no_worker", retry_after_s=5)
        return cards

    async def _wait(self, model: str, is_done: Callable[[dict[str, AdapterCard]], bool]) -> None:
        """Wait until all workers are done. Raises: ApiError."""
        until = time.monotonic() + _MAX_LOAD_S
        while True:
            cards = await self._workers(model)
            states = [is_done({each.name: each for each in card.adapters}) for card in cards]
            if all(states):
                await self._models.refresh()
                return
            if time.monotonic() > until:
                raise ServerError(
                    "Not all workers finished in time: see the workers' logs.",
                    code="deadline_exceeded",
                )
            await asyncio.sleep(_POLL_S)


def _is_loaded(card: AdapterCard | None, source: AdapterSource) -> bool:
    """Raises: InvalidRequest if a worker failed to load the adapter."""
    if card is None or card.revision != source.revision:
        return False
    if card.error:
        raise InvalidRequest(
            f"A worker cannot load the adapter: {card.error}.",
            param="lora_path",
            code="invalid_value",
        )
    return True


def _confirm(name: str, what: str) -> Response:
    return Response(f"Success: LoRA adapter '{name}' {what} successfully.", media_type="text/plain")
