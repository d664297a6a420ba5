"""Model packages: found by name, read with care."""
