"""The Kubernetes example: its manifests match the schemas, its settings are valid, and its parts fit together."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.fleet import ROOT
from shared.telemetry.metrics import METRICS
from tests.config.manifests import check_all, check_schema, check_vllm, pods_of, variables

FOLDER = ROOT / "config" / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
DOCUMENTS = [doc for path in FILES for doc in yaml.safe_load_all(path.read_text())]
PODS = pods_of(DOCUMENTS)
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()


def container(name: str) -> dict[str, Any]:
    [found] = PODS[name]["spec"]["containers"]
    return found


def test_manifests_match_schemas_and_pods_have_minimal_privileges(monkeypatch):
    check_all(DOCUMENTS, monkeypatch)
    assert variables(container("gateway"))["VLM_GATEWAY__API_KEYS"]


def kustomize(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Returns the documents that kustomize builds from a folder, and their text."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout)), done.stdout


def test_vllm_is_a_container_of_the_workers_pod():
    made, _ = kustomize(FOLDER.with_name("kubernetes-vllm"))
    [worker] = [d for d in made if (d["kind"], d["metadata"]["name"]) == ("Deployment", "worker")]
    check_schema(worker)
    _, settings = check_vllm(worker["spec"]["template"])
    assert settings["VLM_REDIS_URL"]  # the worker's other settings are kept


def test_kustomize_builds_the_example():
    made, text = kustomize(FOLDER)
    [config] = [doc for doc in made if doc["kind"] == "ConfigMap"]
    assert set(config["data"]) == {"redis.conf", "start.sh", "users.acl"}
    assert config["metadata"]["name"] in text.split("kind: StatefulSet")[1]  # with its hash
    assert {doc["metadata"].get("namespace") for doc in made} == {None, "vlm-fleet"}
    assert "image: vlm-fleet" not in text
    assert len(made) == len(DOCUMENTS) + 1


def test_network_policies_deny_all_other_traffic():
    policies = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if d["kind"] == "NetworkPolicy"}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert "egress" not in policies["redis"]
    assert policies["worker"]["ingress"][0]["from"]


def test_scaling_uses_existing_metrics_and_deployments():
    [spec] = [d["spec"] for d in DOCUMENTS if d["kind"] == "ScaledObject"]
    assert spec["scaleTargetRef"]["name"] == "worker"
    [worker] = [
        d for d in DOCUMENTS if d["kind"] == "Deployment" and d["metadata"]["name"] == "worker"
    ]
    assert "replicas" not in worker["spec"]  # otherwise each `apply` would undo the scaling
    known = {metric.name: set(metric.labels) for metric in METRICS}
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert any("vlm_queue_age_seconds" in query for query in queries)
    for query in queries:
        [(name, matchers)] = re.findall(r"(vlm_\w+)(?:\{([^}]*)\})?", query)
        assert re.findall(r"(\w+)=", matchers) == ["model"]  # only the load of this model
        assert "model" in known[name]
