"""Compares our engine with transformers and llama.cpp: one checkpoint, one machine, interleaved."""
