"""What `--target kubernetes` prints: manifests that keep to their schemas, with settings that are ours."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from deploy.client import Client
from deploy.commands import CommandFailed, run_deploy
from shared.packages.deployments import Resources, Spec
from shared.settings.load import load_settings
from shared.telemetry.metrics import METRICS
from tests.config.scaled_object import SCALED_OBJECT
from tests.config.test_kubernetes import VERSION, as_autoscaler

SPEC = Spec(max_instances=3, resources=Resources(2.5, 4 * 10**9, 1))


def printed(
    folder: Path, capsys, name: str = "captioner", store: str = "s3://b/p", **more: Any
) -> list[Any]:
    (folder / "config.json").write_text("{}")
    package = {"engine": ["kind=mock"], "entry": "", "command": "", "installed": False}
    run_deploy(
        cast(Client, None), name, str(folder), SPEC, {**package, "env": (), "secret": (), **more},
        store_url=store, signing_key=None, dry_run="yaml", target="kubernetes", wait_s=0,
    )  # fmt: skip
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_the_manifests_keep_to_their_schemas(tmp_path, capsys):
    validator = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    schema = pytest.importorskip("jsonschema")
    documents = printed(tmp_path, capsys, env=["X=1"], secret=["TOKEN=token"])
    assert [each["kind"] for each in documents] == ["Deployment", "Deployment", "ScaledObject"]
    for document in documents:
        if document["kind"] == "ScaledObject":
            schema.validate(document, SCALED_OBJECT)
            # An autoscaler begins at 1; KEDA itself goes from 0 to 1 and back.
            document["spec"]["minReplicaCount"] = 1
            document = as_autoscaler(document)
        validator.validate(document, VERSION, strict=True)


def test_pods_are_nodes_of_one_version_and_as_many_as_it_should_have_instances(
    tmp_path, capsys, monkeypatch
):
    keeper, pods, scaled = printed(tmp_path, capsys)
    rooms = []
    for document in (keeper, pods):
        [container] = document["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["node"]
        for item in container["env"]:
            monkeypatch.setenv(item["name"], item.get("value", "from-a-secret"))
        rooms.append(load_settings().deploy)
        grace_s = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > load_settings().worker.drain_s
    assert rooms[0].takes == "none"
    name, _, digest = rooms[1].takes.partition("@")
    assert (name, len(digest)) == ("captioner", 12)
    assert (rooms[1].cpu, rooms[1].memory_bytes) == (2.5, 4 * 10**9)
    resources = pods["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"memory": "4000000000", "nvidia.com/gpu": 1}
    assert scaled["spec"]["scaleTargetRef"]["name"] == pods["metadata"]["name"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (0, 3)
    [trigger] = scaled["spec"]["triggers"]
    [metric] = [each for each in METRICS if each.name in trigger["metadata"]["query"]]
    for label in ("application", "digest", "state"):
        assert label in metric.labels
    assert f'application="captioner",digest="{digest}"' in trigger["metadata"]["query"]


def test_pods_have_the_secrets_that_are_named_and_no_other_version(tmp_path, capsys, monkeypatch):
    secrets = ["A=token", "B=token", "C=key"]
    keeper, plain, _ = printed(tmp_path, capsys)
    keeper, pods, _ = printed(tmp_path, capsys, secret=secrets)
    assert pods["metadata"]["name"] != plain["metadata"]["name"]
    [container] = pods["spec"]["template"]["spec"]["containers"]
    given = {item["name"]: item for item in container["env"]}
    for name in ("key", "token"):
        reference = {"secretKeyRef": {"name": "captioner-secrets", "key": name}}
        assert given[name]["valueFrom"] == reference
    monkeypatch.setenv("VLM_NODE__SECRETS", given["VLM_NODE__SECRETS"]["value"])
    assert load_settings().node.secrets == ("key", "token")
    assert "captioner-secrets" not in str(keeper)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Captioner_2"}, "--name"),
        ({"store": "file:///srv/packages"}, "--store s3://"),
        *(
            ({"secret": [f"A={secret}"]}, f"--secret {secret}")
            for secret in (
                "REDIS_PASSWORD",
                "REDIS_WORKER_PASSWORD",
                "VLM_WORKER__DRAIN_S",
                "LD_PRELOAD",
                "PATH",
                "1st",
            )
        ),
    ],
)
def test_what_pods_cannot_have_is_refused(tmp_path, capsys, change, says):
    with pytest.raises(CommandFailed, match=says) as failed:
        printed(tmp_path, capsys, **change)
    assert failed.value.code == 1
