"""Kubernetes manifests of one version of a deployment.

Its pods are nodes (`vlm node`) with resources for one instance, which claim slots of this version only. KEDA scales
them by the slots in the gateways' metrics; rollouts and canaries work as on other nodes.
"""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from shared.packages.deployments import Spec, version_name
from shared.packages.environment import Environment, version_digest, why_reserved

PROMETHEUS = "http://prometheus.monitoring:9090"
IMAGE = "vlm-fleet-worker"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
_DRAIN_S = 30
_KEEPER = "deployments"
_PASSWORD = "REDIS_PASSWORD"
_WORKER_PASSWORD = "REDIS_WORKER_PASSWORD"


class CannotRender(ValueError):
    """The deployment cannot run on Kubernetes; the message names the option."""


def render(
    name: str,
    package: str,
    spec: Spec,
    store: str,
    environment: Environment = Environment(),
    image: str = IMAGE,
) -> list[dict[str, Any]]:
    """Render the manifests, in the style of `config/kubernetes`. Raises: CannotRender."""
    if not _NAME.fullmatch(name):
        raise CannotRender(
            f"--name {name}: on Kubernetes a name has 1 to 50 lower-case letters, digits and dashes"
        )
    if urlsplit(store).scheme == "file":
        raise CannotRender(f"{store}: pods cannot reach it; give --store s3://, gs:// or az://")
    digest = version_digest(package, environment)
    short = version_name("", digest).removeprefix("@")
    unique = f"{name}-{short}"
    needed = spec.resources
    requests: dict[str, Any] = {"cpu": f"{needed.cpu:g}"}
    limits: dict[str, Any] = {}
    if needed.memory_bytes:
        requests["memory"] = limits["memory"] = str(needed.memory_bytes)
    if needed.gpu:
        limits["nvidia.com/gpu"] = needed.gpu
    room = {
        "VLM_DEPLOY__TAKES": version_name(name, digest),
        "VLM_DEPLOY__CPU": f"{max(needed.cpu, 0.001):g}",
        **({"VLM_DEPLOY__MEMORY_BYTES": str(needed.memory_bytes)} if needed.memory_bytes else {}),
    }
    resources = {"requests": requests, "limits": limits}
    secrets = sorted(set(environment.secrets.values()))
    for each in secrets:
        reason = "the node sets it" if each in (_PASSWORD, _WORKER_PASSWORD) else why_reserved(each)
        if each[0].isdigit():
            reason = "it begins with a digit"
        if reason:
            raise CannotRender(
                f"--secret {each}: pods get secrets as variables of these names, and {reason}; use "
                "another name"
            )
    pods = _deployment(unique, image, store, room, resources, f"{name}-secrets", secrets)
    keeper = _deployment(
        _KEEPER, image, store, {"VLM_DEPLOY__TAKES": "none"},
        {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
    )  # fmt: skip
    keeper["spec"]["replicas"] = 1
    return [keeper, pods, _scaled(unique, name, short, spec)]


def _deployment(
    name: str,
    image: str,
    store: str,
    settings: dict[str, str],
    resources: dict[str, Any],
    secret: str = "",
    keys: Sequence[str] = (),
) -> dict[str, Any]:
    """A Deployment of nodes. `keys`: of the Kubernetes secret `secret`, for the applications."""
    labels = {"app": "node", "version": name}
    container = {
        "name": "node",
        "image": image,
        "args": ["node"],
        "env": _environment(store, settings, secret, keys),
        # Credentials of the store.
        "envFrom": [{"secretRef": {"name": "vlm-fleet-store", "optional": True}}],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "models", "mountPath": "/models"},
            {"name": "cache", "mountPath": "/cache"},
        ],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _DRAIN_S + 15,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": each, "emptyDir": {}} for each in ("tmp", "models", "cache")],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _environment(
    store: str, settings: dict[str, str], secret: str, keys: Sequence[str]
) -> list[dict[str, Any]]:
    passwords = {_PASSWORD: "redis-node-password", _WORKER_PASSWORD: "redis-worker-password"}
    values = {
        "VLM_REDIS_URL": "redis://node:$(REDIS_PASSWORD)@redis:6379/0",
        "VLM_NODE__WORKER_REDIS_URL": f"redis://worker:$({_WORKER_PASSWORD})@redis:6379/0",
        # The default seccomp profile forbids bubblewrap's namespaces; a pod runs only one version.
        "VLM_NODE__ISOLATION": "auto",
        "VLM_DEPLOY__STORE": store,
        "VLM_DEPLOY__CACHE_DIR": "/models/packages",
        "VLM_WORKER__DRAIN_S": str(_DRAIN_S),
        "VLM_LOGS__FORMAT": "json",
        **settings,
        **({"VLM_NODE__SECRETS": ",".join(keys)} if keys else {}),
    }
    return [
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "vlm-fleet", "key": key}}}
            for name, key in passwords.items()
        ),
        *({"name": key, "value": value} for key, value in values.items()),
        *(
            {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for key in keys
        ),
    ]


def _scaled(unique: str, name: str, short: str, spec: Spec) -> dict[str, Any]:
    chosen = f'application="{name}",digest="{short}",state!="draining"'
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": unique},
        "spec": {
            "scaleTargetRef": {"name": unique},
            "minReplicaCount": 0,
            "maxReplicaCount": spec.max_instances,
            "pollingInterval": 2,
            "cooldownPeriod": 30,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {"stabilizationWindowSeconds": 0},
                        "scaleDown": {
                            "stabilizationWindowSeconds": _DRAIN_S + 15,
                            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}],
                        },
                    }
                }
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "name": "slots",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": PROMETHEUS,
                        # All gateways report the same.
                        "query": f"max(sum by (instance) (vlm_deployment_instances{{{chosen}}}))",
                        "threshold": "1",
                        "ignoreNullValues": "true",  # no slots: no pods
                    },
                }
            ],
        },
    }
