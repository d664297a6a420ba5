"""Text files of a synthetic checkpoint: byte-level BPE tokenizer, processor settings, chat template."""

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

UNK, BOS, EOS, IMAGE, PAD = "<unk>", "<s>", "</s>", "<image>", "<pad>"
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def make_tokenizer(num_base_tokens: int) -> Tokenizer:
    """A byte-level BPE tokenizer, with `<image>` after the base tokens.

    The merges are all pairs of letters, then triples. English text has two to three characters per token, and every id
    below `num_base_tokens` decodes to text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([UNK, BOS, EOS, *alphabet])}
    merges = list(islice(_merges(), num_base_tokens - len(vocab)))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (UNK, BOS, EOS, IMAGE, PAD)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    letters = ascii_lowercase
    pairs = [first + second for first, second in product(letters, letters)]
    yield from (("Ġ", letter) for letter in letters)
    yield from ((first, second) for first, second in product(letters, letters))
    yield from ((f"Ġ{letter}", pair) for pair, letter in product(pairs, letters))
    yield from ((pair, letter) for pair, letter in product(pairs, letters))


def write_text_files(directory: Path, config: dict[str, Any]) -> None:
    """Write everything but the weights for a `config.json`. Raises: OSError."""
    tokenizer = make_tokenizer(config["image_token_index"])
    vision = config["vision_config"]
    side = {"height": vision["image_size"], "width": vision["image_size"]}
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "LlavaProcessor",
            "unk_token": UNK,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "extra_special_tokens": {"image_token": IMAGE},
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["text_config"]["max_position_embeddings"],
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": vision["image_size"]},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": side,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": _CLIP_MEAN,
            "image_std": _CLIP_STD,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": vision["patch_size"],
            "vision_feature_select_strategy": config["vision_feature_select_strategy"],
            "num_additional_image_tokens": 1,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
