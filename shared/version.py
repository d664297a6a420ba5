"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version, or `0` in a checkout that is not installed."""
    try:
        return version("vlm-fleet")
    except PackageNotFoundError:
        return "0"
