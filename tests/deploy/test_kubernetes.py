"""The output of `--target kubernetes`: manifests that match their schemas, with valid settings."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from deploy.commands import CommandFailed, run_deploy
from shared.gateway_client import Client
from shared.packages.deployments import Resources, Spec
from shared.queue.keys import GROUP, RedisKeys
from shared.telemetry.metrics import METRICS
from tests.config.manifests import check_pod, check_schema, check_settings
from tests.config.test_kubernetes import FILES

SPEC = Spec(max_instances=3, resources=Resources(2.5, 4 * 10**9, 1), start_s=601.0)
APPLICATION = "from vlm_app import Application\n\n\nclass A(Application):\n    pass\n"


def printed(
    folder: Path, capsys, name: str = "captioner", store: str = "s3://b/p", **more: Any
) -> list[Any]:
    """Returns the manifests of a model, or of an application with variables and secrets."""
    engine = more.pop("engine", ["kind=mock", "max_num_seqs=16"])
    if {"env", "secret"} & more.keys():
        (folder / "app.py").write_text(APPLICATION)
        engine = []
    else:
        (folder / "config.json").write_text("{}")
    package = {"engine": engine, "entry": "", "command": "", "installed": False}
    key = more.pop("signing_key", None)
    run_deploy(
        cast(Client, None), name, str(folder), SPEC, {**package, "env": (), "secret": (), **more},
        store_url=store, signing_key=key, is_dry=True, form="yaml", image="image:tag", wait_s=0,
    )  # fmt: skip
    text = capsys.readouterr().out
    assert not {"&", "*"} & {word[0] for word in text.split()}  # no YAML anchors or aliases
    return list(yaml.safe_load_all(text))


KINDS = ["Deployment", "PodDisruptionBudget", "ScaledObject", "TriggerAuthentication"]


def test_the_manifests_match_their_schemas(tmp_path, capsys):
    documents = printed(tmp_path, capsys, env=["X=1"], secret=["TOKEN=token"])
    assert [each["kind"] for each in documents] == KINDS
    for document in documents:
        check_schema(document)
    assert len({document["metadata"]["name"] for document in documents}) == 1


def test_pods_are_probed_drained_and_limited_workers_of_one_version(tmp_path, capsys, monkeypatch):
    documents = deployment, budget, scaled, _ = printed(tmp_path, capsys)
    check_pod(documents, deployment["metadata"]["name"])
    settings = check_settings("worker", deployment["spec"]["template"], monkeypatch)
    name, _, digest = settings.deploy.package.partition("@")
    assert (name, len(digest)) == ("captioner", 71)
    assert (settings.deploy.cpu, settings.deploy.memory_bytes) == (2.5, 4 * 10**9)
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == settings.worker.drain_s + 15
    [worker] = pod["containers"]
    assert (worker["image"], worker["args"]) == ("image:tag", ["worker"])
    probe = worker["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= SPEC.start_s
    paths = {key: worker[key]["httpGet"]["path"] for key in ("readinessProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert worker["resources"]["limits"] == {"memory": "4000000000", "nvidia.com/gpu": 1}
    [tmp] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "tmp"]
    assert (tmp["medium"], tmp["sizeLimit"]) == ("Memory", "1Gi")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"] == labels
    policies = next(path for path in FILES if path.name == "network.yaml").read_text()
    assert policies.count(f", {labels['app']}]") == 2  # to Redis and to the store
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]


def test_pods_are_scaled_by_the_queue_and_its_age_down_to_zero(tmp_path, capsys):
    deployment, _, scaled, login = printed(tmp_path, capsys)
    spec = scaled["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 3)
    assert spec["initialCooldownPeriod"] > SPEC.start_s
    waiting, *others = spec["triggers"]
    model = "@".join(deployment["metadata"]["name"].rsplit("-", 1))
    assert waiting["type"] == "redis-streams"
    assert waiting["metadata"] == {
        "address": "redis:6379", "username": "keda", "stream": RedisKeys().queue(model),
        "consumerGroup": GROUP, "lagCount": "12", "activationLagCount": "0",
    }  # fmt: skip
    assert waiting["authenticationRef"]["name"] == login["metadata"]["name"]
    known = {metric.name: metric.labels for metric in METRICS}
    for trigger in others:
        metric, _, label = trigger["metadata"]["query"].removeprefix("max(").partition("{")
        assert "model" in known[metric]
        assert label == f'model="{model}"}})'


def test_an_application_has_the_files_of_its_secrets(tmp_path, capsys):
    pods, *_ = printed(tmp_path, capsys, secret=["A=token", "B=token", "C=LD_PRELOAD"])
    pod = pods["spec"]["template"]["spec"]
    [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == "secrets"]
    assert volume["secretName"] == "captioner-secrets"
    assert [item["key"] for item in volume["items"]] == ["LD_PRELOAD", "token"]
    [container] = pod["containers"]
    settings = {each["name"]: each.get("value") for each in container["env"]}
    assert settings["VLM_ENGINE__START_S"] == "601"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings["VLM_NODE__SECRETS_DIR"] == mounts["secrets"]


def test_options_that_pods_do_not_support_are_refused(tmp_path, capsys):
    store, key = {"store": "file:///srv/packages"}, {"signing_key": Path("key")}
    (tmp_path / "model.safetensors").touch()
    of_other = {"engine": ["kind=other", "max_num_seqs=many"]}
    for change, says in (
        ({"name": "A_2"}, "--name"), (store, "--store s3://"), (key, "--sign"), (of_other, "--set max_num_seqs=many"),
    ):  # fmt: skip
        with pytest.raises(CommandFailed, match=says) as failed:
            printed(tmp_path, capsys, **change)
        assert failed.value.code == 1
