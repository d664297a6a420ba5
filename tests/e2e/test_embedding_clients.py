"""LangChain's and LlamaIndex's clients of OpenAI's embeddings, unchanged, against a whole fleet;
`make embedding-clients` installs them."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.factories_numbers import vector_of
from tests.integration.fleet_process import start_fleet

PYTHON = os.environ.get("CLIENTS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make embedding-clients runs it")
DOCUMENTS = [f"text {number} of many" for number in range(300)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = start_fleet(tmp_path_factory.mktemp("clients"), engine="mock_pooling")
    yield fleet
    fleet.end()


@pytest.mark.parametrize("client", ["langchain", "llama_index"])
def test_vectors_are_those_of_the_texts(client, fleet):
    assert PYTHON is not None
    script = Path(__file__).with_name("embedding_clients.py")
    done = subprocess.run(
        [PYTHON, str(script), client, f"{fleet.url}/v1", "mock-embeddings"],
        input=json.dumps({"documents": DOCUMENTS, "query": "a query"}),
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    vectors = json.loads(done.stdout)
    for text, vector in zip([*DOCUMENTS, "a query"], vectors, strict=True):
        assert vector == pytest.approx(vector_of(text), abs=1e-6)
