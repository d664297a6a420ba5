"""A scripted server for tests of the command-line client."""

from tests.loadtest.conftest import fake as fake
