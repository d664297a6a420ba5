"""Numbers of examples for property tests (few, or as set by `make fuzz`), and files with changed bytes."""

import os

import pytest
from hypothesis import strategies as st

#: Examples of each kind per operation of the document; properties and the chat route get `SHARE` times as many.
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "1"))
IS_LONG = "FUZZ_EXAMPLES" in os.environ
SHARE = 10

takes_its_time = pytest.mark.timeout(7200 if IS_LONG else 120)
#: Offsets in a file, and the byte to write there.
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8)


def num_examples(few: int) -> int:
    """Returns the number of examples of a property: `few` in the short form."""
    return SHARE * FUZZ_EXAMPLES if IS_LONG else few


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for place, value in edits:
        changed[place % len(data)] = value
    return bytes(changed)
