"""Image settings of the built-in model. Its other settings are in the `config.json` of its checkpoint."""

import torch

IMAGE_SIZE = 96  # pixels, both sides
PATCH_SIZE = 16  # pixels
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # mean of CLIP's training images
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """CLIP's normalization. Shapes: uint8 (N, H, W, 3) in, float (N, 3, H, W) out."""
    mean, std = (torch.tensor(each, device=images.device) for each in (IMAGE_MEAN, IMAGE_STD))
    return ((images / 255.0 - mean) / std).permute(0, 3, 1, 2).contiguous()
