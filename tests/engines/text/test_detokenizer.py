from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text.detokenizer import Detokenizer


class TokenTable:
    """A tokenizer whose token `i` is the i-th of the given byte strings."""

    eos_token_ids = frozenset[int]()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self.drops_leading_space = False

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def token_string(self, token_id: int) -> str:
        raise NotImplementedError


def detokenize(tokens: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    """Returns the text of each token up to the end of a stop string, then the remaining text."""
    detokenizer = Detokenizer(TokenTable(tokens), stop)
    pieces = []
    for token_id in range(len(tokens)):
        pieces.append(detokenizer.append(token_id))
        if detokenizer.is_stopped:
            break
    return [*pieces, detokenizer.finish()]


def cut_at_first_stop(text: str, stop: Sequence[str]) -> str:
    """The definition: cut before the stop string that is complete first; of several, before the longest."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stop if s and text[:end].endswith(s)]
        if found:
            return text[: end - max(found)]
    return text


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([b"The", b" red", b" ring"], ["The", " red", " ring", ""]),
        ([b"a\xe2\x82", b"\xac", b"!"], ["a", "\u20ac", "!", ""]),  # complete characters
        ([b"a", b"\xe2\x82"], ["a", "", "\ufffd"]),  # an incomplete character
        ([b"a", b"", b"b"], ["a", "", "b", ""]),  # a special token
        ([b"one E", b"N", b"D two"], ["one ", "", "", ""]),  # the stop string
        ([b"one E", b"N", b"ough"], ["one ", "", "ENough", ""]),  # a false start of it
        ([b"one EN"], ["one ", "EN"]),
    ],
)
def test_text_is_returned_as_soon_as_it_is_certain(tokens: list[bytes], pieces: list[str]):
    assert detokenize(tokens, ["END"]) == pieces


def test_special_tokens_except_the_end_are_text_on_request():
    class Named(TokenTable):
        eos_token_ids = frozenset((3,))

        def token_string(self, token_id: int) -> str:
            return ("", "<loc_1>", "", "</s>")[token_id]

    detokenizer = Detokenizer(Named([b"a", b"", b"b", b""]), keeps_specials=True)
    assert [detokenizer.append(token_id) for token_id in range(4)] == ["a", "<loc_1>", "b", ""]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(0, 40)))
def test_pieces_add_up_to_the_decoded_text(data: bytes, cuts: list[int]):
    assert "".join(detokenize(split(data, cuts))) == data.decode("utf-8", "replace")


@given(
    st.text("ab\u20ac", max_size=30),
    st.lists(st.integers(0, 90)),
    st.lists(st.text("ab\u20ac", max_size=5), max_size=3),
)
def test_stop_strings_cut_equally_for_any_split(text: str, cuts: list[int], stop: list[str]):
    tokens, expected, shown = split(text.encode(), cuts), cut_at_first_stop(text, stop), ""
    *pieces, rest = detokenize(tokens, stop)
    for end, piece in enumerate(pieces, 1):
        shown += piece
        told = b"".join(tokens[:end]).decode(errors="ignore")
        if told in expected:  # held-back text must be the beginning of a stop string
            starts = {each[:k] for each in stop for k in range(len(each))}
            assert told[len(shown) :] == max(filter(told.endswith, starts), key=len, default="")
    assert shown + rest == expected
