"""The tokenizer interface of `engines.text`."""

from dataclasses import dataclass
from typing import Protocol


class Tokenizer(Protocol):
    """Token ids and their bytes."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    drops_leading_space: bool  #: sentencepiece: decoding drops one space at the start

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Strings of special tokens in it are encoded as ordinary text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for special tokens."""
        ...

    def token_string(self, token_id: int) -> str:
        """Spelling in the vocabulary; empty for an unknown id."""
        ...


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A special token. `lstrip`, `rstrip`: white space before or after it is removed."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
