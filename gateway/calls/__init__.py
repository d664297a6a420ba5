"""The lifecycle of a call, the same for every API."""
