"""`vlm nodes` and `vlm drain`: a gateway, two nodes and the command; only the instances are not processes."""

import asyncio
import json

import pytest
from typer.testing import CliRunner, Result

import vlm
from shared.packages.deployments import Resources
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.worker.node.test_agent import Machines, machines, nodes_of  # noqa: F401


@pytest.fixture
async def url(redis_server, redis_prefix, tmp_path):
    keys = {"deploy_keys": ("may-deploy",), "api_keys": ("asks",)}
    deploy = {"store": f"file://{tmp_path}/store"}
    settings = make_settings(redis_server, redis_prefix, gateway=keys, deploy=deploy)
    async with run_gateway_on_socket(settings, refresh=False) as running:
        yield str(running.client.base_url)


async def run(*arguments: str, url: str, key: str = "may-deploy") -> Result:
    command = [*arguments, "--url", url, "--api-key", key]
    return await asyncio.to_thread(CliRunner().invoke, vlm.app, command)


async def test_a_drained_node_ends_and_its_instances_start_on_another(
    machines: Machines,  # noqa: F811
    url: str,
):
    for name in ("one", "two"):
        machines.start(name, cpu=2.0)
    machines.deploy(machines.add_package("{}"), min_instances=2, resources=Resources(cpu=1))
    await machines.wait(lambda app: len(nodes_of(app)) == 2)
    listed = json.loads((await run("nodes", "-o", "json", url=url)).stdout)["data"]
    shown = [(each["id"], each["state"], each["cpu"]) for each in listed]
    assert shown == [("one", "ready", 2.0), ("two", "ready", 2.0)]
    assert sum(len(each["instances"]) for each in listed) == 2
    drained = listed[0]["id"] if listed[0]["instances"] else listed[1]["id"]
    other = "two" if drained == "one" else "one"
    done = await run("drain", drained, url=url)
    assert done.exit_code == 0, done.output
    assert f"{drained}: has ended" in done.stderr
    await asyncio.wait_for(machines.running.pop(drained)[1], 10.0)
    await machines.wait(lambda app: nodes_of(app) == [other, other])
    table = (await run("nodes", url=url)).stdout
    assert other in table
    assert drained not in table
    machines.start(drained, cpu=2.0)  # the drain of the old node does not apply to the new one
    assert await machines.nodes() <= {"one", "two"}
    await machines.wait(lambda app: len(nodes_of(app)) == 2)
    assert not machines.running[drained][1].done()
    assert (await run("drain", "one", url=url)).exit_code == 0
    await machines.wait(lambda app: [slot.node for slot in app.slots] == ["two", "two"])
    assert (await run("drain", "two", url=url)).exit_code == 0
    [app] = json.loads((await run("apps", "-o", "json", url=url)).stdout)["data"]
    assert (app["active"]["num_ready"], app["message"]) == (0, "lost nodes: two")


async def test_drain_requires_a_deploy_key_and_a_known_node(url: str):
    unknown = await run("drain", "no such node", url=url)
    assert unknown.exit_code == 4
    assert "There is no node of this name. Nodes: none." in " ".join(unknown.stderr.split())
    for arguments in (["nodes"], ["drain", "one"]):
        assert (await run(*arguments, url=url, key="asks")).exit_code == 4
