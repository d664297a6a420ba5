"""The package must be imported before transformers, which imports torchvision."""

import engines.torch_backend  # noqa: F401
