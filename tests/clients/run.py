"""`make clients`: published clients against the built-in model, and the table of docs/clients.md.

    python -m tests.clients.run [--write]

Clients run in the environment `.cache/clients` with the versions of `requirements.txt` and `node/package.json`;
each program of `programs` has its own. A client that its registry does not have is skipped. Exits with 1 if a
check fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.clients.open_webui import SPEC, ask_open_webui
from tests.clients.programs import HOME, SKIPPED, ask_programs, ask_runner
from tests.clients.vllm_suite import ask_suite
from tests.integration.fleet_process import ROOT, SAMPLE, start_fleet

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- made by make clients -->\n", "<!-- until here -->\n"
TIMEOUT_S = 1800
REQUIREMENTS = (HERE / "requirements.txt").read_text()
MINERU = "mineru-vl-utils==2.0.7"
LLAMA_INDEX = "llama-index-embeddings-openai==0.7.0"
#: Packages whose sources have tests that can run against a server.
SDKS = ("openai", "anthropic")
VARIABLES = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it would download one
}
#: Some clients set no sampling parameters and need answers that end. Samples of the small model, and its greedy
#: answers to unknown input, can run to the length limit.
SAMPLING = {"temperature": 0, "repetition_penalty": 1.2, "max_new_tokens": 512}


def prepare() -> Path:
    """Creates the environment if it does not exist; returns its interpreter."""
    python = HOME / "bin" / "python"
    if not (HOME / "bin" / "pip").exists():  # created last
        venv.create(HOME, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"]
    subprocess.run(install, check=True)
    return python


def prepare_node() -> Path | None:
    """Returns the folder with the Node packages; None if Node is not installed."""
    if shutil.which("npm") is None:
        return None
    folder = HOME / "node"
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True
    )
    return folder


def prepare_sources(python: Path) -> Path:
    """Returns the folder with the sources of the SDKs, because only these contain the tests."""
    wanted = [line for line in REQUIREMENTS.splitlines() if line.startswith(SDKS)]
    folder = HOME / "sources" / "-".join(wanted)
    if not folder.exists():
        part = folder.with_name("part")
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", part]
        subprocess.run([*command, "--no-binary", ",".join(SDKS), *wanted], check=True)
        part.rename(folder)
    return folder


def ask(python: Path, node: Path | None, sources: Path) -> dict[str, dict[str, str]]:
    """Returns the result of each feature of each client."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "generation_config.json").write_text(json.dumps(SAMPLING))
        with start_fleet(
            Path(folder), "--also", "shapes-clip",
            engine="torch", VLM_ENGINE__GENERATION_CONFIG=folder,
        ) as served:  # fmt: skip
            wish = [served.url, "shapes"]
            told = run("Python", [python, HERE / "checks.py", *wish, SAMPLE])
            if node is None:
                told["clients of Node"] = {"all": "not run: there is no npm"}
            else:
                told |= run("Node", ["node", node / "checks.mjs", *wish, SAMPLE])
            told[MINERU.replace("==", " ")] = ask_runner(MINERU, *wish, SAMPLE)
            told[LLAMA_INDEX.replace("==", " ")] = ask_runner(
                LLAMA_INDEX, served.url, "shapes-clip"
            )
            told[SPEC.replace("==", " ")] = ask_open_webui(*wish, SAMPLE)
            told |= run("SDKs' tests", [python, HERE / "sdk.py", *wish, sources])
    return told


def run(part: str, command: Sequence[str | Path]) -> dict[str, dict[str, str]]:
    """Returns the results that a program prints in its last line, or its error if there is none."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env={**os.environ, **VARIABLES},
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {part: {"all": f"not run: no answer in {TIMEOUT_S} s"}}
    except subprocess.CalledProcessError as error:
        return {part: {"all": f"not run: {error.stderr[-2000:]}"}}


def is_failure(result: str) -> bool:
    return result != "yes" and not result.startswith(SKIPPED)


def to_table(told: dict[str, dict[str, str]]) -> str:
    """Returns a Markdown table of clients and features, with the date."""
    lines = ["| client | works |", "|---|---|"]
    for name, features in told.items():
        works = [feature for feature, result in features.items() if result == "yes"]
        fails = [feature for feature, result in features.items() if is_failure(result)]
        works += [f"{each} (skipped)" for each in features if features[each].startswith(SKIPPED)]
        cell = ", ".join(works) + ("; " if works and fails else "")
        lines.append(
            f"| {name} | {cell}{'**fails or was not run**: ' * bool(fails)}{', '.join(fails)} |"
        )
    return "\n".join(lines) + f"\n\nRun on {datetime.now(UTC):%Y-%m-%d}.\n"


def main() -> int:
    python = prepare()
    told = ask(python, prepare_node(), prepare_sources(python))
    print("programs ...", file=sys.stderr, flush=True)
    told |= ask_programs() | ask_suite(python)
    failed = [
        f"{client}: {feature}: {result}"
        for client, features in told.items()
        for feature, result in features.items()
        if is_failure(result)
    ]
    table = to_table(told)
    print(table, *failed, sep="\n")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
