"""A Python environment that hides some of the installed packages."""

from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements_of(lines: Iterable[str] | None, extra: str = "") -> list[Requirement]:
    """Returns the requirements that apply to this machine."""
    parsed = map(Requirement, lines or ())
    return [each for each in parsed if not each.marker or each.marker.evaluate({"extra": extra})]


def names_of(requirement: Requirement) -> set[str]:
    """Returns its distribution, and those of its extras, such as hiredis of redis[hiredis]."""
    own = requirement.name
    names = {
        one.name
        for extra in requirement.extras
        for one in requirements_of(requires(own), extra)
        if one not in requirements_of(requires(own))
    }
    return {canonicalize_name(name) for name in {own, *names}}


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Returns the distributions that the requirements install, including their dependencies."""
    found: set[str] = set()
    waiting = {name for each in requirements for name in names_of(each)}
    while waiting:
        name = waiting.pop()
        found.add(name)
        below = requirements_of(requires(name))
        waiting |= {one for each in below for one in names_of(each)} - found
    return found


def modules_without(distributions: set[str]) -> set[str]:
    """Returns the top-level modules that neither these distributions nor this project provide."""
    kept = distributions | {"vlm-fleet"}
    return {
        module
        for module, owners in packages_distributions().items()
        if not kept & {canonicalize_name(owner) for owner in owners}
    }


def hide(folder: Path, modules: Iterable[str]) -> str:
    """Returns an entry for PYTHONPATH that hides these modules."""
    script = f"import sys\nsys.modules.update(dict.fromkeys({sorted(modules)}))\n"
    (folder / "sitecustomize.py").write_text(script)
    return str(folder)
