"""Layers of which models are made."""
