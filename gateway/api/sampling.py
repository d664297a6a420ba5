"""Sampling parameters of all text APIs.

Values are checked against `LimitSettings` and become an exact `SamplingParams` value, or an error that names the
field.
"""

import hashlib
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from gateway.api.fields import EchoedStruct, RequestStruct, TokenId, doc, invalid
from gateway.http.exchange import RequestContext
from shared.protocol import Generate, ModelCard, SamplingDefaults, SamplingParams
from shared.settings.limits import LimitSettings

Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.1, le=10)]
Number = TypeVar("Number", int, float)
N = TypeVar("N")

_GREEDY_BELOW = 1e-5  #: lower temperatures are greedy: dividing by them would overflow
_LEAST_TOP_P = 1e-9  #: 0 is valid in requests and selects the most probable token
_MAX_TOKEN_ID_DIGITS = 10
_SEED_MASK = 2**64 - 1  #: negative seeds become large unsigned ones


class StopForm(EchoedStruct, frozen=True, kw_only=True):
    """candle-vllm's format of `stop`: one of these."""

    Single: str | None = None
    Multiple: list[str] | None = None


class SamplingFields(RequestStruct, frozen=True, kw_only=True):
    """Sampling fields of all text APIs, some under other names (`rename`).

    To add a field, add it here, in `translate_sampling`, in `SamplingParams` and in the engine.
    """

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
    ] = None  # colliding keys cannot be sent as numbers
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("Number of tokens before the answer may end.")
    ] = None
    skip_special_tokens: Annotated[bool | None, doc("false keeps special tokens in the text.")] = (
        None
    )
    ignore_eos: Annotated[bool | None, doc("Generate until `max_tokens`, for load tests.")] = None


class OpenAiSampling(SamplingFields, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    repeat_penalty: Annotated[
        RepetitionPenalty | None, doc("llama.cpp's name of `repetition_penalty`.")
    ] = None
    penalty: Annotated[
        RepetitionPenalty | None, doc("candle-vllm's name of `repetition_penalty`.")
    ] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0)] | None,
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
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters. `defaults`, and the key's limit of an answer, apply to fields that the request omits.

    Raises: InvalidRequest.
    """
    openai = fields if isinstance(fields, OpenAiSampling) else OpenAiSampling()
    temperature = _first(fields.temperature, defaults.temperature, 1.0)
    top_p = _first(fields.top_p, defaults.top_p, 1.0)
    most = _most_tokens(limits, context)
    max_tokens = None if max_tokens is None else min(max_tokens, most)
    min_tokens = _min_tokens(fields, most if max_tokens is None else max_tokens)
    default = defaults.max_tokens or (most if context.max_output_tokens else None)
    if max_tokens is None and default is not None:
        max_tokens = min(max(default, min_tokens), most)
    seed = int(context.id[:16], 16) if fields.seed is None else fields.seed
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
        allowed_token_ids=_allowed_token_ids(fields, limits),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(
            _first(fields.repetition_penalty, openai.repeat_penalty, openai.penalty),
            defaults.repetition_penalty,
            1.0,
        ),
        logit_bias=_logit_bias(fields, limits),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=_prompt_logprobs(openai, limits),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        returns_prompt_ids=bool(openai.return_token_ids),
    )


def _first(asked: Number | None, default: Number | None, no_op: N) -> Number | N:
    """The client's value, else the default, else the no-op value."""
    if asked is not None:
        return asked
    return no_op if default is None else default


def check_max_tokens(
    value: int | None, name: str, limits: LimitSettings, context: RequestContext
) -> int | None:
    """The requested number; the engine limits it to the model's context.

    Raises: InvalidRequest.
    """
    most = _most_tokens(limits, context)
    if value is not None and value > most:
        whose = "" if most == limits.max_output_tokens else ", the limit of this key"
        raise invalid(name, f"send at most {most}{whose}")
    return value


def find_num_logprobs(wanted: bool | None, top: int | None, limits: LimitSettings) -> int | None:
    """The number of alternatives of each token. None: no logprobs. Raises: InvalidRequest."""
    if not wanted:
        if top:
            raise invalid("top_logprobs", "it needs logprobs: send logprobs as true")
        return None
    if (top or 0) > limits.max_top_logprobs:
        raise invalid("top_logprobs", f"send at most {limits.max_top_logprobs}")
    return top or 0


