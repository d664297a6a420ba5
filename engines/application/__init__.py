"""Applications of others behind the engine's interface: one process, one task at a time."""
