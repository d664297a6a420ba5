"""The tokenizer interface of `engines.text`, and incremental detokenization.

A `Detokenizer` decodes one answer. Its concatenated pieces equal the decoded answer. Incomplete characters, and text
that may be part of a stop string, are held back.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engines.text.tools import CallReader, num_begun
from shared.protocol import CallPiece

NOTHING_SPELLED: Mapping[int, str] = {}


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


class Detokenizer:
    """The text of one answer outside function calls, up to its first stop string."""

    is_stopped = False  #: whether a stop string has ended the answer
    stopped_by = ""  #: that stop string
    reasoning = ""  #: reasoning that no output contains yet
    num_reasoning_tokens = 0
    #: Whether the last token may be part of a marker that begins the reasoning.
    is_undecided = False
    is_content = True  #: whether the last token is part of the answer's text

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        keeps_stop: bool = False,
        spelled: Mapping[int, str] = NOTHING_SPELLED,
        keeps_specials: bool = False,
        calls: CallReader | None = None,
    ) -> None:
        """`calls`: the parser of function calls, whose pieces are added to `pieces`; None: the request has no tools.

        `keeps_stop`: the text includes the stop string that ends it. `spelled`: texts of special tokens, which the text
        includes. `keeps_specials`: it includes all special tokens except those that end an answer.
        """
        self._token_bytes = tokenizer.token_bytes
        if spelled or keeps_specials:
            self._token_bytes = _spell(tokenizer, spelled, keeps_specials=keeps_specials)
        self._drops_space = tokenizer.drops_leading_space
        self._incomplete = b""
        self._stops = [text for text in stop if text]
        self._keeps_stop = keeps_stop
        self._held = ""  # text that may begin a stop string
        self._calls = calls
        self._is_whole = not self._stops and calls is None  #: whether no text is held back
        self.pieces: list[CallPiece] = []  #: pieces of calls that no output contains yet

    @property
    def has_called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def append(self, token_id: int) -> str:
        """Add the next token; returns the text that it completes. Takes constant time."""
        text = self._decode(self._token_bytes(token_id))
        return text if self._is_whole else self._release(text)

    def append_bytes(self, data: bytes) -> str:
        """`append`, for tokens whose ids are unknown."""
        text = self._decode(data)
        return text if self._is_whole else self._release(text)

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for the bytes of an incomplete character."""
        return self._release_all(self._flush())

    def _decode(self, data: bytes) -> str:
        if self._drops_space and data:
            self._drops_space = False
            data = data.removeprefix(b" ")
        if self._incomplete:
            data = self._incomplete + data
        text, num_decoded = utf_8_decode(data, "replace", False)
        self._incomplete = data[num_decoded:]
        return text

    def _flush(self) -> str:
        text, _ = utf_8_decode(self._incomplete, "replace", True)
        self._incomplete = b""
        return text

    def _release(self, text: str) -> str:
        """Return the text outside calls, up to a stop string, and add the calls to `pieces`."""
        if self._calls is None or self.is_stopped:
            return self._cut(text)
        said, pieces = self._calls.feed(text)
        said = self._cut(said)
        if not self._calls.follows_text:
            self.pieces += pieces
        elif self.is_stopped:
            self._calls.num_calls -= sum(bool(piece.name) for piece in pieces)
        elif self._calls.is_calling:  # the text before the calls is complete
            said, self._held = said + self._held, ""
            self.pieces += pieces
        return said

    def _cut(self, text: str) -> str:
        """The text that precedes any stop string. The stop string that ends first wins; of several, the longest."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        known = self._held + text
        found = [
            (i + len(stop), -len(stop), stop)
            for stop in self._stops
            if (i := known.find(stop)) >= 0
        ]
        if found:
            end, length, self.stopped_by = min(found)
            self.is_stopped, self._held = True, ""
            return known[: end if self._keeps_stop else end + length]
        num_held = max((num_begun(known, stop) for stop in self._stops), default=0)
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]

    def _release_all(self, text: str) -> str:
        released = self._release(text)
        if self._calls is not None:
            released += self._cut(self._calls.finish())
        rest, self._held = self._held, ""
        return released + rest


def _spell(
    tokenizer: Tokenizer, spelled: Mapping[int, str], *, keeps_specials: bool
) -> Callable[[int], bytes]:
    texts = {token_id: text.encode() for token_id, text in spelled.items()}

    def token_bytes(token_id: int) -> bytes:
        data = texts.get(token_id) or tokenizer.token_bytes(token_id)
        if data or not keeps_specials or token_id in tokenizer.eos_token_ids:
            return data
        return tokenizer.token_string(token_id).encode()

    return token_bytes


def decode(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """The text of token ids, with special tokens spelled."""
    pieces = (tokenizer.token_bytes(i) or tokenizer.token_string(i).encode() for i in token_ids)
    data = b"".join(pieces)
    return (data.removeprefix(b" ") if tokenizer.drops_leading_space else data).decode(
        "utf-8", "replace"
    )
