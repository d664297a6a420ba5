"""Our engine beside transformers and llama.cpp: one checkpoint, one machine, in turn."""
