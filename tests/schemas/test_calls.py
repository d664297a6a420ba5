"""Calls are written in fewer steps than they have tokens, in each format, and come out the same."""

import math

import pytest

from engines.core import constraint
from engines.text.tokenizer import HfTokenizer
from tests.schemas import bfcl
from tests.schemas.calls import FORMATS, PLAIN, CallWriter, Outcome, read_case
from tests.schemas.checking import CHECKPOINT

#: In the shape of BFCL's lines.
WEATHER = {
    "name": "weather.get_forecast",
    "description": "The weather of the next days.",
    "parameters": {
        "type": "dict",
        "properties": {
            "location": {"type": "string", "description": "City and country."},
            "num_days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "include_wind": {"type": "boolean", "default": False},
        },
        "required": ["location", "num_days", "unit"],
    },
}
TRIP = {
    "name": "travel.book_train",
    "description": "Book seats.",
    "parameters": {
        "type": "dict",
        "properties": {
            "stations": {"type": "array", "items": {"type": "string"}},
            "price_limit": {"type": "float"},
            "passenger": {
                "type": "dict",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name"],
            },
        },
        "required": ["stations", "passenger"],
    },
}
FORECAST = {"location": ["Oslo", "Oslo, NO"], "num_days": [3], "unit": ["celsius", ""]}
BOOKED = {
    "stations": [["Bergen", "Voss's halt"]],
    "price_limit": [79.5],
    "passenger": [{"name": ["Kari"], "age": [41]}],
}
ANSWERS = {
    "simple": [{"weather.get_forecast": {**FORECAST, "include_wind": ["", True]}}],
    "with all": [{"weather.get_forecast": {**FORECAST, "include_wind": [True]}}],
    "nested": [{"travel.book_train": BOOKED}],
    "several": [{"travel.book_train": BOOKED}, {"weather.get_forecast": FORECAST}],
}


def read(name):
    asked = [[{"role": "user", "content": "What is the weather, and is there a train?"}]]
    row = {"id": name, "question": asked, "function": [WEATHER, TRIP]}
    return read_case(row, {"id": name, "ground_truth": ANSWERS[name]})


@pytest.fixture(scope="module")
def writer():
    """Whose answers never take too long: what drafts are made depends on nothing but tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint, "DRAFT_S", math.inf)
        patch.setattr(constraint, "BURST_S", math.inf)
        made = CallWriter(HfTokenizer(CHECKPOINT, None))
        yield made
        made.close()


@pytest.mark.parametrize("name", [*FORMATS, PLAIN])
def test_calls_take_fewer_steps(writer, name):
    form = None if name == PLAIN else FORMATS[name]
    for answer in ANSWERS:
        outcome = writer.write(read(answer), form)
        assert outcome.refusal == ""
        assert outcome.num_plain_steps >= 1.5 * outcome.num_steps


def test_passing_over_texts_takes_no_steps_more(writer, monkeypatch):
    steps = []
    for num_idle in (constraint.IDLE, math.inf):
        monkeypatch.setattr(constraint, "IDLE", num_idle)
        fresh = CallWriter(HfTokenizer(CHECKPOINT, None))
        steps.append([fresh.write(read(name), FORMATS["hermes"]).num_steps for name in ANSWERS])
        fresh.close()
    assert steps[0] == steps[1]


def test_without_drafts_a_token_takes_a_step(writer):
    outcome = writer.write(read("several"), FORMATS["hermes"], is_drafted=False)
    assert outcome.num_steps == outcome.num_plain_steps


def test_what_does_not_conform_is_not_written(writer):
    ground_truth = [{"weather.get_forecast": {**FORECAST, "unit": ["kelvin"]}}]
    row = {"id": "x", "question": [[{"role": "user", "content": "?"}]], "function": [WEATHER]}
    case = read_case(row, {"id": "x", "ground_truth": ground_truth})
    assert not case.conforms
    assert writer.write(case, FORMATS["hermes"]).refusal


def test_a_table_has_a_line_where_every_answer_was_refused():
    assert bfcl.to_row("t", "f", [Outcome("no")]).startswith("| t | f | 0 |")
