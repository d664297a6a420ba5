"""Operators: a folder each."""
