"""The command line: assembles the commands. Each lives with what it commands."""

import os
import sys
from typing import Annotated

import typer

import deploy.cli
import deploy.session_cli
import engines.cli
import gateway.cli
import loadtest.cli
import search.cli
import worker.cli
from shared.settings import SettingsError


def settings(markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False) -> None:
    """List every setting: its variable, its default and what it means."""
    from engines.registry import settings_classes
    from shared.settings.table import show

    show(settings_classes(), markdown)


app = typer.Typer(
    name="vlm",
    help="A gateway and a fleet of workers for vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    worker.cli.serve,
    gateway.cli.gateway,
    worker.cli.worker,
    worker.cli.node,
    gateway.cli.chat,
):
    app.command()(command)
for command in (
    gateway.cli.status,
    engines.cli.models,
    engines.cli.pull,
    engines.cli.rm,
    engines.cli.make_checkpoint,
    engines.cli.quantize,
    engines.cli.convert_gguf,
    settings,
):
    app.command()(command)
app.command("search-node")(search.cli.search_node)
app.command()(search.cli.embed)
app.command("search")(search.cli.find)
app.add_typer(search.cli.store, name="store")
deploy.cli.add_to(app)
deploy.session_cli.add_to(app)
bench = typer.Typer(help="Measure parts of the system on this machine.", no_args_is_help=True)
bench.command("engine")(engines.cli.bench_engine)
bench.command("peers")(engines.cli.bench_peers)
bench.command("programs")(engines.cli.bench_programs)
bench.command("embeddings")(engines.cli.bench_embeddings)
bench.command("quality")(engines.cli.bench_quality)
bench.command("search")(search.cli.bench_search)
bench.command("gateway")(gateway.cli.bench_gateway)
app.add_typer(bench, name="bench")
app.add_typer(loadtest.cli.app, name="loadtest")


def main() -> None:
    """Run the command; a wrong setting is one clear line and exit code 78."""
    try:
        app()
    except SettingsError as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main()
