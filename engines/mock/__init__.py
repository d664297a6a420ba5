"""The mock engine."""
