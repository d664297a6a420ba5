"""Shared by requests of all APIs: field types, the priority, errors that name a field."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.calls.surface import Totals
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import RequestContext
from gateway.http.unknown_fields import Unsupported
from shared.protocol import Priority, VideoOptions
from shared.settings.limits import (
    MAX_MODEL_CHARS,
    MAX_NAME_CHARS,
    MAX_USER_CHARS,
    LimitSettings,
)

ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
UserName = Annotated[str, Meta(max_length=MAX_USER_CHARS)]
User = Annotated[
    UserName | None,
    Meta(description="The client's name of its user; the log holds a short hash of it."),
]
ShowsTimings = Annotated[
    bool | None, Meta(description="Return the durations of the answer's stages.")
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Ignored = Raw | UnsetType  #: validated as JSON, otherwise ignored
CallName = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Timings = dict[str, float] | UnsetType
#: For clients that cannot send `service_tier`; it takes precedence.
PRIORITY_HEADER = b"x-vlm-priority"


#: Sampling fields of vLLM, SGLang and llama-server.
_TEXT: Unsupported = {
    "bad_words": ([],),
    "best_of": (1,),
    "dry_multiplier": (0,),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_embeds": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "prompt_embeds": (),
    "regex": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
_MESSAGES: Unsupported = {"container": (), "mcp_servers": ([],), "thread": ()}
_RESPONSES: Unsupported = {"conversation": (), "moderation": (), "prompt": ()}
_OLLAMA: Unsupported = {
    "options.mirostat": (0,),
    "options.tfs_z": (1,),
    "options.typical_p": (1,),
}
#: Fields that would change the answer and are not supported, by path, with their no-op values; null is always one.
#: Other unknown fields are ignored.
UNSUPPORTED: dict[str, Unsupported] = {
    "/v1/chat/completions": {
        **_TEXT,
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "messages.audio": ({}, [], ""),
        "mm_processor_kwargs.fps": (),
        "mm_processor_kwargs.num_frames": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    },
    "/v1/completions": {**_TEXT, "suffix": ("",)},
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/responses": {**_RESPONSES, "background": (False,)},
    "/v1/responses/input_tokens": _RESPONSES,
    "/api/chat": _OLLAMA,
    "/api/generate": {**_OLLAMA, "suffix": ("",), "template": ("",)},
    "/v1/vector_stores/{id}/items": {"items.vector": ()},
    "/tokenize": {"chat_template": (), "mm_processor_kwargs": ({},)},
}


def doc(text: str) -> Meta:
    """The description of a field in the OpenAPI document."""
    return Meta(description=text)


class RequestStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable base of request types. See `gateway.http.unknown_fields`."""


class EchoedStruct(RequestStruct, frozen=True, kw_only=True):
    """Base of types that clients send back from an answer: unknown fields are never an error."""

    is_lenient: ClassVar[bool] = True


class SamplingOfFrames(RequestStruct, frozen=True, kw_only=True):
    """Which frames of a video are used. The default is the model's; one of the two may be given."""

    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Meta(ge=1)] | None = None


class VideoFields(SamplingOfFrames, frozen=True, kw_only=True):
    """Which frames of a part of a video are used. Units: seconds."""

    start_s: Annotated[float, Meta(ge=0)] = 0.0
    end_s: Annotated[float, Meta(gt=0)] | None = None

    def options(
        self, param: str, limits: LimitSettings, default: SamplingOfFrames | None = None
    ) -> VideoOptions:
        """`default`: for a video that gives neither fps nor num_frames. Raises: InvalidRequest."""
        given: SamplingOfFrames = self
        if default is not None and self.fps is None and self.num_frames is None:
            given, param = default, "media_io_kwargs.video"
        if given.fps is not None and given.num_frames is not None:
            raise invalid(f"{param}.fps", "it excludes num_frames; send one of the two")
        if (given.num_frames or 0) > limits.max_video_frames:
            raise invalid(f"{param}.num_frames", f"send at most {limits.max_video_frames}")
        if self.end_s is not None and self.end_s <= self.start_s:
            raise invalid(f"{param}.end_s", f"send more than start_s, which is {self.start_s:g}")
        return VideoOptions(given.fps, given.num_frames, self.start_s, self.end_s or 0.0)


class IgnoredStreamFields(RequestStruct, frozen=True, kw_only=True):
    include_obfuscation: bool = False


class StreamOptions(IgnoredStreamFields, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, doc("Send the token counts so far in every chunk.")] = (
        False
    )


Entry = TypeVar("Entry")


class Listing(msgspec.Struct, Generic[Entry]):
    """A page of a list."""

    data: list[Entry]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"

    @classmethod
    def of(cls, data: list[Any], has_more: bool) -> Self:
        return cls(data, has_more, *((data[0].id, data[-1].id) if data else (None, None)))


def check_stream_options(options: StreamOptions | None, is_streamed: bool | None) -> None:
    """Refuse stream options of a request that does not stream. Raises: InvalidRequest."""
    if options is not None and not is_streamed:
        raise invalid("stream_options", "it needs stream: send stream as true")


def find_priority(service_tier: str | None, context: RequestContext) -> Priority:
    """The priority of the header, else of the service tier; at most the key's. Raises: InvalidRequest."""
    name = context.headers.get(PRIORITY_HEADER)
    if name is None:
        asked = Priority.BATCH if service_tier == "flex" else Priority.INTERACTIVE
        return context.at_most(asked)
    for priority in Priority:
        if name == priority.value.encode():
            return context.at_most(priority)
    raise invalid(PRIORITY_HEADER.decode(), "send interactive or batch")


def find_service_tier(asked: str | None, priority: Priority) -> str | UnsetType:
    """The effective service tier, if the request has one."""
    if asked is None:
        return UNSET
    return "flex" if priority is Priority.BATCH else "default"


def wants_timings(asked: bool | None, headers: Mapping[bytes, bytes]) -> bool:
    """Whether body or header request timings."""
    return bool(asked) or headers.get(b"x-vlm-timings", b"").lower() in (b"true", b"1")


def timings_of(totals: Totals) -> Timings:
    """Each stage and the total, if the client asked for them."""
    return UNSET if totals.timings is None else totals.timings


def invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """The error for a field, with what to send instead."""
    return InvalidRequest(f"Invalid value for {param}: {problem}.", param=param, code=code)


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required field: {param}.", param=param, code="missing_field")


def too_many(what: str, most: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Too many {what}: send at most {most}.",
        param=param,
        code=f"too_many_{'images' if what == 'images' else 'inputs'}",
    )
