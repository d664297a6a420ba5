"""Kubernetes manifests of one version of a deployment: workers of its package, scaled by KEDA.

Gateways send requests to the version by weight (`vlm route`). Its queue and its served model are named `NAME@DIGEST`.
"""

import math
import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shared.packages.deployments import Environment, Spec, version_digest, version_name
from shared.packages.manifest import Manifest
from shared.queue.keys import GROUP, RedisKeys

PROMETHEUS = "http://prometheus.monitoring:9090"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
_DRAIN_S = 30
_SECRETS = "/secrets"
_PORT = 8001
_PROBE_S = 2


class CannotRender(ValueError):
    """The deployment cannot run on Kubernetes; the message names the option."""


def render(
    name: str, manifest: Manifest, spec: Spec, store: str, environment: Environment, image: str
) -> list[dict[str, Any]]:
    """Render the manifests, in the style of `config/kubernetes`. Raises: CannotRender."""
    if not _NAME.fullmatch(name):
        raise CannotRender(
            f"--name {name}: on Kubernetes a name has 1 to 50 lower-case letters, digits and dashes"
        )
    if urlsplit(store).scheme == "file":
        raise CannotRender(f"{store}: pods cannot reach it; give --store s3://, gs:// or az://")
    if manifest.config.kind == "model" and environment != Environment():
        raise CannotRender(
            "--env, --secret: a model has no variables; set options of its engine with --set"
        )
    model = version_name(name, version_digest(manifest.digest, environment))
    unique = model.replace("@", "-")
    labels = {"app": "version", "version": unique}
    pod = _pod(name, manifest, spec, store, environment, image)
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": unique, "labels": labels},
            "spec": {  # no `replicas`: KEDA sets them
                "selector": {"matchLabels": labels},
                "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": unique},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
        },
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": unique},
            "spec": _scaling(unique, model, manifest, spec),
        },
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "TriggerAuthentication",
            "metadata": {"name": unique},
            "spec": {"secretTargetRef": [{"parameter": "password", **_secret("redis-keda-password")}]},
        },
    ]  # fmt: skip


def _secret(key: str) -> dict[str, str]:
    return {"name": "vlm-fleet", "key": key}


def _settings(
    name: str, manifest: Manifest, spec: Spec, store: str, environment: Environment
) -> dict[str, str]:
    """The environment variables of the worker, without its Redis password."""
    needed = spec.resources
    settings = {
        "VLM_REDIS_URL": "redis://worker:$(REDIS_PASSWORD)@redis:6379/0",
        "VLM_DEPLOY__PACKAGE": f"{name}@{manifest.digest}",
        "VLM_DEPLOY__STORE": store,
        "VLM_DEPLOY__CACHE_DIR": "/models/packages",
        "VLM_DEPLOY__CPU": f"{max(needed.cpu, 0.001):g}",
        "VLM_WORKER__HEALTH_HOST": "0.0.0.0",
        "VLM_WORKER__HEALTH_PORT": str(_PORT),
        "VLM_WORKER__DRAIN_S": str(_DRAIN_S),
        "VLM_LOGS__FORMAT": "json",
    }
    if needed.memory_bytes:
        settings["VLM_DEPLOY__MEMORY_BYTES"] = str(needed.memory_bytes)
    if manifest.config.kind != "model":
        settings["VLM_ENGINE__START_S"] = f"{spec.start_s:g}"
    if environment != Environment():
        text = msgspec.json.encode(environment, order="sorted").decode()
        settings["VLM_DEPLOY__ENVIRONMENT"] = text.replace("$", "$$")  # Kubernetes expands $(NAME)
        settings["VLM_NODE__SECRETS_DIR"] = _SECRETS
    return settings


