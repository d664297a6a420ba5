"""Commands for users of applications: `vlm run` and `vlm session`."""

from typing import Annotated

import typer

from deploy.cli import Command, Form, Group, connect
from shared.gateway_url import URL, ApiKey, AskUrl

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
    """Run tasks of an application, and print the result of each as a line of JSON."""
    from deploy import sessions

    sessions.run_tasks(connect(url, api_key), name, inputs)


session = typer.Typer(
    cls=Group,
    help="Sessions of applications: common data, and tasks that outlive their connections.",
    no_args_is_help=True,
)


@session.command(cls=Command)
def create(
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
    min_instances: Annotated[int, typer.Option(min=0, help="Instances kept while it is open.")] = 0,
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
    from deploy import sessions

    body = {
        "priority": priority,
        "idle_s": idle_s,
        "timeout_s": timeout_s,
        "min_instances": min_instances,
        "max_instances": max_instances,
    }
    client = connect(url, api_key)
    sessions.run_create(client, application, common_data, resources, body)


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
    from deploy import sessions

    sessions.run_in(connect(url, api_key), session_id, inputs, prefix, wait)


@session.command("list", cls=Command)
def show_all(url: AskUrl = URL, api_key: ApiKey = None, output: Form = None) -> None:
    """List the sessions and the states of their tasks."""
    from deploy import sessions

    sessions.run_list(connect(url, api_key), output)


@session.command(cls=Command)
def view(
    session_id: Session, url: AskUrl = URL, api_key: ApiKey = None, output: Form = None
) -> None:
    """Show a session and its tasks."""
    from deploy import sessions

    sessions.run_view(connect(url, api_key), session_id, output)


@session.command("close", cls=Command)
def close_session(session_id: Session, url: AskUrl = URL, api_key: ApiKey = None) -> None:
    """Close a session to new tasks, and cancel waiting tasks. Running tasks are finished."""
    from deploy import sessions

    sessions.run_close(connect(url, api_key), session_id)


def add_to(root: typer.Typer) -> None:
    """Add the commands to the command line."""
    root.command(cls=Command)(run)
    root.add_typer(session, name="session")
