"""Implements `vlm run` and `vlm session`: sends tasks, waits for their results, shows their states."""

import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from deploy.commands import (
    API,
    ARGUMENTS,
    ROLLOUT,
    CommandFailed,
    parse_resources,
    screen,
    show,
)
from shared.gateway_client import ApiFailed, Client

_MAX_TASKS = 1000  # of one request
_WAIT_S = 30
_MAX_SHOWN_CHARS = 256
#: Codes of errors of a single task, after which other tasks are still sent.
_TASK_ERRORS = (
    *("task_failed", "request_kills_workers", "too_many_attempts", "worker_lost"),
    *("engine_failure", "deadline_exceeded"),
)
_ENDED = ("succeed", "failed", "cancelled")
_COUNTS = ("pending", "running", "succeed", "failed", "cancelled")


def read_input(text: str) -> Any:
    """The input as JSON, or as a string if it is not JSON. `@FILE` reads it from a file. Raises: CommandFailed."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"{text}: cannot be read: {error.strerror}", ARGUMENTS) from None
        except UnicodeDecodeError as error:
            raise CommandFailed(f"{text}: not UTF-8: {error}", ARGUMENTS) from None
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_tasks(client: Client, name: str, inputs: Sequence[str]) -> None:
    """Run tasks in order, without a session; a failed task does not stop the others. Raises: CommandFailed."""
    num_failed = 0
    for number, text in enumerate(inputs, 1):
        body = {"input": read_input(text)}
        try:
            answer = client.ask("POST", f"/v1/applications/{name}/run", body)
        except ApiFailed as error:
            if error.code not in _TASK_ERRORS:
                raise CommandFailed(f"task {number}: {error}", API) from None
            num_failed += 1
            print(f"task {number}: {error}", file=sys.stderr)
        else:
            print(json.dumps(answer["output"]), flush=True)
    _end(num_failed, len(inputs))


def _end(num_failed: int, num_tasks: int) -> None:
    """Raises: CommandFailed."""
    if num_failed:
        raise CommandFailed(f"{num_failed} of {num_tasks} tasks failed", ROLLOUT)


def run_create(
    client: Client, name: str, common_data: str, resources: str, body: dict[str, Any]
) -> None:
    """Open a session and print its id. Raises: CommandFailed."""
    if resources:
        wanted = msgspec.structs.asdict(parse_resources(resources))
        if "cpu" not in resources:  # do not require the default of 1
            del wanted["cpu"]
        body = {**body, "resources": wanted}
    if common_data:
        body = {**body, "common_data": read_input(common_data)}
    print(client.ask("POST", f"/v1/applications/{name}/sessions", body)["id"])


def run_in(
    client: Client, session_id: str, inputs: Sequence[str], prefix: str, waits: bool
) -> None:
    """Send tasks, with retries; print their results in order. Raises: CommandFailed."""
    prefix = prefix or secrets.token_hex(4)
    tasks = [{"id": f"{prefix}-{i}", "input": read_input(t)} for i, t in enumerate(inputs)]
    path = f"/v1/sessions/{session_id}/tasks"
    for first in range(0, len(tasks), _MAX_TASKS):
        _send(client, path, tasks[first : first + _MAX_TASKS])
    if not waits:
        print("\n".join(task["id"] for task in tasks))
        return
    num_failed = 0
    for shown in _results(client, path, [task["id"] for task in tasks]):
        if "output" in shown:
            print(json.dumps(shown["output"]))
        else:
            num_failed += 1
            said = shown.get("error", {}).get("message", shown["state"])
            print(f"{shown['id']}: {said}", file=sys.stderr)
    _end(num_failed, len(tasks))


def _send(client: Client, path: str, tasks: Sequence[dict[str, Any]]) -> None:
    """Send tasks, and retry while the queue is full. Task ids make retries safe."""
    while True:
        try:
            client.ask("POST", path, {"tasks": list(tasks)})
            return
        except ApiFailed as error:
            if error.retry_after_s is None:
                raise
            time.sleep(error.retry_after_s)


def _results(client: Client, path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        shown: dict[str, Any] = {"state": "pending"}
        while shown["state"] not in _ENDED:
            shown = client.ask("GET", f"{path}/{name}?wait={_WAIT_S}")
        yield shown


def run_list(client: Client, form: str | None) -> None:
    """Print a table. Raises: CommandFailed."""
    found = list(client.pages("/v1/sessions"))
    if form is not None:
        show(found, form)
        return
    counts = map(str.capitalize, _COUNTS)
    names = ("ID", "State", "App", "Resources", "Priority", *counts, "Created")
    table = Table(*names, box=None, header_style="bold")
    for each in found:
        counts = [str(each[state]) for state in _COUNTS]
        table.add_row(
            each["id"], each["state"].capitalize(), each["application"],
            _resources(each.get("resources") or {}), each["priority"], *counts,
            _ago(each["created"]),
        )  # fmt: skip
    screen.print(table)


def _resources(found: dict[str, Any]) -> str:
    """Resources in the format of `--resources`."""
    names = {"memory_bytes": "memory"}
    return ",".join(f"{names.get(name, name)}={value:g}" for name, value in found.items() if value)


def run_view(client: Client, session_id: str, form: str | None) -> None:
    """Print a session and its tasks. Raises: CommandFailed."""
    path = f"/v1/sessions/{session_id}"
    found = client.ask("GET", path)
    found["tasks"] = list(client.pages(f"{path}/tasks", include="results"))
    if form is not None:
        show(found, form)
        return
    counts = ", ".join(f"{found[state]} {state}" for state in _COUNTS)
    print(f"{found['id']} of {found['application']}: {found['state']}; {counts}")
    table = Table("Task", "State", "Input", "Result", box=None, header_style="bold")
    for task in found["tasks"]:
        output = json.dumps(task["output"]) if "output" in task else ""
        said = task.get("error", {}).get("message", output)
        table.add_row(task["id"], task["state"], task["input"], said[:_MAX_SHOWN_CHARS])
    screen.print(table)


def run_close(client: Client, session_id: str) -> None:
    """Raises: CommandFailed."""
    found = client.ask("POST", f"/v1/sessions/{session_id}:close", {})
    print(
        f"{session_id}: closed; {found['running']} tasks are still running, {found['cancelled']} were cancelled"
    )


def _ago(at: float) -> str:
    seconds = max(0, int(time.time() - at))  # noqa: TID251
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"
