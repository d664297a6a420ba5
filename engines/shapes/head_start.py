"""Gives the decoder a head start: words begin where the eye sees what they name.

A decoder from scratch spends most of its time on finding that "star" in a question and a star in a picture
have to do with each other. Here the embedding of each such word starts as the mean feature of the patches
it describes, and two layers start with attention that looks for what is alike and copies it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engines.shapes.llava import LlavaForConditionalGeneration
from engines.shapes.scene_heads import SceneTargets
from engines.shapes.world import BACKGROUNDS, COLORS, KINDS, MAX_SHAPES, PLACES, SIZES

LAYERS = (0, 2)  # of the decoder, that start as look-ups
WORD_NORM = 3.0  # of an embedding; features have a norm of about 5
OUTPUT_NORM = 0.3  # of a row of the output head
MARK_NORM = 3.5  # of what tells words from patches
QUERY_GAIN = 0.8  # makes the attention's logits of what is alike about 5 larger than of what is not
MARK_GAIN = 1.0  # makes words look at patches only, not at themselves
COPY_GAIN = 0.15  # of what a head fetches


@torch.no_grad()
def give_head_start(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    features: Tensor,
    targets: SceneTargets,
) -> None:
    """Set embeddings, output head and two layers from what the eye sees in some pictures.

    Shapes: `features` (N, P, width), nearly white and centered; `targets` of the same pictures.
    """
    meanings = dict(_meanings(features.flatten(0, 1), targets))
    vocabulary = tokenizer.get_vocab()
    for word, meaning in meanings.items():
        for text in (word, f"{word} ", f"{word}s", f"{word}s ", word.capitalize()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and ids[0] in vocabulary.values():
                model.model.language_model.embed_tokens.weight[ids[0]] += WORD_NORM * meaning
                model.lm_head.weight[ids[0]] += OUTPUT_NORM * meaning
    _, _, directions = torch.linalg.svd(features.flatten(0, 1)[::7], full_matrices=False)
    mark = directions[-1]  # in which nothing is to be seen
    model.model.language_model.embed_tokens.weight += MARK_NORM * mark
    subspaces = [
        torch.stack([meanings[word] for word in words if word in meanings])
        for words in (KINDS, COLORS, ("top", "middle", "bottom", "left", "center", "right"))
    ]
    for layer in LAYERS:
        _make_look_up(
            model.model.language_model.layers[layer].self_attn, subspaces, directions, mark
        )


def _meanings(features: Tensor, targets: SceneTargets) -> Iterator[tuple[str, Tensor]]:
    """Words with the direction, of length 1, in which the patches that they describe differ from all."""
    overall = features.mean(0)
    filled = targets.kind.flatten() > 0
    of_shapes = features[filled].mean(0)

    def direction(chosen: Tensor, among: Tensor) -> Tensor:
        difference = features[chosen].mean(0) - among
        return difference / difference.norm()

    for index, kind in enumerate(KINDS):
        yield kind, direction(targets.kind.flatten() == index + 1, of_shapes)
    for words, classes in ((COLORS, targets.color), (SIZES, targets.size)):
        for index, word in enumerate(words):
            yield word, direction(filled & (classes.flatten() == index), of_shapes)
    for index, word in enumerate(BACKGROUNDS):
        if word not in COLORS:
            yield word, direction(targets.background.flatten() == index, overall)
    for number in range(MAX_SHAPES + 1):
        yield str(number), direction(targets.count.flatten() == number, overall)
    for word in ("top", "middle", "bottom", "left", "right", "center"):
        cells = [index for index, place in enumerate(PLACES) if word in place.split()]
        yield word, direction(torch.isin(targets.place.flatten(), torch.tensor(cells)), overall)


def _make_look_up(
    attention: Any,
    subspaces: list[Tensor],
    directions: Tensor,
    mark: Tensor,
) -> None:
    """Queries and keys compare within a subspace for each group of heads; values copy all there is to see.

    Rotary positions leave the slow half of a head's pairs nearly alone: only those compare.
    Shapes: each subspace (words, width); `directions` (width, width), the most varied first.
    """
    head_dim, groups = attention.head_dim, attention.num_key_value_groups
    num_groups = attention.k_proj.out_features // head_dim
    slow = [*range(head_dim // 4, head_dim // 2), *range(3 * head_dim // 4, head_dim)]
    content = directions[:head_dim]
    for group in range(num_groups):
        rows = content if group >= len(subspaces) else torch.cat([subspaces[group], content])
        basis = torch.linalg.qr(rows[: len(slow) - 1].T).Q.T
        start = group * head_dim
        compared, marked = torch.tensor(slow[:-1]), slow[-1]
        attention.k_proj.weight[start + compared] = basis
        attention.k_proj.weight[start + marked] = -mark
        attention.v_proj.weight[start : start + head_dim] = content
        for head in range(group * groups, (group + 1) * groups):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            attention.q_proj.weight[head * head_dim + compared] = QUERY_GAIN * basis
            attention.q_proj.weight[head * head_dim + marked] = MARK_GAIN * mark
            attention.o_proj.weight[:, columns] = COPY_GAIN * content.T
