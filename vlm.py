"""The command line, assembled from the commands of all packages."""

import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

import deploy.cli
import deploy.keys_cli
import deploy.session_cli
import engines.cli
import gateway.cli
import loadtest.cli
import search.cli
import worker.cli
from shared.options import FiniteCommand
from shared.settings import SettingsError
from shared.version import package_version


def settings() -> None:
    """List every setting with its variable and default."""
    from engines.registry import settings_classes
    from shared.settings.load import show

    show(settings_classes())


#: Color of output that is not printed by rich. Rich supports NO_COLOR itself. Source: https://no-color.org
_COLOR = False if os.environ.get("NO_COLOR") else None

app = typer.Typer(
    name="vlm",
    help="A gateway and a fleet of workers for vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "color": _COLOR},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"vlm-fleet {package_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself."""


for command in (
    worker.cli.serve,
    gateway.cli.gateway,
    worker.cli.worker,
    worker.cli.node,
    gateway.cli.chat,
    search.cli.embed,
    engines.cli.models,
    engines.cli.pull,
    engines.cli.rm,
    settings,
):
    app.command(cls=FiniteCommand)(command)
app.command("ray-workers", hidden=True)(worker.cli.ray_workers)
app.command("search-node")(search.cli.search_node)
app.command("search")(search.cli.find)
app.add_typer(search.cli.store, name="store")
for command in (*deploy.cli.COMMANDS, deploy.session_cli.run):
    app.command(cls=deploy.cli.Command)(command)
app.add_typer(deploy.session_cli.session, name="session")
app.add_typer(deploy.keys_cli.app, name="keys")
for command in (deploy.keys_cli.forget, deploy.keys_cli.audit, deploy.keys_cli.usage):
    app.command(cls=deploy.cli.GatewayCommand)(command)
if find_spec("benchmarks") is not None:  # the wheel does not contain it
    from benchmarks.cli import app as bench

    app.add_typer(bench, name="bench")
app.command(cls=FiniteCommand)(loadtest.cli.loadtest)

#: Commands by heading of `vlm --help`, in display order.
_GROUPS = {
    "Serve": "serve gateway worker node search-node settings",
    "Ask": "chat embed search store run session",
    "Models": "models pull rm",
    "Deploy": "deploy apps app logs promote rollback scale route undeploy gc",
    "Operate": "nodes drain keys usage forget audit plan",
    "Measure": "bench loadtest",
}
for registered in (*app.registered_commands, *app.registered_groups):
    name = registered.name or getattr(registered.callback, "__name__", "").replace("_", "-")
    registered.rich_help_panel = next(
        (title for title, names in _GROUPS.items() if name in names.split()), None
    )


def main() -> None:
    """Run the command. A wrong setting prints one line and exits with code 78."""
    try:
        app()
    except SettingsError as error:
        typer.secho(str(error), err=True, fg="red", color=_COLOR)
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main()
