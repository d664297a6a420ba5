"""An engine whose tokens come from a server: prompts, text, stop strings, reasoning and calls are handled here."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engines.base import (
    Adapter,
    AdapterLimits,
    BadAdapter,
    EngineCall,
    EngineOutput,
    EngineStats,
    InvalidRequest,
    PreparedImage,
)
from engines.core.answers import Answer, PromptingEngine
from engines.core.constraint import Constraint, ConstraintFailure
from engines.core.runner import Processor, TokenChoice
from engines.packages.adapter_files import read_adapter
from engines.text.grammar import GrammarCompiler
from engines.text.processor import ChatProcessor
from engines.upstream.client import DONE, UpstreamClient
from engines.upstream.dialect import Chunk, Dialect, PromptText, UpstreamRequest
from engines.upstream.server import ServerProcess
from engines.upstream.settings import UpstreamSettings
from engines.upstream.streams import OpenRequest, StreamBroken, StreamEngine, error_message
from shared.protocol import ErrorCode, FinishReason, Generate, Task, Tools

ADAPTER_S = 120.0  #: time limit to load an adapter


class UpstreamEngine(StreamEngine[UpstreamRequest], PromptingEngine[UpstreamRequest]):
    """A model at a server that accepts and returns token ids."""

    def __init__(
        self,
        settings: UpstreamSettings,
        dialect: Dialect,
        processor: ChatProcessor,
        client: UpstreamClient,
        max_model_len: int,
        vocab_size: int,
        server: ServerProcess | None = None,
    ) -> None:
        super().__init__(dialect.name, dialect.path, dialect.metrics, client, server)
        self.processor, self.max_model_len, self.vocab_size = processor, max_model_len, vocab_size
        self.max_num_seqs = settings.max_num_seqs
        self._dialect, self._text = dialect, PromptText(processor)
        # Compiles grammars, to refuse grammars that the server would ignore or compile for minutes.
        self._grammars = GrammarCompiler.create(
            processor.tokenizer, vocab_size, processor.reasoning, processor.spelled
        )
        self._adapters: dict[str, Adapter] = {}  # by digest

    def can_continue(self, task: Task) -> bool:
        return isinstance(task, Generate) and self._dialect.can_continue(task)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> UpstreamRequest:
        """Build the prompt. Raises: InvalidRequest, PromptTooLong, BadGrammar, GrammarTooComplex."""
        task = call.task
        assert isinstance(task, Generate)  # the worker checks the task against the capabilities
        tools = self._choose_tools(task.tools)
        prompt = self._build_prompt(task, images, tools)
        grammar, is_forced = task.grammar, tools is not None and tools.is_required
        param = "tool_choice" if grammar is None else grammar.param
        if (grammar is not None or is_forced) and prompt.is_thinking:
            raise InvalidRequest(
                "this model reasons before it answers, and its engine would apply the grammar to the reasoning: "
                "disable thinking",
                param,
            )
        if grammar is not None and tools is not None and not self._dialect.runs_grammar_source:
            raise InvalidRequest(
                "this model's engine cannot combine functions with a grammar: send tool_choice none, or "
                f"omit {param}",
                param,
            )
        request = UpstreamRequest(**self._fields(call, prompt, tools), grammar=grammar)
        self._check_request(request)
        self._dialect.check(request, self._text)
        constraint: Constraint | None = None
        if self._grammars is not None and (is_forced or grammar is not None):
            if tools is not None and self._dialect.runs_grammar_source:
                form = self.processor.tool_format
                constraint = self._grammars.compile_tools(tools, form, grammar)
            elif grammar is not None:
                constraint = self._grammars.compile(grammar)
        if constraint is not None and self._dialect.runs_grammar_source:
            self._check_conformity(constraint, request, param)
            request = replace(request, grammar_source=constraint.source)
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
            if self._grammars is None or not self._dialect.runs_grammar_source:
                raise InvalidRequest(
                    "this model's engine cannot force a function call: send tool_choice auto",
                    "tool_choice",
                )
            return tools
        return tools if self.processor.shows_tools else None

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Load an adapter at the server, under its digest. Raises: BadAdapter."""
        if self._dialect.adapter_paths is None:
            return super().load_adapter(directory, limits)
        files = read_adapter(directory, limits)
        adapter = Adapter(files.digest, files.config.get("r", 0), len(files.weights))
        body = {"lora_name": adapter.digest, "lora_path": str(directory.resolve())}
        try:
            response = self._client.request(
                "POST", self._dialect.adapter_paths[0], timeout_s=ADAPTER_S, json=body
            )
        except httpx.HTTPError as error:
            raise BadAdapter(f"the server failed: {type(error).__name__} {error}") from None
        if response.status_code == httpx.codes.NOT_FOUND and "Not Found" in response.text:
            raise BadAdapter(f"{self._dialect.name} was started without LoRA adapters")
        if response.is_error and "already" not in response.text:  # loaded by another worker
            raise BadAdapter(error_message(response.content) or response.text[:300])
        self._adapters[adapter.digest] = adapter
        return adapter

    def unload_adapter(self, digest: str) -> None:
        if self._adapters.pop(digest, None) is not None and self._dialect.adapter_paths is not None:
            with suppress(httpx.HTTPError):  # a server that is lost has no adapters
                self._client.request(
                    "POST", self._dialect.adapter_paths[1], json={"lora_name": digest}
                )

    def add(self, request: UpstreamRequest) -> None:
        self._check_id(request.request_id)
        opened = _TokenRequest(request, self._dialect, self.processor)
        reason = opened.finish_reason(request.output_token_ids[-1:], opened.num_tokens)
        if opened.answer.is_stopped:
            reason = FinishReason.STOP
        if reason is not None:  # the earlier attempt has reported the whole text
            self._finished_early.append(opened.answer.end(reason))
            return
        self._send(opened)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), num_adapters=len(self._adapters))

    def close(self) -> None:
        super().close()
        if self._grammars is not None:
            self._grammars.close()


