"""The mock of an embedding engine."""
