"""`POST /v1/completions`: continue a prompt without a chat template.

Source: OpenAI API reference, "Create completion"; vLLM, "Completions API".
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from gateway.api.answers import (
    ChunkOptions,
    ChunkStream,
    CompletionUsage,
    PromptLogprobs,
    PromptTokens,
    merge_tokens,
    to_usage,
)
from gateway.api.fields import (
    UNSUPPORTED,
    ModelName,
    Timings,
    TokenId,
    check_chars,
    check_model,
    check_most,
    check_stream,
    doc,
    find_priority,
    invalid,
    num_choices,
    split_choices,
    timings_of,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import StructuredFields, check_with_grammar, find_grammar
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http.exchange import RequestContext
from shared.protocol import (
    CallEvent,
    Finished,
    Generate,
    ModelCard,
    OutputLogprob,
    PromptLogprob,
    SamplingParams,
    TextPart,
    Tokens,
    TokensPart,
)

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(StructuredFields, frozen=True, kw_only=True):
    model: ModelName
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    #: 0 for logprobs of the prompt only.
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: Annotated[
        bool | None, doc("Return the prompt before the text, with logprobs of its tokens.")
    ] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        doc("Number of most likely tokens to return logprobs of, for each token."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("false adds no special tokens, such as BOS, to a prompt.")
    ] = None


class CompletionLogprobs(msgspec.Struct):
    """Text, logprob, alternatives and text offset of each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  #: null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One choice, or its part in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  #: in the first chunk of a stream
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer or a chunk; both have the same format."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    service_tier: str | UnsetType = UNSET  #: echoed from the request
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings = UNSET


class CompletionOptions(ChunkOptions, frozen=True):
    num_choices: int = 1  #: of each prompt
    #: The prompts to echo; None for a prompt of token ids.
    echo: tuple[str | None, ...] = ()


class Completions(Surface):
    """Continue a prompt."""

    name = "text_completion"
    path = "/v1/completions"
    tag = "completions"
    task = "generate"
    id_prefix = "cmpl-"
    batchable = True
    options = CompletionOptions
    request_type = CompletionRequest
    answer_type = chunk_type = Completion
    traced = ("stream", "n", "max_tokens", "temperature", "top_p", "top_k", "seed")
    unsupported = UNSUPPORTED["/v1/completions"]
    commas = "max_input_commas"  # of lists of token ids

    def read(self, body: bytes, context: RequestContext) -> CompletionRequest:
        request: CompletionRequest = super().read(body, context)
        check_stream(request)
        if request.max_tokens == 0 and request.prompt_logprobs is None and not request.echo:
            raise invalid("max_tokens", "send at least 1; 0 needs echo or prompt_logprobs")
        return request

    def plan(self, request: CompletionRequest, context: RequestContext, card: ModelCard) -> Plan:
        prompts = _prompts(request)
        count = num_choices(request, self.limits)
        self._check(prompts, count, request)
        most = context.max_output_tokens or DEFAULT_MAX_TOKENS
        default = min(DEFAULT_MAX_TOKENS, most, self.limits.max_output_tokens)
        sampling = translate_sampling(
            request,
            self.limits,
            context,
            card.sampling,
            default if request.max_tokens is None else request.max_tokens,
            num_logprobs=request.logprobs,
        )
        sampling = _with_echo(sampling, request, prompts)
        check_model(sampling, card)
        grammar = find_grammar(request, card, self.limits)
        if grammar is not None:
            check_with_grammar(sampling)
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
                ),
                count,
            )
        ]
        priority = find_priority(request.service_tier, context)
        echo = [prompt.text if isinstance(prompt, TextPart) else None for prompt in prompts]
        return Plan(
            tasks,
            CompletionOptions.of(
                request,
                priority,
                num_choices=count,
                echo=tuple(echo) if request.echo else (),
                with_logprobs=request.logprobs is not None,
            ),
            num_prompts=len(prompts),
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(request.timings, context.headers),
            priority=priority,
        )

    def _check(
        self, prompts: Sequence[TextPart | TokensPart], count: int, request: CompletionRequest
    ) -> None:
        limits = self.limits
        check_most("prompt", len(prompts) * count, limits.max_prompts, "prompts, times n")
        num_chars = sum(len(prompt.text) for prompt in prompts if isinstance(prompt, TextPart))
        check_chars(num_chars, limits.max_text_chars, "prompt", "context_length_exceeded")
        check_most("logprobs", request.logprobs or 0, limits.max_top_logprobs)

    def answer(self, options: CompletionOptions, head: AnswerHead) -> Answer:
        return CompletionAnswer(options, head)

    def describe_fields(self, properties: dict[str, Any]) -> None:
        limits = self.limits
        properties["prompt"]["description"] = (
            f"At most {limits.max_prompts} prompts (each counts `n` times), of {limits.max_text_chars} "
            "characters together. Special tokens in a text are encoded as such."
        )


def _with_echo(
    sampling: SamplingParams, request: CompletionRequest, prompts: Sequence[TextPart | TokensPart]
) -> SamplingParams:
    """Request logprobs of the prompt if the echo has logprobs, or is decoded from token ids."""
    is_text = isinstance(prompts[0], TextPart)
    if not request.echo or (is_text and request.logprobs is None):
        return sampling
    most = max(request.logprobs or 0, request.prompt_logprobs or 0)
    return replace(sampling, num_prompt_logprobs=most)


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


