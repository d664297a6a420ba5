"""SGLang: token ids in and out by `POST /generate`.

Source: sglang/srt/managers/io_struct.py, sglang/srt/managers/tokenizer_manager.py,
sglang/srt/multimodal/processors/qwen_vl.py.
"""

import json
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any, ClassVar

import msgspec

from engines.base import OpenVideo
from engines.core.runner import TokenChoice
from engines.upstream.client import UpstreamClient
from engines.upstream.dialect import (
    Chunk,
    Dialect,
    ServerInfo,
    UpstreamRequest,
    find_model,
    has_output_penalty,
    model_arguments,
    to_bias,
)
from engines.upstream.media import MediaFile, UnexpandedMedia, data_url, to_mp4
from engines.upstream.settings import SglangSettings
from engines.upstream.vllm import FINISH
from shared.protocol import Generate, Grammar, Priority

#: Models for which SGLang reads every frame of a video within `MAX_FRAMES` and `MAX_FPS`. For others, it samples.
VIDEO_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
MAX_FRAMES, MAX_FPS = 768, 2.0
_Scored = tuple[float | None, int, Any]  # logprob, token id, text


class _Finish(msgspec.Struct):
    type: str = ""
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_time: float = 0.0  #: seconds
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Scored] = []
    output_top_logprobs: list[list[_Scored] | None] = []


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_events = msgspec.json.Decoder(_Event)


class SglangMedia(UnexpandedMedia):
    def __init__(self, tokens: Mapping[str, tuple[int, str]], model_type: str) -> None:
        kinds = ("image", "video") if model_type in VIDEO_MODELS else ("image",)
        super().__init__({kind: tokens[kind] for kind in kinds if kind in tokens}, MAX_FRAMES)

    def process_video(self, video: OpenVideo) -> MediaFile:
        return to_mp4(video, MAX_FRAMES, MAX_FPS)


