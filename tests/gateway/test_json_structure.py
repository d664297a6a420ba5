"""Keys that come twice, depth and number of parts: what another parser of the same body says, at any bytes."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.json_structure import check_structure
from shared.limits import LimitSettings
from tests.fuzzing import num_examples

LIMITS = LimitSettings()

keys = st.sampled_from(["a", "b", "é", '"', "\\", 'a"', "a\\", "\n", ""]) | st.text(max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=4),
    max_leaves=20,
)


def write(value: Any, ascii: bool, space: str) -> str:
    """JSON of lists, scalars, and objects as lists of pairs, so that keys may come twice."""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=ascii)
    if value and all(isinstance(item, tuple) for item in value):
        pairs = (
            f"{json.dumps(key, ensure_ascii=ascii)}{space}:{space}{write(item, ascii, space)}"
            for key, item in value
        )
        return "{" + f"{space},".join(pairs) + "}"
    return "[" + f",{space}".join(write(item, ascii, space) for item in value) + "]"


def has_repeated_key(text: str) -> bool:
    """By the standard library."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found |= len(dict(pairs)) < len(pairs)

    json.loads(text, object_pairs_hook=look)
    return found


def problem(body: bytes, limits: LimitSettings = LIMITS) -> str | None:
    """What is wrong with a body, if anything."""
    try:
        check_structure(body, limits)
    except InvalidRequest as error:
        return error.message
    return None


@settings(deadline=None, max_examples=num_examples(50))
@given(values, st.booleans(), st.sampled_from(["", " ", "\n\t" * 20]))
def test_repeated_keys_are_found_wherever_they_are(value, ascii, space):
    text = write(value, ascii, space)
    found = problem(text.encode("utf-8", "surrogatepass"))
    assert (found is not None) == has_repeated_key(text)


@settings(deadline=None, max_examples=num_examples(50))
@given(st.binary(max_size=200) | st.text('{}[]":, \\ab', max_size=60).map(str.encode))
def test_what_is_not_json_does_no_harm(body):
    problem(body)


@pytest.mark.parametrize("bracket", ["[]", "{}"])
@settings(deadline=None, max_examples=num_examples(50))
@given(depth=st.integers(8, 40), limit=st.integers(8, 40))
def test_depth_is_bounded(bracket, depth, limit):
    opening = '{"a":' if bracket == "{}" else "["
    body = opening * (depth - 1) + bracket + bracket[1] * (depth - 1)
    found = problem(body.encode(), LimitSettings(max_json_depth=limit))
    assert (found is not None) == (depth > limit)
    assert found is None or str(limit) in found


@pytest.mark.parametrize("part", ['""', "[]", "{}"])
def test_the_number_of_parts_is_bounded(part):
    limits = LimitSettings(max_json_items=100)
    assert problem(f"[{','.join([part] * 40)}]".encode(), limits) is None
    found = problem(f"[{','.join([part] * 101)}]".encode(), limits)
    assert found is not None
    assert "100" in found


@pytest.mark.parametrize(
    "body",
    [b'"' + b"\\\\" * 2_000_000 + b'"', b'"' + b'\\"' * 2_000_000 + b'"', b"[]," * 2_000_000, b"  " * 2_000_000],
    ids=["backslashes", "quotes", "arrays", "spaces"],
)  # fmt: skip
def test_the_time_is_linear_in_the_bytes(body):
    began_at = time.process_time()
    problem(body)
    assert time.process_time() - began_at < 1.0
