"""A real Prometheus that scrapes a fleet on this machine with the rules and the job names of `config/`."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.fleet import free_port
from tests.integration.fleet_process import ROOT

CONFIG = ROOT / "config" / "prometheus"
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
