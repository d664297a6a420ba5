"""Request fields that several APIs share: types, checks against limits, priority and sampling parameters."""

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from msgspec.structs import replace

from gateway.calls.surface import Totals
from gateway.http.body import Unsupported
from gateway.http.errors import InvalidRequest, NotFound, invalid
from gateway.http.errors import missing as missing
from gateway.http.exchange import RequestContext
from shared.protocol import (
    Generate,
    ModelCard,
    Priority,
    SamplingDefaults,
    SamplingParams,
    VideoOptions,
)
from shared.settings.limits import MAX_MODEL_CHARS, MAX_NAME_CHARS, MAX_USER_CHARS, LimitSettings

ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
UserName = Annotated[str, Meta(max_length=MAX_USER_CHARS)]
User = Annotated[UserName | None, Meta(description="Identifies the end user; logged as a hash.")]
ShowsTimings = Annotated[bool | None, Meta(description="Return the duration of each stage.")]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Ignored = Raw | UnsetType  #: validated as JSON, otherwise ignored
CallName = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Timings = dict[str, float] | UnsetType
#: For clients that cannot send `service_tier`. The header takes precedence.
PRIORITY_HEADER = b"x-vlm-priority"


#: Unsupported sampling fields of vLLM, SGLang and llama-server.
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
_MEDIA: Unsupported = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}
_RESPONSES: Unsupported = {"conversation": (), "moderation": (), "prompt": (), **_MEDIA}
_OLLAMA: Unsupported = {"options.mirostat": (0,), "options.tfs_z": (1,), "options.typical_p": (1,)}
#: Fields that are refused because they would change the answer, by API path. Each has a tuple of values without effect,
#: which are accepted, as is null. Other unknown fields are ignored.
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
        "mm_processor_kwargs.use_audio_in_video": (False,),
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
    "/tokenize": {"chat_template": (), **_MEDIA},
}


def doc(text: str) -> Meta:
    """The description of a field in the OpenAPI document."""
    return Meta(description=text)


class RequestStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable base of request types. See `gateway.http.body`."""


class EchoedStruct(RequestStruct, frozen=True, kw_only=True):
    """Base of types for parts of an answer that clients send back. Unknown fields are never an error."""

    is_lenient: ClassVar[bool] = True


class SamplingOfFrames(RequestStruct, frozen=True, kw_only=True):
    """Selects frames of a video. Send at most one field; by default the model decides."""

    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    num_frames: Positive | None = None


class VideoFields(SamplingOfFrames, frozen=True, kw_only=True):
    """Selects a time range of a video, and frames in this range. Units: seconds."""

    start_s: Annotated[float, Meta(ge=0)] = 0.0
    end_s: Annotated[float, Meta(gt=0)] | None = None

    def options(
        self, param: str, limits: LimitSettings, default: SamplingOfFrames | None = None
    ) -> VideoOptions:
        """The frame options. `default`: used if neither fps nor num_frames is given. Raises: InvalidRequest."""
        given: SamplingOfFrames = self
        if default is not None and self.fps is None and self.num_frames is None:
            given, param = default, "media_io_kwargs.video"
        if given.fps is not None and given.num_frames is not None:
            raise invalid(f"{param}.fps", "send fps or num_frames, not both")
        check_most(f"{param}.num_frames", given.num_frames or 0, limits.max_video_frames)
        if self.end_s is not None and self.end_s <= self.start_s:
            raise invalid(f"{param}.end_s", f"send more than start_s, which is {self.start_s:g}")
        return VideoOptions(given.fps, given.num_frames, self.start_s, self.end_s or 0.0)


class AudioData(RequestStruct, frozen=True, kw_only=True):
    """An audio file in base64. Its content determines its format."""

    data: str
    format: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None

    @property
    def url(self) -> str:
        """A `data:` URL. Many clients send one instead of base64."""
        return self.data if self.data[:5] == "data:" else f"data:audio/wav;base64,{self.data}"


class IgnoredStreamFields(RequestStruct, frozen=True, kw_only=True):
    include_obfuscation: bool = False


class StreamOptions(IgnoredStreamFields, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, doc("Send the token counts so far in every chunk.")] = (
        False
    )


class NewestQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


Entry = TypeVar("Entry")
Made = TypeVar("Made", bound=msgspec.Struct)


def copy_fields(source: object, type_: type[Made], **others: Any) -> Made:
    """Create a struct from the source's attributes of the same names, and from `others`."""
    names = [name for name in type_.__struct_fields__ if name not in others]
    same = {name: getattr(source, name) for name in names if hasattr(source, name)}
    return type_(**same, **others)


class Data(msgspec.Struct, Generic[Entry]):
    """A list in OpenAI's format."""

    data: list[Entry]
    object: str = "list"


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


