"""Commands, make targets and the settings file of the docs work."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlm
from shared.settings.load import load_settings

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
SETTINGS = (ROOT / "docs" / "settings.md").read_text()


def test_the_settings_file_on_the_page_loads(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(re.findall(r"^```yaml\n(.*?)^```$", SETTINGS, re.M | re.S)[0])
    monkeypatch.setenv("VLM_CONFIG", str(path))
    monkeypatch.chdir(tmp_path)
    assert load_settings().gateway.port == 9000


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.M))))
def test_every_make_target_that_is_named_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = r"(?:`|^)vlm ((?:bench )?[a-z][a-z-]+)"


@pytest.mark.parametrize("command", sorted(set(re.findall(COMMANDS, TEXT, re.M))))
def test_every_vlm_command_that_is_named_exists(command):
    done = CliRunner().invoke(vlm.app, [*command.split(), "--help"])
    assert done.exit_code == 0, done.output
