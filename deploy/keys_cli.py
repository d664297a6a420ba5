"""`vlm keys`: create, list, change, rotate and revoke the API keys of a fleet."""

import re
import sys
from contextlib import suppress
from datetime import UTC, datetime  # noqa: TID251 (people see it)
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import typer

from deploy.cli import GatewayCommand, commands, connect
from shared.gateway_url import URL, Url

app = typer.Typer(help="Create, list, change, rotate and revoke API keys.", no_args_is_help=True)

Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="VLM_API_KEY",
        help="VLM_GATEWAY__ROOT_KEY, or a key with the role admin.",
    ),
]
AnyKey = Annotated[
    str | None, typer.Option("--api-key", envvar="VLM_API_KEY", help="Any key of the fleet.")
]
Name = Annotated[str, typer.Argument(help="The key's name.")]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PATH = "/v1/admin/keys"
#: Limits that `--remove` accepts, and their fields in a request.
_REMOVABLE = {
    "models": "models", "rpm": "requests_per_minute", "tpm": "tokens_per_minute", "open": "open_requests",
    "max-output-tokens": "max_output_tokens", "expires": "expires_in_s", "budget": "budget",
}  # fmt: skip


def _seconds(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}[smhd]", text):
        raise typer.BadParameter("give a number and s, m, h or d, such as 90d")
    return int(text[:-1]) * _UNITS[text[-1]]


def _dollars(text: str) -> float:
    with suppress(ValueError):
        if 0 < (amount := float(text)) <= 1_000_000:
            return amount
    raise typer.BadParameter("give dollars above 0, at most 1,000,000")


def _removed(text: str | None) -> str | None:
    if text is not None and not set(text.split(",")) <= set(_REMOVABLE):
        raise typer.BadParameter(f"give some of {', '.join(_REMOVABLE)}, separated by commas")
    return text


