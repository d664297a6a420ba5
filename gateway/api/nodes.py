"""`/v1/nodes`: the machines that run deployments. For deploy keys."""

import msgspec
from msgspec.structs import replace

from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import NotFound
from shared.packages.deployment_state import DeploymentState
from shared.packages.rollout import NodeRecord


class NodeInstance(msgspec.Struct):
    application: str
    slot: int
    digest: str
    state: str


class NodeObject(msgspec.Struct):
    """A node, what it offers, and its instances."""

    id: str
    cpu: float
    memory_bytes: int
    gpu: int
    state: str  #: `ready` or `draining`
    instances: list[NodeInstance]


class NodeList(msgspec.Struct):
    data: list[NodeObject]
    object: str = "list"


class Nodes(Resource):
    tag = "applications"
    access = "deploy"

    def __init__(self, deployments: DeploymentState) -> None:
        self._deployments = deployments

    @operation("GET", "/v1/nodes")
    async def list_nodes(self, caller: Caller) -> NodeList:
        """List the nodes and their instances."""
        nodes = await self._deployments.nodes()
        return NodeList([_to_object(nodes[node_id]) for node_id in sorted(nodes)])

    @operation("POST", "/v1/nodes/{name}:drain")
    async def drain_node(self, caller: Caller) -> NodeObject:
        """Have a node finish the requests of its instances and end; other nodes start them again."""
        nodes = await self._deployments.nodes()
        node = nodes.get(caller.path["name"])
        if node is None:
            raise NotFound(
                f"There is no node of this name; there are: {', '.join(sorted(nodes)) or 'none'}.",
                param="name",
                code="node_not_found",
            )
        await self._deployments.drain(node.id)
        return _to_object(replace(node, is_stopping=True))


def _to_object(node: NodeRecord) -> NodeObject:
    return NodeObject(
        node.id, node.cpu, node.memory_bytes, node.gpu,
        "draining" if node.is_stopping else "ready",
        [NodeInstance(each.app, each.slot, each.digest, each.state) for each in node.slots],
    )  # fmt: skip
