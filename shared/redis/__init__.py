"""Clients of Redis, and the embedded server."""
