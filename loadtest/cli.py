"""The command of the load test: `vlm loadtest`.

Locust is imported only when a test runs.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadtest.load_plan import DEFAULT_USERS, make_plan
from loadtest.record import Order, Profile, Target, Workload, parse_objective

Users = Annotated[
    str | None,
    typer.Option(
        help="Concurrent users: 8, steps 2,4,8 or a ramp 1..16.", show_default=DEFAULT_USERS
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(help="Requests/s instead of users: 5, steps 5,10,20 or a ramp 1..30."),
]
Slo = Annotated[str, typer.Option(help="Latency objective, ms: ttft=500,tpot=50,e2e=5000.")]


def _writable(path: Path | None) -> Path | None:
    """Check that a file can be written, before the load starts. Raises: BadParameter."""
    if path is not None:
        target = path if path.exists() else path.parent
        if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written: choose another file")
    return path


def _with_scheme(host: str) -> str:
    return f"http://{host}" if host and "://" not in host else host


ApiKey = Annotated[
    str, typer.Option(envvar="VLM_API_KEY", help="API key, if the server requires one.")
]


def loadtest(
    profile: Annotated[Profile, typer.Option(help="Kinds of questions.")] = "mixed",
    users: Users = None,
    rate: Rate = None,
    duration: Annotated[float, typer.Option(min=0.5, help="Seconds of all steps together.")] = 30.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds of load before the steps.")] = 1.0,
    host: Annotated[
        str,
        typer.Option(
            help="The server's address.", show_default="a fleet of its own", callback=_with_scheme
        ),
    ] = "",
    engine: Annotated[str, typer.Option(help="Engine of the fleet if --host is not set.")] = "mock",
    model: Annotated[
        str, typer.Option(help="Model to ask.", show_default="the server's first")
    ] = "",
    api_key: ApiKey = "",
    slo: Slo = "ttft=500,tpot=50",
    max_failures: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Accepted ratio of failures.")
    ] = 0.0,
    stream_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fraction of streamed answers.")
    ] = 0.5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 16,
    image_bytes: Annotated[
        int, typer.Option(min=1000, max=16_000_000, help="Bytes of a noise image.")
    ] = 60_000,
    think_time: Annotated[
        float, typer.Option(min=0.0, help="Mean pause of a user, seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of questions and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for data.")] = 60.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="JSON file to write.", callback=_writable)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="HTML file to write, with the tables.", callback=_writable),
    ] = None,
) -> None:
    """Load a server that speaks OpenAI's API, and check and time every answer."""
    option = "--slo"
    try:
        objective = parse_objective(slo)
        option = "--rate" if rate else "--users"
        plan = make_plan(users, rate, duration, warmup)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
    workload = Workload(
        profile=profile,
        stream_ratio=stream_ratio,
        max_tokens=max_tokens,
        image_bytes=image_bytes,
        think_s=think_time,
        seed=seed,
    )
    from loadtest.run import LoadTestError, run

    target = Target(url=host, model=model, timeout_s=timeout, api_key=api_key)
    order = Order(target=target, workload=workload, plan=plan)
    try:
        sys.exit(run(order, objective, max_failures, engine, json, html))
    except (LoadTestError, OSError) as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(1)
