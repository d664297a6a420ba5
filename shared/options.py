"""Command-line options that several commands share, and how a command reads its settings.

Settings are imported only when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from shared.settings import SettingsError

if TYPE_CHECKING:
    from shared.settings.tree import Settings

#: Options that set a setting, by the path of the setting.
SettingOptions = Mapping[str, Any]


def option(
    type_: Any, name: str, text: str, default: str | bool = False, metavar: str | None = None
) -> Any:
    """An option that sets a setting. `default`: the default that the help shows."""
    return Annotated[
        type_ | None, typer.Option(name, help=text, show_default=default, metavar=metavar)
    ]


LISTEN: SettingOptions = {
    "gateway.host": option(str, "--host", "Address to listen on.", "127.0.0.1"),
    "gateway.port": option(int, "--port", "Port to listen on; 0: any free port.", "8000"),
    "gateway.allow_open": option(
        bool, "--allow-open", "Allow serving without API keys on an address that is not loopback."
    ),
}
_COMMON: SettingOptions = {
    "redis.url": option(
        str,
        "--redis-url",
        "URL of Redis (redis://, rediss://, unix:// or redis+sentinel://); for shards a list: NAME=URL,NAME=URL.",
    ),
    "logs.level": option(
        Literal["debug", "info", "warning", "error"],
        "--log-level",
        "Minimum level of log lines.",
        "info; serve: warning",
    ),
}
_Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting, such as `--set worker.lease_s=5`; can be repeated. "
        "`vlm settings` lists them.",
        show_default=False,
    ),
]
#: Process id of the parent: the command ends when the parent ends.
_DieWithParent = Annotated[int | None, typer.Option("--die-with-parent", hidden=True)]


class FiniteCommand(TyperCommand):
    """A command that refuses `nan` and `inf` as numbers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", ctx, param)  # type: ignore
        return rest


def takes_settings(
    *groups: SettingOptions, process: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options for settings to a command, and pass the `Settings` as its first argument.

    `process`: name of a long-lived process in its logs; None for other commands.
    """
    by_name = {
        path.replace(".", "_"): (path, option)
        for group in (*groups, _COMMON)
        for path, option in group.items()
    }
    spelled = {path: option.__metadata__[0].default for path, option in by_name.values()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(
            assignments: list[str] | None = None, die_with_parent: int | None = None, **given: Any
        ) -> None:
            options = {path: given.pop(name) for name, (path, _) in by_name.items()}
            is_child = die_with_parent is not None
            settings = _read_settings(options, spelled, assignments or [], is_child)
            if process is not None:
                _begin_process(process, settings, die_with_parent)
            command(settings, **given)

        own = list(inspect.signature(command).parameters.values())[1:]
        shared = [_option(name, option) for name, (_, option) in by_name.items()]
        shared.append(_option("assignments", _Assignments))
        if process is not None:
            shared.append(_option("die_with_parent", _DieWithParent))
        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return run

    return decorate


def _option(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _read_settings(
    options: Mapping[str, Any], spelled: Mapping[str, str], assignments: list[str], is_child: bool
) -> Settings:
    """The settings of a command. Options that are not None override all other sources. Raises: SettingsError.

    `options`: values by path (`gateway.port`). `spelled`: the same options as typed on the command line. A child
    process of `vlm serve` reads only its environment: the parent has read `.env` and passes the child's settings on.
    """
    from shared.settings.load import load_settings

    assigned = dict(map(_parse, assignments))
    given = {path: value for path, value in options.items() if value is not None}
    typed = {path: f"--set {path}" for path in assigned} | {path: spelled[path] for path in given}
    overrides: dict[str, Any] = {"_env_file": None} if is_child else {}
    return load_settings(typed, **overrides, **to_tree(assigned | given, "."))


def _parse(assignment: str) -> tuple[str, str]:
    path, equals, value = assignment.partition("=")
    if not equals or not path.strip():
        raise SettingsError(f"--set {assignment}: write NAME=VALUE, as in engine.model=shapes")
    return path.strip().lower(), value


def to_tree(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nest settings by group: `worker.id` becomes `id` in `worker`. Raises: SettingsError."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        *groups, name = path.split(separator)
        tree = root
        for group in groups:
            tree = tree.setdefault(group, {})
            if not isinstance(tree, dict):
                raise SettingsError(f"--set {path}: {group} is also set to a value; set only one")
        tree[name] = value
    return root


def _begin_process(name: str, settings: Settings, parent: int | None) -> None:
    """Set up the logs of the long-lived process `name`, and end it with its parent. Raises: SettingsError."""
    from shared.process import die_with_parent
    from shared.telemetry.logs import setup_logging

    if not settings.redis.url and name != "search":
        raise SettingsError("VLM_REDIS_URL: set the URL of Redis (`vlm serve` starts its own)")
    if parent is not None:
        die_with_parent(parent)
    setup_logging(settings.logs, name)
