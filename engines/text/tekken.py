"""Mistral's tekken.json as the content of a tokenizer.json. Source: `Tekkenizer` of mistral-common."""

import base64
from collections.abc import Mapping
from typing import Any

from engines.packages.checkpoint_json import Fields

_MAX_TOKEN_BYTES = 512
_MAX_TOKENS = 2**21


def to_tokenizer_json(tekken: Fields, letters: Mapping[int, str]) -> dict[str, Any]:
    """`letters` are the characters of bytes in a byte-level vocabulary. Raises: UnsupportedCheckpoint."""
    settings = tekken.section("config")
    special, vocab = tekken.get("special_tokens"), tekken.get("vocab")
    if not isinstance(special, list):
        raise tekken.refuse("special_tokens", "are missing; save the checkpoint's tokenizer.json")
    count = settings.whole("default_num_special_tokens", len(special), at_most=_MAX_TOKENS)
    size = settings.whole("default_vocab_size", at_least=count, at_most=_MAX_TOKENS)
    try:
        names = {each["rank"]: each["token_str"] for each in special}
        tokens = [base64.b64decode(each["token_bytes"]) for each in vocab]
    except (KeyError, TypeError, ValueError):
        raise tekken.refuse("vocab", "and special_tokens are not lists of tokens") from None
    if max(map(len, tokens), default=0) > _MAX_TOKEN_BYTES:
        raise tekken.refuse("vocab", f"has a token of more than {_MAX_TOKEN_BYTES} bytes")
    names = {place: names.get(place, f"<SPECIAL_{place}>") for place in range(count)}
    tokens = tokens if size is None else tokens[: size - count]
    ranks = {"".join(map(letters.__getitem__, x)): count + i for i, x in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spell = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split", "pattern": {"Regex": settings.get("pattern")}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, **flags} for i, name in names.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, spell]},
        "post_processor": None,
        "decoder": spell,
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in names.items()} | ranks,
            "merges": find_merges(ranks),
            "ignore_merges": True,
        },
    }


def find_merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs that tokens are merged from, in the order of the tokens' ranks."""
    found = []
    for whole, rank in ranks.items():
        cuts = ((whole[:i], whole[i:]) for i in range(1, len(whole)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        found += sorted((rank, ranks[a], ranks[b], a, b) for a, b in pairs)
    return [(a, b) for *_, a, b in sorted(found)]