def find_priority(service_tier: str | None, context: RequestContext) -> Priority:
    """The priority from the header, else from the service tier; limited by the key. Raises: InvalidRequest."""
    name = context.headers.get(PRIORITY_HEADER)
    if name is None:
        asked = Priority.BATCH if service_tier == "flex" else Priority.INTERACTIVE
        return context.at_most(asked)
    for priority in Priority:
        if name == priority.value.encode():
            return context.at_most(priority)
    raise invalid(PRIORITY_HEADER.decode(), "send interactive or batch")


def find_service_tier(asked: str | None, priority: Priority) -> str | UnsetType:
    """The effective service tier, if the request names one."""
    if asked is None:
        return UNSET
    return "flex" if priority is Priority.BATCH else "default"


def wants_timings(asked: bool | None, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the body or the header requests timings."""
    return bool(asked) or headers.get(b"x-vlm-timings", b"").lower() in (b"true", b"1")


def timings_of(totals: Totals) -> Timings:
    """Duration of each stage and the total, if the client asked for timings."""
    return UNSET if totals.timings is None else totals.timings


def no_such(what: str, param: str) -> NotFound:
    return NotFound(f"There is no such {what}.", param=param, code="not_found")


def check_most(param: str, count: int, most: int, unit: str = "") -> None:
    """Raises: InvalidRequest if a field exceeds its limit."""
    if count > most:
        raise invalid(param, f"send at most {most} {unit}".rstrip())


def check_num(what: str, num: int, most: int, param: str) -> None:
    """Raises: InvalidRequest if there are too many inputs or images."""
    if num > most:
        code = f"too_many_{'images' if what == 'images' else 'inputs'}"
        raise InvalidRequest(f"Too many {what}: send at most {most}.", param=param, code=code)


def check_chars(num_chars: int, most: int, param: str, code: str = "text_too_long") -> None:
    """Raises: InvalidRequest if all texts together are too long."""
    if num_chars > most:
        message = f"The texts are too long: send at most {most} characters."
        raise InvalidRequest(message, param=param, code=code)


# Sampling fields, which are checked against `LimitSettings` and translated to `SamplingParams`.

Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.1, le=10)]
Number = TypeVar("Number", int, float)
N = TypeVar("N")

_GREEDY_BELOW = 1e-5  #: lower temperatures are greedy: dividing by them would overflow
_LEAST_TOP_P = 1e-9  #: replaces 0, which clients send to get only the most probable token
_TOKEN_ID = re.compile("[0-9]{1,10}")
_SEED_MASK = 2**64 - 1  #: negative seeds become large unsigned ones


class StopForm(EchoedStruct, frozen=True, kw_only=True):
    """candle-vllm's format of `stop`: an object with one of these fields."""

    Single: str | None = None
    Multiple: list[str] | None = None


class SamplingFields(RequestStruct, frozen=True, kw_only=True):
    """Sampling fields of all text APIs. An API may rename a field with `msgspec.field(name=...)`.

    To add a field, add it here, in `translate_sampling`, in `SamplingParams` and in the engine.
    """

    prefix: ClassVar[str] = ""  #: prefix of the fields' names in errors
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | StopForm | None = None
    stop_token_ids: Annotated[list[TokenId] | None, doc("Token ids that end the answer.")] = None
    include_stop_str_in_output: Annotated[
        bool | None, doc("Whether the answer keeps the stop string that ended it.")
    ] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None, doc("The only token ids that may be sampled.")
    ] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[
        dict[str, Bias] | None, doc("Added to the logits of token ids, given in decimal digits.")
    ] = None
    min_tokens: Annotated[Count | None, doc("Minimum number of tokens of the answer.")] = None
    skip_special_tokens: Annotated[bool | None, doc("false keeps special tokens in the text.")] = (
        None
    )
    ignore_eos: Annotated[bool | None, doc("Generate until `max_tokens`, for load tests.")] = None


