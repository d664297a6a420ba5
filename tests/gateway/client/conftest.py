"""Fixtures: a server made of a script."""

from tests.loadtest.conftest import fake as fake
