"""A server of chat completions whose model is a script that calls the offered tools.

A fleet with `--engine openai` runs in front of it, to test agent programs completely.
"""

import json
import re
from contextlib import AbstractContextManager
from typing import Any

from tests.http_server import Handler, serve_http

MODEL = "scripted"
#: The task of a program; the script edits the file that the prompt names.
TASK = "Replace the word hello by goodbye in {}"
_FILE = re.compile(r"/[\w./-]+/note\.txt")
_EDIT = "sed -i s/hello/goodbye/ {}"

Call = tuple[str, dict[str, Any]]


def _steps(names: set[str], file: str) -> list[Call]:
    """Returns the tool calls that solve the task."""
    if {"Read", "Edit"} <= names:
        edit = {"file_path": file, "old_string": "hello", "new_string": "goodbye"}
        return [("Read", {"file_path": file}), ("Edit", edit)]
    if "exec_command" in names:
        return [("exec_command", {"cmd": _EDIT.format(file)})]
    if "look" in names:
        return [("look", {"kind": "star"})]
    return []


def _answer(body: dict[str, Any]) -> Call | str:
    messages = body["messages"]
    names = {tool["function"]["name"] for tool in body.get("tools", ())}
    files = _FILE.findall(json.dumps(messages))
    steps = _steps(names, files[-1] if files else "")
    done = [message for message in messages if message["role"] == "tool"]
    if len(done) < len(steps):
        return steps[len(done)]
    return f"The tools said: {done[-1]['content']}" if done else "I see a star."


class _Handler(Handler):
    def do_GET(self) -> None:
        data = json.dumps({"data": [{"id": MODEL}]}).encode()
        self.answer(200, data, content_type="application/json")

    def do_POST(self) -> None:
        told, reason = _answer(json.loads(self.body())), "stop"
        delta: dict[str, Any] = {"content": told}
        if not isinstance(told, str):
            function = {"name": told[0], "arguments": json.dumps(told[1])}
            delta, reason = {"tool_calls": [{"index": 0, "function": function}]}, "tool_calls"
        usage = {"prompt_tokens": 9, "completion_tokens": 9}
        events = [
            {"choices": [{"delta": delta}]},
            {"choices": [{"delta": {}, "finish_reason": reason}], "usage": usage},
        ]
        data = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
        self.answer(200, data + b"data: [DONE]\n\n", content_type="text/event-stream")


def run_scripted() -> AbstractContextManager[str]:
    """Runs a server; yields its URL."""
    return serve_http(_Handler)
