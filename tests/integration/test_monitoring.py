"""Dashboard and alerts on a real Prometheus: every query finds what it asks for on a fleet under light load."""

import asyncio
import json
import math
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.fleet import free_port
from tests.factories_images import data_url
from tests.integration.fleet_process import ROOT, Served, invoke_vlm, start_fleet
from tests.integration.prometheus_process import (
    CONFIG,
    SCRAPE_PAUSE_S,
    as_asked,
    needed,
    operands,
    run_prometheus,
    values,
)

DASHBOARD = json.loads((ROOT / "config/grafana/dashboards/vlm-fleet.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCALING = yaml.safe_load((ROOT / "config/kubernetes/autoscaling.yaml").read_text())
MAX_OPEN = 6
PATIENCE_S = 60


def all_queries() -> set[str]:
    shown = {as_asked(target["expr"]) for panel in PANELS for target in panel["targets"]}
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


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel, under the name that its legend has."""

    name: str
    values: list[float]


def read_target(
    client: httpx.Client, target: dict[str, Any], span: tuple[float, float]
) -> list[Series]:
    """What one query of a panel draws in a span of time."""
    asked = {"query": as_asked(target["expr"]), "start": span[0], "end": span[1]}
    answer = client.get("/api/v1/query_range", params={**asked, "step": SCRAPE_PAUSE_S}).json()
    assert answer["status"] == "success", (target, answer)
    found = []
    for line in answer["data"]["result"]:
        known = [number for _, value in line["values"] if (number := float(value)) == number]
        if known:
            found.append(Series(legend(target["legendFormat"], line["metric"]), known))
    return found


def legend(form: str, labels: dict[str, str]) -> str:
    """The name of a line, by a target's `legendFormat`."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), form)


@dataclass(frozen=True, slots=True)
class Watched:
    """What a Prometheus beside a fleet under load has of each query, and of each target of each panel."""

    missing: set[str]
    targets: dict[tuple[int, str], list[Series]]


async def watch(client: httpx.Client, url: str) -> Watched:
    """Load a fleet until every query has data."""
    queries, began = all_queries(), time.time()
    missing = queries
    assert len(queries) > 40
    task = asyncio.create_task(load(url))
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while missing and not task.done():
                began = time.time() if missing == queries else began
                missing = missing - await asyncio.to_thread(with_data, client, missing)
                await asyncio.sleep(0.2)  # the next scrape
    span = (began, time.time())
    targets = {
        (panel["id"], target["refId"]): read_target(client, target, span)
        for panel in PANELS
        for target in panel["targets"]
    }
    task.cancel()
    [failed] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(failed, asyncio.CancelledError), failed
    return Watched(missing, targets)


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


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Watched:
    needed("prometheus")
    folder, worker_port = tmp_path_factory.mktemp("monitoring"), free_port()
    fleet = start_fleet(
        folder / "fleet",
        VLM_WORKER__HEALTH_PORT=str(worker_port),
        VLM_LIMITS__MAX_OPEN_REQUESTS=str(MAX_OPEN),
        VLM_ENGINE__MOCK__DECODE_S="0.01",
    )
    deploy(fleet, folder)
    ports = {"gateway": int(fleet.url.rpartition(":")[2]), "worker": worker_port}
    try:
        with run_prometheus(folder, ports) as client:
            return asyncio.run(watch(client, fleet.url))
    finally:
        fleet.end()


def test_every_query_of_dashboard_and_alerts_has_data(watched):
    assert not watched.missing


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_target_of_a_panel_draws_lines_of_its_own_within_the_axis(watched, panel):
    targets = [watched.targets[panel["id"], target["refId"]] for target in panel["targets"]]
    assert all(targets)
    names = [line.name for lines in targets for line in lines]
    assert len(set(names)) == len(names)
    assert panel["type"] == "stat" or all(names)
    values = [value for lines in targets for line in lines for value in line.values]
    axis = panel["fieldConfig"]["defaults"]
    assert min(values) >= axis["min"]
    assert max(values) <= axis.get("max", math.inf)


@pytest.mark.parametrize("words", ["test rules alerts_test.yml", "check config prometheus.yml"])
def test_alerts_fire_when_they_should_and_prometheus_takes_its_configuration(words):
    *command, file = words.split()
    done = subprocess.run(
        [needed("promtool"), *command, str(CONFIG / file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