class _TokenRequest(OpenRequest):
    def __init__(self, request: UpstreamRequest, dialect: Dialect, processor: Processor) -> None:
        super().__init__(request.request_id)
        self._request, self._dialect = request, dialect
        self._eos_token_ids = processor.tokenizer.eos_token_ids
        self.answer = Answer.begin(request, processor)
        self.answer.scheduled_at = self.answer.added_at
        self._output_ids = list(request.output_token_ids)
        self._num_at_send = 0  # output tokens at the last send
        self._has_all_ids = True

    @property
    def num_tokens(self) -> int:
        return self.answer.num_tokens + len(self.answer.undecided)

    @property
    def is_started(self) -> bool:
        return self.answer.first_token_at is not None

    def body(self) -> dict[str, Any]:
        self._num_at_send = len(self._output_ids)
        body = self._dialect.body(self._request, self._output_ids)
        self.abort = self._dialect.abort(body)
        return body

    def can_continue(self) -> bool:
        return self._has_all_ids and self._dialect.can_continue(self._request)

    def fail(self, message: str, code: ErrorCode) -> EngineOutput:
        return self.answer.fail(message, code)

    def read(self, data: bytes) -> list[EngineOutput]:
        if data == DONE:
            return []
        chunk = self._dialect.parse(data)
        if chunk.finish or chunk.error:
            self.abort = None
        if chunk.error:
            raise StreamBroken(chunk.error, chunk.error_status)
        self._note_usage(chunk)
        return self._add_tokens(chunk) if chunk.tokens or chunk.finish else []

    def _note_usage(self, chunk: Chunk) -> None:
        answer, request = self.answer, self._request
        if answer.first_token_at is None:
            answer.scheduled_at = answer.added_at + chunk.queue_s
            if chunk.num_prompt_tokens is not None and request.images:
                num_prompt = chunk.num_prompt_tokens - len(request.output_token_ids)
                num_added = max(0, num_prompt - len(request.prompt_token_ids))
                answer.num_prompt_tokens = len(request.prompt_token_ids) + num_added
                num_media = len(request.images) + num_added
                # The server does not distinguish images from audio.
                is_audio = all(each.kind == "audio" for each in request.images)
                answer.num_image_tokens = 0 if is_audio else num_media
                answer.num_audio_tokens = num_media if is_audio else 0
        if chunk.num_cached_tokens is not None:
            answer.num_cached_tokens = min(chunk.num_cached_tokens, answer.num_prompt_tokens)

    def _add_tokens(self, chunk: Chunk) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        if chunk.num_computed is not None:
            num_known = len(self._output_ids) - self._num_at_send
            num_missing = chunk.num_computed - num_known - len(chunk.tokens)
            if num_missing > 0:
                self._dialect.recover(chunk, num_missing)
        if chunk.num_lost:
            self._has_all_ids = False
            self._num_at_send -= chunk.num_lost
            outputs.append(self.answer.output_bytes(chunk.lost, chunk.num_lost))
            if self.answer.is_stopped:
                return outputs
        tokens = [self._with_logprobs(choice) for choice in chunk.tokens]
        num_before, reason = self.num_tokens, chunk.finish
        for index, choice in enumerate(tokens, 1):
            found = self.finish_reason([choice.token_id], num_before + index)
            if found is not None:
                tokens, reason = tokens[:index], found
                break
        self._output_ids += [choice.token_id for choice in tokens]
        return [*outputs, self.answer.output(tokens, reason)]

    def finish_reason(self, last: Sequence[int], num_tokens: int) -> FinishReason | None:
        """The finish reason of an answer of `num_tokens` tokens that end with `last`; None: it continues."""
        sampling = self._request.sampling
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends = (*ends, *self._eos_token_ids)
        if num_tokens >= sampling.min_tokens and any(token_id in ends for token_id in last):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self._request.max_tokens else None

    def _with_logprobs(self, choice: TokenChoice) -> TokenChoice:
        """The token with as many logprobs as the request asks for."""
        count = self._request.sampling.num_logprobs
        if count is None:
            return TokenChoice(choice.token_id)
        # vLLM puts the sampled token first.
        best = sorted(choice.top_logprobs, key=lambda pair: pair[1], reverse=True)
        return TokenChoice(choice.token_id, choice.logprob, tuple(best[:count]))