def _pod(
    name: str, manifest: Manifest, spec: Spec, store: str, environment: Environment, image: str
) -> dict[str, Any]:
    needed, secrets = spec.resources, sorted(set(environment.secrets.values()))
    requests: dict[str, Any] = {"cpu": f"{needed.cpu:g}"}
    limits: dict[str, Any] = {"nvidia.com/gpu": needed.gpu} if needed.gpu else {}
    if needed.memory_bytes:
        requests["memory"] = limits["memory"] = str(needed.memory_bytes)
    password = {"secretKeyRef": _secret("redis-worker-password")}
    settings = _settings(name, manifest, spec, store, environment)
    ready = {"httpGet": {"path": "/readyz", "port": "health"}}
    alive = {"httpGet": {"path": "/healthz", "port": "health"}}
    num_probes = math.ceil(spec.start_s / _PROBE_S)
    items = [{"key": key, "path": key} for key in secrets]
    mounted = {"secretName": f"{name}-secrets", "items": items, "defaultMode": 0o440}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "tmp": ("/tmp", {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}),
        "models": ("/models", {"emptyDir": {}}),
        "cache": ("/cache", {"emptyDir": {"sizeLimit": "1Gi"}}),
        "secrets": (_SECRETS, {"secret": mounted} if secrets else {"emptyDir": {}}),
    }
    container = {
        "name": "worker",
        "image": image,
        "args": ["worker"],
        "env": [
            {"name": "REDIS_PASSWORD", "valueFrom": password},
            *({"name": key, "value": value} for key, value in settings.items()),
        ],
        "envFrom": [{"secretRef": {"name": "vlm-fleet-store", "optional": True}}],
        "ports": [{"name": "health", "containerPort": _PORT}],
        "startupProbe": {**ready, "periodSeconds": _PROBE_S, "failureThreshold": num_probes},
        "readinessProbe": {**ready, "periodSeconds": 5},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5},
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": key, "mountPath": path} for key, (path, _) in volumes.items()],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _DRAIN_S + 15,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": key, **kind} for key, (_, kind) in volumes.items()],
    }


def _scaling(unique: str, model: str, manifest: Manifest, spec: Spec) -> dict[str, Any]:
    config = manifest.config
    seats = config.engine.get("max_num_seqs", "32") if config.kind == "model" else "1"
    if not seats.isdecimal():  # only workers validate the settings of an external engine
        raise CannotRender(f"--set max_num_seqs={seats}: give a whole number")
    most = str(max(1, int(seats) * 3 // 4))

    def prometheus(name: str, metric: str, kind: str, threshold: str) -> dict[str, Any]:
        query = f'max({metric}{{model="{model}"}})'  # all gateways report the same value
        # A version that is not routed yet has no metrics.
        rest = {"threshold": threshold, "ignoreNullValues": "true"}
        metadata = {"serverAddress": PROMETHEUS, "query": query, **rest}
        return {"type": "prometheus", "name": name, "metricType": kind, "metadata": metadata}

    waiting = {
        "type": "redis-streams",
        "name": "waiting",
        "metricType": "AverageValue",
        "metadata": {
            "address": "redis:6379",
            "username": "keda",
            "stream": RedisKeys().queue(model),
            "consumerGroup": GROUP,
            "lagCount": most,
            "activationLagCount": "0",
        },
        "authenticationRef": {"name": unique},
    }
    idle_s = math.ceil(spec.idle_s)
    one_by_one = [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0},
        "scaleDown": {"stabilizationWindowSeconds": min(3600, idle_s), "policies": one_by_one},
    }
    return {
        "scaleTargetRef": {"name": unique},
        "minReplicaCount": spec.min_instances,
        "maxReplicaCount": spec.max_instances,
        "pollingInterval": 2,
        # Keep the first pod until it is routed: a gateway refuses routes to versions without workers.
        "initialCooldownPeriod": math.ceil(spec.start_s) + idle_s,
        "cooldownPeriod": idle_s,
        "fallback": {  # while Prometheus or Redis does not answer
            "failureThreshold": 6,
            "replicas": max(1, spec.min_instances),
            "behavior": "currentReplicasIfHigher",
        },
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            waiting,
            prometheus("age", "vlm_queue_age_seconds", "Value", f"{spec.target_age_s:g}"),
            # The queue's lag leaves out running requests, but scaling down must not stop them.
            prometheus("open", "vlm_queue_depth", "AverageValue", most),
        ],
    }
