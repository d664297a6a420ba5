"""Versions as on Kubernetes: worker processes with the arguments and variables of the manifests.

Paths, ports and the address of Redis are replaced. A gateway splits requests between the versions by weight.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from redis.asyncio import Redis

from deploy.commands import run_deploy, upload
from deploy.pack import pack
from shared.gateway_client import Client
from shared.packages.deployments import Spec
from shared.packages.store import FileStore
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.gateway.api.test_applications import DEPLOY, Deployments
from tests.integration.fleet_process import ROOT, invoke_vlm
from tests.waiting import wait_for
from worker.node.serve import find_port

APPLICATION = """
import os

from vlm_app import Application


class A(Application):
    def run(self, name):
        return os.environ.get(name)
"""
WITHIN_S = 60.0


class Cluster:
    """Runs pods as processes of this machine."""

    def __init__(self, folder: Path, capsys: Any, prefix: str, **variables: str) -> None:
        self.folder = folder
        self.prefix = prefix
        self.variables = variables
        self._capsys = capsys
        self._processes: list[subprocess.Popen[bytes]] = []

    def render(self, files: dict[str, str], *engine: str, **more: Any) -> list[dict[str, Any]]:
        """Stores the package of a version of `cap`; returns its manifests."""
        package = self.folder / f"package-{len(list(self.folder.glob('package-*')))}"
        package.mkdir()
        for name, text in files.items():
            (package / name).write_text(text)
        options = {"engine": engine, "entry": "", "command": "", "installed": False}
        self._capsys.readouterr()
        run_deploy(
            cast(Client, None), "cap", str(package), Spec(),
            {**options, "env": (), "secret": (), **more},
            store_url="s3://models/vlm", signing_key=None, is_dry=True, form="yaml", image="i",
            wait_s=0,
        )  # fmt: skip
        documents = list(yaml.safe_load_all(self._capsys.readouterr().out))
        values = dict(each.split("=") for each in engine)
        upload(pack(str(package), engine=values), FileStore(self.folder / "store"))
        return documents

    def start(self, deployment: dict[str, Any]) -> "subprocess.Popen[bytes]":
        """Starts a pod of a Deployment; returns when its probe succeeds."""
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value", "from-a-secret") for item in container["env"]}
        given = {name: expand(value, given) for name, value in given.items()}
        port = find_port("127.0.0.1", 0)
        replaced = {
            "VLM_DEPLOY__STORE": f"file://{self.folder}/store",
            "VLM_DEPLOY__CACHE_DIR": f"{self.folder}/cache-{port}",
            "VLM_WORKER__HEALTH_HOST": "127.0.0.1",
            "VLM_WORKER__HEALTH_PORT": str(port),
            **self.variables,
        }
        given = {name: replaced.get(name, value) for name, value in given.items()}
        system = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", "vlm", *container["args"]], cwd=self.folder,
            env={**system, "PYTHONPATH": str(ROOT), **given, "VLM_REDIS__KEY_PREFIX": self.prefix},
        )  # fmt: skip
        self._processes.append(process)
        path = container["startupProbe"]["httpGet"]["path"]

        def is_ready() -> bool:
            assert process.poll() is None
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status == 200
            except OSError:
                return False

        wait_for(is_ready, WITHIN_S)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def expand(value: str, variables: dict[str, str]) -> str:
    """Expands variables like Kubernetes."""
    found = re.compile(r"\$\$|\$\((\w+)\)")
    return found.sub(lambda m: variables.get(m[1], m[0]) if m[1] else "$", value)


def version(deployment: dict[str, Any]) -> str:
    return deployment["metadata"]["name"].rpartition("-")[2]


@pytest.fixture
def cluster(tmp_path, capsys, redis_server, redis_prefix) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, capsys, redis_prefix, VLM_REDIS_URL=redis_server)
    yield cluster
    cluster.end()


@pytest.fixture
async def gateway(redis_server, redis_prefix, tmp_path) -> AsyncIterator[Deployments]:
    url = f"file://{tmp_path}/store"
    groups = {"gateway": {"deploy_keys": ("may-deploy",)}, "deploy": {"store": url}}
    settings = make_settings(redis_server, redis_prefix, **groups)
    async with run_gateway_on_socket(settings, refresh=False) as running:
        yield Deployments(running, url)


async def route(gateway: Deployments, *weights: str) -> None:
    command = ("route", "cap", *weights, "--url", gateway.gateway.url)
    done = await asyncio.to_thread(invoke_vlm, *command, DEPLOY_KEY="may-deploy")
    assert done.returncode == 0, done.stderr


async def answered(gateway: Deployments, count: int) -> Counter[str]:
    """Counts by version which one answers each of `count` clients."""
    versions: Counter[str] = Counter()
    for number in range(count):
        body = {
            "model": "cap", "user": f"{number}", "max_tokens": 1,
            "messages": [{"role": "user", "content": "hi"}],
        }  # fmt: skip
        answer = await gateway.client.post("/v1/chat/completions", json=body, headers=DEPLOY)
        assert answer.status_code == 200, answer.text
        versions[answer.headers["x-vlm-package"].removeprefix("cap@sha256:")[:12]] += 1
    return versions


async def test_requests_go_to_the_workers_of_the_manifests_by_weight(
    cluster: Cluster, gateway: Deployments, redis: Redis, redis_prefix
):
    rendered = [cluster.render({"config.json": f"[{n}]"}, "kind=mock") for n in range(2)]
    old, new = (version(documents[0]) for documents in rendered)
    pods = [cluster.start(documents[0]) for documents in rendered]
    await route(gateway, f"{old}=90", f"{new}=10")
    first = await answered(gateway, 200)
    assert set(first) == {old, new}
    assert 5 <= first[new] <= 40
    await route(gateway, f"{old}=0", f"{new}=100")
    assert await answered(gateway, 20) == {new: 20}

    # The stream that KEDA reads exists.
    trigger = rendered[1][2]["spec"]["triggers"][0]["metadata"]
    stream = trigger["stream"].replace("vlm:", f"{redis_prefix}:", 1)
    groups = await redis.execute_command("XINFO", "GROUPS", stream)
    assert trigger["consumerGroup"].encode() in groups[0]

    # The old version is removed; the new one moves to another pod.
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(WITHIN_S) == 0
    cluster.start(rendered[1][0])
    assert await answered(gateway, 5) == {new: 5}


async def test_an_application_in_a_pod_has_its_variables_and_secrets(
    cluster: Cluster, gateway: Deployments, tmp_path
):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "token").write_text("of-the-secret\n")
    cluster.variables |= {"VLM_NODE__SECRETS_DIR": f"{tmp_path}/secrets"}
    given = {"env": ["PLAIN=$(REDIS_PASSWORD)$$"], "secret": ["KEY=token"]}
    documents = cluster.render({"app.py": APPLICATION}, **given)
    cluster.start(documents[0])
    await route(gateway, f"{version(documents[0])}=1")

    async def ask(name: str) -> Any:
        answer = await gateway.client.post(
            "/v1/applications/cap/run", json={"input": name}, headers=DEPLOY
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["output"]

    assert await ask("PLAIN") == "$(REDIS_PASSWORD)$$"
    assert await ask("KEY") == "of-the-secret"
    assert await ask("REDIS_PASSWORD") is None
    assert await ask("VLM_DEPLOY__STORE") is None
