"""Tests that only longer targets with TESTS_LONG run: `make families`, `faults`, `hostile`, `browser-test` and more."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

IS_LONG = bool(os.environ.get("TESTS_LONG"))


def long(target: str) -> pytest.MarkDecorator:
    """Marks a test that only `make TARGET` runs."""
    return pytest.mark.skipif(not IS_LONG, reason=f"the long form: make {target}")


def few(cases: Iterable[Case], short: Collection[Case]) -> Sequence[Case]:
    """Returns all cases in the long form, otherwise those that are in `short`, in the order of `cases`."""
    cases = list(cases)
    assert all(case in cases for case in short), "a case of the short form is gone"
    return [case for case in cases if IS_LONG or case in short]
