"""The API of a server: how a request is written and how its stream is read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from engines.base import EngineStartError, InvalidRequest
from engines.core.runner import TokenChoice
from engines.core.sequence import EngineRequest
from engines.packages.resolve import BUILT_IN, parse_hub_id, resolve_model
from engines.text.processor import ChatProcessor, ControlSpelling
from engines.upstream.client import UpstreamClient
from engines.upstream.settings import UpstreamSettings
from shared.protocol import FinishReason, Generate, Grammar, SamplingParams

MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class UpstreamRequest(EngineRequest):
    """A prepared request. `max_tokens` is the number of output tokens, including those of earlier attempts."""

    grammar: Grammar | None = None
    grammar_source: str = ""  #: the grammar in the syntax of llguidance, if the server runs it
    max_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    tokens: Sequence[TokenChoice] = ()
    finish: FinishReason | None = None
    error: str = ""
    error_status: int = 500  #: HTTP status of the error
    num_prompt_tokens: int | None = None  #: including image tokens and output of earlier attempts
    num_cached_tokens: int | None = None
    queue_s: float = 0.0
    num_computed: int | None = None  #: tokens of this stream so far; set if `tokens` can lack some
    text: str = ""  #: text of all new tokens; set if `tokens` can lack some
    lost: bytes = b""  #: text of `num_lost` tokens that precede `tokens`; their ids are unknown
    num_lost: int = 0


class ServerInfo(msgspec.Struct):
    max_model_len: int
    version: str = ""
    takes_images: bool = True


class Dialect(ABC):
    name: str
    program: tuple[str, ...]  #: command that starts the server
    path: str
    versions: tuple[str, str] | None = None  #: tested versions: first, first untested; None: any
    health_path = "/health"
    metrics_path = ""
    #: Fields of `EngineStats` by the name of a Prometheus metric.
    metrics: ClassVar[Mapping[str, str]] = {}
    #: Paths that load and unload a LoRA adapter; None: not supported.
    adapter_paths: tuple[str, str] | None = None
    unsupported: tuple[str, ...] = ("num_prompt_logprobs",)  #: sampling parameters
    grammar_kinds: tuple[str, ...] = ("json", "regex", "choice")
    #: Kinds of media for which the server tokenizes the text of prompts again.
    retokenized: tuple[str, ...] = ()
    runs_grammar_source = False  #: whether the server enforces `grammar_source`
    environment: ClassVar[Mapping[str, str]] = {}  #: variables of the started server

    @abstractmethod
    def arguments(self, port: int) -> list[str]:
        """Arguments that start the server on a port of the loopback interface."""

    @abstractmethod
    def describe(self, client: UpstreamClient) -> ServerInfo:
        """Read the server's properties. Raises: httpx.HTTPError, KeyError, ValueError."""

    def check(self, request: UpstreamRequest, text: "PromptText") -> None:
        """Raises: InvalidRequest for a parameter that the API lacks, or a message that the server would misread."""
        refuse(request.sampling, self.name, *self.unsupported)
        for kind in {each.kind for each in request.images} & {*self.retokenized}:
            text.check(request.prompt_token_ids, kind)
        grammar = request.grammar
        if grammar is None or self.runs_grammar_source or grammar.kind in self.grammar_kinds:
            return
        kinds = ", ".join(self.grammar_kinds)
        raise InvalidRequest(
            f"{self.name} supports grammars of {kinds}, not {grammar.kind}", grammar.param
        )

    @abstractmethod
    def can_continue(self, task: Generate | UpstreamRequest) -> bool:
        """Whether an answer that continues from its output tokens equals the uninterrupted answer."""

    @abstractmethod
    def body(self, request: UpstreamRequest, output_ids: Sequence[int]) -> dict[str, Any]:
        """The request for the tokens after the prompt and `output_ids`."""

    def abort(self, body: Mapping[str, Any]) -> tuple[str, object] | None:
        """Path and JSON that abort the request with this body immediately; None: closing its stream aborts it."""
        return None

    @abstractmethod
    def parse(self, data: bytes) -> Chunk:
        """Read one event. Raises: msgspec.MsgspecError."""

    def recover(self, chunk: Chunk, num_missing: int) -> None:
        """Find the tokens that a chunk with `num_computed` lacks."""
        raise NotImplementedError


