"""What `make test` leaves to longer targets, which set TESTS_LONG: `make families`, `faults`, `hostile`, `browser-test` ..."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

IS_LONG = bool(os.environ.get("TESTS_LONG"))


def long(target: str) -> pytest.MarkDecorator:
    """A test of the long form alone, which `make TARGET` runs."""
    return pytest.mark.skipif(not IS_LONG, reason=f"the long form: make {target}")


def few(cases: Iterable[Case], short: Collection[Case]) -> Sequence[Case]:
    """All cases in the long form; else those that are named in `short`, in the order of `cases`."""
    cases = list(cases)
    assert all(case in cases for case in short), "a case of the short form is gone"
    return [case for case in cases if IS_LONG or case in short]
