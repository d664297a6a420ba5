"""An engine whose tokens come from a server: prompts, text, stop strings, reasoning and calls are handled here.

A broken stream continues from its tokens while the server is healthy. When the server is lost, `step` raises: the worker
ends, and its requests continue elsewhere from their token logs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec

from engines.base import (
    Adapter,
    AdapterLimits,
    BadAdapter,
    Capabilities,
    EngineCall,
    EngineLoadFailed,
    EngineOutput,
    EngineStats,
    InvalidRequest,
    PreparedImage,
)
from engines.core.answers import Answer
from engines.core.constraint import Constraint, ConstraintFailure
from engines.core.prompting import PromptingEngine
from engines.core.runner import Processor, TokenChoice
from engines.packages.adapter_files import read_adapter
from engines.text.grammar import GrammarCompiler
from engines.upstream.client import ServerLost, StreamEvent, UpstreamClient
from engines.upstream.dialect import Chunk, Dialect, UpstreamRequest, error_message
from engines.upstream.server import ServerProcess
from engines.upstream.settings import UpstreamSettings
from shared.protocol import ErrorCode, FinishReason, Generate, Task, Tools

POLL_S = 0.05
MAX_TRIES = 3  #: of a stream that breaks while the server is healthy
RETRY_S = 0.2
ADAPTER_S = 120.0  #: to load an adapter
_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class ServerAdapter:
    """A LoRA adapter that the server has loaded under its digest."""

    digest: str
    rank: int
    num_bytes: int


@dataclass(slots=True)
class _Stream:
    """A request at the server."""

    request: UpstreamRequest
    answer: Answer
    output_ids: list[int] = field(default_factory=list)
    num_sends: int = 0
    num_breaks: int = 0
    num_at_send: int = 0  #: output tokens at the last send
    has_all_ids: bool = True

    @property
    def stream_id(self) -> str:
        """Name of the stream since the last send."""
        return f"{self.request.request_id}/{self.num_sends}"


class UpstreamEngine(PromptingEngine[UpstreamRequest]):
    """A model at a server."""

    def __init__(
        self,
        settings: UpstreamSettings,
        dialect: Dialect,
        processor: Processor,
        client: UpstreamClient,
        max_model_len: int,
        vocab_size: int,
        server: ServerProcess | None = None,
    ) -> None:
        self.processor, self.max_model_len, self.vocab_size = processor, max_model_len, vocab_size
        self._settings, self._dialect = settings, dialect
        # Compiled to refuse what the server would ignore, or would spend minutes on.
        self._grammars = GrammarCompiler.create(
            processor.tokenizer, vocab_size, processor.reasoning, processor.spelled
        )
        self._client, self._server = client, server
        self._streams: dict[str, _Stream] = {}
        self._finished_early: list[EngineOutput] = []
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._adapters: dict[str, Adapter] = {}  # by digest
        self.startup_s: dict[str, float] = {}

    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(
            self._settings.max_num_seqs,
            tasks=("generate", "tokenize"),
            decodes_images=True,
            takes_grammars=self._grammars is not None,
        )

    def can_continue(self, task: Task) -> bool:
        """Whether the server's state of a request is a function of its tokens."""
        return isinstance(task, Generate) and self._dialect.can_continue(task)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> UpstreamRequest:
        """Build the prompt. Raises: InvalidRequest, PromptTooLong, BadGrammar, GrammarTooComplex."""
        task = call.task
        assert isinstance(task, Generate)  # the worker checks the task against the capabilities
        tools = self._choose_tools(task.tools)
        prompt = self._build_prompt(task, images, tools)
        if task.grammar is not None and prompt.is_thinking:
            raise InvalidRequest(
                "this model reasons before it answers, and its engine would apply the grammar to the reasoning: "
                "disable thinking",
                task.grammar.param,
            )
        request = UpstreamRequest(
            call.request_id,
            prompt.token_ids,
            task.sampling,
            prompt.images,
            call.output_token_ids,
            call.tenant,
            call.priority,
            is_thinking=prompt.is_thinking,
            is_raw=task.prompt is not None,
            tool_format=None if tools is None else self.processor.tool_format,
            adapter=self._find_adapter(call.adapter),
            grammar=task.grammar,
        )
        self._check_request(request)
        self._dialect.check(request)
        if task.grammar is not None and self._grammars is not None:
            constraint = self._grammars.compile(task.grammar)
            if self._dialect.runs_grammar_source:
                self._check_conformity(constraint, request, task.grammar.param)
                request = replace(request, grammar_source=self._grammars.source(task.grammar))
        return replace(request, max_tokens=self._max_output_tokens(request))

    def _check_conformity(
        self, constraint: Constraint, request: UpstreamRequest, param: str
    ) -> None:
        """Raises: InvalidRequest if the tokens of an earlier attempt do not conform to the grammar."""
        earlier = request.output_token_ids
        if not earlier or earlier[-1] in self.processor.tokenizer.eos_token_ids:
            return
        try:
            constraint.begin().mask(earlier, 0)
        except ConstraintFailure as failure:
            raise InvalidRequest(str(failure), param) from None

    def _choose_tools(self, tools: Tools | None) -> Tools | None:
        if tools is not None and tools.is_required:
            raise InvalidRequest(
                "this model's engine cannot force a function call: send tool_choice auto",
                "tool_choice",
            )
        return tools if self.processor.shows_tools else None

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Load an adapter at the server, under its digest. Raises: BadAdapter."""
        if self._dialect.adapter_paths is None:
            return super().load_adapter(directory, limits)
        files = read_adapter(directory, limits)
        adapter = ServerAdapter(files.digest, files.config.get("r", 0), len(files.weights))
        body = {"lora_name": adapter.digest, "lora_path": str(directory.resolve())}
        try:
            response = self._client.request(
                "POST", self._dialect.adapter_paths[0], timeout_s=ADAPTER_S, json=body
            )
        except httpx.HTTPError as error:
            raise BadAdapter(f"the server fails: {type(error).__name__} {error}") from None
        if response.status_code == httpx.codes.NOT_FOUND and "Not Found" in response.text:
            raise BadAdapter(f"{self._dialect.name} was started without LoRA adapters")
        if response.is_error and "already" not in response.text:  # by another worker
            raise BadAdapter(error_message(response.content) or response.text[:300])
        self._adapters[adapter.digest] = adapter
        return adapter

    def unload_adapter(self, digest: str) -> None:
        """Unload an adapter at the server."""
        if self._adapters.pop(digest, None) is not None and self._dialect.adapter_paths is not None:
            with suppress(httpx.HTTPError):  # a server that is lost has no adapters
                self._client.request(
                    "POST", self._dialect.adapter_paths[1], json={"lora_name": digest}
                )

    def wake(self) -> None:
        """Make `step` return."""
        self._client.wake()

    def add(self, request: UpstreamRequest) -> None:
        """Send a request. Raises: InvalidRequest."""
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        answer = Answer.begin(request, self.processor)
        output_ids = list(request.output_token_ids)
        stream = _Stream(request, answer, output_ids)
        reason = self._finish_reason(request, output_ids[-1:], len(output_ids))
        if answer.is_stopped:
            reason = FinishReason.STOP
        if reason is not None:  # the lost attempt has reported all of the text
            self._finished_early.append(answer.end(reason))
            return
        answer.scheduled_at = answer.added_at
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._streams[request.request_id] = stream
        self._send(stream)

    def abort(self, request_id: str) -> None:
        """Close the request's stream; the server aborts it. Idempotent."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self._client.cancel(stream.stream_id)
        self._finished_early = [
            output for output in self._finished_early if output.request_id != request_id
        ]

    def step(self) -> list[EngineOutput]:
        """Wait for tokens. Raises: EngineLoadFailed if the server is lost."""
        self._num_steps += 1
        outputs, self._finished_early = self._finished_early, []
        try:
            events = self._client.receive(0.0 if outputs else POLL_S)
        except ServerLost as error:
            if self._server is not None:
                self._server.check()
            raise EngineLoadFailed(
                f"{self._dialect.name} at {self._client.url} fails its health check: {error}"
            ) from None
        for event in events:
            stream = self._streams.get(event.stream_id.rpartition("/")[0])
            if stream is not None and stream.stream_id == event.stream_id:
                outputs += self._handle(stream, event)
        return outputs

    def has_work(self) -> bool:
        """Whether a stream is open or an output is pending."""
        return bool(self._streams or self._finished_early)

    def stats(self) -> EngineStats:
        """Counts of this worker, and the server's caches."""
        started = sum(
            stream.answer.first_token_at is not None for stream in tuple(self._streams.values())
        )
        stats = EngineStats(
            num_running=started,
            num_waiting=len(self._streams) - started,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_adapters=len(self._adapters),
            startup_s=self.startup_s,
        )
        for name, target in self._dialect.metrics.items():
            if (value := self._client.metrics.get(name)) is not None:
                setattr(stats, target, value if target.endswith("_ratio") else int(value))
        return stats

    def close(self) -> None:
        """Close all streams and stop a server that was started here. Idempotent."""
        self._streams.clear()
        self._client.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._server is not None:
            self._server.close()

    @property
    def server_pid(self) -> int | None:
        """Process id of a server that was started here."""
        return None if self._server is None else self._server.pid

    def _send(self, stream: _Stream, delay_s: float = 0.0) -> None:
        body = self._dialect.body(stream.request, stream.output_ids)
        stream.num_sends += 1
        stream.num_at_send = len(stream.output_ids)
        data = msgspec.json.encode(body)
        self._client.start(stream.stream_id, self._dialect.path, data, delay_s)

    def _handle(self, stream: _Stream, event: StreamEvent) -> list[EngineOutput]:
        if event.kind == "refused":
            return self._refuse(stream, event)
        if event.kind == "broken":
            return self._retry(stream, event.data.decode())
        chunk = self._dialect.parse(event.data)
        if chunk is None:
            return []
        if chunk.error:
            return self._retry(stream, chunk.error)
        self._note_usage(stream, chunk)
        if not (chunk.tokens or chunk.finish):
            return []
        outputs = self._add_tokens(stream, chunk)
        if outputs[-1].finish_reason is not None:
            del self._streams[stream.request.request_id]
            self._client.cancel(stream.stream_id)
        return outputs

    def _note_usage(self, stream: _Stream, chunk: Chunk) -> None:
        answer, request = stream.answer, stream.request
        if answer.first_token_at is None:
            answer.scheduled_at = answer.added_at + chunk.queue_s
            if chunk.num_prompt_tokens is not None and request.images:
                num_prompt = chunk.num_prompt_tokens - len(request.output_token_ids)
                num_added = max(0, num_prompt - len(request.prompt_token_ids))
                answer.num_prompt_tokens = len(request.prompt_token_ids) + num_added
                answer.num_image_tokens = len(request.images) + num_added
        if chunk.num_cached_tokens is not None:
            answer.num_cached_tokens = min(chunk.num_cached_tokens, answer.num_prompt_tokens)

    def _add_tokens(self, stream: _Stream, chunk: Chunk) -> list[EngineOutput]:
        request, answer = stream.request, stream.answer
        outputs: list[EngineOutput] = []
        if chunk.num_computed is not None:
            num_known = len(stream.output_ids) - stream.num_at_send
            num_missing = chunk.num_computed - num_known - len(chunk.tokens)
            if num_missing > 0:
                self._dialect.recover(chunk, num_missing)
        if chunk.num_lost:
            stream.has_all_ids = False
            stream.num_at_send -= chunk.num_lost
            self._num_output_tokens += chunk.num_lost
            outputs.append(answer.output_bytes(chunk.lost, chunk.num_lost))
            if answer.is_stopped:
                return outputs
        tokens = [_with_logprobs(request, choice) for choice in chunk.tokens]
        num_before = answer.num_tokens + len(answer.undecided)
        reason = chunk.finish
        for index, choice in enumerate(tokens, 1):
            found = self._finish_reason(request, [choice.token_id], num_before + index)
            if found is not None:
                tokens, reason = tokens[:index], found
                break
        stream.output_ids += [choice.token_id for choice in tokens]
        self._num_output_tokens += len(tokens)
        return [*outputs, answer.output(tokens, reason)]

    def _finish_reason(
        self, request: UpstreamRequest, last: Sequence[int], num_tokens: int
    ) -> FinishReason | None:
        """Why an answer ends after its last token, if it does."""
        sampling = request.sampling
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends = (*ends, *self.processor.tokenizer.eos_token_ids)
        if num_tokens >= sampling.min_tokens and any(token_id in ends for token_id in last):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.max_tokens else None

    def _refuse(self, stream: _Stream, event: StreamEvent) -> list[EngineOutput]:
        message = error_message(event.data)
        if event.status in _BUSY:
            self._send(stream, delay_s=RETRY_S)
            return []
        if event.status >= 500:
            return self._retry(stream, message or f"status {event.status}")
        code = ErrorCode.INVALID_REQUEST
        if "context" in message or "max_model_len" in message:
            code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
        return self._fail(stream, code, message or "The model's engine refuses the request.")

    def _retry(self, stream: _Stream, reason: str) -> list[EngineOutput]:
        """Continue a broken stream from its tokens."""
        request = stream.request
        task = Generate((), request.sampling, grammar=request.grammar)
        can_continue = stream.has_all_ids and self._dialect.can_continue(task)
        stream.num_breaks += 1
        if stream.num_breaks < MAX_TRIES and (can_continue or not stream.answer.num_tokens):
            self._client.cancel(stream.stream_id)
            self._send(stream, delay_s=RETRY_S * stream.num_breaks)
            return []
        message = f"The model's engine failed: {reason}"
        return self._fail(stream, ErrorCode.ENGINE_FAILURE, message)

    def _fail(self, stream: _Stream, code: ErrorCode, message: str) -> list[EngineOutput]:
        self._client.cancel(stream.stream_id)
        del self._streams[stream.request.request_id]
        return [stream.answer.fail(message, code)]


def _with_logprobs(request: UpstreamRequest, choice: TokenChoice) -> TokenChoice:
    """The token with as many logprobs as the request asks for."""
    count = request.sampling.num_logprobs
    if count is None:
        return TokenChoice(choice.token_id)
    # vLLM puts the sampled token first.
    best = sorted(choice.top_logprobs, key=lambda pair: pair[1], reverse=True)
    return TokenChoice(choice.token_id, choice.logprob, tuple(best[:count]))
