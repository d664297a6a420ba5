"""Stored API keys and their usage, OpenID Connect tokens, and the audit log."""
