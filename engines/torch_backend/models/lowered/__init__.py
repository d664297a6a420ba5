"""Transformers' models whose decoder is one that our program computes: see `model`."""
