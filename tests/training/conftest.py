"""Imports the package before transformers, which imports torchvision."""

import engines.torch_backend  # noqa: F401
