"""Backups as described in docs/operating.md: a copy of the data directory contains all that was acknowledged."""

import shutil
import signal
import threading
from pathlib import Path

from redis import Redis

from shared.redis.embedded import EmbeddedRedis
from tests.factories_queue import wait_until_written
from tests.integration.fleet_process import Served, start_fleet
from tests.waiting import wait_for

STORES = "/v1/vector_stores"


def start(folder: Path) -> Served:
    return start_fleet(folder, "--search", engine="mock_pooling", VLM_LOGS__LEVEL="error")


def patiently(served: Served, method: str, path: str, **options) -> dict:
    """Returns the response, after waiting for the search process."""

    def ask() -> dict | None:
        with served.client() as client:
            response = client.request(method, path, **options)
        if response.status_code == 503:
            assert "retry-after" in response.headers
            return None
        assert response.status_code == 200, response.text
        return response.json()

    return wait_for(ask, 60.0)


def store_of(served: Served, num_items: int) -> str:
    store = patiently(served, "POST", STORES, json={"name": "s"})["id"]
    items = [{"id": str(n), "text": f"text {n}"} for n in range(num_items)]
    patiently(served, "PUT", f"{STORES}/{store}/items", json={"items": items})
    return store


def test_a_copy_of_a_stopped_fleet_serves_its_data(tmp_path):
    with start(tmp_path / "data") as served:
        store = store_of(served, 20)
        lines = {"file": ("a.jsonl", '{"custom_id": "one"}')}
        purpose = {"purpose": "batch"}
        file = patiently(served, "POST", "/v1/files", files=lines, data=purpose)
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(60)
    shutil.copytree(tmp_path / "data", tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(tmp_path / "data")

    with start(tmp_path / "copy") as served:
        assert patiently(served, "GET", f"{STORES}/{store}")["num_items"] == 20
        query = {"query": "text 7", "max_num_results": 1}
        found = patiently(served, "POST", f"{STORES}/{store}/search", json=query)
        assert len(found["data"]) == 1
        with served.client() as client:
            assert client.get(f"/v1/files/{file['id']}/content").json() == {"custom_id": "one"}


def test_a_copy_of_a_running_redis_has_all_that_was_saved_before(tmp_path):
    """Rewriting is disabled while the append-only file is copied; its last command can be truncated."""
    stopping = threading.Event()

    def write(client: Redis) -> None:
        number = 0
        while not stopping.is_set():
            client.set(f"later:{number}", "x" * 1000)
            number += 1

    with EmbeddedRedis(tmp_path / "data") as server:
        client = Redis(unix_socket_path=str(server.socket_path))
        for number in range(1000):
            client.set(f"before:{number}", number)
        writing = threading.Thread(target=write, args=(client,))
        writing.start()
        try:
            client.config_set("auto-aof-rewrite-percentage", 0)
            wait_for(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0, 20.0)
            wait_until_written(client)
            client.client_unpause()
            shutil.copytree(
                tmp_path / "data",
                tmp_path / "copy",
                ignore=shutil.ignore_patterns("*.sock", "lock"),
            )
        finally:
            stopping.set()
            writing.join()
    with EmbeddedRedis(tmp_path / "copy") as restored:
        client = Redis(unix_socket_path=str(restored.socket_path))
        assert [client.get(f"before:{n}") for n in (0, 999)] == [b"0", b"999"]
        assert client.dbsize() >= 1000