class OpenAiSampling(SamplingFields, frozen=True, kw_only=True):
    """Fields of chat and of completions."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Annotated[
        ServiceTier | None, doc("`flex`: priority `batch`; other values: `interactive`.")
    ] = None
    user: User = None
    timings: ShowsTimings = None
    max_tokens: Positive | None = None
    n: Positive | None = None
    repeat_penalty: Annotated[
        RepetitionPenalty | None, doc("llama.cpp's name of `repetition_penalty`.")
    ] = None
    penalty: Annotated[
        RepetitionPenalty | None, doc("candle-vllm's name of `repetition_penalty`.")
    ] = None
    prompt_logprobs: Annotated[
        Count | None,
        doc("Number of best tokens whose logprobs are returned for each token of the prompt."),
    ] = None
    return_token_ids: Annotated[bool | None, doc("Return the token ids of prompt and output.")] = (
        None
    )


def translate_sampling(
    fields: SamplingFields,
    limits: LimitSettings,
    context: RequestContext,
    defaults: SamplingDefaults,
    max_tokens: int | None = None,
    name: str = "max_tokens",
    *,
    num_logprobs: int | None = None,
) -> SamplingParams:
    """Sampling parameters. Omitted fields get `defaults`; `max_tokens` without a default gets the key's output limit.

    `name`: the API's name of `max_tokens`. Engines limit the value to the remaining context. Raises: InvalidRequest.
    """
    most = min(limits.max_output_tokens, context.max_output_tokens or limits.max_output_tokens)
    if max_tokens is not None and max_tokens > most:
        whose = "" if most == limits.max_output_tokens else ", the limit of this key"
        raise invalid(name, f"send at most {most}{whose}")
    openai = fields if isinstance(fields, OpenAiSampling) else OpenAiSampling()
    temperature = _first(fields.temperature, defaults.temperature, 1.0)
    top_p = _first(fields.top_p, defaults.top_p, 1.0)
    min_tokens, longest = fields.min_tokens or 0, most if max_tokens is None else max_tokens
    if min_tokens > longest:
        problem = f"send at most {longest}, the maximum number of tokens of the answer"
        raise invalid(fields.prefix + "min_tokens", problem)
    default = defaults.max_tokens or (most if context.max_output_tokens else None)
    if max_tokens is None and default is not None:
        max_tokens = min(max(default, min_tokens), most)
    seed = int(context.id[:16], 16) if fields.seed is None else fields.seed
    if fields.allowed_token_ids == []:
        raise invalid(
            fields.prefix + "allowed_token_ids", "send at least one token id, or leave it out"
        )
    check_most("prompt_logprobs", openai.prompt_logprobs or 0, limits.max_top_logprobs)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=max(top_p, _LEAST_TOP_P),
        top_k=max(_first(fields.top_k, defaults.top_k, 0), 0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        seed=seed & _SEED_MASK,
        stop=_stop(fields, limits),
        stop_token_ids=_token_ids(fields, "stop_token_ids", limits.max_stop_token_ids),
        keeps_stop=bool(fields.include_stop_str_in_output),
        allowed_token_ids=_token_ids(fields, "allowed_token_ids", limits.max_allowed_token_ids),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(
            _first(fields.repetition_penalty, openai.repeat_penalty, openai.penalty),
            defaults.repetition_penalty,
            1.0,
        ),
        logit_bias=_logit_bias(fields, limits),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=openai.prompt_logprobs,
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        returns_prompt_ids=bool(openai.return_token_ids),
    )


def _first(asked: Number | None, default: Number | None, no_op: N) -> Number | N:
    """The client's value, else the default, else the no-op value."""
    if asked is not None:
        return asked
    return no_op if default is None else default


def find_num_logprobs(wanted: bool | None, top: int | None, limits: LimitSettings) -> int | None:
    """The number of alternatives of each token. None: no logprobs. Raises: InvalidRequest."""
    if not wanted:
        if top:
            raise invalid("top_logprobs", "send logprobs: true as well")
        return None
    check_most("top_logprobs", top or 0, limits.max_top_logprobs)
    return top or 0


def check_stream(fields: OpenAiSampling) -> None:
    """Refuse `stream_options` without `stream`, and `prompt_logprobs` with `stream`. Raises: InvalidRequest."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "send stream: true as well")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "streams do not support it; send stream: false")


def _stop(fields: SamplingFields, limits: LimitSettings) -> tuple[str, ...]:
    if (given := fields.stop) is None:
        return ()
    if isinstance(given, StopForm):
        given = given.Single if given.Single is not None else given.Multiple or ()
    stop = (given,) if isinstance(given, str) else tuple(given)
    name = fields.prefix + fields.__struct_encode_fields__[fields.__struct_fields__.index("stop")]
    check_most(name, len(stop), limits.max_stop_strings, "strings")
    if any(not 1 <= len(text) <= limits.max_stop_chars for text in stop):
        raise invalid(name, f"send strings of 1 to {limits.max_stop_chars} characters")
    return stop


def _token_ids(fields: SamplingFields, name: str, most: int) -> tuple[int, ...]:
    token_ids: list[int] | None = getattr(fields, name)
    if token_ids is None:
        return ()
    check_most(fields.prefix + name, len(token_ids), most, "token ids")
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(fields: SamplingFields, limits: LimitSettings) -> dict[int, float]:
    if (bias := fields.logit_bias) is None:
        return {}
    name = fields.prefix + "logit_bias"
    check_most(name, len(bias), limits.max_logit_bias, "entries")
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise invalid(name, "send token ids in decimal digits as keys")
    return {int(key): value for key, value in bias.items()}


def check_model(sampling: SamplingParams, card: ModelCard, prefix: str = "") -> None:
    """Refuse token ids outside the vocabulary. `prefix`: of the fields' names in errors. Raises: InvalidRequest."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        token_ids = getattr(sampling, name)
        if token_ids and max(token_ids) >= card.vocab_size:
            raise invalid(prefix + name, f"send token ids below {card.vocab_size}")


def split_choices(task: Generate, count: int) -> list[Generate]:
    """One task per choice, with independent seeds; the first choice has the request's seed."""
    sampling, tasks = task.sampling, [task]
    for choice in range(1, count):
        digest = hashlib.blake2b(f"{sampling.seed}:{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
        tasks.append(replace(task, sampling=replace(sampling, seed=seed)))
    return tasks
