"""Loads checkpoints."""
