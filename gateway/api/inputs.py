"""Shared by APIs that return numbers for inputs: fields, the split into calls and usage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from gateway.api.fields import (
    ModelName,
    RequestStruct,
    ServiceTier,
    ShowsTimings,
    User,
    doc,
    find_priority,
    wants_timings,
)
from gateway.calls.key_limits import CHARS_PER_TOKEN, TOKENS_PER_IMAGE
from gateway.calls.resume import KEY_HEADER
from gateway.calls.surface import Plan, Totals
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.protocol import (
    Embed,
    ImagePart,
    ModelCard,
    Rerank,
    Task,
    TextPart,
    TokensPart,
    Truncate,
)

#: The end at which long inputs are truncated, as in TEI. true: END. false and NONE: long inputs are refused.
Truncation = bool | Literal["NONE", "START", "END"]
Item = TypeVar("Item")

#: Maximum of a call, in estimated tokens and in inputs. Larger requests are split, so that workers share the work.
MAX_CALL_TOKENS = 8192
MAX_CALL_INPUTS = 256


class InputFields(RequestStruct, frozen=True, kw_only=True):
    model: ModelName
    truncate: Annotated[
        Truncation | None, doc("The end at which inputs that are too long are cut.")
    ] = None
    user: User = None
    service_tier: ServiceTier | None = None
    timings: ShowsTimings = None


class InputUsage(msgspec.Struct):
    """Token counts with OpenAI's names, without output tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, totals: Totals) -> "InputUsage":
        prompt = totals.prompt
        details = {
            "cached_tokens": prompt.num_cached_tokens,
            "image_tokens": prompt.num_image_tokens,
        }
        return cls(prompt.num_prompt_tokens, prompt.num_prompt_tokens, details)


def to_truncate(value: bool | str | None) -> Truncate:
    names: dict[object, Truncate] = {"START": "start", "END": "end", True: "end"}
    return names.get(value, "none")


def to_plan(
    request: InputFields,
    context: RequestContext,
    tasks: Sequence[Task],
    options: msgspec.Struct,
    images: Sequence[ImageSource] = (),
) -> Plan:
    return Plan(
        tasks,
        options,
        images,
        num_prompts=len(tasks),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=find_priority(request.service_tier, context),
    )


def split_inputs(
    task: Embed,
    parts: Sequence[TextPart | TokensPart | ImagePart],
    card: ModelCard,
    headers: Mapping[bytes, bytes],
) -> list[Embed]:
    """Split the inputs into tasks of limited size."""

    def num_tokens(part: TextPart | TokensPart | ImagePart) -> int:
        if isinstance(part, TextPart):
            return len(part.text) // CHARS_PER_TOKEN + 1
        if isinstance(part, TokensPart):
            return len(part.token_ids)
        return card.image_tokens or TOKENS_PER_IMAGE

    return [
        replace(task, inputs=tuple(some), first=None if task.first is None else first)
        for first, some in _split(parts, num_tokens, headers)
    ]


def split_documents(
    task: Rerank, documents: Sequence[str], headers: Mapping[bytes, bytes]
) -> list[Rerank]:
    """Split the documents into tasks of limited size, each with the only query or with its documents' queries."""
    many, longest = len(task.queries) > 1, max(map(len, task.queries))
    return [
        replace(
            task,
            queries=task.queries[first : first + len(part)] if many else task.queries,
            documents=tuple(part),
            first=None if task.first is None else first,
        )
        for first, part in _split(
            documents, lambda text: (longest + len(text)) // CHARS_PER_TOKEN, headers
        )
    ]


def _split(
    items: Sequence[Item],
    num_tokens: Callable[[Item], int],
    headers: Mapping[bytes, bytes],
) -> Iterator[tuple[int, Sequence[Item]]]:
    """The items of each call, with the index of the first one.

    A request with an idempotency key is not split, as the key identifies one call.
    """
    if KEY_HEADER in headers:
        yield 0, items
        return
    begin, total = 0, 0
    for index, item in enumerate(items):
        count = num_tokens(item)
        if index > begin and (total + count > MAX_CALL_TOKENS or index - begin >= MAX_CALL_INPUTS):
            yield begin, items[begin:index]
            begin, total = index, 0
        total += count
    yield begin, items[begin:]
