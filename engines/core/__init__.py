"""The engine without tensors: scheduling, blocks, sequences."""