def _most_tokens(limits: LimitSettings, context: RequestContext) -> int:
    return min(limits.max_output_tokens, context.max_output_tokens or limits.max_output_tokens)


def _min_tokens(fields: SamplingFields, most: int) -> int:
    value = fields.min_tokens or 0
    if value > most:
        raise invalid("min_tokens", f"send at most {most}, as many as the answer may have")
    return value


def _prompt_logprobs(fields: OpenAiSampling, limits: LimitSettings) -> int | None:
    if (fields.prompt_logprobs or 0) > limits.max_top_logprobs:
        raise invalid("prompt_logprobs", f"send at most {limits.max_top_logprobs}")
    return fields.prompt_logprobs


def check_prompt_logprobs(fields: OpenAiSampling, is_streamed: bool | None) -> None:
    """Refuse prompt logprobs of streams, whose chunks have no field for them. Raises: InvalidRequest."""
    if fields.prompt_logprobs is not None and is_streamed:
        raise invalid("prompt_logprobs", "it needs a whole answer: send stream as false")


def _stop(fields: SamplingFields, limits: LimitSettings) -> tuple[str, ...]:
    given = () if fields.stop is None else fields.stop
    if isinstance(given, StopForm):
        given = given.Single if given.Single is not None else given.Multiple or ()
    stop = (given,) if isinstance(given, str) else tuple(given)
    name = fields.__struct_encode_fields__[fields.__struct_fields__.index("stop")]
    if len(stop) > limits.max_stop_strings:
        raise invalid(name, f"send at most {limits.max_stop_strings} strings")
    if any(not 1 <= len(text) <= limits.max_stop_chars for text in stop):
        raise invalid(name, f"send strings of 1 to {limits.max_stop_chars} characters")
    return stop


def _token_ids(fields: SamplingFields, name: str, most: int) -> tuple[int, ...]:
    token_ids: list[int] = getattr(fields, name) or []
    if len(token_ids) > most:
        raise invalid(name, f"send at most {most} token ids")
    return tuple(dict.fromkeys(token_ids))


def _allowed_token_ids(fields: SamplingFields, limits: LimitSettings) -> tuple[int, ...]:
    if fields.allowed_token_ids == []:
        raise invalid("allowed_token_ids", "send at least one token id, or leave it out")
    return _token_ids(fields, "allowed_token_ids", limits.max_allowed_token_ids)


def _logit_bias(fields: SamplingFields, limits: LimitSettings) -> dict[int, float]:
    bias = fields.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise invalid("logit_bias", f"send at most {limits.max_logit_bias} entries")
    if not all(map(_is_token_id, bias)):
        raise invalid("logit_bias", "send token ids in decimal digits as keys")
    return {int(key): value for key, value in bias.items()}


def _is_token_id(key: str) -> bool:
    return len(key) <= _MAX_TOKEN_ID_DIGITS and key.isascii() and key.isdigit()


def num_choices(fields: OpenAiSampling, limits: LimitSettings) -> int:
    """Number of choices. Raises: InvalidRequest."""
    count = fields.n or 1
    if count > limits.max_choices:
        raise invalid("n", f"send at most {limits.max_choices}")
    return count


def check_model(sampling: SamplingParams, card: ModelCard) -> None:
    """Refuse parameters that the model does not support. Raises: InvalidRequest."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if any(token_id >= card.vocab_size for token_id in getattr(sampling, name)):
            raise invalid(name, f"send token ids below {card.vocab_size}")


def _choice_seed(seed: int, choice: int) -> int:
    """An independent seed for each choice; the first one has the request's."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


def split_choices(task: Generate, count: int) -> list[Generate]:
    """One task per choice, which differ in their seeds only."""
    sampling = task.sampling
    return [task] + [
        replace(task, sampling=replace(sampling, seed=_choice_seed(sampling.seed, choice)))
        for choice in range(1, count)
    ]
