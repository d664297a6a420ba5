"""Transformers models whose decoder this project's `Llama` computes."""
