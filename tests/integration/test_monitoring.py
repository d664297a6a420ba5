"""Dashboard and alerts on a real Prometheus: every query finds what it asks for on a fleet under light load."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.fleet import free_port
from tests.factories_images import data_url
from tests.integration.fleet_process import ROOT, Served, invoke_vlm, start_fleet

CONFIG = ROOT / "config" / "prometheus"
DASHBOARD = json.loads((ROOT / "config/grafana/dashboards/vlm-fleet.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCALING = yaml.safe_load((ROOT / "config/kubernetes/autoscaling.yaml").read_text())
MAX_OPEN = 6
PATIENCE_S = 60
SCRAPE_PAUSE_S = 0.25
WINDOW_S = 4  # of rates: a few scrapes


def needed(tool: str) -> str:
    """The path of one of Prometheus' programs. Skips the test, and says why, where it is missing."""
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed (Debian: prometheus)")
    return path


def to_local(config: dict[str, Any], ports: dict[str, int]) -> dict[str, Any]:
    """The configuration of `config/` for processes on this machine. `ports`: by job."""
    pause = f"{int(SCRAPE_PAUSE_S * 1000)}ms"
    jobs = [
        {
            "job_name": job["job_name"],
            "static_configs": [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}],
        }
        for job in config["scrape_configs"]
    ]
    return {
        "global": {"scrape_interval": pause, "evaluation_interval": pause},
        "rule_files": [str(CONFIG / name) for name in config["rule_files"]],
        "scrape_configs": jobs,
    }


@contextmanager
def run_prometheus(folder: Path, ports: dict[str, int]) -> Iterator[httpx.Client]:
    """A client of a Prometheus that runs until the block ends."""
    program = needed("prometheus")
    config = folder / "prometheus.yml"
    ours = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    config.write_text(yaml.safe_dump(to_local(ours, ports)))
    port = free_port()
    process = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = []
        while "Server is ready" not in "".join(said[-1:]):
            line = process.stderr.readline()
            assert line, "".join(said)
            said.append(line)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def values(client: httpx.Client, query: str) -> list[float]:
    """The values of a query now, those that are numbers."""
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    found = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in found if value == value]


def as_asked(expression: str) -> str:
    """A dashboard's expression as Grafana sends it, for all models and a short window."""
    window = f"{WINDOW_S}s"
    return expression.replace("$__rate_interval", window).replace("$model", ".*")


def operands(expression: str) -> list[str]:
    """What an alert compares, as queries that have a value whenever there is data to compare.

    `bool` keeps what a comparison would drop; which outcome is compared does not matter.
    """
    parts = re.split(r"\s+(?:and|or|unless)(?: on \(\w+\))?\s+", expression.strip())
    return [
        re.sub(r'outcome=~?"[^"]+"', 'outcome=~".+"', re.sub(r" (>|<|==) ", r" \1 bool ", part))
        for part in parts
        if not part.startswith("absent(")  # has data when there is none
    ]


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
