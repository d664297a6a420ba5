"""Finds model packages by name, and reads their untrusted files."""
