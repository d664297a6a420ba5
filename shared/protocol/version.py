"""The version of the wire, and what is said where two versions meet."""

PROTOCOL_VERSION = 2


class UnsupportedVersion(Exception):
    """The other end speaks another version; the message says which end to update."""


def explain_versions(gateway: int, worker: int) -> str:
    """Who speaks what, and which side to update."""
    older = "gateway" if gateway < worker else "worker"
    return f"the gateway speaks protocol {gateway}, the worker {worker}: update the {older}"
