"""The Kubernetes example: its manifests keep to the schemas, its settings are ours, its parts fit together."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.fleet import ROOT
from shared.telemetry.metrics import METRICS
from tests.config.manifests import (
    check_pod,
    check_schema,
    check_selectors,
    check_settings,
    check_vllm,
    pods_of,
)

FOLDER = ROOT / "config" / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
DOCUMENTS = [doc for path in FILES for doc in yaml.safe_load_all(path.read_text())]
PODS = pods_of(DOCUMENTS)
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()


def only(kind: str) -> dict[str, Any]:
    [found] = [doc for doc in DOCUMENTS if doc["kind"] == kind]
    return found


def container(name: str) -> dict[str, Any]:
    [found] = PODS[name]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda doc: f"{doc['kind']}-{doc['metadata']['name']}"
)
def test_every_manifest_keeps_to_its_schema(document):
    check_schema(document)


def kustomize(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Documents of a folder, and their text."""
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
    assert settings["VLM_REDIS_URL"]  # the worker's own settings stay


def test_kustomize_puts_it_together():
    made, text = kustomize(FOLDER)
    [config] = [doc for doc in made if doc["kind"] == "ConfigMap"]
    assert set(config["data"]) == {"redis.conf", "start.sh", "users.acl"}
    assert config["metadata"]["name"] in text.split("kind: StatefulSet")[1]  # with its hash
    assert {doc["metadata"].get("namespace") for doc in made} == {None, "vlm-fleet"}
    assert "image: vlm-fleet" not in text
    assert len(made) == len(DOCUMENTS) + 1


def test_every_file_is_put_together():
    resources = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {name for name in resources if name.endswith(".yaml")} == {path.name for path in FILES}


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_settings_are_known_and_leave_time_to_drain(name, monkeypatch):
    settings = check_settings(name, PODS[name], monkeypatch)
    assert settings.redis.url.startswith(f"redis://{name}:")
    assert name == "worker" or settings.gateway.api_keys


@pytest.mark.parametrize("name", PODS)
def test_pods_may_do_nothing_that_they_need_not(name):
    check_pod(DOCUMENTS, name)


def test_what_selects_pods_finds_them_at_ports_that_are_there():
    check_selectors(DOCUMENTS)


def test_all_talk_is_denied_that_is_not_allowed():
    policies = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if d["kind"] == "NetworkPolicy"}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert "egress" not in policies["redis"]
    assert policies["worker"]["ingress"][0]["from"]


def test_scaling_asks_for_metrics_that_exist_and_for_a_deployment_that_does():
    spec = only("ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == "worker"
    [worker] = [
        d for d in DOCUMENTS if d["kind"] == "Deployment" and d["metadata"]["name"] == "worker"
    ]
    assert "replicas" not in worker["spec"]  # else each `apply` would undo the scaling
    known = {metric.name: set(metric.labels) for metric in METRICS}
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert any("vlm_queue_age_seconds" in query for query in queries)
    for query in queries:
        [(name, matchers)] = re.findall(r"(vlm_\w+)(?:\{([^}]*)\})?", query)
        assert re.findall(r"(\w+)=", matchers) == ["model"]  # no other model's load
        assert "model" in known[name]


def test_secrets_that_are_asked_for_are_made_by_the_guide():
    wanted = {
        (ref["name"], ref["key"])
        for name in PODS
        for item in container(name)["env"]
        if (ref := item.get("valueFrom", {}).get("secretKeyRef"))
    }
    [command] = re.findall(r"kubectl [^\n]*create secret generic (?:[^\n]*\\\n)*[^\n]*", GUIDE)
    made = re.findall(r"--from-literal=([\w-]+)=", command)
    assert wanted == {("vlm-fleet", key) for key in made}


def scrape_config() -> str:
    [found] = re.findall(r"```yaml\n(scrape_configs:.*?)```", GUIDE, re.S)
    return found


def test_prometheus_would_find_the_pods():
    found = {}
    for job in yaml.safe_load(scrape_config())["scrape_configs"]:
        [rule] = job["relabel_configs"]
        found[job["job_name"]] = rule["regex"]
    ports = {name: container(name)["ports"][0]["name"] for name in ("gateway", "worker")}
    pods = {"gateway": "gateway", "worker": "(worker|version)"}
    assert found == {name: f"{pods[name]};{port}" for name, port in ports.items()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_guides_configuration(tmp_path):
    path = tmp_path / "prometheus.yml"
    # Debian's knows no Kubernetes; all but where the pods are found is looked at.
    known = re.sub(
        "kubernetes_sd_configs: .*", "static_configs: [{ targets: [pod:1] }]", scrape_config()
    )
    path.write_text(known)
    command = ["promtool", "check", "config", "--syntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
