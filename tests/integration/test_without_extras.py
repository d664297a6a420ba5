"""An installation without extras: the programs that run, and the error where an extra is missing."""

import os
import tomllib
from pathlib import Path

import pytest

from tests.hidden_packages import closure, hide, modules_without, requirements_of
from tests.integration.fleet_process import ROOT, run_vlm, start_fleet

TORCH = "pip install '.[torch]'"
SEARCH = "pip install '.[search]'"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH that hides the packages of all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = closure(requirements_of(project["dependencies"]))
    return f"{hide(tmp_path_factory.mktemp('hidden'), modules_without(base))}:{ROOT}"


@pytest.mark.parametrize(
    ("command", "install"),
    [
        ("serve", TORCH),
        ("serve --model org/name", TORCH),
        ("serve --engine mock --also shapes-clip", TORCH),
        ("serve --engine mock --search", SEARCH),
        ("worker --redis-url unix:///nowhere", TORCH),
        ("search-node --url unix:///tmp/nowhere.sock", SEARCH),
        ("models --check", TORCH),
        ("embed README.md --output new", SEARCH),
        ("search . x", SEARCH),
    ],
)
def test_a_missing_extra_is_a_one_line_error_and_exit_code_78(
    command: str, install: str, path: str, tmp_path: Path
):
    arguments = command.split()
    if arguments[0] == "serve":
        arguments += ["--port", "0", "--data-dir", str(tmp_path)]
    done = run_vlm(*arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == os.EX_CONFIG, done.stderr
    assert install in done.stderr
    assert "Traceback" not in done.stderr
    others = [line for line in done.stderr.splitlines() if "pip install" not in line]
    assert others == [] or (others[0].startswith("starting ") and "--search" in command)


def test_models_are_listed(path: str):
    done = run_vlm("models", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "shapes-clip" in done.stdout


def test_a_fleet_on_the_mock_engine_answers(path: str, tmp_path: Path):
    with start_fleet(tmp_path, PYTHONPATH=path) as fleet:
        done = run_vlm("chat", "--url", fleet.url, "hello", env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
