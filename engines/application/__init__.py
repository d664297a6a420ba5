"""User applications as engines: one process that runs one task at a time."""