class Sglang(Dialect):
    """Continues answers from token ids, except those with videos, grammars or penalties."""

    name = "SGLang"
    program = ("python", "-m", "sglang.launch_server")
    versions = ("0.5", "0.6")
    unsupported = ("num_prompt_logprobs", "allowed_token_ids")
    retokenized = ("video",)
    path = "/generate"
    adapter_paths = ("/load_lora_adapter", "/unload_lora_adapter")
    metrics_path = "/metrics"
    metrics: ClassVar[Mapping[str, str]] = {"sglang:token_usage": "kv_usage_ratio"}

    def __init__(self, settings: SglangSettings, media_token_ids: Sequence[int] = ()) -> None:
        self._settings, self._media_token_ids = settings, media_token_ids

    def arguments(self, port: int) -> list[str]:
        settings = self._settings
        arguments = [
            "--model-path", *model_arguments(settings), "--host", "127.0.0.1", "--port", str(port),
            "--max-running-requests", str(settings.max_num_seqs), "--dtype", settings.dtype,
            "--tp-size", str(settings.tensor_parallel), "--incremental-streaming-output",
            "--enable-priority-scheduling", "--enable-metrics",
        ]  # fmt: skip
        if settings.max_model_len is not None:
            arguments += ["--context-length", str(settings.max_model_len)]
        if settings.quantization:
            arguments += ["--quantization", settings.quantization]
        return arguments

    def describe(self, client: UpstreamClient) -> ServerInfo:
        server = client.request("GET", "/server_info").raise_for_status().json()
        if not server.get("incremental_streaming_output"):
            raise ValueError("start SGLang with --incremental-streaming-output")
        video = (server.get("mm_process_config") or {}).get("video") or {}
        if wrong := {"fps", "nframes", "max_frames"} & video.keys():
            names = ", ".join(sorted(wrong))
            raise ValueError(f"start SGLang without {names} of videos in --mm-process-config")
        return ServerInfo(find_model(client)["max_model_len"], server["version"])

    def can_continue(self, task: Generate | UpstreamRequest) -> bool:
        has_video = any(each.kind == "video" for each in task.images)
        return task.grammar is None and not has_output_penalty(task.sampling) and not has_video

    def body(self, request: UpstreamRequest, output_ids: Sequence[int]) -> dict[str, Any]:
        wanted, num_done = request.sampling, len(output_ids)
        sampling: dict[str, Any] = {
            "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k or -1, "min_p": wanted.min_p,
            "presence_penalty": wanted.presence_penalty, "frequency_penalty": wanted.frequency_penalty,
            "repetition_penalty": wanted.repetition_penalty, "sampling_seed": wanted.seed & (2**31 - 1),
            "max_new_tokens": request.max_tokens - num_done, "min_new_tokens": max(0, wanted.min_tokens - num_done),
            "ignore_eos": wanted.ignore_eos, "stop_token_ids": list(wanted.stop_token_ids),
        }  # fmt: skip
        if bias := to_bias(wanted, self._media_token_ids):
            sampling["logit_bias"] = bias
        if request.grammar is not None:
            sampling |= _constrain(request.grammar)
        body: dict[str, Any] = {
            # SGLang keeps the id of a closed stream for 2 s, and aborts all ids that start with it
            "rid": f"{request.request_id}-{token_hex(8)}",
            "input_ids": [*request.prompt_token_ids, *output_ids], "sampling_params": sampling, "stream": True,
        }  # fmt: skip
        if wanted.num_logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": wanted.num_logprobs}
        if request.adapter is not None:
            body["lora_path"] = request.adapter.digest  # the name it was loaded under
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        if request.priority is Priority.INTERACTIVE and not self._settings.url:
            body["priority"] = 1  # larger is earlier; refused without priority scheduling
        for each in request.images:
            body.setdefault(f"{each.kind}_data", []).append(data_url(each.pixels))
        return body

    def abort(self, body: Mapping[str, Any]) -> tuple[str, object]:
        """SGLang aborts the request of a closed stream only after 2 s."""
        return "/abort_request", {"rid": body["rid"]}

    def parse(self, data: bytes) -> Chunk:
        event = _events.decode(data)
        meta = event.meta_info
        chunk = Chunk(
            num_prompt_tokens=meta.prompt_tokens, num_cached_tokens=meta.cached_tokens,
            queue_s=meta.queue_time, tokens=_tokens(event.output_ids, meta),
        )  # fmt: skip
        if meta.finish_reason is not None:
            chunk.finish = FINISH.get(meta.finish_reason.type)
            if chunk.finish is None:
                chunk.error = meta.finish_reason.message or "the request was aborted"
                chunk.error_status = meta.finish_reason.status_code or 500
        return chunk


def _tokens(token_ids: list[int], meta: _Meta) -> list[TokenChoice]:
    """The new tokens. `meta` has the logprobs of the whole answer so far, or only those of the new tokens."""
    scores = meta.output_token_logprobs[len(meta.output_token_logprobs) - len(token_ids) :]
    if len(scores) < len(token_ids) or not token_ids:
        return [TokenChoice(token_id) for token_id in token_ids]
    tops = meta.output_top_logprobs[len(meta.output_top_logprobs) - len(token_ids) :]
    tops = tops if len(tops) == len(token_ids) else [None] * len(token_ids)
    return [
        TokenChoice(token_id, score[0], tuple((top[1], top[0] or 0.0) for top in best or ()))
        for token_id, score, best in zip(token_ids, scores, tops, strict=True)
    ]


def _constrain(grammar: Grammar) -> dict[str, str]:
    if grammar.kind == "json":
        return {"json_schema": grammar.source or "{}"}
    if grammar.kind == "regex":
        return {"regex": grammar.source}
    # Without \u escapes: SGLang reads the two escapes of an emoji as two characters.
    texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
    choices = " | ".join(texts)
    return {"ebnf": f"root ::= {choices}"}
