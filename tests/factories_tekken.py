"""A small tekken.json like those of Mistral's checkpoints."""

import base64
from typing import Any

_NAMES = {
    0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
    24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]",
}  # fmt: skip
_MERGED = (
    b"th",
    b"he",
    b"the",
    b" t",
    b" the",
    b"at",
    b"Wh",
    b"What",
    b" w",
    b"or",
    b" wor",
    b"\n\n",
    b"\xc3\xa9",
)
_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tekken() -> dict[str, Any]:
    """Returns 36 named special tokens of 40, all bytes, and merged tokens, the last of which is one too many."""
    tokens = [bytes([byte]) for byte in range(256)] + list(_MERGED) + [b"unused"]
    return {
        "config": {
            "pattern": _PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": 40 + len(tokens) - 1,
            "default_num_special_tokens": 40,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": _NAMES.get(rank, f"[OTHER_{rank}]"), "is_control": True}
            for rank in range(36)
        ],
    }
