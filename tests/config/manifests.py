"""Checks for Kubernetes manifests of the example, of the chart, and of `vlm deploy`."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.upstream.settings import VllmSettings
from engines.upstream.vllm import Vllm
from shared.settings.load import load_settings
from shared.settings.tree import Settings

VERSION = "1.30"  #: the oldest supported version
KEDA = Path(__file__).parent / "keda"


@cache
def schema_of(kind: str) -> dict[str, Any]:
    """Returns the schema of a KEDA object from its CRD."""
    definition = yaml.safe_load((KEDA / f"{kind.lower()}s.yaml").read_text())["spec"]
    assert definition["names"]["kind"] == kind
    [version] = definition["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    _close(schema)
    del schema["properties"]["metadata"]["additionalProperties"]
    return schema


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "additionalProperties" not in schema:
            schema["additionalProperties"] = schema.get(
                "x-kubernetes-preserve-unknown-fields", False
            )
        for each in schema.values():
            _close(each)


def check_schema(document: dict[str, Any]) -> None:
    """Validates an object. Unknown fields, which a cluster would drop, are errors.

    Raises: jsonschema.ValidationError, kubernetes_validate.ValidationError.
    """
    validator = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    if document["apiVersion"].startswith("keda.sh/"):
        jsonschema = pytest.importorskip("jsonschema", reason="it is not installed")
        jsonschema.validate(document, schema_of(document["kind"]))
        if document["kind"] != "ScaledObject":
            return
        document = _as_autoscaler(document)
    validator.validate(document, VERSION, strict=True)


def _as_autoscaler(scaled: dict[str, Any]) -> dict[str, Any]:
    """Returns the autoscaler that KEDA creates from it, without its metrics."""
    spec = scaled["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": target,
            # An autoscaler starts at 1; KEDA itself scales from 0 to 1 and back.
            "minReplicas": max(spec["minReplicaCount"], 1),
            "maxReplicas": spec["maxReplicaCount"],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }


def pods_of(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet")
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod["spec"]["containers"] + pod["spec"].get("initContainers", [])


def variables(container: dict[str, Any]) -> dict[str, Any]:
    found = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert len(found) == len(container["env"])
    return found


def check_all(documents: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks schemas, pods, their settings, and selectors."""
    for document in documents:
        if document["kind"] not in ("PodMonitor", "PrometheusRule"):  # defined by other projects
            check_schema(document)
    check_selectors(documents)
    for name, pod in pods_of(documents).items():
        check_pod(documents, name)
        user = name.partition("-")[0]
        if user != "redis":
            with monkeypatch.context() as patch:
                settings = check_settings(user, pod, patch)
            assert user == "search" or f"://{user}:" in settings.redis.url


def check_pod(documents: list[dict[str, Any]], name: str) -> None:
    """Checks that a pod has minimal privileges, probes, limits, and all volumes that it mounts."""
    pod = pods_of(documents)[name]
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    # The variables of services would be unknown settings.
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    claims = [
        claim
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", name)
        for claim in each["spec"].get("volumeClaimTemplates", [])
    ]
    volumes = {each["name"] for each in spec["volumes"] + [claim["metadata"] for claim in claims]}
    assert volumes == {m["name"] for box in containers(pod) for m in box["volumeMounts"]}
    for box in containers(pod):
        context = dict(box["securityContext"])
        is_read_only = context.pop("readOnlyRootFilesystem", None)
        assert is_read_only is (None if box["name"] == "vllm" else True)
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert box["resources"]["limits"]["memory"]
        assert "startupProbe" in box
    for box in spec["containers"]:
        assert {"readinessProbe", "livenessProbe"} <= set(box)


def check_settings(name: str, pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Checks that its variables are settings and that it has time to drain. Returns the settings."""
    box = pod["spec"]["containers"][0]
    for key, value in variables(box).items():
        if not isinstance(value, str):
            value = "postgresql://postgres/vlm" if key == "VLM_SEARCH__INDEX" else "from-a-secret"
        # Kubernetes expands these.
        value = value.replace("$(REDIS_USER)", name).replace("$(REDIS_PASSWORD)", "secret")
        if key.startswith("VLM_"):
            monkeypatch.setenv(key, value)
    settings = load_settings()
    if name == "search":
        assert settings.search.url == f"http://0.0.0.0:{box['ports'][0]['containerPort']}"
        return settings
    pause_s = box.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    process = settings.gateway if name == "gateway" else settings.worker
    assert pause_s + process.drain_s + 5 <= pod["spec"]["terminationGracePeriodSeconds"]
    listening = (settings.gateway.host, settings.gateway.port) if name == "gateway" else (
        settings.worker.health_host, settings.worker.health_port)  # fmt: skip
    [port] = box["ports"]
    assert listening == ("0.0.0.0", port["containerPort"])
    return settings


def check_selectors(documents: list[dict[str, Any]]) -> None:
    """Checks that every selector matches a pod, at ports that exist."""
    pods = pods_of(documents).values()
    labels = [pod["metadata"]["labels"] for pod in pods]
    named = {port["name"] for pod in pods for box in pod["spec"]["containers"] for port in box["ports"]}  # fmt: skip
    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {}))
        wanted = selector if kind == "Service" else selector.get("matchLabels", {})
        assert any(wanted.items() <= each.items() for each in labels), (kind, wanted)
        if kind == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= named
        if kind == "NetworkPolicy":
            assert {p["port"] for rule in spec.get("ingress", []) for p in rule["ports"]} <= named


def check_vllm(pod: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks that vLLM is a container of the worker's pod. Returns it, and the worker's variables."""
    [server], [own] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    settings = variables(own)
    url = settings["VLM_ENGINE__URL"]
    assert settings["VLM_ENGINE__KIND"] == "vllm"
    assert server["restartPolicy"] == "Always"
    assert server["args"][0] == settings["VLM_ENGINE__MODEL"]
    assert f"--port={url.rpartition(':')[2]}" in server["args"]
    needed = {arg for arg in Vllm(VllmSettings()).arguments(1) if arg.startswith("--enable-")}
    assert needed <= set(server["args"])
    assert f"{url}/health" in server["startupProbe"]["exec"]["command"]
    return server, settings
