"""Commands for users of applications, `vlm run` and `vlm session`: send tasks, wait for results, show states."""

import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from deploy.cli import ARGUMENTS, Command, Form, Group, commands, connect
from shared.gateway_url import URL, ApiKey, AskUrl

if TYPE_CHECKING:
    from shared.gateway_client import Client

_MAX_TASKS = 1000  # per request
_WAIT_S = 30
_MAX_SHOWN_CHARS = 256
#: Error codes that concern a single task: the next tasks are still sent.
_TASK_ERRORS = (
    *("task_failed", "request_kills_workers", "too_many_attempts", "worker_lost"),
    *("engine_failure", "deadline_exceeded"),
)
_ENDED = ("succeed", "failed", "cancelled")
_COUNTS = ("pending", "running", "succeed", "failed", "cancelled")

Session = Annotated[str, typer.Argument(help="Id of the session.", show_default=False)]
Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...", help="JSON, any other text, or @FILE with JSON.", show_default=False
    ),
]


def run(
    name: Annotated[str, typer.Argument(help="Name of the application.", show_default=False)],
    inputs: Inputs,
    url: AskUrl = URL,
    api_key: ApiKey = None,
) -> None:
    """Run tasks of an application in order, and print the result of each as a line of JSON."""
    from shared.gateway_client import ApiFailed

    client, num_failed = connect(url, api_key), 0
    for number, text in enumerate(inputs, 1):
        body = {"input": _read_input(text)}
        try:
            answer = client.ask("POST", f"/v1/applications/{name}/run", body)
        except ApiFailed as error:
            if error.code not in _TASK_ERRORS:
                raise commands().CommandFailed(f"task {number}: {error}", commands().API) from None
            num_failed += 1
            print(f"task {number}: {error}", file=sys.stderr)
        else:
            print(json.dumps(answer["output"]), flush=True)
    _end(num_failed, len(inputs))


session = typer.Typer(
    cls=Group,
    help="Sessions of applications: common data, and tasks that outlive their connections.",
    no_args_is_help=True,
)


@session.command(cls=Command)
def create(
    context: typer.Context,
    application: Annotated[
        str, typer.Argument(help="Name of the application.", show_default=False)
    ],
    common_data: Annotated[
        str, typer.Option(help="Data for `enter`: JSON, a text, or @FILE.", show_default=False)
    ] = "",
    priority: Annotated[str, typer.Option(help="interactive or batch.")] = "interactive",
    idle_s: Annotated[
        float, typer.Option(help="Seconds without a task before the session expires.")
    ] = 3600,
    timeout_s: Annotated[float, typer.Option(help="Time limit of each task in seconds.")] = 3600,
    min_instances: Annotated[int, typer.Option(min=0, help="Minimum instances while open.")] = 0,
    max_instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of instances; applies if all open sessions set one.",
            show_default="as deployed",
        ),
    ] = None,
    resources: Annotated[
        str, typer.Option(help="Minimum resources of an instance: cpu=2,memory=4g,gpu=1.")
    ] = "",
    url: AskUrl = URL,
    api_key: ApiKey = None,
) -> None:
    """Open a session, and print its id."""
    names = ("priority", "idle_s", "timeout_s", "min_instances", "max_instances")
    body: dict[str, Any] = {name: context.params[name] for name in names}
    if resources:
        body["resources"] = wanted = msgspec.structs.asdict(commands().parse_resources(resources))
        if "cpu" not in resources:  # the default, cpu=1, is not a minimum of the session
            del wanted["cpu"]
    if common_data:
        body["common_data"] = _read_input(common_data)
    path = f"/v1/applications/{application}/sessions"
    print(connect(url, api_key).ask("POST", path, body)["id"])


