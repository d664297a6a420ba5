"""Bytes of vocabulary entries, by the decoder of tokenizer.json: byte-level, sentencepiece (▁, <0x0A>) or Metaspace."""

import re
from typing import Any

from engines.base import UnsupportedCheckpoint

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet. Source: `bytes_to_unicode` in github.com/openai/gpt-2, encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class ByteDecoder:
    """Decodes single tokens. `drops_leading_space`: the first space of a text is dropped.

    Raises: UnsupportedCheckpoint if the decoding of a token depends on its neighbours otherwise.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.drops_leading_space = False
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        for step in _flatten(decoder):
            self._read_step(step)

    def decode(self, token: str) -> bytes:
        """The bytes of one token."""
        if self._is_byte_level:
            known = all(character in _ALPHABET for character in token)
            return bytes(_ALPHABET[c] for c in token) if known else token.encode()
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self._replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.drops_leading_space = True
            case {"type": "Metaspace", "replacement": str(replacement)}:
                self._replacements.append((replacement, " "))
                self.drops_leading_space = step.get("prepend_scheme", "always") != "never"
            case _:
                raise UnsupportedCheckpoint(
                    f"tokenizer.json's decoder {step.get('type')!r} is unknown"
                )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedCheckpoint("tokenizer.json has no decoder")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
