"""`POST /v1/completions`: text behind a prompt, which is sent as it stands, without a chat template.

Source: OpenAI API reference, "Create completion"; vLLM, "Completions API".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.answers import (
    SYSTEM_FINGERPRINT,
    CompletionUsage,
    encode,
    merge_tokens,
    to_usage,
    usage_of,
)
from gateway.api.conversation import check_text_chars
from gateway.api.fields import (
    ModelName,
    Neutral,
    ServiceTier,
    StreamOptions,
    Timings,
    TokenId,
    UserName,
    check_neutral,
    check_stream_options,
    find_priority,
    find_service_tier,
    invalid,
    timings_of,
    wants_timings,
)
from gateway.api.openapi import branch, describe_operation, write_neutral
from gateway.api.sampling import (
    check_max_tokens,
    check_model,
    num_choices,
    seed_of,
    split_choices,
    translate_sampling,
)
from gateway.api.structured import StructuredFields, check_with_grammar, find_grammar
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http import sse
from gateway.http.body import JsonBody
from gateway.http.context import RequestContext
from shared.protocol import (
    Finished,
    Generate,
    ModelCard,
    OutputLogprob,
    Started,
    TextPart,
    Tokens,
    TokensPart,
    Usage,
)
from shared.settings.limits import LimitSettings

DEFAULT_MAX_TOKENS = 16
#: JSON that asks for nothing, by field that is not supported; null always does.
_NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "best_of": (b"1",),
    "prompt_logprobs": (),
    "suffix": (b'""',),
}


class CompletionRequest(StructuredFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    model: ModelName
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    #: 0 for the logprobs of a prompt alone.
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None  #: the prompt stands before the text, with logprobs of its tokens
    logprobs: Annotated[int, Meta(ge=0)] | None = None  #: so many rivals of each token
    add_special_tokens: bool | None = None  #: vLLM's: false puts none around a prompt, such as BOS
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: UserName | None = None  #: the log holds a short hash of it
    timings: bool | None = None  #: ours: the answer ends with its stage timings
    best_of: Neutral = UNSET
    prompt_logprobs: Neutral = UNSET
    suffix: Neutral = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Of each token: its text, its logprob, its rivals, and where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]  #: a prompt's first has none
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer, or a chunk of one: they have one shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    service_tier: str | UnsetType = UNSET  #: that it was served as, where the request named one
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings = UNSET


class CompletionOptions(msgspec.Struct, frozen=True):
    """How the client wants its answer."""

    num_choices: int = 1  #: of each prompt
    echo: tuple[str, ...] = ()  #: the prompts, if they are to stand before the texts
    with_logprobs: bool = False
    is_echoed: bool = False  #: with logprobs of the prompt, whose tokens begin the answer
    include_usage: bool = False
    continuous_usage: bool = False
    service_tier: str | UnsetType = UNSET


_BODY = JsonBody(CompletionRequest)


class Completions(Surface):
    """OpenAI's completions."""

    name = "text_completion"
    path = "/v1/completions"
    task = "generate"
    id_prefix = "cmpl-"
    batchable = True
    options = CompletionOptions

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.max_commas = limits.max_input_commas  # of token ids

    def read(self, body: bytes, context: RequestContext) -> CompletionRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _BODY.decode(body)
        check_neutral(request, _NEUTRAL)
        if _is_echoed(request):
            self._check_echo(request)
        elif request.max_tokens == 0:
            raise invalid("max_tokens", "send at least 1; none is for echo with logprobs")
        check_stream_options(request.stream_options, request.stream)
        return request

    def plan(self, request: CompletionRequest, context: RequestContext, card: ModelCard) -> Plan:
        """`n` tasks for each prompt. Raises: InvalidRequest."""
        prompts = _prompts(request)
        count = num_choices(request, self.limits)
        self._check(prompts, count, request)
        max_tokens = check_max_tokens(request.max_tokens, "max_tokens", self.limits)
        sampling = translate_sampling(
            request,
            self.limits,
            seed_of(context),
            card.sampling,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            num_logprobs=request.logprobs,
        )
        check_model(sampling, card)
        grammar = find_grammar(request, card, self.limits)
        if grammar is not None:
            check_with_grammar(sampling)
            if _is_echoed(request):
                raise invalid(grammar.param, "it cannot stand beside echo with logprobs")
        adds_special = request.add_special_tokens is not False
        tasks = [
            task
            for prompt in prompts
            for task in split_choices(
                Generate(
                    (),
                    sampling,
                    prompt=prompt,
                    add_special_tokens=adds_special,
                    grammar=grammar,
                    is_echoed=_is_echoed(request),
                ),
                count,
            )
        ]
        priority = find_priority(request.service_tier, context.headers)
        stream_options = request.stream_options or StreamOptions()
        echo = [prompt.text for prompt in prompts if isinstance(prompt, TextPart)]
        return Plan(
            tasks,
            CompletionOptions(
                num_choices=count,
                echo=tuple(echo) if request.echo else (),
                with_logprobs=request.logprobs is not None,
                is_echoed=_is_echoed(request),
                include_usage=stream_options.include_usage,
                continuous_usage=stream_options.continuous_usage_stats,
                service_tier=find_service_tier(request.service_tier, priority),
            ),
            num_prompts=len(prompts),
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(request.timings, context.headers),
            priority=priority,
        )

    def _check_echo(self, request: CompletionRequest) -> None:
        """Refuse what would be of the prompt's tokens, too. Raises: InvalidRequest."""
        for name in ("stream", "stop", "presence_penalty", "frequency_penalty", "min_tokens"):
            if getattr(request, name):
                raise invalid(name, "it cannot stand beside echo with logprobs; leave it out")

    def _check(
        self, prompts: Sequence[TextPart | TokensPart], count: int, request: CompletionRequest
    ) -> None:
        limits = self.limits
        if len(prompts) * count > limits.max_prompts:
            raise invalid("prompt", f"send at most {limits.max_prompts} prompts, times n")
        check_text_chars(
            sum(len(prompt.text) for prompt in prompts if isinstance(prompt, TextPart)),
            "prompt",
            limits,
        )
        is_allowed = isinstance(prompts[0], TextPart) or _is_echoed(request)
        if request.echo and not is_allowed:
            raise invalid("echo", "it needs prompts of text; POST /detokenize tells that of ids")
        if (request.logprobs or 0) > limits.max_top_logprobs:
            raise invalid("logprobs", f"send at most {limits.max_top_logprobs}")

    def answer(self, options: CompletionOptions, head: AnswerHead) -> Answer:
        """A `Completion` or its chunks."""
        return CompletionAnswer(options, head)

    def describe(self, request: CompletionRequest) -> Mapping[str, Any]:
        """What was asked for, in numbers."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        return {
            "stream": bool(request.stream),
            "choice.count": request.n,
            **{name: getattr(request, name) for name in names},
        }

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request, with the operator's limits."""
        limits = self.limits
        operation, schemas = describe_operation(
            operation_id="create_completion",
            summary="Continue a prompt",
            tag="completions",
            request=CompletionRequest,
            answer=Completion,
            chunk=Completion,
            limits=limits,
        )
        properties = schemas["CompletionRequest"]["properties"]
        properties["prompt"]["description"] = (
            f"At most {limits.max_prompts} prompts, times `n`, of {limits.max_text_chars} "
            "characters together. Special tokens that a text spells are tokens."
        )
        branch(properties["max_tokens"], "integer")["maximum"] = limits.max_output_tokens
        branch(properties["logprobs"], "integer")["maximum"] = limits.max_top_logprobs
        write_neutral(properties, _NEUTRAL)
        return operation, schemas


