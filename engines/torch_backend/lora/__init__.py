"""Adapters beside a model's weights."""
