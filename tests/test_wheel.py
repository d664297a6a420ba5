"""The wheel holds what a user runs and all the data that this needs, and no more."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.integration.fleet_process import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what an installation would hold."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    with ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the installed packages alone, away from the repository."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)},
    )  # fmt: skip


def test_it_holds_our_packages_and_nothing_else(installed):
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {
        "gateway",
        "worker",
        "search",
        "deploy",
        "engines",
        "shared",
        "loadtest",
        "vlm.py",
        "vlm_app.py",
    }


@pytest.mark.parametrize(
    "folder", ["gateway", "worker", "search", "deploy", "engines", "shared", "loadtest"]
)
def test_every_tracked_file_is_in_it(installed, folder):
    listing = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    tracked = set(listing.stdout.split())
    if not tracked:
        pytest.skip("not a git repository")
    held = {
        str(path.relative_to(installed))
        for path in (installed / folder).rglob("*")
        if path.is_file()
    }
    assert tracked <= held


def test_its_commands_run(installed):
    script = "import vlm; print(vlm.__file__); vlm.main()"
    helped = run(installed, "-c", script, "--help")
    assert helped.returncode == 0, helped.stderr
    assert str(installed) in helped.stdout
    processes = "gateway.main, worker.main, worker.node.serve, loadtest.run"
    imported = run(installed, "-c", f"import {processes}")
    assert imported.returncode == 0, imported.stderr
