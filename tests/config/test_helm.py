"""The Helm chart, rendered by Helm's library: its objects match the schemas and equal those of `config/kubernetes`."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.fleet import ROOT
from shared.settings.redis_url import SentinelUrl
from tests.config import test_kubernetes as example
from tests.config.manifests import check_all, check_vllm, pods_of, variables

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make helm-test")
pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")

CHART = ROOT / "config" / "helm"
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
ALERTS = yaml.safe_load((ROOT / "config" / "prometheus" / "alerts.yml").read_text())
QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"
EXTERNAL = "rediss://$(REDIS_USER):$(REDIS_PASSWORD)@redis.example.com:6380/0"
ALL: dict[str, Any] = {
    "image": {"pullSecrets": ["registry"]},
    "gateway": {
        "env": {"VLM_GATEWAY__REMOTE_IMAGES": "any-public", "VLM_LIMITS__MAX_IMAGES": "4"},
        "secretEnv": {"VLM_GATEWAY__ADMIN_KEYS": "admin-keys"},
        "ingress": {"enabled": True, "className": "nginx", "host": "vlm.example.com",
                    "tlsSecret": "vlm-tls", "annotations": {"a/b": "c"}},
    },
    "redis": {"sentinel": {"enabled": True}},
    "workers": [
        {"name": "shapes", "model": "shapes"},
        {"name": "qwen", "model": QWEN, "vllm": {"enabled": True}, "drainS": 120,
         "models": {"claim": "weights"}, "secretEnv": {"HF_TOKEN": "hf-token"},
         "nodeSelector": {"gpu": "yes"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
         "autoscaling": {"minReplicas": 2}},
        {"name": "gpu", "model": "org/model", "env": {"VLM_ENGINE__SERVED_NAME": "m"},
         "resources": {"limits": {"nvidia.com/gpu": 1}}},
    ],
    "autoscaling": {"enabled": True},
    "search": {"enabled": True, "secretEnv": {"VLM_SEARCH__INDEX": "search-index"},
               "storage": {"className": "ssd"}},
    "monitoring": {"podMonitors": True, "rules": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "gatewayEgress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
        "searchEgress": [{"ports": [{"protocol": "TCP", "port": 5432}]}],
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": ALL,
    "external": ALL | {"redis": {"url": EXTERNAL, "ports": [6380]}},
}


def render(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    with helm.Chart.load(chart) as loaded:
        made = loaded.render(values, name="fleet", namespace="vlm-fleet")
    return [doc for text in made.values() for doc in yaml.safe_load_all(text) if doc]


MADE = {variant: render(values) for variant, values in VARIANTS.items()}


def name_of(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def by_name(variant: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {name_of(document): document for document in MADE[variant]}


def pods(variant: str) -> dict[str, dict[str, Any]]:
    return pods_of(MADE[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_match_schemas_and_pods_have_minimal_privileges(variant, monkeypatch):
    check_all(MADE[variant], monkeypatch)
    report = helm.lint(CHART, VARIANTS[variant], strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_every_object_is_rendered_once_if_enabled():
    for variant, documents in MADE.items():
        assert len(by_name(variant)) == len(documents)
    kinds = {variant: {kind for kind, _ in by_name(variant)} for variant in VARIANTS}
    assert {"ScaledObject", "PodMonitor", "PrometheusRule", "Ingress"}.isdisjoint(kinds["default"])
    assert {"ScaledObject", "PodMonitor", "PrometheusRule", "Ingress"} <= kinds["all"]
    assert "search" not in pods("default")
    assert "search" in pods("all")
    assert "redis" not in pods("external")
    assert ("NetworkPolicy", "redis") not in by_name("external")
    assert not any(kind == "NetworkPolicy" for kind, _ in
                   map(name_of, render({"networkPolicy": {"enabled": False}})))  # fmt: skip


def same(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an object that the chart and the example have in common."""
    spec = yaml.safe_load(yaml.safe_dump(document["spec"]).replace("worker-shapes", "worker"))
    pod = spec.get("template", {})
    pod.get("metadata", {}).pop("annotations", None)
    for container in pod.get("spec", {}).get("containers", []):
        container["env"].sort(key=lambda each: each["name"])
        del container["image"]
        container.pop("imagePullPolicy", None)
    for labels in (pod.get("metadata", {}).get("labels"), spec.get("selector", {}).get("matchLabels")):  # fmt: skip
        if labels:
            labels.pop("worker", None)
    return spec