Models = Annotated[str | None, typer.Option(help="Comma-separated patterns of model names.")]
Rpm = Annotated[int | None, typer.Option("--rpm", min=1, help="Requests per minute.")]
Tpm = Annotated[int | None, typer.Option("--tpm", min=1, help="Tokens per minute.")]
Open = Annotated[int | None, typer.Option("--open", min=1, help="Concurrent answers.")]
MaxOutputTokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")]
MaxPriority = Annotated[
    Literal["interactive", "batch"] | None,
    typer.Option(help="Highest priority of its requests: interactive by default."),
]
Expires = Annotated[
    int | None,
    typer.Option(
        "--expires", parser=_seconds, metavar="TIME", help="Lifetime from now, such as 90d."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(parser=_dollars, metavar="DOLLARS", help="Dollars that the key can spend."),
]
Per = Annotated[
    Literal["month", "day"] | None,
    typer.Option("--per", help="Period of the budget: month by default."),
]
Tag = Annotated[str | None, typer.Option(help="Label of its usage, such as a team.")]


@app.command(cls=GatewayCommand)
def create(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Name of the key: a person or a program.")],
    roles: Annotated[
        str, typer.Option(help="Comma-separated: use, adapters, deploy, admin.")
    ] = "use",
    models: Models = None, requests_per_minute: Rpm = None, tokens_per_minute: Tpm = None,
    open_requests: Open = None, max_output_tokens: MaxOutputTokens = None,
    max_priority: MaxPriority = None, expires_in_s: Expires = None, budget: Budget = None,
    period: Per = None, tag: Tag = None, url: Url = URL, api_key: Key = None,
) -> None:  # fmt: skip
    """Create a key. The last line of output is the key, which is shown only once."""
    body = {"name": name, "roles": roles.split(",")} | _limits(context)
    _show_new(connect(url, api_key).ask("POST", _PATH, body))


@app.command(cls=GatewayCommand)
def update(
    context: typer.Context,
    name: Name,
    models: Models = None, requests_per_minute: Rpm = None, tokens_per_minute: Tpm = None,
    open_requests: Open = None, max_output_tokens: MaxOutputTokens = None,
    max_priority: MaxPriority = None, expires_in_s: Expires = None, budget: Budget = None,
    period: Per = None, tag: Tag = None,
    remove: Annotated[
        str | None,
        typer.Option(help="Comma-separated limits to remove, such as rpm,budget.", callback=_removed),
    ] = None,
    url: Url = URL, api_key: Key = None,
) -> None:  # fmt: skip
    """Change the limits of a key; gateways apply the change within two seconds. Omitted options change nothing."""
    removed = {_REMOVABLE[each]: None for each in (remove.split(",") if remove else ())}
    body = _limits(context) | removed
    _change("PATCH", name, "changed", url, api_key, body)


def _limits(context: typer.Context) -> dict[str, Any]:
    """The limits among the options, as fields of a request."""
    fields = (*_REMOVABLE.values(), "max_priority", "period", "tag")
    given = {name: context.params[name] for name in fields if context.params[name] is not None}
    return given | ({"models": given["models"].split(",")} if "models" in given else {})


@app.command("list", cls=GatewayCommand)
def list_keys(url: Url = URL, api_key: Key = None) -> None:
    """List the keys."""
    table = commands().new_table(
        "name", "state", "roles", "models", "rpm", "tpm", "open", "budget", "tag", "expires"
    )
    for key in connect(url, api_key).ask("GET", _PATH)["data"]:
        limits = (key["requests_per_minute"], key["tokens_per_minute"], key["open_requests"])
        table.add_row(
            key["name"], key["state"], ", ".join(key["roles"]), ", ".join(key["models"] or ["all"]),
            *("-" if limit is None else str(limit) for limit in limits),
            f"{key['budget']:g} per {key['period']}" if key["budget"] else "-", key["tag"] or "-",
            _date(key["expires_at"]),
        )  # fmt: skip
    commands().screen.print(table)


@app.command(cls=GatewayCommand)
def show(name: Name, url: Url = URL, api_key: Key = None) -> None:
    """Show a key as JSON."""
    commands().show(connect(url, api_key).ask("GET", f"{_PATH}/{quote(name, safe='')}"), "json")


@app.command(cls=GatewayCommand)
def rotate(name: Name, url: Url = URL, api_key: Key = None) -> None:
    """Replace a key by a new key with the same name, data and limits. The old key ends within two seconds."""
    _show_new(connect(url, api_key).ask("POST", f"{_PATH}/{quote(name, safe='')}:rotate"))


@app.command(cls=GatewayCommand)
def revoke(name: Name, url: Url = URL, api_key: Key = None) -> None:
    """Revoke a key, and end its requests within two seconds."""
    _change("DELETE", name, "revoked", url, api_key)


def _change(
    method: str, name: str, told: str, url: str, api_key: str | None, body: Any = None
) -> None:
    connect(url, api_key).ask(method, f"{_PATH}/{quote(name, safe='')}", body)
    commands().console.print(f"{name}: {told}")


def forget(
    key: Annotated[str, typer.Option(help="The key's name.")], url: Url = URL, api_key: Key = None
) -> None:
    """Delete the stored data of a key: answers, sessions, batches, files, vector stores."""
    found = connect(url, api_key).ask("POST", f"{_PATH}/{quote(key, safe='')}:forget")
    counts = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in found.items() if name != "object"
    )
    commands().console.print(f"{key}: deleted {counts}")


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of entries.")] = 50,
    url: Url = URL,
    api_key: Key = None,
) -> None:
    """List the requested changes to keys, deployments, nodes and adapters, newest first."""
    table = commands().new_table("time", "key", "address", "action", "name")
    for each in connect(url, api_key).ask("GET", f"/v1/admin/audit?limit={limit}")["data"]:
        at = datetime.fromtimestamp(each["at"], UTC).isoformat(" ", "seconds")
        table.add_row(at, each["key"], each["address"], each["action"], each["name"])
    commands().screen.print(table)


def usage(
    begin: Annotated[
        str | None, typer.Option("--from", help="First day, in UTC.", show_default="of this month")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Last day.", show_default="today")] = None,
    by: Annotated[str, typer.Option(help="Comma-separated: day, key, tag, model.")] = "key,model",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    url: Url = URL,
    api_key: AnyKey = None,
) -> None:
    """Show the usage of your key, or of all keys if yours is VLM_GATEWAY__ROOT_KEY or has the role admin."""
    asked = {"from": begin, "to": end, "by": by, "format": "csv" if csv else None}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    if csv:
        with connect(url, api_key).stream("GET", f"/v1/usage?{query}") as answer:
            sys.stdout.write(answer.read().decode())
        return
    counts = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "images")
    groups = by.split(",")
    table = commands().new_table(*groups, *(name.replace("_", " ") for name in counts), "cost ($)")
    for row in connect(url, api_key).ask("GET", f"/v1/usage?{query}")["data"]:
        cost = "-" if row["cost"] is None else f"{row['cost']:.6f}"
        table.add_row(
            *(row[name] or "-" for name in groups), *(str(row[name]) for name in counts), cost
        )
    commands().screen.print(table)


def _show_new(found: dict[str, Any]) -> None:
    commands().console.print(f"{found['name']}: expires {_date(found['expires_at'])}")
    sys.stdout.write(found["key"] + "\n")


def _date(seconds: int | None) -> str:
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "minutes")
