"""Sessions of applications: what their tasks have in common, and how each task stands."""
