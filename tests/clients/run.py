"""`make clients`: published clients against the built-in model, and the table of docs/clients.md.

    python -m tests.clients.run [--write]

Each client runs in an environment of its own, `.cache/clients`, with the versions of
`requirements.txt` and `node/package.json`. Ends with 1 if one of them fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.integration.fleet_process import ROOT, SAMPLE, start_fleet

HERE = Path(__file__).parent
HOME = ROOT / ".cache" / "clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- made by make clients -->\n", "<!-- until here -->\n"
TIMEOUT_S = 1800
REQUIREMENTS = (HERE / "requirements.txt").read_text()
#: Whose sources bring tests that can be run against a server.
SDKS = ("openai", "anthropic")
VARIABLES = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch one
}


def prepare() -> Path:
    """The interpreter of the environment, made where it is not."""
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"]
    subprocess.run(install, check=True)
    return python


def prepare_node() -> Path | None:
    """The folder with the packages of Node; None where there is no Node."""
    if shutil.which("npm") is None:
        return None
    folder = HOME / "node"
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True
    )
    return folder


def prepare_sources(python: Path) -> Path:
    """The folder with the sources of the SDKs, whose tests are in them alone."""
    folder = HOME / "sources"
    wanted = [line for line in REQUIREMENTS.splitlines() if line.startswith(SDKS)]
    subprocess.run(
        [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder,
         "--no-binary", ",".join(SDKS), *wanted],
        check=True,
    )  # fmt: skip
    return folder


def ask(python: Path, node: Path | None, sources: Path) -> dict[str, dict[str, str]]:
    """What each client says of each feature."""
    with tempfile.TemporaryDirectory() as folder:
        served = start_fleet(Path(folder), engine="torch")
        wish = [served.url, "shapes"]
        try:
            told = run([python, HERE / "checks.py", *wish, SAMPLE])
            if node is not None:
                told |= run(["node", node / "checks.mjs", *wish, SAMPLE])
            return told | run([python, HERE / "sdk.py", *wish, sources])
        finally:
            served.end()


def run(command: Sequence[str | Path]) -> dict[str, dict[str, str]]:
    """What a program says in the last line of its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **VARIABLES},
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def to_table(told: dict[str, dict[str, str]]) -> str:
    """Clients by feature, in Markdown."""
    lines = ["| client | works |", "|---|---|"]
    for name, features in told.items():
        works = ", ".join(feature for feature, result in features.items() if result == "yes")
        lines.append(f"| {name} | {works} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    python = prepare()
    told = ask(python, prepare_node(), prepare_sources(python))
    failed = [
        f"{client}: {feature}: {result}"
        for client, features in told.items()
        for feature, result in features.items()
        if result != "yes"
    ]
    table = to_table(told)
    print(table, *failed, sep="\n")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
