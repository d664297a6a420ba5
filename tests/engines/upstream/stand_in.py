"""Simulated servers with the APIs of vLLM, SGLang and OpenAI on a real socket.

Each token is a function of all earlier ones. They serve tests of contracts and faults; `make test-engines` runs a
real llama-server.
"""

import json
import math
import sys
import threading
import time
from array import array
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from engines.upstream.vllm import PLUGIN, PLUGIN_VERSION
from tests.http_server import Handler, serve_http

CONTEXT = 512
PROBE = {"version": "probe"}
EOS_ID = 2
MAX_CHARS = 200_000  #: limit of a body
BAD_ID = 203  #: an input with this token is refused
NAN_ID = 202  #: an input with this token has a vector of NaN
FIRST_ID, NUM_IDS = 67, 26  #: printable tokens of the tiny checkpoint


@dataclass
class StandIn:
    """The behavior of the server, and the requests that it received."""

    version: str = "0.33.0"
    adapters: dict[str, str] | None = field(default_factory=dict)  #: None: disabled
    has_plugin: bool = False  #: the logits processor for vLLM
    token_s: float = 0.0  #: pause before each token
    is_healthy: bool = True
    key: str = ""
    refuse_with: tuple[int, str] | None = None  #: status and message of the next request
    refuses_in_stream: bool = False  #: as events, like vLLM and SGLang
    #: Status and message with which SGLang's scheduler aborts the next request.
    abort_with: tuple[int | None, str] | None = None
    #: Recorded responses that replace the simulated ones: JSON by path, and the lines of the next streams.
    gets: dict[str, Any] = field(default_factory=dict)
    streams: list[list[str]] = field(default_factory=list)
    break_after: list[int] = field(default_factory=list)  #: tokens before the next streams break
    hold_after: int | None = None  #: number of tokens after which streams wait for `released`
    released: threading.Event = field(default_factory=threading.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    rids: set[str] = field(default_factory=set)  #: request IDs that SGLang has seen
    aborted: list[str] = field(default_factory=list)  #: request IDs of `POST /abort_request`
    vectors: tuple[str, ...] = ("/v1/embeddings",)  #: supported paths for vectors and scores
    num_open: int = 0
    url: str = ""


def next_token(ids: list[int], salt: object) -> int:
    digest = sha256(f"{ids} {salt}".encode()).digest()
    return FIRST_ID + digest[0] % NUM_IDS


def _tokens(
    ids: list[int], images: list[str], max_tokens: int, sampling: dict[str, Any]
) -> Iterator[tuple[int, str | None]]:
    """Yields token IDs, each with its finish reason."""
    ids = list(ids)
    seed = sampling.get("seed", sampling.get("sampling_seed", 0))
    salt = (seed if sampling["temperature"] else None, images)
    allowed = sampling.get("allowed_token_ids")
    for number in range(1, max_tokens + 1):
        token = next_token(ids, salt)
        if allowed:
            token = allowed[token % len(allowed)]
        ids.append(token)
        finish = "length" if number == max_tokens else None
        if token in sampling["stop_token_ids"]:
            finish = "stop"
        yield token, finish
        if finish:
            return


class _Handler(Handler):
    state: StandIn

    def do_GET(self) -> None:
        state = self.state
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": state.version},
            "/v1/models": {"data": [{"id": "model", "max_model_len": CONTEXT}]},
            "/server_info": {"version": "0.5.23", "incremental_streaming_output": True},
            **state.gets,
        }
        if self.path == "/metrics":
            self.answer(
                200,
                b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
                b'vllm:num_requests_running{engine="0"} %d\n' % state.num_open,
            )
        elif state.key not in (self.headers["authorization"] or ""):
            self.answer(401, b"{}")
        elif self.path == "/health" and not state.is_healthy:
            self.answer(503, b"{}")
        else:
            self.answer(200, json.dumps(answers[self.path]).encode())

    def do_POST(self) -> None:
        state, body = self.state, json.loads(self.body())
        if (control := _control(state, self.path, body)) is not None:
            self.answer(*control)
            return
        state.bodies.append(body)
        if answer := _VECTORS.get(self.path):
            found = answer(body) if self.path in state.vectors else (404, {"detail": "Not Found"})
            self.answer(found[0], json.dumps(found[1]).encode())
            return
        _check(state, body)
        if state.refuse_with is not None:
            (status, message), state.refuse_with = state.refuse_with, None
            error = json.dumps({"error": {"message": message, "code": status}}).encode()
            if state.refuses_in_stream:
                status, error = 200, b"data: " + error + b"\n\ndata: [DONE]\n\n"
            self.answer(status, error)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if state.streams:
            self.wfile.write("".join(f"{line}\n\n" for line in state.streams.pop(0)).encode())
            return
        limit = state.break_after.pop(0) if state.break_after else None
        state.num_open += 1
        try:
            events = _events(state, self.path, body)
            for number, event in enumerate(events):
                if number == limit:
                    return
                if number == state.hold_after:
                    state.released.wait()
                time.sleep(state.token_s)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            state.num_open -= 1


