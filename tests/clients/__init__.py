"""Clients that nobody of the project wrote, as they are published, against a server of ours."""
