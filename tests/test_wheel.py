"""The wheel contains the programs and all their data, and nothing else."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.integration.fleet_process import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the contents of an installation."""
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
    """Runs Python with only the installed packages, outside of the repository."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed)},
    )  # fmt: skip


def test_the_wheel_has_exactly_the_tracked_files_of_our_packages(installed):
    ours = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    files = {"vlm.py", "vlm_app.py"}
    folders = {"gateway", "worker", "search", "deploy", "engines", "shared", "loadtest"}
    assert ours == folders | files
    listing = subprocess.run(
        ["git", "ls-files", *sorted(ours)], cwd=ROOT, capture_output=True, text=True
    )
    held = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert set(listing.stdout.split()) <= held


def test_commands_of_the_wheel_run(installed):
    script = "import vlm; print(vlm.__file__); vlm.main()"
    helped = run(installed, "-c", script, "--help")
    assert helped.returncode == 0, helped.stderr
    assert str(installed) in helped.stdout
    processes = "gateway.main, worker.main, worker.node.serve, loadtest.run"
    imported = run(installed, "-c", f"import {processes}")
    assert imported.returncode == 0, imported.stderr