def test_the_default_fleet_equals_that_of_the_example():
    scaled = render({"autoscaling": {"enabled": True}})
    made = {
        (kind, name.replace("worker-shapes", "worker")): document
        for document in scaled
        for kind, name in [name_of(document)]
    }
    wanted = {name_of(d): d for d in example.DOCUMENTS if d["kind"] != "Namespace"}
    assert set(made) == set(wanted) | {("ConfigMap", "redis")}
    for name, document in wanted.items():
        assert same(made[name]) == same(document), name


def test_redis_gets_the_files_of_the_repository():
    for variant in ("default", "all"):
        data = by_name(variant)["ConfigMap", "redis"]["data"]
        for name in ("redis.conf", "start.sh", "users.acl"):
            assert data[name] == (ROOT / "config" / "redis" / name).read_text()
        [volume] = [v for v in pods(variant)["redis"]["spec"]["volumes"] if v["name"] == "config"]
        assert volume["configMap"] == {"name": "redis"}


def test_gateways_and_workers_use_the_sentinels():
    known = by_name("all")
    stateful = known["StatefulSet", "redis"]["spec"]
    assert stateful["replicas"] == 3
    assert known["Service", "redis"]["spec"]["clusterIP"] == "None"
    server, sentinel = stateful["template"]["spec"]["containers"]
    hosts = variables(sentinel)["PEERS"].split()
    assert hosts == [f"redis-{n}.{stateful['serviceName']}" for n in range(3)]
    [port] = [each["containerPort"] for each in sentinel["ports"]]
    for name in ("gateway", "worker-shapes", "worker-qwen"):
        user = name.partition("-")[0]
        text = variables(pods("all")[name]["spec"]["containers"][0])["VLM_REDIS_URL"]
        url = SentinelUrl.parse(text)
        assert url is not None
        assert url.sentinels == tuple((host, port) for host in hosts)
        assert url.primary.startswith(f"redis://{user}:$(REDIS_PASSWORD)@")
        egress = known["NetworkPolicy", user]["spec"]["egress"]
        assert {"protocol": "TCP", "port": port} in egress[0]["ports"]
    script = known["ConfigMap", "redis"]["data"]["sentinel.sh"]
    assert f"sentinel monitor {url.name} " in script
    # The variables that the script reads, and those that the containers set.
    asked = set(re.findall(r"\$\{?([A-Z]{2}[A-Z_]+)", script)) - {"PWD", "TMPDIR"}
    assert asked == {"SELF", "PEERS", "REDIS_REPLICA_PASSWORD", "DOWN_AFTER_MS"}
    assert asked <= set(variables(sentinel))
    assert asked - {"DOWN_AFTER_MS"} <= set(variables(server))


def test_an_external_redis_is_used():
    for name in ("gateway", "worker-qwen"):
        box = pods("external")[name]["spec"]["containers"][0]
        order = [each["name"] for each in box["env"]]
        assert variables(box)["VLM_REDIS_URL"] == EXTERNAL
        assert variables(box)["REDIS_USER"] == name.partition("-")[0]
        # Kubernetes expands only variables that are defined before.
        assert order.index("VLM_REDIS_URL") > max(order.index("REDIS_USER"), order.index("REDIS_PASSWORD"))  # fmt: skip
    for name in ("gateway", "worker"):
        egress = by_name("external")["NetworkPolicy", name]["spec"]["egress"]
        assert egress[0] == {"ports": [{"protocol": "TCP", "port": 6380}]}


def test_vllm_is_a_container_of_the_workers_pod():
    server, settings = check_vllm(pods("all")["worker-qwen"])
    assert server["args"][0] == QWEN
    assert variables(server)["HF_TOKEN"] == settings["HF_TOKEN"]
    [patch] = yaml.safe_load((ROOT / "config/kubernetes-vllm/kustomization.yaml").read_text())["patches"]  # fmt: skip
    [wanted] = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["initContainers"]
    server["env"] = [each for each in server["env"] if each["name"] != "HF_TOKEN"]
    assert sorted(server.pop("args")) == sorted(wanted.pop("args"))
    assert server == wanted
    for model, wanted in ((f"{QWEN}@main", [QWEN, "--revision=main"]), ("/m@1", ["/m@1"])):
        worker = {"name": "w", "model": model, "vllm": {"enabled": True}}
        [server] = pods_of(render({"workers": [worker]}))["worker-w"]["spec"]["initContainers"]
        assert [a for a in server["args"] if model.startswith(a) or "--rev" in a] == wanted


