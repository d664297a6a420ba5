"""Every command of the README works unchanged, except for the port, with the built-in model."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleet_process import ROOT, Served, invoke_vlm, run_vlm_on_terminal

README = (ROOT / "README.md").read_text()
SEARCH = (ROOT / "docs" / "search.md").read_text()
ANSWER = "A white background with a red star at the top left"


def block(language: str, start: str) -> str:
    [found] = re.findall(rf"```{language}\n({start}.*?)```", README, re.DOTALL)
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_the_readme_streams_the_answer(shapes_fleet):
    code = block("python", "import base64").replace("http://127.0.0.1:8000", shapes_fleet.url)
    assert run([sys.executable, "-c", code]).startswith(ANSWER)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_that_serve_prints_answers(shapes_fleet):
    answer = json.loads(run(["bash", "-c", shapes_fleet.curl]))
    assert answer["choices"][0]["message"]["content"].startswith(ANSWER)
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_make_command_of_the_readme_starts_a_fleet(tmp_path):
    """Installation is skipped: its stamp counts as new."""
    [command] = re.findall(r"^(make serve) ", README, re.M)
    options = ["-o", ".venv/.installed", f"BIN={Path(sys.executable).parent}"]
    options.append(f"ARGS=--engine mock --port 0 --data-dir {tmp_path}")
    with Served.start([*command.split(), *options]) as served, served.client() as client:
        assert client.get("/readyz").status_code == 200


def test_the_deployments_of_the_readme_are_in_the_tutorial():
    """`test_doc_pages.py` runs those of the tutorial."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text().splitlines()
    commands = block("bash", r"\.venv/bin/vlm deploy ").replace(".venv/bin/", "").splitlines()
    assert set(commands) - {"vlm app captioner"} <= set(tutorial)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_that_find_a_fault_answer(shapes_fleet):
    page = (ROOT / "docs" / "clients.md").read_text()
    [commands] = re.findall(r"```bash\n(curl .*?)```", page, re.S)
    answers = run(["bash", "-ec", commands.replace("http://127.0.0.1:8000", shapes_fleet.url)])
    assert '"status":"ready"' in answers
    assert '"id":"shapes"' in answers
    assert "HTTP/1.1 200" in answers


def test_the_search_of_the_search_page_has_the_shown_result(monkeypatch):
    monkeypatch.chdir(ROOT)
    [(command, shown)] = re.findall(
        r"```bash\n\.venv/bin/vlm (search .*?)\n```\n+```\n(.*?)```", SEARCH, re.S
    )
    done = invoke_vlm(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    first = done.stdout.split("\n")[:2]
    assert {line.split()[1] for line in first} == {
        line.split()[1] for line in shown.split("\n")[:2]
    }


def test_the_chat_of_the_readme_prints_the_shown_answer(shapes_fleet):
    [(command, shown)] = re.findall(
        r"```bash\n\.venv/bin/vlm (chat .*?)\n```\n+```\n(.*?)```", README, re.S
    )
    asked = [*shlex.split(command), "--url", shapes_fleet.url]
    code, printed = run_vlm_on_terminal(*asked, TERM="dumb")
    assert code == 0, printed
    number = re.compile(r"\d+(\.\d+)?")
    answer, timing = printed.strip().splitlines()
    shown_answer, shown_timing = shown.strip().split("\n")
    assert answer == shown_answer
    assert number.sub("0", timing) == number.sub("0", shown_timing)