@session.command("run", cls=Command)
def run_in(
    session_id: Session,
    inputs: Inputs,
    prefix: Annotated[
        str,
        typer.Option(
            "--id",
            help="Prefix of the task ids PREFIX-0, PREFIX-1 ...; a repeated id does not run the task again.",
            show_default="at random",
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option(help="Wait for the tasks to end, and print their results.")
    ] = True,
    url: AskUrl = URL,
    api_key: ApiKey = None,
) -> None:
    """Send tasks to a session. The exit code is 5 if one fails."""
    client, prefix = connect(url, api_key), prefix or secrets.token_hex(4)
    tasks = [{"id": f"{prefix}-{i}", "input": _read_input(t)} for i, t in enumerate(inputs)]
    path = f"/v1/sessions/{session_id}/tasks"
    for first in range(0, len(tasks), _MAX_TASKS):
        _send(client, path, tasks[first : first + _MAX_TASKS])
    if not wait:
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


@session.command("list", cls=Command)
def show_all(url: AskUrl = URL, api_key: ApiKey = None, output: Form = None) -> None:
    """List the sessions and the states of their tasks."""
    from shared.packages.deployments import Resources

    found = list(connect(url, api_key).pages("/v1/sessions"))
    if output is not None:
        commands().show(found, output)
        return
    table = commands().new_table(
        "ID", "State", "App", "Resources", "Priority", *map(str.capitalize, _COUNTS), "Created"
    )
    for each in found:
        counts = [str(each[state]) for state in _COUNTS]
        table.add_row(
            each["id"], each["state"].capitalize(), each["application"],
            str(Resources(**each["resources"])) if each["resources"] else "", each["priority"],
            *counts, _ago(each["created"]),
        )  # fmt: skip
    commands().screen.print(table)


@session.command(cls=Command)
def view(
    session_id: Session, url: AskUrl = URL, api_key: ApiKey = None, output: Form = None
) -> None:
    """Show a session and its tasks."""
    client, path = connect(url, api_key), f"/v1/sessions/{session_id}"
    found = client.ask("GET", path)
    found["tasks"] = list(client.pages(f"{path}/tasks", include="results"))
    if output is not None:
        commands().show(found, output)
        return
    counts = ", ".join(f"{found[state]} {state}" for state in _COUNTS)
    print(f"{found['id']} of {found['application']}: {found['state']}; {counts}")
    table = commands().new_table("Task", "State", "Input", "Result")
    for task in found["tasks"]:
        result = json.dumps(task["output"]) if "output" in task else ""
        said = task.get("error", {}).get("message", result)
        table.add_row(task["id"], task["state"], task["input"], said[:_MAX_SHOWN_CHARS])
    commands().screen.print(table)


@session.command("close", cls=Command)
def close_session(session_id: Session, url: AskUrl = URL, api_key: ApiKey = None) -> None:
    """Close a session to new tasks, and cancel waiting tasks. Running tasks are finished."""
    found = connect(url, api_key).ask("POST", f"/v1/sessions/{session_id}:close", {})
    print(
        f"{session_id}: closed; {found['running']} tasks are still running, {found['cancelled']} were cancelled"
    )


def _read_input(text: str) -> Any:
    """The input as JSON, or as a string if it is not JSON. `@FILE` reads it from a file. Raises: CommandFailed."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise commands().CommandFailed(
                f"{text}: cannot be read: {error.strerror}", ARGUMENTS
            ) from None
        except UnicodeDecodeError as error:
            raise commands().CommandFailed(f"{text}: not UTF-8: {error}", ARGUMENTS) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _end(num_failed: int, num_tasks: int) -> None:
    """Raises: CommandFailed if a task failed."""
    if num_failed:
        raise commands().CommandFailed(
            f"{num_failed} of {num_tasks} tasks failed", commands().ROLLOUT
        )


def _send(client: "Client", path: str, tasks: Sequence[dict[str, Any]]) -> None:
    """Send tasks, and retry while the queue is full or the key is over a limit. Task ids make retries safe."""
    from shared.gateway_client import ApiFailed

    while True:
        try:
            client.ask("POST", path, {"tasks": list(tasks)})
            return
        except ApiFailed as error:
            if error.retry_after_s is None or error.code == "insufficient_quota":
                raise
            time.sleep(error.retry_after_s)


def _results(client: "Client", path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        shown: dict[str, Any] = {"state": "pending"}
        while shown["state"] not in _ENDED:
            shown = client.ask("GET", f"{path}/{name}?wait={_WAIT_S}")
        yield shown


def _ago(at: float) -> str:
    seconds = max(0, int(time.time() - at))  # noqa: TID251
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"
