"""vLLM: token ids in and out by `POST /inference/v1/generate`.

Source: vllm/entrypoints/scale_out/token_in_token_out/protocol.py.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from engines.registry import VLLM_VERSIONS
from engines.upstream.client import UpstreamClient
from engines.upstream.dialect import (
    Chunk,
    Dialect,
    ServerInfo,
    TokenUsage,
    UpstreamRequest,
    find_model,
    has_output_penalty,
    model_arguments,
    to_bias,
    to_choices,
)
from engines.upstream.media import data_url
from engines.upstream.settings import VllmSettings
from shared.protocol import FinishReason, Generate, Grammar, Priority

#: Key of the logits processor's parameters in `extra_args`, and its version.
PLUGIN = "vlm_fleet"
PLUGIN_VERSION = "vlm_fleet logits processor 1"
PROBE_S = 120.0  #: the first request of a server may compile kernels
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list["_Logprob"] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Metrics(msgspec.Struct):
    queue_time_ms: float | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    metrics: _Metrics | None = None


_events = msgspec.json.Decoder(_Event)


class Vllm(Dialect):
    """Continues answers from token ids; with grammars or penalties, only if vLLM has our logits processor."""

    name = "vLLM"
    program = ("vllm", "serve")
    versions = VLLM_VERSIONS
    environment: ClassVar[Mapping[str, str]] = {
        "PYTHONPATH": str(Path(__file__).with_name("plugin"))
    }
    path = "/inference/v1/generate"
    adapter_paths = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    metrics_path = "/metrics"
    metrics: ClassVar[Mapping[str, str]] = {
        "vllm:kv_cache_usage_perc": "kv_usage_ratio",
        "vllm:prefix_cache_queries_total": "num_prefix_query_tokens",
        "vllm:prefix_cache_hits_total": "num_prefix_hit_tokens",
        "vllm:num_preemptions_total": "num_preemptions",
    }

    def __init__(self, settings: VllmSettings, media_token_ids: Sequence[int] = ()) -> None:
        self._settings, self._media_token_ids = settings, media_token_ids
        self._model = settings.upstream_model

    def arguments(self, port: int) -> list[str]:
        settings = self._settings
        arguments = [
            *model_arguments(settings), "--host", "127.0.0.1", "--port", str(port),
            "--max-num-seqs", str(settings.max_num_seqs), "--dtype", settings.dtype,
            "--tensor-parallel-size", str(settings.tensor_parallel), "--enable-scale-out",
            "--enable-prompt-tokens-details", "--scheduling-policy", "priority",
            "--media-io-kwargs", json.dumps({"video": {"num_frames": -1}}),  # not only the first 32 frames
        ]  # fmt: skip
        if settings.max_model_len is not None:
            arguments += ["--max-model-len", str(settings.max_model_len)]
        if settings.quantization:
            arguments += ["--quantization", settings.quantization]
        return arguments

    def describe(self, client: UpstreamClient) -> ServerInfo:
        found = find_model(client, self._model)
        self._model = found["id"]
        self.runs_grammar_source = self._probe_plugin(client)
        version = client.request("GET", "/version").raise_for_status().json()["version"]
        return ServerInfo(found["max_model_len"], version)

    def _probe_plugin(self, client: UpstreamClient) -> bool:
        """Whether vLLM has our logits processor, which refuses parameters of another version."""
        sampling = {"max_tokens": 1, "extra_args": {PLUGIN: {"version": "probe"}}}
        body = {"model": self._model, "token_ids": [0], "sampling_params": sampling}
        response = client.request("POST", self.path, timeout_s=PROBE_S, json=body)
        if response.status_code in (403, 404):
            raise ValueError("start vLLM with --enable-scale-out")
        return PLUGIN_VERSION in response.text

    def can_continue(self, task: Generate | UpstreamRequest) -> bool:
        has_penalty = has_output_penalty(task.sampling)
        if self.runs_grammar_source:  # our processor cannot be combined with a repetition penalty
            return not has_penalty or task.sampling.repetition_penalty == 1.0
        return task.grammar is None and not has_penalty

    def _plugin_arguments(self, request: UpstreamRequest, num_done: int) -> dict[str, Any]:
        """Parameters that the logits processor applies instead of vLLM; empty: none."""
        found: dict[str, Any] = {}
        if request.grammar_source:
            found["grammar"] = request.grammar_source
        if self.runs_grammar_source and has_output_penalty(request.sampling) and num_done:
            found["presence_penalty"] = request.sampling.presence_penalty
            found["frequency_penalty"] = request.sampling.frequency_penalty
        return {"version": PLUGIN_VERSION, "num_earlier": num_done, **found} if found else {}

    def body(self, request: UpstreamRequest, output_ids: Sequence[int]) -> dict[str, Any]:
        wanted, num_done = request.sampling, len(output_ids)
        sampling: dict[str, Any] = {
            "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k, "min_p": wanted.min_p,
            "seed": wanted.seed & (2**63 - 1), "presence_penalty": wanted.presence_penalty,
            "frequency_penalty": wanted.frequency_penalty, "repetition_penalty": wanted.repetition_penalty,
            "max_tokens": request.max_tokens - num_done, "min_tokens": max(0, wanted.min_tokens - num_done),
            "ignore_eos": wanted.ignore_eos, "stop_token_ids": list(wanted.stop_token_ids),
            "logprobs": wanted.num_logprobs, "detokenize": False,
        }  # fmt: skip
        if bias := to_bias(wanted, self._media_token_ids):
            sampling["logit_bias"] = bias
        if wanted.allowed_token_ids:
            sampling["allowed_token_ids"] = list(wanted.allowed_token_ids)
        if arguments := self._plugin_arguments(request, num_done):
            sampling["extra_args"] = {PLUGIN: arguments}
            if "presence_penalty" in arguments:
                sampling["presence_penalty"] = sampling["frequency_penalty"] = 0.0
        if request.grammar is not None and not self.runs_grammar_source:
            sampling["structured_outputs"] = _structured(request.grammar)
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "model": self._model if request.adapter is None else request.adapter.digest,
            "token_ids": [*request.prompt_token_ids, *output_ids], "sampling_params": sampling, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if request.priority is Priority.BATCH and not self._settings.url:
            body["priority"] = 1  # refused without --scheduling-policy priority
        if request.images:
            body["content_parts"] = [
                {"type": f"{each.kind}_url", "url": data_url(each.pixels), "uuid": each.image_hash}
                for each in request.images
            ]
        return body

    def parse(self, data: bytes) -> Chunk:
        event = _events.decode(data)
        chunk = Chunk()
        if event.metrics is not None and event.metrics.queue_time_ms is not None:
            chunk.queue_s = event.metrics.queue_time_ms / 1000
        if (usage := event.usage) is not None:
            chunk.num_prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                chunk.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in event.choices[:1]:
            chunk.finish = FINISH.get(choice.finish_reason or "")
            if choice.finish_reason and chunk.finish is None:
                chunk.error = f"the request ended with {choice.finish_reason}"
            scores = choice.logprobs and choice.logprobs.content
            chunk.tokens = to_choices(choice.token_ids or [], scores)
        return chunk


def _structured(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json":
        schema = json.loads(grammar.source or "{}")
        return {"json_object": True} if schema in ({}, True) else {"json": grammar.source}
    if grammar.kind == "regex":
        return {"regex": grammar.source}
    return {"choice": json.loads(grammar.source)}
