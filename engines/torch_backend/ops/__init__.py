"""Operators, one folder each."""
