"""Lets a checkpoint learn more: new tokens for new words, new layers that change nothing at first."""

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from training.shapes.architecture import make_config
from training.shapes.clips import ask_about_clip, sample_clip
from training.shapes.conversations import sample_conversation
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.small_talk import sample_small_talk
from training.shapes.structured import ask_with_tools, list_tools, sample_json, sample_tools
from training.shapes.tokenizer import UNK_ID, VOCAB_SIZE, add_words, to_fast
from training.shapes.world import sample_scene

NEW_LAYERS = (1, 3)  # of the old layers, behind which a new one comes


def sample_texts(number: int, seed: int = 0) -> Iterator[str]:
    """What the model reads and says, of every sort."""
    rng = Random(seed)
    for _ in range(number):
        scenes = tuple(sample_scene(rng) for _ in range(rng.randint(1, 2)))
        for turn in sample_conversation(scenes, 2, rng).turns:
            yield f"{turn.question.text} {turn.question.answer}"
        yield sample_small_talk(rng)
        asked = sample_json(scenes[0], rng)
        yield f"{asked.text} {asked.answer}"
        clip = ask_about_clip(sample_clip(rng), rng)
        yield f"{clip.text} {clip.answer}"
        tools = sample_tools(rng)
        yield list_tools(tools)
        for question in ask_with_tools(scenes[0], tools, rng):
            yield f"{question.text} {question.answer}"


def grow_tokenizer(
    old: PreTrainedTokenizerFast, num_samples: int = 3000
) -> PreTrainedTokenizerFast:
    """The tokenizer with more words; the old ones keep their numbers. Always the same."""
    return to_fast(add_words(old.backend_tokenizer, sample_texts(num_samples), VOCAB_SIZE))


def grow_model(
    old: LlavaForConditionalGeneration,
    old_tokenizer: PreTrainedTokenizerFast,
    tokenizer: PreTrainedTokenizerFast,
) -> LlavaForConditionalGeneration:
    """A model of today's size that says what the old one says."""
    text: Any = old.config.text_config
    if text.vocab_size == VOCAB_SIZE:
        return old
    torch.manual_seed(0)
    new = LlavaForConditionalGeneration._from_config(make_config(), dtype=torch.float32)
    with torch.no_grad():
        state = dict(new.state_dict())
        places = _places(text.num_hidden_layers)
        for name, tensor in old.state_dict().items():
            head, mark, rest = name.partition("language_model.layers.")
            if mark:
                index, _, rest = rest.partition(".")
                name = f"{head}{mark}{places[int(index)]}.{rest}"
            state[name][: len(tensor)].copy_(tensor)
        for index in set(range(len(new.model.language_model.layers))) - set(places):
            layer: Any = new.model.language_model.layers[index]
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        parts = _parts(old_tokenizer, tokenizer)
        for weight in (new.model.language_model.embed_tokens.weight, new.lm_head.weight):
            _fill_in(weight, parts)
    return new


def _places(num_layers: int) -> list[int]:
    """Where the old layers go."""
    places: list[int] = []
    for index in range(num_layers):
        places.append(index + sum(before < index for before in NEW_LAYERS))
    return places


def _parts(old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> dict[int, list[int]]:
    """The old tokens that spell each new one."""
    return {
        index: old.encode(new.decode([index]), add_special_tokens=False) or [UNK_ID]
        for index in range(len(old), len(new))
    }


def _fill_in(weight: Tensor, parts: dict[int, list[int]]) -> None:
    for index, ids in parts.items():
        weight[index] = weight[ids].mean(0)
