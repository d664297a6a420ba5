"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version that is installed, or `0` in a bare checkout."""
    try:
        return version("vlm-fleet")
    except PackageNotFoundError:
        return "0"
