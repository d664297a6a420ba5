"""One call: what a gateway asks of the fleet, around one task."""

from enum import StrEnum
from typing import NamedTuple

from shared.protocol.content import Message
from shared.protocol.tasks import Task
from shared.protocol.version import PROTOCOL_VERSION


class Priority(StrEnum):
    """Who is waited for. Batch work takes what interactive work leaves, and gives it back."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Call(Message, frozen=True, tag_field="version", tag=PROTOCOL_VERSION, omit_defaults=True):
    """One task for one model. Its version is always on the wire, first, and is read before the rest."""

    id: str
    reply_to: str  #: the gateway's id, which names its mailbox
    model: str
    task: Task
    tenant: str = ""  #: whose caches and limits it uses
    priority: Priority = Priority.INTERACTIVE
    trace_parent: str | None = None
    #: Whether results are wanted as they come; else they may wait for one another.
    wants_stream: bool = True
    #: It goes on without its gateway: its answer may be asked for elsewhere.
    is_resumable: bool = False
    adapter: str = ""  #: digest of what changes the model for this call


class Envelope(NamedTuple):
    """What the queue knows of a call, and the call itself as bytes that it never reads."""

    id: str
    model: str
    reply_to: str
    tenant: str
    priority: Priority
    payload: bytes
