"""Environments of a node's child processes: no credential of the node or of the cloud reaches a worker."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from shared.packages.deployments import Generation, Resources, Spec, record_generation
from shared.packages.store import FileStore
from shared.settings.load import load_settings
from tests.config.redis_with_users import PASSWORDS, run_redis
from tests.integration.fleet_process import ROOT
from tests.waiting import wait_for
from tests.worker.node.test_install import add
from worker.node.environment import (
    GATEWAY_GROUPS,
    SEARCH_GROUPS,
    WORKER_GROUPS,
    child_environment,
    plain_environment,
)
from worker.node.serve import find_port

WITHIN_S = 60.0
CLOUD = {
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "AZURE_CLIENT_SECRET": "canary-azure",
    "GOOGLE_APPLICATION_CREDENTIALS": "/canary-google",
    "REDIS_PASSWORD": "canary-redis",
    "SOME_OTHER_TOKEN": "canary-other",
}
KEPT = {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/hub", "https_proxy": "http://proxy:3128"}


@pytest.fixture
def cloud(monkeypatch) -> None:
    for name, value in (CLOUD | KEPT).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("groups", [WORKER_GROUPS, SEARCH_GROUPS, GATEWAY_GROUPS])
def test_a_child_inherits_only_listed_variables(cloud, groups):
    found = child_environment(load_settings(), groups)
    assert not [value for value in found.values() if "canary" in value]
    assert KEPT.items() <= found.items()
    assert found["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("store", "name"),
    [
        ("s3://bucket/models", "AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://bucket", "AZURE_CLIENT_SECRET"),
    ],
)
def test_a_gateway_gets_only_the_credentials_of_its_store(cloud, store, name):
    settings = load_settings(deploy={"store": store})
    found = child_environment(settings, GATEWAY_GROUPS)
    assert {each for each, value in found.items() if "canary" in value} == {name}
    assert name not in child_environment(settings, WORKER_GROUPS)


def test_only_pip_gets_the_index_url(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@index")
    assert "PIP_INDEX_URL" not in plain_environment()
    assert "PIP_INDEX_URL" in plain_environment(prefixes=("PIP_",))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    "start", ["worker.main import run_worker as run", "worker.node.agent import run_agent as run"]
)
def test_a_node_and_its_workers_are_not_dumpable(start):
    code = f"""
import ctypes
from {start}
from shared.settings.load import load_settings
run(load_settings(engine={{"kind": "no such engine"}}))
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


def run_node(folder: Path, **variables: str) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ, **CLOUD, "VLM_DEPLOY__STORE": f"file://{folder}/store",
        "VLM_DEPLOY__CACHE_DIR": f"{folder}/cache", **variables,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "vlm", "node"], cwd=ROOT, env=environment, stderr=subprocess.PIPE
    )


def deploy_mock(folder: Path) -> None:
    store = FileStore(folder / "store")
    digest = add(store, {"config.json": b"{}"})
    spec = Spec(min_instances=1, resources=Resources(cpu=0.5))
    record_generation(store, Generation("n", 1, digest, spec))


def test_a_worker_of_a_node_has_its_own_redis_user_and_the_nodes_metrics(redis_program, tmp_path):
    deploy_mock(tmp_path)
    port = find_port("127.0.0.1", 0)
    with run_redis(redis_program, tmp_path) as redis, redis.client("admin") as admin:
        node = run_node(
            tmp_path,
            VLM_REDIS_URL=redis.url("node"),
            VLM_NODE__WORKER_REDIS_URL=redis.url("worker"),
            VLM_NODE__METRICS_PORT=str(port),
        )
        try:
            wait_for(lambda: admin.exists("vlm:workers") or node.poll() is not None, WITHIN_S)
            assert node.poll() is None

            def read() -> str:
                page = httpx.get(
                    f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=False
                ).text
                return page if "vlm_num_requests_running{" in page else ""

            page = wait_for(read, WITHIN_S)
            assert page.count("# TYPE vlm_num_requests_running ") == 1
            assert 'application="n"' in page
            assert 'worker="n-' in page
            users = {each["user"] for each in admin.client_list()}
            children = psutil.Process(node.pid).children(recursive=True)
            workers = [each for each in children if "worker" in each.cmdline()]
            if os.geteuid() == 0:  # other users cannot read environments
                seen = [value for each in workers for value in each.environ().values()]
                assert workers
                assert not [v for v in seen if "canary" in v or PASSWORDS["node"] in v]
        finally:
            node.terminate()
            node.communicate(timeout=WITHIN_S)
        assert {"node", "worker"} <= users


def test_a_node_whose_password_workers_would_get_does_not_start(tmp_path):
    node = run_node(tmp_path, VLM_REDIS_URL="redis://node:secret@127.0.0.1:1/0")
    _, said = node.communicate(timeout=WITHIN_S)
    assert node.returncode == os.EX_CONFIG
    assert b"VLM_NODE__WORKER_REDIS_URL" in said
    assert b"secret@" not in said
