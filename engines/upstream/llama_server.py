"""llama.cpp's server: `POST /completion` with token ids, or with text and images.

Source: llama.cpp, tools/server/README.md, tools/server/server-schema.cpp.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from engines.core.runner import TokenChoice
from engines.text.processor import ChatProcessor
from engines.upstream.client import UpstreamClient
from engines.upstream.dialect import (
    Chunk,
    Dialect,
    PromptText,
    ServerInfo,
    UpstreamRequest,
    to_choices,
)
from engines.upstream.settings import LlamaServerSettings
from shared.protocol import FinishReason, Generate

_MAX_RECOVERED_BYTES = 3  #: maximum size of a token whose id can be recovered


class _Score(msgspec.Struct):
    token_id: int = msgspec.field(name="id")
    logprob: float = 0.0
    top_logprobs: list["_Score"] = []


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Event(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int | None = None
    tokens_predicted: int = 0
    completion_probabilities: list[_Score] = []
    timings: _Timings | None = None


_events = msgspec.json.Decoder(_Event)


class LlamaServer(Dialect):
    """Resumes an interrupted answer from its output token ids, even if a JSON schema constrains it.

    The server reports no ids for tokens that end within a character. They are recovered if only one sequence of tokens
    spells the missing bytes.
    """

    name = "llama-server"
    program = ("llama-server",)
    path = "/completion"
    unsupported = (
        "num_prompt_logprobs", "allowed_token_ids", "min_tokens",
        "presence_penalty", "frequency_penalty",  # llama-server counts the prompt too
    )  # fmt: skip
    grammar_kinds = ("json",)
    retokenized = ("image",)

    def __init__(self, settings: LlamaServerSettings, processor: ChatProcessor) -> None:
        self._settings = settings
        self._tokenizer = tokenizer = processor.tokenizer
        self._text = PromptText(processor)
        self._image_marker = "<__media__>"
        self._short: dict[bytes, int] = {}  # tokens of a few bytes
        for token_id in reversed(range(tokenizer.vocab_size)):
            data = tokenizer.token_bytes(token_id)
            if 0 < len(data) <= _MAX_RECOVERED_BYTES:
                self._short[data] = token_id

    def arguments(self, port: int) -> list[str]:
        settings = self._settings
        arguments = [
            "--model", settings.model, "--host", "127.0.0.1", "--port", str(port),
            "--parallel", str(settings.max_num_seqs), "--no-ui",
        ]  # fmt: skip
        if settings.max_model_len is not None:  # context of all slots together
            arguments += ["--ctx-size", str(settings.max_model_len * settings.max_num_seqs)]
        if settings.mmproj:
            arguments += ["--mmproj", settings.mmproj]
        return arguments

    def describe(self, client: UpstreamClient) -> ServerInfo:
        server = client.request("GET", "/props").raise_for_status().json()
        self._image_marker = server.get("media_marker", self._image_marker)
        return ServerInfo(
            server["default_generation_settings"]["n_ctx"],
            server.get("build_info", ""),
            server.get("modalities", {}).get("vision", False),
        )

    def can_continue(self, task: Generate | UpstreamRequest) -> bool:
        return True

    def body(self, request: UpstreamRequest, output_ids: Sequence[int]) -> dict[str, Any]:
        wanted = request.sampling
        token_ids = [*request.prompt_token_ids, *output_ids]
        body: dict[str, Any] = {
            "prompt": self._prompt(request, token_ids) if request.images else token_ids,
            "stream": True, "return_tokens": True,
            "cache_prompt": not request.cache_salt,  # slots share prefixes between tenants
            "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k, "min_p": wanted.min_p,
            "seed": wanted.seed % (2**32 - 1),  # the largest number would be a random seed
            "repeat_penalty": wanted.repetition_penalty, "repeat_last_n": 2**20,
            "ignore_eos": wanted.ignore_eos, "n_predict": request.max_tokens - len(output_ids),
            "logit_bias": [[token_id, bias] for token_id, bias in wanted.logit_bias.items()],
            "n_probs": 0 if wanted.num_logprobs is None else max(1, wanted.num_logprobs),
        }  # fmt: skip
        if request.grammar is not None:
            schema = json.loads(request.grammar.source or "{}")
            body["json_schema"] = {"type": "object"} if schema in ({}, True) else schema
            if output_ids:  # the grammar reads this before the first token
                body["generation_prompt"] = self._text.decode(output_ids)
        return body

    def _prompt(self, request: UpstreamRequest, token_ids: Sequence[int]) -> dict[str, Any]:
        parts: list[str] = []
        start = 0
        for image in request.images:
            parts += [self._text.decode(token_ids[start : image.offset]), self._image_marker]
            start = image.offset + image.num_tokens
        return {
            "prompt_string": "".join([*parts, self._text.decode(token_ids[start:])]),
            "multimodal_data": [b64encode(image.pixels).decode() for image in request.images],
        }

    def parse(self, data: bytes) -> Chunk:
        event = _events.decode(data)
        chunk = Chunk(num_cached_tokens=None if event.timings is None else event.timings.cache_n)
        if event.stop:  # earlier events had the tokens
            chunk.num_prompt_tokens = event.tokens_evaluated
            chunk.num_computed = event.tokens_predicted
            chunk.finish = FinishReason.LENGTH if event.stop_type == "limit" else FinishReason.STOP
            return chunk
        scores = event.completion_probabilities
        is_scored = len(scores) == len(event.tokens)
        chunk.tokens = to_choices(event.tokens, scores if is_scored else None)
        chunk.num_computed, chunk.text = event.tokens_predicted, event.content
        return chunk

    def recover(self, chunk: Chunk, num_missing: int) -> None:
        """Add unreported tokens to the chunk. In the last chunk, they are parts of a character and the end token."""
        if chunk.finish is not None:
            ends = self._tokenizer.eos_token_ids
            if chunk.finish is FinishReason.STOP and len(ends) == 1:
                chunk.tokens = [TokenChoice(next(iter(ends)))]
                num_missing -= 1
            chunk.lost, chunk.num_lost = b"\xff" if num_missing else b"", num_missing
            return
        known = b"".join(self._tokenizer.token_bytes(choice.token_id) for choice in chunk.tokens)
        data = chunk.text.encode().removesuffix(known)
        found = self._spellings(num_missing, data)
        if len(found) == 1:
            chunk.tokens = [*map(TokenChoice, found[0]), *chunk.tokens]
        else:
            chunk.lost, chunk.num_lost = data, num_missing

    def _spellings(self, num_tokens: int, data: bytes) -> list[list[int]]:
        """At most two sequences of `num_tokens` tokens whose bytes are `data`."""
        if num_tokens == 0 or not data:
            return [[]] if num_tokens == 0 and not data else []
        found: list[list[int]] = []
        for length in range(1, min(_MAX_RECOVERED_BYTES, len(data)) + 1):
            first = self._short.get(data[:length])
            if first is not None:
                found += [[first, *rest] for rest in self._spellings(num_tokens - 1, data[length:])]
        return found[:2]
