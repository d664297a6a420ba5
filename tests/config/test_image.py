"""The contents of the container image, as far as they can be checked without Docker."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_image_has_all_files_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert set(wheel["only-include"]) <= let_through


@pytest.mark.parametrize("package", ["bubblewrap", "openssh-client"])
def test_every_image_has_the_programs_that_gateways_and_nodes_run(package: str):
    final = (ROOT / "config" / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    command = final.replace("\\\n", " ")
    installed = re.findall(r"apt-get install ([^&]*)", command)
    always = re.sub(r"\$\(.*?\)", "", " ".join(installed)).split()
    assert package in always
