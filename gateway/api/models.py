"""`GET /v1/models`: the models that the fleet serves.

Source: OpenAI API reference, "Models"; Anthropic API reference, "Models", for who sends
`anthropic-version`.
"""

from datetime import UTC, datetime  # noqa: TID251 (people see it)

import msgspec
from msgspec import Struct

from gateway.calls.models import ModelDirectory
from gateway.http.endpoint import Caller, Resource, operation
from shared.protocol import ModelCard, SamplingDefaults
from shared.settings.limits import LimitSettings


class ModelLimits(msgspec.Struct):
    """What one request may hold; of images only where the model takes them."""

    max_output_tokens: int | msgspec.UnsetType = msgspec.UNSET
    #: Characters of all texts together.
    max_text_chars: int | msgspec.UnsetType = msgspec.UNSET
    max_images: int | msgspec.UnsetType = msgspec.UNSET
    max_image_bytes: int | msgspec.UnsetType = msgspec.UNSET
    max_image_pixels: int | msgspec.UnsetType = msgspec.UNSET
    #: Larger images are scaled to so many pixels for the model.
    scaled_image_pixels: int | msgspec.UnsetType = msgspec.UNSET
    #: The most tokens that one image may come to.
    max_image_tokens: int | msgspec.UnsetType = msgspec.UNSET


class ModelObject(msgspec.Struct):
    """A model, with what a client may want to know of it besides OpenAI's four fields."""

    id: str
    created: int
    max_model_len: int
    supports_images: bool
    #: That take requests now; without any, requests wait in the queue.
    num_workers: int
    #: Tags of the tasks that it takes: `generate`, `embed`, `rerank`, `tokenize`.
    tasks: tuple[str, ...]
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]
    limits: ModelLimits
    #: Whether its answers can be held to a schema.
    supports_grammars: bool
    #: Whether it may think before it answers.
    reasoning: bool
    #: Variables of its chat template that `chat_template_kwargs` may set.
    template_options: tuple[str, ...]
    #: Names under which the model is served with LoRA adapters.
    adapters: tuple[str, ...]
    #: Where a request says nothing, as the model's makers suggest.
    default_sampling: SamplingDefaults
    #: Of its arithmetic and of its weights; null where it is not known, or there is none.
    dtype: str | None
    quantization: str | None
    format: str | None
    #: Of its vectors, and what they may be cut to; absent where it makes none.
    dimensions: int | msgspec.UnsetType = msgspec.UNSET
    shorter_dimensions: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    #: Of an adapter: the model that it changes.
    parent: str | None = None
    root: str | None = None
    #: Of what was deployed: its name, `@` and the digest of the package that serves.
    package: str | msgspec.UnsetType = msgspec.UNSET
    #: Of the files that decide its vectors, and the prompts that may stand before a text.
    digest: str | msgspec.UnsetType = msgspec.UNSET
    prompts: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "model"
    owned_by: str = "vlm-fleet"


class ModelList(msgspec.Struct):
    """Models with workers first; of these, models of workers, then deployments, versions of
    deployments and adapters, each by the newest.
    """

    data: list[ModelObject]
    object: str = "list"


class AnthropicModel(msgspec.Struct):
    """A model, as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    #: Absent where it makes no text.
    max_tokens: int | msgspec.UnsetType
    lifecycle: str = "active"
    type: str = "model"


class AnthropicModelList(msgspec.Struct):
    """All of them: there is no second page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


#: What a task makes.
_OUTPUTS = {"generate": "text", "embed": "embedding", "rerank": "score"}


class Models(Resource):
    """The models that the fleet serves."""

    tag = "models"

    def __init__(self, models: ModelDirectory, limits: LimitSettings) -> None:
        self._models = models
        self._limits = limits

    @operation("GET", "/v1/models", answer_type=ModelList, is_suggested=True)
    async def list_models(self, caller: Caller) -> Struct:
        """List the models that the fleet serves."""
        models = self._models
        deployed = {name: route.card for name, route in models.routes.items()}
        found = [*{**models.cards, **models.adapters, **deployed}.values()]
        found.sort(key=lambda card: (models.num_workers[card.queue] == 0, *_order(card)))
        objects = [self._to_object(card) for card in found]
        if _is_anthropic(caller):
            names = [each.id for each in objects] or [None]
            return AnthropicModelList(
                [_to_anthropic(each) for each in objects], names[0], names[-1]
            )
        return ModelList(objects)

    @operation("GET", "/v1/models/{name:path}", answer_type=ModelObject)
    async def retrieve_model(self, caller: Caller) -> Struct:
        """Show a model."""
        models, name = self._models, caller.path["name"]
        card = models.cards.get(name) or models.adapters.get(name)
        if card is None and name in models.routes:
            card = models.routes[name].card
        if card is None:
            raise models.missing(name)
        found = self._to_object(card)
        return _to_anthropic(found) if _is_anthropic(caller) else found

    def _to_object(self, card: ModelCard) -> ModelObject:
        models = self._models
        return ModelObject(
            id=card.name,
            created=card.created_at,
            max_model_len=card.max_model_len,
            supports_images=card.supports_images,
            num_workers=models.num_workers[card.queue],
            tasks=card.tasks,
            input_modalities=("text", "image") if card.supports_images else ("text",),
            output_modalities=tuple(_OUTPUTS[task] for task in card.tasks if task in _OUTPUTS),
            limits=_limits(card, self._limits),
            supports_grammars=card.supports_grammars,
            reasoning=bool(card.reasoning),
            template_options=card.template_options,
            adapters=tuple(n for n, each in models.adapters.items() if each.parent == card.name),
            default_sampling=card.sampling,
            dtype=card.dtype or None,
            quantization=card.quantization or None,
            format=card.format or None,
            dimensions=card.dimensions or msgspec.UNSET,
            shorter_dimensions=card.shorter_dimensions if card.dimensions else msgspec.UNSET,
            parent=card.parent or None,
            root=card.queue,
            package=card.package or msgspec.UNSET,
            digest=card.digest or msgspec.UNSET,
            prompts=card.prompts or msgspec.UNSET,
        )


def _is_anthropic(caller: Caller) -> bool:
    """Anthropic's API asks for this header on every request."""
    return b"anthropic-version" in caller.context.headers


def _to_anthropic(model: ModelObject) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC)
    limits = (model.max_model_len, model.limits.max_output_tokens)
    return AnthropicModel(model.id, model.id, created, *limits)


def _order(card: ModelCard) -> tuple[bool, bool, bool, int, str]:
    """Clients take the first model as their default; a deployment must not change it."""
    is_version = bool(card.package) and not card.parent
    return bool(card.adapter), bool(card.package), is_version, -card.created_at, card.name


def _limits(card: ModelCard, limits: LimitSettings) -> ModelLimits:
    """What the gateway holds requests for this model against."""
    found = ModelLimits()
    if "generate" in card.tasks:
        found.max_output_tokens = min(limits.max_output_tokens, card.max_model_len - 1)
        found.max_text_chars = limits.max_text_chars
    if card.supports_images:
        generates = "generate" in card.tasks
        found.max_images = limits.max_images if generates else limits.max_input_images
        found.max_image_bytes = limits.max_image_bytes
        found.max_image_pixels = limits.max_image_pixels
        found.scaled_image_pixels = card.max_image_pixels or msgspec.UNSET
        found.max_image_tokens = card.image_tokens or msgspec.UNSET
    return found
