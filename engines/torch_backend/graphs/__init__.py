"""CUDA graphs of a decode step."""
