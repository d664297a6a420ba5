"""Dashboard and alerts on a real Prometheus: every query finds what it asks for on a fleet under light load."""

import asyncio
import json
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.fleet import free_port
from tests.factories_images import data_url
from tests.integration.fleet_process import ROOT, Served, invoke_vlm, start_fleet
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
        for target in panel.get("targets", ())
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
    image = {"type": "image_url", "image_url": {"url": data_url(seed=seed)}}
    content = [image, {"type": "text", "text": "What is it?"}]
    body = {"model": "mock", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    await client.post("/v1/chat/completions", json={**body, **extra})


async def watch(client: httpx.Client, url: str) -> set[str]:
    """Load a fleet until every query has data. Returns those that have none."""
    missing = all_queries()
    assert len(missing) > 40
    task = asyncio.create_task(load(url))
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while missing and not task.done():
                missing = missing - await asyncio.to_thread(with_data, client, missing)
                await asyncio.sleep(0.2)  # the next scrape
    task.cancel()
    [failed] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(failed, asyncio.CancelledError), failed
    return missing


def deploy(fleet: Served, folder: Path) -> None:
    """A package whose instance is there, though nobody asks it."""
    package = folder / "package"
    package.mkdir()
    (package / "config.json").write_text("{}")
    key = (folder / "fleet" / "deploy.key").read_text()
    done = invoke_vlm(
        *("deploy", "--name", "captioner", "--application", str(package), "--set", "kind=mock"),
        *("--url", fleet.url, "--min-instances", "1"),
        DEPLOY_KEY=key,
    )
    assert done.returncode == 0, done.stderr


def test_every_query_of_dashboard_and_alerts_has_data(tmp_path):
    needed("prometheus")
    worker_port = free_port()
    fleet = start_fleet(
        tmp_path / "fleet",
        VLM_WORKER__HEALTH_PORT=str(worker_port),
        VLM_LIMITS__MAX_OPEN_REQUESTS=str(MAX_OPEN),
        VLM_ENGINE__MOCK__DECODE_S="0.01",
    )
    try:
        deploy(fleet, tmp_path)
        ports = {"gateway": int(fleet.url.rpartition(":")[2]), "worker": worker_port}
        with run_prometheus(tmp_path, ports) as client:
            assert not asyncio.run(watch(client, fleet.url))
    finally:
        fleet.end()


@pytest.mark.parametrize("words", ["test rules alerts_test.yml", "check config prometheus.yml"])
def test_alerts_fire_when_they_should_and_prometheus_takes_its_configuration(words):
    *command, file = words.split()
    done = subprocess.run(
        [needed("promtool"), *command, str(CONFIG / file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
