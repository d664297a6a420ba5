"""`make clients`: published clients against the built-in model, and the table of docs/clients.md.

    python -m tests.clients.run [--write]

Each client runs in an environment of its own, `.cache/clients`, with the versions of
`requirements.txt`. Ends with 1 if one of them fails.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.integration.fleet_process import ROOT, SAMPLE, start_fleet

HERE = Path(__file__).parent
HOME = ROOT / ".cache" / "clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- made by make clients -->\n", "<!-- until here -->\n"
TIMEOUT_S = 900
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


def ask(python: Path) -> dict[str, dict[str, str]]:
    """What each client says of each feature."""
    with tempfile.TemporaryDirectory() as folder:
        served = start_fleet(Path(folder), engine="torch")
        try:
            command = [python, HERE / "checks.py", served.url, "shapes", SAMPLE]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, **VARIABLES},
            )
        finally:
            served.end()
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
    told = ask(prepare())
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