class PromptText:
    """Texts of prompts, for a server that tokenizes prompts with media itself."""

    def __init__(self, processor: ChatProcessor) -> None:
        self._tokenizer = processor.tokenizer
        self._control_ids = {token.id for token in processor.control_tokens.values()}
        self._spelling = ControlSpelling(processor.control_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, with control tokens spelled."""
        read = self._tokenizer
        data = b"".join(read.token_bytes(i) or read.token_string(i).encode() for i in token_ids)
        return data.decode("utf-8", "replace")

    def check(self, token_ids: Sequence[int], kind: str) -> None:
        """Raises: InvalidRequest if a message spells a control token, which the server would read as a real one."""
        num_control = sum(token_id in self._control_ids for token_id in token_ids)
        if len(self._spelling.find(self.decode(token_ids))) != num_control:
            raise InvalidRequest(
                "A message contains the text of a control token, which this engine does not support "
                f"in prompts with {kind}s: remove it.",
                "messages",
            )


def find_model(client: UpstreamClient, wanted: str = "") -> dict[str, Any]:
    """A model's entry in `GET /v1/models`; without a name, the first. Raises: EngineStartError; those of `describe`."""
    listed = client.request("GET", MODELS).raise_for_status().json()["data"]
    for found in listed:
        if found["id"] == wanted or not wanted:
            return found
    names = ", ".join(each["id"] for each in listed)[:300]
    raise EngineStartError(f"VLM_ENGINE__UPSTREAM_MODEL: {client.url} serves {names}, not {wanted}")


def model_arguments(settings: UpstreamSettings) -> list[str]:
    """Arguments for the model: a directory, or a hub repository and its revision."""
    found = parse_hub_id(settings.model)
    if settings.model in BUILT_IN or found is None or Path(settings.model).is_dir():
        return [str(resolve_model(settings.model))]
    repository, revision = found
    return [repository, *(["--revision", revision] if revision else [])]


_NEUTRAL = SamplingParams()
#: Names of parameters in requests, if they differ from those of `SamplingParams`.
_PARAMS = {
    "keeps_stop": "include_stop_str_in_output", "num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs",
    "returns_prompt_ids": "return_token_ids",
}  # fmt: skip


class TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None
    audio_tokens: int | None = None
    reasoning_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """`usage` in the APIs of OpenAI and vLLM."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None


def refuse(sampling: SamplingParams, engine: str, *names: str) -> None:
    """Raises: InvalidRequest if one of these parameters is set."""
    for name in names:
        if getattr(sampling, name) != getattr(_NEUTRAL, name):
            param = _PARAMS.get(name, name)
            raise InvalidRequest(f"{engine} does not support {param}: leave it out", param)


def to_bias(sampling: SamplingParams, media_token_ids: Sequence[int]) -> dict[str, float]:
    """`logit_bias`; tokens of media are forbidden, because the server would expand sampled ones."""
    bias = {str(token_id): value for token_id, value in sampling.logit_bias.items()}
    return bias | {str(token_id): -100.0 for token_id in media_token_ids}


def has_output_penalty(sampling: SamplingParams) -> bool:
    """Whether a request penalizes output tokens. A retry has them in its prompt, where servers do not count them."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def to_choices(token_ids: Sequence[int], scores: Sequence[Any] | None) -> list[TokenChoice]:
    """Tokens, with their logprobs if there are any."""
    if not scores:
        return [TokenChoice(token_id) for token_id in token_ids]
    return [
        TokenChoice(
            token_id,
            score.logprob,
            tuple((top.token_id, top.logprob) for top in score.top_logprobs),
        )
        for token_id, score in zip(token_ids, scores, strict=True)
    ]
