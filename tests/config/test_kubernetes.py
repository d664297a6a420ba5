"""The Kubernetes example: its manifests keep to the schemas, its settings are ours, its parts fit together."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.upstream.settings import VllmSettings
from engines.upstream.vllm import Vllm
from loadtest.fleet import ROOT
from shared.settings.load import load_settings
from shared.telemetry.metrics import METRICS
from tests.config.keda_schemas import check_keda

FOLDER = ROOT / "config" / "kubernetes"
VERSION = "1.30"  #: the oldest that it is for
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
DOCUMENTS = [doc for path in FILES for doc in yaml.safe_load_all(path.read_text())]
PODS = {
    doc["metadata"]["name"]: doc["spec"]["template"]
    for doc in DOCUMENTS
    if doc["kind"] in ("Deployment", "StatefulSet")
}
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()


def only(kind: str) -> dict[str, Any]:
    [found] = [doc for doc in DOCUMENTS if doc["kind"] == kind]
    return found


def container(name: str) -> dict[str, Any]:
    [found] = PODS[name]["spec"]["containers"]
    return found


def as_autoscaler(scaled: dict[str, Any]) -> dict[str, Any]:
    """The autoscaler that KEDA makes of it, but for its metrics."""
    spec = scaled["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda doc: f"{doc['kind']}-{doc['metadata']['name']}"
)
def test_every_manifest_keeps_to_its_schema(document):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    if document["kind"] == "ScaledObject":
        check_keda(document)
        document = as_autoscaler(document)
    validator.validate(document, VERSION, strict=True)


@pytest.mark.parametrize(
    "break_it", [("spec", "replica"), ("spec", "template", "spec", "hostname2")]
)
def test_a_misspelt_field_is_found(break_it):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    [gateway] = [
        d for d in DOCUMENTS if d["kind"] == "Deployment" and d["metadata"]["name"] == "gateway"
    ]
    broken = yaml.safe_load(yaml.safe_dump(gateway))
    place = broken
    for name in break_it[:-1]:
        place = place[name]
    place[break_it[-1]] = 2
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, VERSION, strict=True)


def test_a_misspelt_field_of_scaling_is_found():
    schema = pytest.importorskip("jsonschema")
    scaled = only("ScaledObject")
    broken = scaled | {"spec": scaled["spec"] | {"maxReplicas": 8}}
    with pytest.raises(schema.ValidationError, match="maxReplicas"):
        check_keda(broken)


def kustomize(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Documents of a folder, and their text."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout)), done.stdout


def test_vllm_is_a_container_of_the_workers_pod():
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    made, _ = kustomize(FOLDER.with_name("kubernetes-vllm"))
    [worker] = [d for d in made if (d["kind"], d["metadata"]["name"]) == ("Deployment", "worker")]
    validator.validate(worker, VERSION, strict=True)
    pod = worker["spec"]["template"]["spec"]
    [server], [own] = pod["initContainers"], pod["containers"]
    settings = {each["name"]: each.get("value") for each in own["env"]}
    url, model = settings["VLM_ENGINE__URL"], settings["VLM_ENGINE__MODEL"]
    assert settings["VLM_ENGINE__KIND"] == "vllm"
    assert server["restartPolicy"] == "Always"
    assert f"--port={url.rpartition(':')[2]}" in server["args"]
    assert server["args"][0] == model
    needed = {arg for arg in Vllm(VllmSettings()).arguments(1) if arg.startswith("--enable-")}
    assert needed <= set(server["args"])
    assert f"{url}/health" in server["startupProbe"]["exec"]["command"]
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
    for item in container(name)["env"]:
        if item["name"].startswith("VLM_"):
            monkeypatch.setenv(item["name"], item.get("value", "from-a-secret"))
    settings = load_settings()
    spec = PODS[name]["spec"]
    pause_s = (
        container(name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    )
    drain_s = getattr(settings, name).drain_s
    assert pause_s + drain_s + 5 <= spec["terminationGracePeriodSeconds"]
    assert settings.redis.url.startswith(f"redis://{name}:")
    [port] = container(name)["ports"]
    listening = (settings.gateway.host, settings.gateway.port) if name == "gateway" else (
        settings.worker.health_host, settings.worker.health_port)  # fmt: skip
    assert listening == ("0.0.0.0", port["containerPort"])
    assert name == "worker" or settings.gateway.api_keys
    assert not spec["enableServiceLinks"]  # their variables would be unknown settings


@pytest.mark.parametrize("name", PODS)
def test_pods_may_do_nothing_that_they_need_not(name):
    spec, box = PODS[name]["spec"], container(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert box["resources"]["limits"]["memory"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(box)
    mounted = {mount["name"] for mount in box["volumeMounts"]}
    claims = [d for d in DOCUMENTS if d["metadata"]["name"] == name and d["kind"] == "StatefulSet"]
    templates = claims[0]["spec"]["volumeClaimTemplates"] if claims else []
    volumes = spec["volumes"] + [template["metadata"] for template in templates]
    assert mounted == {volume["name"] for volume in volumes}


def test_what_selects_pods_finds_them():
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    selected = [
        (doc["kind"], spec.get("selector", spec.get("podSelector")))
        for doc in DOCUMENTS
        if doc["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment")
        for spec in [doc["spec"]]
    ]
    assert len(selected) == 2 + 2 + 5 + 2
    for kind, selector in selected:
        wanted = selector if kind == "Service" else selector.get("matchLabels", {})
        assert not wanted or wanted in labels.values(), selector


def test_ports_that_are_named_are_there():
    named = {p["name"] for name in PODS for p in container(name)["ports"]}
    used = [
        port["targetPort"]
        for d in DOCUMENTS
        if d["kind"] == "Service"
        for port in d["spec"]["ports"]
    ]
    policies = [
        rule
        for d in DOCUMENTS
        if d["kind"] == "NetworkPolicy"
        for rule in d["spec"].get("ingress", [])
    ]
    used += [port["port"] for rule in policies for port in rule["ports"]]
    assert used
    assert set(used) <= named


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
