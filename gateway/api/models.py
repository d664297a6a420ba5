"""`GET /v1/models`: list models; `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for admin keys.

A request that loads or unloads an adapter returns when every worker of the model is done. Source: OpenAI API reference,
"Models"; Anthropic API reference, "Models", for requests with `anthropic-version`; vLLM, "LoRA Adapters".
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime  # noqa: TID251 (shown to users)
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from gateway.api.fields import Data, copy_fields, invalid
from gateway.calls.models import ModelDirectory
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import InvalidRequest, NotFound, Overloaded, ServerError
from shared.media import MEDIA
from shared.protocol import PROTOCOL_VERSION, AdapterCard, ModelCard, SamplingDefaults
from shared.queue.registry import AdapterSource
from shared.settings.limits import MAX_MODEL_CHARS, LimitSettings
from shared.settings.tree import ADAPTER_NAME

_POLL_S = 0.1
_MAX_PATH_CHARS = 1024
_MAX_LOAD_S = 120.0

#: `(?!\n)` because Python's `$` also matches before a final newline, and JSON Schema has no `\Z`.
AdapterName = Annotated[str, Meta(pattern=rf"^(?:{ADAPTER_NAME.pattern})$(?!\n)")]

logger = logging.getLogger(__name__)


class ModelLimits(msgspec.Struct):
    """Limits of one request. Limits of inputs that the model does not accept are absent."""

    max_output_tokens: int | msgspec.UnsetType = msgspec.UNSET
    #: Characters of all texts together.
    max_text_chars: int | msgspec.UnsetType = msgspec.UNSET
    max_images: int | msgspec.UnsetType = msgspec.UNSET
    max_image_bytes: int | msgspec.UnsetType = msgspec.UNSET
    max_image_pixels: int | msgspec.UnsetType = msgspec.UNSET
    #: Larger images are scaled down to this number of pixels.
    scaled_image_pixels: int | msgspec.UnsetType = msgspec.UNSET
    max_image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    max_videos: int | msgspec.UnsetType = msgspec.UNSET
    max_video_bytes: int | msgspec.UnsetType = msgspec.UNSET
    max_video_s: float | msgspec.UnsetType = msgspec.UNSET
    max_video_frames: int | msgspec.UnsetType = msgspec.UNSET
    max_audios: int | msgspec.UnsetType = msgspec.UNSET
    max_audio_bytes: int | msgspec.UnsetType = msgspec.UNSET
    max_audio_s: float | msgspec.UnsetType = msgspec.UNSET


class ModelObject(msgspec.Struct):
    """A model: OpenAI's fields `id`, `created`, `object` and `owned_by`, and extensions."""

    id: str
    created: int
    max_model_len: int
    supports_images: bool
    #: Number of workers that accept requests now. 0: requests wait in the queue.
    num_workers: int
    #: Supported tasks: `generate`, `embed`, `rerank`, `tokenize`.
    tasks: tuple[str, ...]
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]
    limits: ModelLimits
    #: Whether answers can be constrained to a schema.
    supports_grammars: bool
    #: Whether the model can reason before it answers.
    reasoning: bool
    #: Chat template variables that `chat_template_kwargs` may set.
    template_options: tuple[str, ...]
    #: Model names that select a LoRA adapter of this model.
    adapters: tuple[str, ...]
    #: Defaults from the model's generation config.
    default_sampling: SamplingDefaults
    #: dtype of the computation (null: unknown), and quantization of the weights (null: none, or unknown).
    dtype: str | None
    quantization: str | None
    format: str | None
    #: Number of dimensions of embeddings, and smaller supported numbers. Absent if the model does not embed.
    dimensions: int | msgspec.UnsetType = msgspec.UNSET
    shorter_dimensions: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    #: The base model of an adapter, or the model of an alias.
    parent: str | None = None
    root: str | None = None
    #: Deployment and digest of its package, `name@sha256:...`.
    package: str | msgspec.UnsetType = msgspec.UNSET
    #: Digest of the files that determine the embeddings, and names of the model's prompts.
    digest: str | msgspec.UnsetType = msgspec.UNSET
    prompts: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "model"
    owned_by: str = "vlm-fleet"


class ModelList(Data[ModelObject]):
    """Models that have workers come before models that have none.

    Order in both groups: models outside deployments, deployments, versions, adapters, aliases; newest first in each.
    """


class AnthropicModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    #: Absent for models that generate no text.
    max_tokens: int | msgspec.UnsetType
    lifecycle: str = "active"
    type: str = "model"


class AnthropicModelList(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


#: Output modality by task.
_OUTPUTS = {"generate": "text", "embed": "embedding", "rerank": "score"}


@dataclass
class Models(Resource):
    tag = "models"

    _models: ModelDirectory
    _limits: LimitSettings

    @operation("GET", "/v1/models", answer_type=ModelList, is_suggested=True)
    async def list_models(self, caller: Caller) -> Struct:
        """List the served models."""
        cards = sorted(self._models.usable(caller.context.tenant), key=self._order)
        objects = [self._to_object(card) for card in cards]
        if _is_anthropic(caller):
            names = [each.id for each in objects] or [None]
            return AnthropicModelList(
                [_to_anthropic(each) for each in objects], names[0], names[-1]
            )
        return ModelList(objects)

    @operation("GET", "/v1/models/{name:path}", answer_type=ModelObject)
    async def retrieve_model(self, caller: Caller) -> Struct:
        """Show a model."""
        models, name, tenant = self._models, caller.path["name"], caller.context.tenant
        models.check_use(tenant, name)
        card = next((card for card in models.usable(tenant) if card.name == name), None)
        if card is None:
            raise models.missing(name, tenant=tenant)
        found = self._to_object(card)
        return _to_anthropic(found) if _is_anthropic(caller) else found

    def _order(self, card: ModelCard) -> tuple[Any, ...]:
        """Sort key. Clients use the first model by default, so a new deployment must not become the first."""
        models, is_version = self._models, bool(card.package) and not card.parent
        kind = (card.name in models.aliases, bool(card.adapter), bool(card.package), is_version)
        return not models.num_workers[card.queue], *kind, -card.created_at, card.name

    def _to_object(self, card: ModelCard) -> ModelObject:
        models = self._models
        return copy_fields(
            card,
            ModelObject,
            id=card.name,
            created=card.created_at,
            num_workers=models.num_workers[card.queue],
            input_modalities=("text", *(kind for kind, m in MEDIA.items() if m.is_taken(card))),
            output_modalities=tuple(_OUTPUTS[task] for task in card.tasks if task in _OUTPUTS),
            limits=_limits(card, self._limits),
            reasoning=bool(card.reasoning),
            adapters=tuple(n for n, each in models.adapters.items() if each.parent == card.name),
            default_sampling=card.sampling,
            dtype=card.dtype or None,
            quantization=card.quantization or None,
            format=card.format or None,
            dimensions=card.dimensions or msgspec.UNSET,
            shorter_dimensions=card.shorter_dimensions if card.dimensions else msgspec.UNSET,
            parent=models.aliases.get(card.name) or card.parent or None,
            root=models.aliases.get(card.name) or card.queue,
            package=card.package or msgspec.UNSET,
            digest=card.digest or msgspec.UNSET,
            prompts=card.prompts or msgspec.UNSET,
        )


def _is_anthropic(caller: Caller) -> bool:
    """Anthropic's API requires this header on every request."""
    return b"anthropic-version" in caller.context.headers


def _to_anthropic(model: ModelObject) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC)
    limits = (model.max_model_len, model.limits.max_output_tokens)
    return AnthropicModel(model.id, model.id, created, *limits)


def _limits(card: ModelCard, limits: LimitSettings) -> ModelLimits:
    generates = "generate" in card.tasks
    kinds = {"max_text": generates, "max_image": card.supports_images}
    kinds |= {"max_video": card.supports_video, "max_audio": card.supports_audio}
    begins = tuple(name for name, is_taken in kinds.items() if is_taken)
    names = ModelLimits.__struct_fields__
    same = [name for name in names if name.startswith(begins) and hasattr(limits, name)]
    found = ModelLimits(**{name: getattr(limits, name) for name in same})
    if generates:
        found.max_output_tokens = min(limits.max_output_tokens, card.max_model_len - 1)
    if card.supports_images:
        found.max_images = limits.max_images if generates else limits.max_input_images
        found.scaled_image_pixels = card.max_image_pixels or msgspec.UNSET
        found.max_image_tokens = card.image_tokens or msgspec.UNSET
    return found


class UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora_name: AdapterName
    lora_int_id: int | None = None  #: sent by vLLM's clients; ignored
    #: Required unless exactly one text model is served. vLLM's `--lora-modules` has a field of this name.
    base_model_name: Annotated[str, Meta(max_length=MAX_MODEL_CHARS)] | None = None


class LoadAdapter(UnloadAdapter, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora_path: Annotated[str, Meta(min_length=1, max_length=_MAX_PATH_CHARS)]
    load_inplace: bool = False  #: whether to replace a loaded adapter of this name


@dataclass
class Adapters(Resource):
    """Loads and unloads LoRA adapters on the workers of a model."""

    tag = "models"
    access = "adapters"

    _models: ModelDirectory
    _max_loras: int
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @operation("POST", "/v1/load_lora_adapter")
    async def load_lora_adapter(self, caller: Caller, body: LoadAdapter) -> Response:
        """Load a LoRA adapter on every worker of a model. Requests select it as `model:lora_name`."""
        name = body.lora_name
        async with self._lock:
            model = await self._base_model(body.base_model_name, caller.context.tenant)
            listed = await self._listed(model, name)
            before = listed.get(name)
            if before is not None and not body.load_inplace:
                raise invalid("lora_name", "already loaded; unload it, or send load_inplace: true")
            if before is None and len(listed) >= self._max_loras:
                raise invalid("lora_name", f"{self._max_loras} adapters are loaded; unload one")
            source = AdapterSource(body.lora_path, token_hex(8))
            await self._models.registry.put_adapter(model, name, source)
            try:
                await self._wait(model, lambda held: _is_loaded(held.get(name), source))
            except BaseException:
                if before is None:
                    await self._models.registry.remove_adapter(model, name)
                else:
                    await self._models.registry.put_adapter(model, name, before)
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
                message = "No adapter of this name is loaded: GET /v1/models lists adapters."
                raise NotFound(message, param="lora_name", code="model_not_found")
            await self._models.registry.remove_adapter(model, name)
            await self._wait(model, lambda held: name not in held)
        logger.info("the adapter %s:%s is unloaded", model, name)
        return _confirm(name, "removed")

    async def _base_model(self, name: str | None, tenant: str) -> str:
        """The model of the adapter. Raises: Forbidden, InvalidRequest, and the errors of `ModelDirectory.find`."""
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
        """Adapters that requests have loaded. Raises: InvalidRequest if the workers' settings define `name`."""
        for card in await self._workers(model):
            if any(each.name == name and not each.revision for each in card.adapters):
                raise invalid("lora_name", "the workers' settings define this adapter; change them")
        return await self._models.registry.adapters(model)

    async def _workers(self, model: str) -> list[ModelCard]:
        """The cards of live workers. Raises: Overloaded if there are none."""
        workers = await self._models.registry.workers()
        cards = [w.card for w in workers if w.card.name == model and w.state == "ready"]
        cards = [card for card in cards if card.version == PROTOCOL_VERSION]
        if not cards:
            message = "No worker serves this model: start one, then retry."
            raise Overloaded("no_worker", message, code="no_worker", retry_after_s=5)
        return cards

    async def _wait(self, model: str, is_done: Callable[[dict[str, AdapterCard]], bool]) -> None:
        """Wait until `is_done` is true for the adapters of each worker. Raises: ApiError."""
        until = time.monotonic() + _MAX_LOAD_S
        while True:
            cards = await self._workers(model)
            states = [is_done({each.name: each for each in card.adapters}) for card in cards]
            if all(states):
                await self._models.refresh()
                return
            if time.monotonic() > until:
                message = "Not all workers finished in time: see the workers' logs."
                raise ServerError(message, code="deadline_exceeded")
            await asyncio.sleep(_POLL_S)


def _is_loaded(card: AdapterCard | None, source: AdapterSource) -> bool:
    """Raises: InvalidRequest if a worker failed to load the adapter."""
    if card is None or card.revision != source.revision:
        return False
    if card.error:
        message = f"A worker cannot load the adapter: {card.error}."
        raise InvalidRequest(message, param="lora_path", code="invalid_value")
    return True


def _confirm(name: str, what: str) -> Response:
    return Response(f"Success: LoRA adapter '{name}' {what} successfully.", media_type="text/plain")
