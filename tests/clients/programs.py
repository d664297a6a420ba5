"""Agent programs, each installed in its own environment and run with a fleet.

Their model is a script (`scripted`) that calls the tools they offer, so that a complete session runs.
"""

import json
import os
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.scripted import MODEL, TASK, run_scripted
from tests.integration.fleet_process import ROOT, start_fleet

HERE = Path(__file__).parent
HOME = ROOT / ".cache" / "clients"
SKIPPED = "skipped: "
TIMEOUT_S = 180
Told = dict[str, dict[str, str]]


class NotHad(Exception):
    """The registry does not have the package."""


@dataclass(frozen=True)
class CommandLine:
    """A coding assistant from npm that edits a file. `{url}` is the fleet, `{model}` its model."""

    package: str
    version: str
    command: tuple[str, ...]
    variables: Mapping[str, str]


COMMAND_LINES = (
    CommandLine(
        "@anthropic-ai/claude-code",
        "2.1.197",
        ("claude", "--model", "{model}", "--allowedTools", "Read,Edit", "--print"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    CommandLine(
        "@openai/codex",
        "0.171.0",
        (
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            "--model", "{model}", "-c", "model_provider=fleet", "-c",
            'model_providers.fleet={{name="fleet",base_url="{url}/v1",wire_api="responses",env_key="KEY"}}',
        ),
        {"KEY": "none"},
    ),
)  # fmt: skip
#: Packages from PyPI with a check in `runners.py`.
RUNNERS = ("openai-agents==0.24.0", "anthropic==2.12.0")


def install_npm(spec: str) -> Path:
    """Installs a package; returns the folder of its programs. Raises: NotHad."""
    if shutil.which("npm") is None:
        raise NotHad("there is no npm")
    folder = HOME / spec.replace("/", "-")
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        install(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", folder, spec])
        (folder / "done").touch()
    return folder / "node_modules" / ".bin"


def install_pip(spec: str) -> Path:
    """Installs a package; returns the interpreter of its environment. Raises: NotHad."""
    folder = HOME / spec
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True)
        install([folder / "bin" / "python", "-m", "pip", "install", "--quiet", spec])
        (folder / "done").touch()
    return folder / "bin" / "python"


def install(command: Sequence[str | Path], **variables: str) -> None:
    """Runs a command of pip or npm. Raises: NotHad."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = (done.stderr or done.stdout or "it cannot be installed").strip()
        raise NotHad(said.splitlines()[-1][:200])


def ask_programs() -> Told:
    """Returns the result of each program."""
    told: Told = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        run_scripted() as upstream,
        start_fleet(Path(folder), "--url", upstream, engine="openai") as served,
    ):
        for each in COMMAND_LINES:
            told[f"{each.package} {each.version}"] = _edit(each, served.url)
        for spec in RUNNERS:
            told[f"{spec.replace('==', ' ')} tools"] = ask_runner(spec, served.url, MODEL)
    return told


def ask_runner(spec: str, *arguments: str | Path) -> dict[str, str]:
    """Runs `runners.py` for a package in its own environment; returns the results."""
    try:
        python = install_pip(spec)
    except NotHad as error:
        return {"all": f"{SKIPPED}{error}"}
    done = subprocess.run(
        [python, HERE / "runners.py", spec.partition("==")[0], *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return {"all": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def _edit(program: CommandLine, url: str) -> dict[str, str]:
    """Runs the program in its own home; returns whether it edited a file."""
    try:
        programs = install_npm(f"{program.package}@{program.version}")
    except NotHad as error:
        return {"edits a file": f"{SKIPPED}{error}"}
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "work" / "note.txt"
        file.parent.mkdir()
        file.write_text("say hello\n")
        name, *rest = (each.format(url=url, model=MODEL) for each in program.command)
        variables = {
            key: each.format(url=url, model=MODEL) for key, each in program.variables.items()
        }
        done = subprocess.run(
            [programs / name, *rest, TASK.format(file)],
            cwd=file.parent,
            env={"PATH": os.environ["PATH"], "HOME": home, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        is_done = file.read_text() == "say goodbye\n" and "The tools said" in done.stdout
        return {"edits a file": "yes" if is_done else (done.stdout + done.stderr)[-500:]}
