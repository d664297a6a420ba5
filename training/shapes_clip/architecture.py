"""The shape of the network: `CLIPModel` of transformers, whose eye is the one of the chat model.

The eye's layers are taken over with fewer neurons; a fifth lets the class token gather what the patches
know. Only the fourth layer's MLP and what follows learns, so what comes before is computed once an image.

Shape letters: N images, P patches and the class token, W the eye's width, V numbers of a vector.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from training import PACKAGES
from training.shapes.architecture import normalize

EYE = PACKAGES / "shapes" / "checkpoint"
CHECKPOINT = PACKAGES / "shapes_clip" / "checkpoint"
DIMENSIONS = 192
NUM_NEURONS = 576  # of the eye's 768 in each layer, those that change most


def make_model(eye: Any, images: Tensor) -> CLIPModel:
    """A model of the checkpoint's shape with the vision tower of the chat model, and fresh weights beyond it, in fp32.

    `images` say which neurons matter. Shapes: uint8 (n, size, size, 3).
    """
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig.from_pretrained(CHECKPOINT))
    vision: Any = model.vision_model
    vision.embeddings.load_state_dict(eye.embeddings.state_dict())
    vision.pre_layrnorm.load_state_dict(eye.pre_layrnorm.state_dict())
    for layer, taken in zip(vision.encoder.layers, _fewer_neurons(eye, images), strict=False):
        layer.load_state_dict(taken)
    return freeze(model)


def freeze(model: CLIPModel) -> CLIPModel:
    """Let all learn but the layers of the chat model, of which only the end of the last does."""
    vision: Any = model.vision_model
    vision.requires_grad_(False)
    for module in (
        vision.encoder.layers[-2].mlp,
        vision.encoder.layers[-2].layer_norm2,
        vision.encoder.layers[-1],
        vision.post_layernorm,
    ):
        module.requires_grad_(True)
    return model


@torch.no_grad()
def _fewer_neurons(eye: Any, images: Tensor) -> list[dict[str, Tensor]]:
    """The layers' weights with NUM_NEURONS neurons; the mean of the others goes to the bias."""
    seen: dict[int, Tensor] = {}

    def watch(index: int):
        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[index] = inputs[0].flatten(0, 1)

        return keep

    layers = eye.encoder.layers
    hooks = [layer.mlp.fc2.register_forward_pre_hook(watch(i)) for i, layer in enumerate(layers)]
    eye(normalize(images))
    for hook in hooks:
        hook.remove()
    made = []
    for index, layer in enumerate(layers):
        weights = dict(layer.state_dict())
        out = weights["mlp.fc2.weight"]
        order = (seen[index].std(0) * out.norm(dim=0)).argsort(descending=True)
        kept, dropped = order[:NUM_NEURONS], order[NUM_NEURONS:]
        weights["mlp.fc2.bias"] = (
            weights["mlp.fc2.bias"] + out[:, dropped] @ seen[index].mean(0)[dropped]
        )
        weights["mlp.fc2.weight"] = out[:, kept]
        for name in ("mlp.fc1.weight", "mlp.fc1.bias"):
            weights[name] = weights[name][kept]
        made.append(weights)
    return made


def look(model: CLIPModel, images: Tensor) -> Tensor:
    """What does not learn: all up to the fourth layer's attention. Shapes: uint8 (N, size, size, 3); (N, P, W)."""
    vision: Any = model.vision_model
    hidden = vision.pre_layrnorm(vision.embeddings(normalize(images)))
    *before, last = vision.encoder.layers[:-1]
    for layer in before:
        hidden = _attended(layer, hidden, hidden)
        hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
    return _attended(last, hidden, hidden)


def see(model: CLIPModel, looked: Tensor, stands_for: int = 1) -> Tensor:
    """The rest, for the class token alone where the others no longer matter. Shapes: (N, P, W); (N, V).

    `stands_for`: how many patches each that is given stands for.
    """
    vision: Any = model.vision_model
    layer, last = vision.encoder.layers[-2:]
    hidden = looked + layer.mlp(layer.layer_norm2(looked))
    counted = torch.full((1, hidden.shape[1]), math.log(stands_for), dtype=hidden.dtype)
    counted[:, 0] = 0
    token = _attended(last, hidden[:, :1], hidden, counted)
    token = token + last.mlp(last.layer_norm2(token))
    return model.visual_projection(vision.post_layernorm(token[:, 0]))


def _attended(layer: Any, asking: Tensor, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    attention = layer.self_attn
    heads = (attention.num_heads, -1)
    normed = layer.layer_norm1(hidden)
    queries = attention.q_proj(normed[:, : asking.shape[1]])
    parts = (queries, attention.k_proj(normed), attention.v_proj(normed))
    query, key, value = (part.unflatten(-1, heads).transpose(1, 2) for part in parts)
    if bias is not None:
        bias = bias.to(query.dtype)
    gathered = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    gathered = gathered.transpose(1, 2).flatten(2)
    return asking + attention.out_proj(gathered)
