"""The baseline: a FastAPI endpoint that reads a request as JSON and returns a constant answer.

The gateway benchmark runs it as a process: `python -m benchmarks.gateway.bare_endpoint PORT`.
"""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

NUM_TOKENS = 16
WORDS = [f"word{number:02d} " for number in range(NUM_TOKENS)]
HEAD = {"id": "chatcmpl-0", "created": 0, "model": "bare"}
ANSWER = {"role": "assistant", "content": "".join(WORDS)}
COMPLETION = {
    **HEAD,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": ANSWER, "finish_reason": "length"}],
    "usage": {
        "prompt_tokens": 16,
        "completion_tokens": NUM_TOKENS,
        "total_tokens": 16 + NUM_TOKENS,
    },
}


def to_event(delta: dict[str, str], finish_reason: str | None = None) -> str:
    """One chunk of the streamed answer, as a server-sent event."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


EVENTS = [
    to_event({"role": "assistant", "content": ""}),
    *(to_event({"content": word}) for word in WORDS),
    to_event({}, "length"),
    "data: [DONE]\n\n",
]

app = FastAPI()


@app.get("/readyz")
async def is_ready() -> dict[str, str]:
    """Answer the readiness probe."""
    return {"status": "ready"}


@app.post("/v1/chat/completions", response_model=None)
async def answer(request: Request) -> dict[str, Any] | StreamingResponse:
    """The fixed answer, whole or one event per token."""
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(stream_events(), media_type="text/event-stream")
    return COMPLETION


async def stream_events() -> AsyncIterator[str]:
    """Yield each event separately, like a model."""
    for event in EVENTS:
        yield event


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
