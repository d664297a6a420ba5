"""Drafts for answers that are constrained by a grammar, and tokens of forced text.

Forced text is certain except for its tokenization. Between forced texts, JSON has optional spaces and punctuation; the
answer so far shows whether the model writes spaces.
"""

from typing import TYPE_CHECKING

from engines.text.detokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_BYTES = 96
_CONTEXT_TOKENS = 8
_SHOWN_TOKENS = 48
_WORD = bytes(code for code in range(256) if code >= 128 or chr(code).isalnum() or code == ord("_"))
_SIGNS = (b'"', b":", b",", b"}", b"]", b"{", b"[")
#: Where one of these is allowed, the position is inside a string or number.
_INSIDE = (b"0", b"a")


class Drafter:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        count = min(vocab_size, tokenizer.vocab_size)
        self._bytes = [tokenizer.token_bytes(token_id) for token_id in range(count)]
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(self._bytes):
            if text:
                self._ids.setdefault(text, token_id)
        self._is_word = [
            text.isascii() and text.replace(b" ", b"").isalpha() for text in self._bytes
        ]
        self._longest = min(32, max(map(len, self._ids), default=0))

    def draft(self, matcher: "LLMatcher", output: list[int]) -> list[int]:
        """Probable next tokens. Does not change the matcher."""
        last = b""
        for token_id in reversed(output[-4:]):
            last = self._text(token_id) + last
        text = self._find(matcher, last, output)
        if not text:
            return []
        copy, found, piece = matcher.deep_copy(), bytearray(), text
        while piece and len(found) < _MAX_BYTES:
            token_ids = self._spell(piece)
            if not token_ids or not copy.consume_tokens(token_ids):
                break
            found += piece
            piece = self._find(copy, bytes(found), output)
        return self._cut(output, bytes(found))

    def spell(self, matcher: "LLMatcher", output: list[int]) -> int | None:
        """The first token of forced text, as the tokenizer spells the text.

        None if no text is forced, or if what follows may change the token: it ends in the text's last word or sign.
        """
        forced = bytes(matcher.compute_ff_bytes()[:_MAX_BYTES])
        num_certain = len(forced.rstrip(_WORD)) - 1
        if num_certain < 1:
            return None
        token_id = self._cut(output, forced)[0]
        return token_id if len(self._text(token_id)) <= num_certain else None

    def resumes(self, token_id: int) -> bool:
        """Whether a token has other characters than letters and spaces."""
        return token_id >= len(self._is_word) or not self._is_word[token_id]

    def _find(self, matcher: "LLMatcher", before: bytes, output: list[int]) -> bytes:
        """Forced text, else likely text."""
        forced = matcher.compute_ff_bytes()
        if forced:
            return bytes(forced[:_MAX_BYTES])
        if before[-1:] in (b",", b":") and self._writes_spaces(output):
            return b" " if self._allows(matcher, b" ") else b""
        if any(self._allows(matcher, inside) for inside in _INSIDE):
            return b""
        signs = [sign for sign in _SIGNS if self._allows(matcher, sign)]
        return signs[0] if len(signs) == 1 else b""

    def _writes_spaces(self, output: list[int]) -> bool:
        shown = b"".join(map(self._text, output[-_SHOWN_TOKENS:]))
        with_space = shown.count(b'": ') + shown.count(b', "')
        return with_space >= shown.count(b'":"') + shown.count(b',"')

    def _allows(self, matcher: "LLMatcher", text: bytes) -> bool:
        token_id = self._ids.get(text)
        return token_id is not None and matcher.validate_tokens([token_id]) == 1

    def _cut(self, output: list[int], text: bytes) -> list[int]:
        """Tokenize a text in the context of the output."""
        context = b"".join(map(self._text, output[-_CONTEXT_TOKENS:]))
        try:
            token_ids = self._tokenizer.encode((context + text).decode())
        except UnicodeDecodeError:
            return self._spell(text)
        num_bytes, place = 0, len(token_ids)
        while place and num_bytes < len(text):
            place -= 1
            num_bytes += len(self._text(token_ids[place]))
        found = token_ids[place:]
        if b"".join(map(self._text, found)) != text:
            return self._spell(text)
        return found

    def _spell(self, text: bytes) -> list[int]:
        """Tokenize a text greedily by longest match; empty if that is not possible."""
        found, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                token_id = self._ids.get(text[start:end])
                if token_id is not None:
                    break
            else:
                return []
            found.append(token_id)
            start = end
        return found

    def _text(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""
