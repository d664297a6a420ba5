"""Dashboard and alerts on a real Prometheus: every query finds what it asks for on a fleet under light load."""

import asyncio
import json
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.fleet import free_port
from tests.factories_pictures import data_url
from tests.integration.fleet_process import ROOT, start_fleet
from tests.integration.prometheus_process import (
    CONFIG,
    as_asked,
    needed,
    operands,
    run_prometheus,
    values,
)

DASHBOARD = json.loads((ROOT / "config/grafana/dashboards/vlm-fleet.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCALING = yaml.safe_load((ROOT / "config/kubernetes/autoscaling.yaml").read_text())
MAX_OPEN = 6
PATIENCE_S = 60


def all_queries() -> set[str]:
    shown = {
        as_asked(target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }
    scaling = {trigger["metadata"]["query"] for trigger in SCALING["spec"]["triggers"]}
    asked = {query.replace("shapes", "mock") for query in scaling}
    return shown | asked | {part for rule in ALERTS for part in operands(rule["expr"])}


def with_data(client: httpx.Client, queries: set[str]) -> set[str]:
    return {query for query in queries if values(client, query)}


async def load(url: str) -> None:
    """For ever: more requests than are let in, some of them wrong, one whose client leaves."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        number = 0
        while True:
            number += 1
            async with asyncio.TaskGroup() as group:
                leaving = group.create_task(ask(client, number, max_tokens=2000, ignore_eos=True))
                asked = [
                    group.create_task(ask(client, number, stream=index % 2 == 0))
                    for index in range(2 * MAX_OPEN)
                ]
                asked.append(group.create_task(ask(client, number, temperature=9)))
                await asyncio.wait(asked)
                leaving.cancel()


async def ask(client: httpx.AsyncClient, seed: int, **extra) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(seed=seed)}}
    content = [picture, {"type": "text", "text": "What is it?"}]
    body = {"model": "mock", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    await client.post("/v1/chat/completions", json={**body, **extra})


async def test_every_query_of_dashboard_and_alerts_has_data(tmp_path: Path):
    needed("prometheus")
    worker_port = free_port()
    fleet = start_fleet(
        tmp_path / "fleet",
        VLM_WORKER__HEALTH_PORT=str(worker_port),
        VLM_LIMITS__MAX_OPEN_REQUESTS=str(MAX_OPEN),
        VLM_ENGINE__MOCK__DECODE_S="0.01",
    )
    ports = {"gateway": int(fleet.url.rpartition(":")[2]), "worker": worker_port}
    missing = all_queries()
    assert len(missing) > 40
    try:
        with run_prometheus(tmp_path, ports) as client:
            task = asyncio.create_task(load(fleet.url))
            async with asyncio.timeout(PATIENCE_S):
                while missing and not task.done():
                    missing -= await asyncio.to_thread(with_data, client, missing)
                    await asyncio.sleep(0.2)  # the next scrape
            task.cancel()
            [failed] = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(failed, asyncio.CancelledError), failed
    except TimeoutError:
        pytest.fail(f"no data: {sorted(missing)}")
    finally:
        fleet.end()


def test_alerts_fire_when_they_should_and_only_then():
    done = subprocess.run(
        [needed("promtool"), "test", "rules", str(CONFIG / "alerts_test.yml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration():
    done = subprocess.run(
        [needed("promtool"), "check", "config", str(CONFIG / "prometheus.yml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