class CompletionAnswer(ChunkStream):
    """A `Completion`, whole or in chunks."""

    chunk_type = Completion

    def __init__(self, options: CompletionOptions, head: AnswerHead) -> None:
        super().__init__(options, head)
        self.options = options
        self.num_choices = options.num_choices
        self._num_chars: dict[int, int] = {}  # by choice
        self._tokens_of_prompt: defaultdict[int, PromptTokens] = defaultdict(PromptTokens)

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        pieces: list[list[ChoiceEvent]] = [[] for _ in totals.finished]
        reasons = [""] * len(pieces)
        for index, event in events:
            self._tokens_of_prompt[index].add(event)
            if isinstance(event, Tokens):
                pieces[index].append((index, event))
            elif isinstance(event, Finished):
                reasons[index] = event.finish_reason.value
        choices = [self._choice(index, each, reasons[index]) for index, each in enumerate(pieces)]
        return self.encode(Completion, choices, usage=to_usage(totals), timings=timings_of(totals))

    def _choice(self, index: int, events: Sequence[ChoiceEvent], reason: str) -> CompletionChoice:
        choice = self._begin(index)
        choice.finish_reason = reason
        for _, event in merge_tokens(events):
            assert isinstance(event, Tokens)
            choice.text += event.text
            if choice.token_ids is not UNSET:
                choice.token_ids += event.token_ids
            logprobs = self._logprobs(index, event)
            if choice.logprobs is not None and logprobs is not None:
                for name in CompletionLogprobs.__struct_fields__:
                    getattr(choice.logprobs, name).extend(getattr(logprobs, name))
        if self.options.with_prompt_logprobs:
            choice.prompt_logprobs = self._tokens_of_prompt[index].to_prompt_logprobs()
        return choice

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        for index, event in events:
            self._tokens_of_prompt[index].add(event)
        return super().frames(events, totals)

    def can_begin(self, event: CallEvent) -> bool:
        """Whether all tokens of the prompt have arrived, which the first chunk echoes."""
        if isinstance(event, Tokens):
            return bool(event.num_tokens or event.text)
        return isinstance(event, Finished)

    def first_chunk(self, index: int, event: CallEvent) -> bytes | None:
        first = self._begin(index)
        has_logprobs = first.logprobs is not None and bool(first.logprobs.tokens)
        if first.text or first.token_ids is not UNSET or has_logprobs:
            return self.chunk(first)
        return None

    def empty(self, index: int) -> CompletionChoice:
        return CompletionChoice(index, "")

    def content(self, index: int, event: Tokens) -> CompletionChoice | None:
        if not (event.num_tokens or event.text):
            return None
        choice = CompletionChoice(index, event.text, self._logprobs(index, event))
        if self.options.with_token_ids:
            choice.token_ids = event.token_ids
        has_content = choice.text or choice.token_ids or choice.logprobs is not None
        return choice if has_content else None

    def _begin(self, index: int) -> CompletionChoice:
        """The part before the text: the echoed prompt, with logprobs of its tokens if requested."""
        choice = CompletionChoice(index, "")
        entries: list[PromptLogprob] = []
        if self.options.echo:
            entries = self._tokens_of_prompt[index].entries
            text = self.options.echo[index // self.options.num_choices]
            spelled = b"".join([entry.chosen.token_bytes for entry in entries])
            choice.text = spelled.decode("utf-8", "replace") if text is None else text
        if self.options.with_logprobs:
            choice.logprobs = to_echoed_logprobs(entries, choice.text)
        if self.options.with_token_ids:
            choice.prompt_token_ids, choice.token_ids = self._tokens_of_prompt[index].token_ids, ()
        self._num_chars[index] = len(choice.text)
        return choice

    def _logprobs(self, index: int, event: Tokens) -> CompletionLogprobs | None:
        if not self.options.with_logprobs:
            return None
        begin = self._num_chars.get(index, 0)
        self._num_chars[index] = begin + len(event.text)
        return to_logprobs(event.logprobs, begin)


def to_echoed_logprobs(entries: Sequence[PromptLogprob], text: str) -> CompletionLogprobs:
    """The `logprobs` object of a prompt's tokens; the first has no logprob."""
    found = CompletionLogprobs([], [], [], [])
    # a tokenizer may put a space before the text
    begin = len(text) - sum(len(entry.chosen.token) for entry in entries)
    for entry in entries:
        chosen = entry.chosen
        found.tokens.append(chosen.token)
        found.token_logprobs.append(chosen.logprob if entry.rank else None)
        top = {rival.token: rival.logprob for _, rival in entry.top}
        found.top_logprobs.append({**top, chosen.token: chosen.logprob} if entry.rank else None)
        found.text_offset.append(max(begin, 0) if entry.position else 0)
        begin += len(chosen.token)
    return found


def to_logprobs(entries: Sequence[OutputLogprob], begin: int) -> CompletionLogprobs:
    """The `logprobs` object of tokens. `begin`: offset of the first token in the text."""
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