def _control(state: StandIn, path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
    """Returns status and response of a request that generates no tokens, or None."""
    if path == "/abort_request":
        state.aborted.append(body["rid"])
        return 200, b""
    if path.endswith("_adapter"):
        return _change_adapters(state.adapters, path, body)
    if body.get("sampling_params", {}).get("extra_args", {}).get(PLUGIN) != PROBE:
        return None
    found = (400, PLUGIN_VERSION) if state.has_plugin else (200, "")
    status, message = state.refuse_with or found
    state.refuse_with = None
    return status, json.dumps({"error": {"message": message}}).encode()


def _check(state: StandIn, body: dict[str, Any]) -> None:
    """Refuses a long prompt, and a request ID that begins like a known one, because SGLang aborts by prefix."""
    if len(str(body)) > MAX_CHARS:
        state.refuse_with = (400, "the prompt exceeds the context")
    if rid := body.get("rid"):
        if any(rid.startswith(each) or each.startswith(rid) for each in state.rids):
            state.refuse_with = (400, f"Duplicate request ID detected: {rid}")
        state.rids.add(rid)


def _events(state: StandIn, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state.abort_with is None:
        return _APIS[path](body)
    (status, message), state.abort_with = state.abort_with, None
    reason = {"type": "abort", "message": message, "status_code": status}
    return iter([{"output_ids": [1], "meta_info": {"prompt_tokens": 1, "finish_reason": reason}}])


def _change_adapters(
    adapters: dict[str, str] | None, path: str, body: dict[str, str]
) -> tuple[int, bytes]:
    if adapters is None:
        return 404, b'{"detail": "Not Found"}'
    name = body["lora_name"]
    if "unload" in path:
        return (200 if adapters.pop(name, None) else 404), b"{}"
    if name in adapters:
        return 400, b'{"error": {"message": "it has already been loaded"}}'
    if "bad" in body["lora_path"]:
        return 400, b'{"success": false, "error_message": "it has another base model"}'
    adapters[name] = body["lora_path"]
    return 200, b"{}"


def _vllm(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    sampling, ids = body["sampling_params"], body["token_ids"]
    images = [part["url"] for part in body.get("content_parts", ())]
    count = sampling["logprobs"]
    usage = {"prompt_tokens": len(ids) + 15 * len(images)}
    for token, finish in _tokens(ids, images, sampling["max_tokens"], sampling):
        score = None
        if count is not None:
            top = [{"token_id": token + i, "logprob": -0.5 - i} for i in range(count)]
            score = {"content": [{"token_id": token, "logprob": -0.5, "top_logprobs": top}]}
        choice = {"token_ids": [token], "finish_reason": finish, "logprobs": score}
        yield {"choices": [choice], "usage": usage}


def _sglang(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    sampling, ids, images = body["sampling_params"], body["input_ids"], body.get("image_data", [])
    scores: list[Any] = []
    tops: list[Any] = []
    for token, finish in _tokens(ids, images, sampling["max_new_tokens"], sampling):
        meta: dict[str, Any] = {"prompt_tokens": len(ids) + 15 * len(images)}
        if body.get("return_logprob"):
            scores.append([-0.5, token, None])
            tops.append([[-0.5 - i, token + i, None] for i in range(body["top_logprobs_num"])])
            meta |= {"output_token_logprobs": scores, "output_top_logprobs": tops}
        if finish:
            meta["finish_reason"] = {"type": finish}
        yield {"output_ids": [token], "meta_info": meta}


def _openai(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompt = list(str(body["messages"]).encode())
    sampling = {"temperature": body["temperature"], "seed": body["seed"], "stop_token_ids": ()}
    tokens = [token for token, _ in _tokens(prompt, [], body.get("max_tokens", 16), sampling)]
    text = "".join(chr(ord("a") + token - FIRST_ID) for token in tokens)
    length = min((text.index(stop) for stop in body.get("stop", ()) if stop in text), default=None)
    deltas: list[dict[str, Any]] = [{"content": letter} for letter in text[:length]]
    if body.get("tools"):
        function = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
        deltas = [{"tool_calls": [{"index": 0, "function": function}]}]
    for delta in deltas:
        yield {"choices": [{"delta": delta, "finish_reason": None}]}
    finish = "length" if length is None else "stop"
    yield {"choices": [{"delta": {}, "finish_reason": finish}]}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    yield {"choices": [], "usage": usage}


def _embeddings(body: dict[str, Any]) -> tuple[int, Any]:
    if any(BAD_ID in ids for ids in body["input"]):
        return 400, {"error": {"message": "a bad id"}}
    data = []
    for index, ids in enumerate(body["input"]):
        digest = sha256(str(ids).encode()).digest()
        spoilt = math.nan if NAN_ID in ids else 128.0
        numbers = array("f", [byte - spoilt for byte in digest[:16]])
        vector = b64encode(numbers.tobytes()).decode()
        data.append({"index": index, "embedding": vector})
    return 200, {"data": data[::-1]}


def _rerank(body: dict[str, Any]) -> tuple[int, Any]:
    scores = [(len(text), index) for index, text in enumerate(body["documents"])]
    ordered = sorted(scores, reverse=True)
    return 200, {"results": [{"index": i, "relevance_score": n / 100 or None} for n, i in ordered]}


_VECTORS = {"/v1/embeddings": _embeddings, "/v1/rerank": _rerank}
_APIS = {"/inference/v1/generate": _vllm, "/generate": _sglang, "/v1/chat/completions": _openai}


@contextmanager
def run_stand_in(port: int = 0, **state: Any) -> Iterator[StandIn]:
    """Runs a server on a port of the loopback interface; 0 selects a free port."""
    found = StandIn(**state)
    with serve_http(_Handler, port, state=found) as found.url:
        try:
            yield found
        finally:
            found.released.set()


if __name__ == "__main__":  # run as the `command` of an engine, which appends its arguments
    with run_stand_in(int(sys.argv[sys.argv.index("--port") + 1]), token_s=0.05):
        threading.Event().wait()
