"""The tree of settings and where their values come from."""
