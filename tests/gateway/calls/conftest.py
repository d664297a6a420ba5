"""The `client` fixture: OpenAI's client of the test's gateway."""

from tests.gateway.api.conftest import api_key as api_key
from tests.gateway.api.conftest import client as client
