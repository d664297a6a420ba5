"""Training of the built-in models, whose packages are in `engines/packages`."""

from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "engines" / "packages"
