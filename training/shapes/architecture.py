"""The shape of the network: a LLaVA of about five million parameters, in the classes of `transformers`."""

import torch

from training.shapes.llava import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
)
from training.shapes.tokenizer import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE

IMAGE_SIZE = 96  # pixels, both sides
PATCH_SIZE = 16  # pixels
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training images
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def make_config() -> LlavaConfig:
    return LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=6,
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
            projection_dim=256,
            hidden_act="quick_gelu",
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
            },  # half of the pairs hardly turn
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            tie_word_embeddings=False,
        ),
        image_token_index=IMAGE_ID,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=NUM_IMAGE_TOKENS,
        tie_word_embeddings=False,
    )


def normalize(images: torch.Tensor) -> torch.Tensor:
    """CLIP's normalization. Shapes: uint8 (N, H, W, 3) in, float (N, 3, H, W) out."""
    mean, std = (torch.tensor(each, device=images.device) for each in (IMAGE_MEAN, IMAGE_STD))
    return ((images / 255.0 - mean) / std).permute(0, 3, 1, 2).contiguous()
