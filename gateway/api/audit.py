"""`/v1/admin/audit`: who asked to change keys, deployments, nodes and adapters. For the root key and keys with the role `admin`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.http.endpoint import Caller, Resource, operation
from gateway.keys.audit import AuditEntry, AuditLog


class AuditList(msgspec.Struct):
    """Entries, newest first."""

    data: list[AuditEntry]
    object: str = "list"


class AuditQuery(msgspec.Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Audit(Resource):
    tag = "keys"
    access = "admin"

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    @operation("GET", "/v1/admin/audit")
    async def list_audit_entries(self, caller: Caller, query: AuditQuery) -> AuditList:
        """List who asked to change keys, deployments, nodes and adapters, newest first."""
        return AuditList(await self._log.read(query.limit))
