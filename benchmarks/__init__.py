"""Benchmarks of the engine, the gateway and search, alone and compared with other projects."""