def test_an_entry_of_workers_overrides_the_defaults():
    limits = pods("all")["worker-gpu"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 1, "memory": "4Gi"}
    assert pods("all")["worker-qwen"]["spec"]["terminationGracePeriodSeconds"] == 135
    off = {"name": "w", "model": "m", "replicas": 0, "vllm": {"enabled": False}, "tolerations": []}
    defaults = {"replicas": 2, "vllm": {"enabled": True}, "tolerations": [{"operator": "Exists"}]}
    made = {name_of(d): d for d in render({"workers": [off], "workerDefaults": defaults})}
    spec = made["Deployment", "worker-w"]["spec"]
    assert spec["replicas"] == 0
    assert "initContainers" not in spec["template"]["spec"]
    assert "tolerations" not in spec["template"]["spec"]


def test_scaling_uses_the_queue_of_the_workers_model():
    models = {"shapes": "shapes", "qwen": QWEN, "gpu": "m"}
    for name, model in models.items():
        scaled = by_name("all")["ScaledObject", f"worker-{name}"]["spec"]
        assert scaled["scaleTargetRef"]["name"] == f"worker-{name}"
        assert "replicas" not in by_name("all")["Deployment", f"worker-{name}"]["spec"]
        for trigger in scaled["triggers"]:
            assert f'{{model="{model}"}}' in trigger["metadata"]["query"]
    for model, served in {"/models/m": "m", "/models/m.gguf": "m", "org/m@main": "org/m"}.items():
        made = render(
            {"autoscaling": {"enabled": True}, "workers": [{"name": "w", "model": model}]}
        )
        [scaled] = [each for each in made if each["kind"] == "ScaledObject"]
        assert f'"{served}"' in scaled["spec"]["triggers"][0]["metadata"]["query"]


def test_prometheus_scrapes_with_the_job_names_of_dashboard_and_alerts():
    for app, port in (("gateway", "http"), ("worker", "health")):
        monitor = by_name("all")["PodMonitor", app]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        [endpoint] = monitor["spec"].pop("podMetricsEndpoints")
        assert monitor["spec"] == {"selector": {"matchLabels": {"app": app}}}
        key = {"credentials": {"name": "vlm-fleet", "key": "api-keys"}}
        assert endpoint == {
            "port": port,
            "path": "/metrics",
            "relabelings": [{"targetLabel": "job", "replacement": app}],
        } | ({"authorization": key} if app == "gateway" else {})
    assert by_name("all")["PrometheusRule", "vlm-fleet"]["spec"] == ALERTS


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"redis": {"sentinel": {"enable": True}}}, "enable"),
        ({"workers": [{"name": "a", "model": "b", "gpus": 1}]}, "gpus"),
        ({"workerDefaults": {"model": "b"}}, "model"),
        ({"workers": [{"name": "a"}]}, "model"),
        ({"gateway": {"env": {"VLM_GATEWAY__DRAIN_S": "3"}}}, "VLM_GATEWAY__DRAIN_S"),
        ({"gateway": {"env": {"VLM_LIMITS__MAX_IMAGES": 4}}}, "VLM_LIMITS__MAX_IMAGES"),
        ({"gateway": {"ingress": {"enabled": True}}}, "host"),
        ({"workers": [{"name": "a", "model": "b"}, {"name": "a", "model": "c"}]}, "named a"),
        ({"redis": {"url": EXTERNAL, "sentinel": {"enabled": True}}}, "sentinel.enabled"),
    ],
    ids=str,
)
def test_unknown_wrong_or_contradictory_values_are_refused_by_name(values, named):
    with pytest.raises(helm.HelmError, match=rf"\b{named}\b"):
        render(values)


def test_the_chart_has_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with helm.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == chart.version == project["version"]
        assert chart.metadata["description"] == project["description"]
        assert chart.name == project["name"]


def test_the_values_of_the_guide_are_accepted():
    section = GUIDE.split("## Helm")[1].split("\n## ")[0]
    [text] = re.findall(r"```yaml\n(.*?)```", section, re.S)
    made = {name_of(document) for document in render(yaml.safe_load(text))}
    assert ("Deployment", "worker-qwen") in made
    assert ("Deployment", "worker-shapes") not in made
