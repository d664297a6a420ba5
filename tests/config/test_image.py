"""What the container image is made of, as far as no engine is needed to see it."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_image_gets_all_that_the_wheel_holds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert set(wheel["only-include"]) <= let_through
