"""The options that commands of several packages have, and the settings that a command starts with.

Imports no settings before a command runs: the help of the command line is shown at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shared.settings import SettingsError

if TYPE_CHECKING:
    from shared.settings.tree import Settings

Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[
    int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default="8000")
]
AllowOpen = Annotated[
    bool | None,
    typer.Option("--allow-open", help="Serve without API keys on other addresses than loopback."),
]
RedisUrl = Annotated[
    str | None, typer.Option(help="redis://, rediss:// or unix:// URL.", show_default=False)
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    typer.Option(help="Least level shown.", show_default="info"),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting, as in `--set worker.lease_s=5`; may be repeated. `vlm settings` lists them.",
        show_default=False,
    ),
]
DieWithParent = Annotated[bool, typer.Option("--die-with-parent", hidden=True)]


def read_settings(
    options: dict[str, Any], assignments: list[str] | None, is_child: bool = False
) -> Settings:
    """The settings that a command starts with: its options that are not None, then all other sources.

    `options` are by path (`gateway.port`). A child of `vlm serve` has its settings from its environment
    alone: its parent has read `.env`, and hands on what is the child's own. Raises: SettingsError.
    """
    from shared.settings.load import load_settings

    overrides: dict[str, Any] = {"_env_file": None} if is_child else {}
    for path, value in [*map(_parse, assignments or ()), *options.items()]:
        if value is not None:
            _put(overrides, path, value)
    return load_settings(**overrides)


def _parse(assignment: str) -> tuple[str, str]:
    path, equals, value = assignment.partition("=")
    if not equals or not path.strip():
        raise SettingsError(f"--set {assignment}: write NAME=VALUE, as in engine.model=shapes")
    return path.strip().lower(), value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"--set {path}: {group} has a value of its own")
    tree[name] = value


def run_process(name: str, settings: Settings, is_child: bool) -> None:
    """Make this process the long-lived one `name` of a fleet. Raises: SettingsError."""
    from shared.process import die_with_parent
    from shared.telemetry.logs import setup_logging

    if not settings.redis.url:
        raise SettingsError("VLM_REDIS_URL: no Redis is named (`vlm serve` brings its own)")
    if is_child:
        die_with_parent()
    setup_logging(settings.logs, name)