def _is_echoed(request: CompletionRequest) -> bool:
    """Whether the tokens of the prompt have logprobs."""
    return bool(request.echo) and request.logprobs is not None


def _prompts(request: CompletionRequest) -> list[TextPart | TokensPart]:
    """Raises: InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [TextPart(given)]
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    ids = [prompt for prompt in given if isinstance(prompt, int)]
    lists = [prompt for prompt in given if isinstance(prompt, list)]
    if len(ids) == len(given):
        return [TokensPart(tuple(ids))]
    if len(texts) == len(given):
        return [TextPart(text) for text in texts]
    if len(lists) == len(given) and all(lists):
        return [TokensPart(tuple(each)) for each in lists]
    raise invalid("prompt", "send a text, token ids, a list of texts, or a list of lists of ids")


class CompletionAnswer:
    """One answer, whole or in chunks."""

    def __init__(self, options: CompletionOptions, head: AnswerHead) -> None:
        self.options = options
        self.head = head
        self._begun: set[int] = set()
        self._num_chars: dict[int, int] = {}  # so far, by choice
        self._counts: dict[int, int] = {}  # output tokens so far, by choice
        self._prompts: dict[int, Usage] = {}  # by choice
        self._num_tokens = 0

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """A `Completion`."""
        pieces: list[list[Tokens]] = [[] for _ in totals.finished]
        reasons, num_echoed = [""] * len(pieces), [0] * len(pieces)
        for index, event in events:
            if isinstance(event, Tokens):
                pieces[index].append(event)
            elif isinstance(event, Finished):
                reasons[index] = event.finish_reason.value
                num_echoed[index] = event.usage.num_prompt_tokens - 1
        if self.options.is_echoed:
            return self._whole_echoed(pieces, reasons, num_echoed, totals)
        choices = [
            self._choice(index, [(index, event) for event in each], reasons[index])
            for index, each in enumerate(pieces)
        ]
        return self._encode(choices, to_usage(totals), timings_of(totals))

    def _whole_echoed(
        self, pieces: list[list[Tokens]], reasons: list[str], num_echoed: list[int], totals: Totals
    ) -> bytes:
        choices = [
            self._echoed(index, *each)
            for index, each in enumerate(zip(pieces, reasons, num_echoed, strict=True))
        ]
        usage = usage_of(totals.prompt, totals.num_output_tokens - sum(num_echoed))
        return self._encode(choices, usage, timings_of(totals))

    def _choice(self, index: int, events: Sequence[ChoiceEvent], reason: str) -> CompletionChoice:
        """All of a text."""
        text, logprobs = self._begin(index), None
        for _, event in merge_tokens(events):
            assert isinstance(event, Tokens)
            logprobs = self._logprobs(index, event)
            text += event.text
        if logprobs is None and self.options.with_logprobs:
            logprobs = CompletionLogprobs([], [], [], [])
        return CompletionChoice(index, text, logprobs, reason)

    def _echoed(
        self, index: int, pieces: list[Tokens], reason: str, num_echoed: int
    ) -> CompletionChoice:
        """All of a text whose prompt has logprobs: its first token has none, and is known by the text alone."""
        entries = [entry for event in pieces for entry in event.logprobs]
        first = ""
        if self.options.echo:
            prompt = self.options.echo[index // self.options.num_choices]
            behind = "".join(entry.chosen.token for entry in entries[:num_echoed])
            first = prompt.removesuffix(behind) if prompt.endswith(behind) else ""
        text = first + "".join(event.text for event in pieces)
        logprobs = to_logprobs(entries, len(first))
        logprobs.tokens.insert(0, first)
        logprobs.token_logprobs.insert(0, None)
        logprobs.top_logprobs.insert(0, None)
        logprobs.text_offset.insert(0, 0)
        return CompletionChoice(index, text, logprobs, reason)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """Chunks; the last ones hold the usage and the timings, where they are asked for."""
        frames: list[Frame] = []
        timings = UNSET if totals is None else timings_of(totals)
        last = events[-1][1] if events else None
        for index, event in merge_tokens(events):
            self._count(index, event)
            if index not in self._begun and (echo := self._begin(index)):
                frames.append((0, self._chunk(CompletionChoice(index, echo))))
            if isinstance(event, Tokens):
                logprobs = self._logprobs(index, event)
                if event.text or logprobs is not None:
                    chunk = self._chunk(CompletionChoice(index, event.text, logprobs))
                    frames.append((event.index + event.num_tokens, chunk))
            elif isinstance(event, Finished):
                self._num_tokens = event.usage.num_output_tokens
                choice = CompletionChoice(index, "", None, event.finish_reason.value)
                is_end = event is last and not self.options.include_usage
                chunk = self._chunk(choice, timings if is_end else UNSET)
                frames.append((self._num_tokens + 1, chunk))
        if totals is not None:
            frames += self._end(totals, timings)
        return frames

    def _end(self, totals: Totals, timings: Timings) -> Iterator[Frame]:
        if self.options.include_usage:
            yield self._num_tokens + 2, sse.frame(self._encode([], to_usage(totals), timings))
        yield self._num_tokens + 3, sse.DONE

    def _begin(self, index: int) -> str:
        """What stands before a text."""
        self._begun.add(index)
        if not self.options.echo:
            return ""
        echo = self.options.echo[index // self.options.num_choices]
        self._num_chars[index] = len(echo)
        return echo

    def _count(self, index: int, event: object) -> None:
        if isinstance(event, Tokens):
            self._counts[index] = event.index + event.num_tokens
        elif isinstance(event, Started | Finished):
            self._prompts[index // self.options.num_choices] = event.usage

    def _logprobs(self, index: int, event: Tokens) -> CompletionLogprobs | None:
        if not self.options.with_logprobs:
            return None
        begin = self._num_chars.get(index, 0)
        self._num_chars[index] = begin + len(event.text)
        return to_logprobs(event.logprobs, begin)

    def _chunk(self, choice: CompletionChoice, timings: Timings = UNSET) -> bytes:
        usage = None if self.options.include_usage else UNSET
        if self.options.continuous_usage:
            prompts = self._prompts.values()
            prompt = Usage(
                sum(each.num_prompt_tokens for each in prompts),
                num_cached_tokens=sum(each.num_cached_tokens for each in prompts),
            )
            usage = usage_of(prompt, sum(self._counts.values()))
        return sse.frame(self._encode([choice], usage, timings))

    def _encode(
        self,
        choices: list[CompletionChoice],
        usage: CompletionUsage | UnsetType | None,
        timings: Timings,
    ) -> bytes:
        return encode(
            Completion(
                id=self.head.id,
                created=self.head.created,
                model=self.head.model,
                system_fingerprint=self.head.package or SYSTEM_FINGERPRINT,
                choices=choices,
                service_tier=self.options.service_tier,
                usage=usage,
                timings=timings,
            )
        )


def to_logprobs(entries: Sequence[OutputLogprob], begin: int) -> CompletionLogprobs:
    """The `logprobs` object of tokens that begin at a character of the text."""
    found = CompletionLogprobs([], [], [], [])
    for entry in entries:
        chosen = entry.chosen
        found.tokens.append(chosen.token)
        found.token_logprobs.append(chosen.logprob)
        top = {rival.token: rival.logprob for rival in entry.top}
        found.top_logprobs.append({**top, chosen.token: chosen.logprob})
        found.text_offset.append(begin)
        begin += len(chosen.token)
    return found
