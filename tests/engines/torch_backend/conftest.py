"""Imports the package before transformers, which imports torchvision."""

import torch

import engines.torch_backend  # noqa: F401

torch.set_num_threads(1)
