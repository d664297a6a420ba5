"""`vlm serve --search`: stores beside chat, in a process whose death costs nothing that it answered."""

import time

import pytest

from tests.integration.fleet_process import Served, start_fleet

STORES = "/v1/vector_stores"


@pytest.fixture
def served(tmp_path):
    fleet = start_fleet(
        tmp_path / "data", "--search", engine="mock_pooling", VLM_LOGS__LEVEL="error"
    )
    yield fleet
    fleet.end()


def test_a_killed_search_process_comes_back_with_what_it_has_acknowledged(served: Served):
    with served.client() as client:
        deadline = time.monotonic() + 60
        while (made := client.post(STORES, json={"name": "s"})).status_code != 200:
            assert made.status_code == 503, made.text
            assert time.monotonic() < deadline
            time.sleep(float(made.headers["retry-after"]) / 4)
        store = made.json()["id"]
        items = [{"id": str(n), "text": f"text {n}"} for n in range(100)]
        put = client.put(f"{STORES}/{store}/items", json={"items": items})
        assert put.status_code == 200, put.text
        served.child("search-node").kill()
        # The rest goes on meanwhile.
        embedded = client.post("/v1/embeddings", json={"model": "mock-embeddings", "input": "a"})
        assert embedded.status_code == 200
        while (found := client.get(f"{STORES}/{store}")).status_code != 200:
            assert found.status_code == 503, found.text
            assert time.monotonic() < deadline
            time.sleep(float(found.headers["retry-after"]) / 4)
        assert found.json()["num_items"] == 100
        page = client.post(f"{STORES}/{store}/search", json={"query": "text 7"}).json()
        assert len(page["data"]) == 10
