"""How many examples a property is tried with: a few, or as many as `make fuzz` asks for; and files with changed bytes."""

import os

import pytest
from hypothesis import strategies as st

#: Of each kind to each operation of the document; properties and the chat route get `SHARE` times as many.
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "1"))
IS_LONG = "FUZZ_EXAMPLES" in os.environ
SHARE = 10

takes_its_time = pytest.mark.timeout(7200 if IS_LONG else 120)
#: Places in a file, and what stands there.
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8)


def num_examples(few: int) -> int:
    """How often to try a property: `few` times in the short form."""
    return SHARE * FUZZ_EXAMPLES if IS_LONG else few


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for place, value in edits:
        changed[place % len(data)] = value
    return bytes(changed)
